"""What cannot work with a model, said before anything starts: its shape against the layout, and teachers against it.

Reads `config.json` files and nothing else of a model; never imports torch, transformers or Megatron.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from drivetrain_backend_api.errors import DataError, UnsupportedModelError
from drivetrain_backend_megatron.architectures import ModelShape, differences, read_shape, read_table, shape_of
from drivetrain_backend_megatron.config import MegatronConfig

_TP = "--tensor-model-parallel-size"
_PP = "--pipeline-model-parallel-size"
_CHUNK = "--num-layers-per-virtual-pipeline-stage"
_CP = "--context-parallel-size"
_EP = "--expert-model-parallel-size"


def validate(config: Any) -> list[str]:
    """Return one sentence for each thing that cannot work with a whole resolved configuration.

    Args:
        config: its `train` is a `MegatronConfig`, its `placement` knows the number of train workers.
    """
    return model_findings(config.train, world_size=config.placement.train_world_size)


def model_findings(config: MegatronConfig, *, world_size: int | None = None) -> list[str]:
    """Return one sentence for each thing that cannot work with the model folders that are given.

    A folder without a readable `config.json` is passed over: whoever starts the run says that, and `read_shape` does.

    Args:
        config: of the train workers.
        world_size: how many of them there are, None where that is not known yet.
    """
    path = Path(config.hf_checkpoint)
    try:
        table = read_table(path)
    except DataError:
        return _world_findings(config, world_size)
    try:
        shape = shape_of(table, path / "config.json")
    except (DataError, UnsupportedModelError) as error:
        return [f"--hf-checkpoint {error}"]
    return [
        *_layer_findings(config),
        *layout_findings(shape, config, world_size=world_size),
        *same_shape_findings(shape, config),
    ]


def _layer_findings(config: MegatronConfig) -> list[str]:
    if config.transformer_impl != "transformer_engine" or find_spec("transformer_engine") is not None:
        return []
    return [
        "--transformer-impl transformer_engine: TransformerEngine is not installed; "
        "pip install 'transformer-engine[pytorch]' (never run with it so far), or take --transformer-impl local"
    ]


def layout_findings(shape: ModelShape, config: MegatronConfig, *, world_size: int | None = None) -> list[str]:
    """Return one sentence for each way in which a model cannot be cut as the configuration asks.

    Args:
        shape: of the model.
        config: its parallel sizes.
        world_size: ranks in all, None where that is not known yet.
    """
    found = [
        *_tensor_findings(shape, config.tensor_model_parallel_size),
        *_context_findings(shape, config.tensor_model_parallel_size, config.context_parallel_size),
        *_pipeline_findings(shape, config),
        *_expert_findings(shape, config),
    ]
    # numbers of workers that fit sizes which do not work would only mislead
    return found or _world_findings(config, world_size)


def _divisors(*numbers: int) -> str:
    """List what divides all numbers, for people."""
    return _either([one for one in range(1, min(numbers) + 1) if not any(number % one for number in numbers)])


def _either(numbers: Sequence[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last


def _tensor_findings(shape: ModelShape, tp: int) -> list[str]:
    cut = {"attention heads": shape.num_attention_heads, "key-value heads": shape.num_query_groups}
    if len(shape.sparse_layers) < shape.num_layers:
        cut["rows of each MLP"] = shape.ffn_hidden_size
    uneven = [f"{number} {what}" for what, number in cut.items() if number % tp]
    if not uneven:
        return []
    return [f"{_TP} {tp} does not divide the model's {' and '.join(uneven)}; give {_divisors(*cut.values())}"]


def _context_findings(shape: ModelShape, tp: int, cp: int) -> list[str]:
    """Attention trades tokens for heads: each context-parallel rank takes its share of a tensor-parallel rank's."""
    heads, groups = shape.num_attention_heads // tp, shape.num_query_groups // tp
    if cp == 1 or shape.num_attention_heads % tp or shape.num_query_groups % tp:
        return []
    works = [one for one in range(1, heads + 1) if not heads % one and (not groups % one or not one % groups)]
    if cp in works:
        return []
    return [
        f"{_CP} {cp} cannot share out the {heads} attention heads and {groups} key-value heads of a tensor-parallel "
        f"rank; give {_either(works)}"
    ]


def _pipeline_findings(shape: ModelShape, config: MegatronConfig) -> list[str]:
    layers, pp = shape.num_layers, config.pipeline_model_parallel_size
    if layers % pp:
        return [f"{_PP} {pp} does not divide the model's {layers} layers; give {_divisors(layers)}"]
    found, stage, chunk = [], layers // pp, config.num_layers_per_virtual_pipeline_stage
    if chunk is not None and stage % chunk:
        return [f"{_CHUNK} {chunk} does not divide the {stage} layers of a pipeline stage; give {_divisors(stage)}"]
    if (config.recompute_num_layers or 1) > (chunk or stage):
        found.append(
            f"--recompute-num-layers {config.recompute_num_layers} exceeds the {chunk or stage} layers of a "
            f"{'model chunk' if chunk else 'pipeline stage'}; lower it"
        )
    return found


def _expert_findings(shape: ModelShape, config: MegatronConfig) -> list[str]:
    ep = config.expert_model_parallel_size
    if shape.experts is None:
        if ep == 1:
            return []
        return [f"{_EP} {ep} needs a mixture-of-experts model, and {shape.model_type} here is dense; drop it"]
    found = []
    if (experts := shape.experts.num_experts) % ep:
        found.append(f"{_EP} {ep} does not divide the model's {experts} experts; give {_divisors(experts)}")
    if config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
        found.append(f"a mixture-of-experts model with {_TP} above 1 needs --sequence-parallel; give it")
    return found


def _world_findings(config: MegatronConfig, world_size: int | None) -> list[str]:
    if world_size is None:
        return []
    tp, pp, cp = (
        config.tensor_model_parallel_size,
        config.pipeline_model_parallel_size,
        config.context_parallel_size,
    )
    if world_size % config.model_parallel_size:
        return [
            f"{world_size} train workers (--actor-num-nodes x --actor-num-gpus-per-node) are no multiple of "
            f"{config.model_parallel_size} ({_TP} {tp} x {_PP} {pp} x {_CP} {cp}); give such a number of them"
        ]
    stage, ep = world_size // pp, config.expert_model_parallel_size
    if stage % ep:
        return [f"{_EP} {ep} does not divide the {stage} train workers of a pipeline stage; give {_divisors(stage)}"]
    return []


def same_shape_findings(shape: ModelShape, config: MegatronConfig) -> list[str]:
    """Return one sentence for each further model folder whose weights do not belong into the model.

    Reference and teacher are kept as further weights of the one model. Folders that are no Hugging Face model folders
    are passed over.
    """
    found = []
    kept = "the same architecture and size, or --train-backend fsdp, which keeps it as a separate model"
    folders = {
        "--load": (config.load, "this model"),
        "--ref-load": (config.ref_load, kept),
        "--opd-teacher-load": (config.opd_teacher_load, kept),
    }
    for flag, (folder, wanted) in folders.items():
        if folder is None or not is_hf_folder(Path(folder)):
            continue
        try:
            other = differences(read_shape(Path(folder)), shape)
        except (DataError, UnsupportedModelError) as error:
            found.append(f"{flag} {error}")
            continue
        if other:
            found.append(
                f"{flag} {folder}: another model than --hf-checkpoint ({', '.join(other)}); give one of {wanted}"
            )
    return found


def is_hf_folder(folder: Path) -> bool:
    """Say whether a folder looks like a Hugging Face model: a configuration, and safetensors weights beside it."""
    weights = ("model.safetensors", "model.safetensors.index.json")
    return (folder / "config.json").is_file() and any((folder / name).is_file() for name in weights)
