"""Checkpoints: from any layout to any other bit for bit, as Megatron writes and reads them, and to Hugging Face."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

# Ranks run as a script of this folder.
sys.path.insert(0, str(Path(__file__).parent))

from checkpoint_values import NEXT_ROLLOUT, STEPS, hf_values

from drivetrain_backend_api.checkpoint_files import read_metadata
from drivetrain_backend_api.errors import DataError
from drivetrain_backend_api.sharded_checkpoint import stored_tensors
from drivetrain_backend_api.testing.models import make_model
from drivetrain_backend_api.testing.ranks import free_port
from drivetrain_backend_megatron.architectures import read_shape
from drivetrain_backend_megatron.checkpoint_files import check_checkpoint
from drivetrain_backend_megatron.load_kind import LoadKind, find_source
from drivetrain_backend_megatron.name_map import places

RANKS = Path(__file__).with_name("checkpoint_ranks.py")
TP, PP, CP, EP = (f"{one}_parallel_size" for one in ("tensor_model", "pipeline_model", "context", "expert_model"))
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
COMPACT = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
PLAIN = ("dense", "moe", "mixed")

SAVES: Mapping[str, tuple[str, int, dict[str, Any]]] = {
    "dense": ("dense", 4, {TP: 2}),
    "fp32": ("dense", 2, {"fp32": True, "async_save": True}),
    "tied": ("tied", 2, {PP: 2}),
    "moe": ("moe", 4, {EP: 2}),
    "mixed": ("mixed", 2, {EP: 2}),
}
"""Name of a checkpoint -> model, ranks and layout that wrote it."""

LOADS: Mapping[str, tuple[str, int, dict[str, Any]]] = {
    "dense-same": ("dense", 4, {TP: 2}),
    "dense-tp4": ("dense", 4, {TP: 4}),
    "dense-pp2-interleaved": ("dense", 4, {PP: 2, "num_layers_per_virtual_pipeline_stage": 1}),
    "dense-cp2-overlapped": ("dense", 2, {CP: 2, **OVERLAP}),
    "dense-alone": ("dense", 1, {}),
    "dense-alone-fp32": ("dense", 1, {"fp32": True}),
    "dense-tp2-bf16-moments": ("dense", 2, {TP: 2, **COMPACT}),
    "dense-dp2-on-the-host": ("dense", 2, {"optimizer_cpu_offload": True}),
    "fp32-tp2": ("fp32", 2, {TP: 2, "fp32": True}),
    "fp32-alone-bf16": ("fp32", 1, {}),
    "tied-same": ("tied", 2, {PP: 2}),
    "tied-pp4": ("tied", 4, {PP: 4}),
    "tied-tp2": ("tied", 2, {TP: 2}),
    "moe-same": ("moe", 4, {EP: 2}),
    "moe-tp2-ep2": ("moe", 4, {TP: 2, EP: 2, "sequence_parallel": True}),
    "moe-pp2": ("moe", 2, {PP: 2}),
    "mixed-pp2": ("mixed", 2, {PP: 2}),
    "mixed-alone": ("mixed", 1, {}),
}
"""Name of a load -> checkpoint, ranks and layout that read it."""


pytestmark = pytest.mark.slow


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What all jobs of the one launch left."""

    root: Path
    models: Mapping[str, Path]

    def found(self, name: str) -> list[dict[str, Any]]:
        """What each rank of a job found."""
        if errors := sorted(self.root.glob(f"{name}.rank*.error")):
            pytest.fail("\n".join(one.read_text() for one in errors))
        reports = sorted(self.root.glob(f"{name}.rank*.json"))
        assert reports, f"job {name} did not end; {(self.root / 'log').read_text()[-3000:]}"
        return [json.loads(one.read_text()) for one in reports]


def make_moe(folder: Path, *, sparse_step: int) -> Path:
    """A model whose every block, or every second one, is a mixture of four experts."""
    folder.mkdir()
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 67,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 6,
        "max_position_embeddings": 128,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": sparse_step,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: hf_values("main", name, size) for one in places(read_shape(folder)) for name, size in one.hf}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    root = tmp_path_factory.mktemp("checkpoints")
    models = {
        "dense": make_model(root / "model-dense", "qwen3"),
        "tied": make_model(root / "model-tied", "qwen3-tied"),
        "moe": make_moe(root / "model-moe", sparse_step=1),
        "mixed": make_moe(root / "model-mixed", sparse_step=2),
    }
    jobs = []

    def add(
        name: str, action: str, folder: str, ranks: int, config: Mapping[str, Any], model: str, **more: Any
    ) -> None:
        settings = {"hf_checkpoint": str(models[model]), "distributed_timeout_minutes": 1.0, **config}
        if "fp32" not in settings:
            settings["bf16"] = True
        job = {"name": name, "action": action, "folder": str(root / folder), "ranks": ranks, "config": settings}
        jobs.append(job | {"port": free_port()} | more)

    for name, (model, ranks, config) in SAVES.items():
        (root / name).mkdir()
        add(f"save-{name}", "save", name, ranks, config, model)
    for name, (saved, ranks, config) in LOADS.items():
        add(name, "load", saved, ranks, config, SAVES[saved][0])
    for model in PLAIN:
        (root / f"plain-{model}").mkdir()
        tp = 2 if model == "dense" else 1
        add(f"save-plain-{model}", "save_plain", f"plain-{model}", tp, {TP: tp}, model)
        add(f"plain-{model}", "load", f"plain-{model}", 2, {PP: 2}, model, weights_only=True)
    ours = {"ours": str(root / "dense"), "plain": str(root / "plain-dense")}
    add("into-plain", "load_plain", "into-plain", 2, {TP: 2}, "dense", **ours)
    add("hugging-face", "load", "model-moe", 2, {EP: 2}, "moe", weights_only=True, stored="float32")
    add("another-model", "load", "tied", 1, {}, "dense")
    add("another-plain-model", "load", "plain-mixed", 1, {}, "moe")
    add("nothing", "load", "nothing", 1, {}, "dense")
    add("damaged", "load", "damaged", 2, {}, "dense", damage="dense")
    for folder, stored in (("dense", "float32"), ("plain-dense", "bfloat16"), ("nothing", "float32")):
        add(f"reference-{folder}", "load_reference", folder, 2, {TP: 2}, "dense", stored=stored)
    (root / "nothing").mkdir()
    (root / "jobs.json").write_text(json.dumps(jobs))
    with (root / "log").open("w") as log:
        subprocess.run(
            [sys.executable, str(RANKS), str(root)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            timeout=280,
            check=True,
        )
    return Launch(root=root, models=models)


@pytest.mark.parametrize("name", LOADS)
def test_what_was_saved_under_one_layout_is_loaded_under_another_bit_for_bit(launch: Launch, name: str) -> None:
    for rank, found in enumerate(launch.found(name)):
        assert found["differences"] == []
        assert (found["next"], found["steps"]) == (NEXT_ROLLOUT, STEPS)
        # the seed that this rank was saved with, or the one before the load
        assert found["seed"] == (100 + rank if name.endswith("-same") else 1)


@pytest.mark.parametrize("model", PLAIN)
def test_a_checkpoint_of_megatron_gives_the_weights_under_another_layout(launch: Launch, model: str) -> None:
    for found in launch.found(f"plain-{model}"):
        assert found == {"next": 0, "steps": 0, "seed": 1, "differences": []}


def test_megatron_reads_what_we_write(launch: Launch) -> None:
    assert [one["differences"] for one in launch.found("into-plain")] == [[], []]


def test_a_reference_takes_the_weights_alone_of_either_kind(launch: Launch) -> None:
    for folder in ("dense", "plain-dense"):
        assert launch.found(f"reference-{folder}") == [{"differences": []}] * 2
    assert all(
        one["error"].startswith(f"--ref-load {launch.root / 'nothing'} holds nothing to load")
        for one in launch.found("reference-nothing")
    )


def test_a_hugging_face_folder_gives_the_weights(launch: Launch) -> None:
    for found in launch.found("hugging-face"):
        assert found == {"next": 0, "steps": 0, "seed": 1, "differences": []}


@pytest.mark.parametrize("model", PLAIN)
def test_keys_and_shapes_are_those_of_megatron(launch: Launch, model: str) -> None:
    launch.found(f"save-plain-{model}")
    ours = {key: tuple(one.size) for key, one in stored_tensors(read_metadata(launch.root / model)).items()}
    theirs = {
        key: tuple(one.size) for key, one in stored_tensors(read_metadata(launch.root / f"plain-{model}", "")).items()
    }
    weights = {key: size for key, size in ours.items() if not key.startswith("optimizer.")}
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert weights.pop(key) == (67, 32)  # they pad it to 68 for two tensor-parallel ranks
        assert theirs.pop(key)[1:] == (32,)
    # what is fused where there is TransformerEngine, which their layers without it take for fused too
    for key in [one for one in theirs if one.endswith("mlp.linear_fc1.layer_norm_weight")]:
        if key not in weights:
            theirs[key.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")] = theirs.pop(key)
    if model == "moe":  # ours has keys of its own for each layer of a mixture
        layers = {key: theirs.pop(key) for key in list(theirs) if key.startswith("decoder.layers.")}
        theirs |= {
            key.replace("decoder.layers.", f"decoder.layers.{layer}."): size[1:]
            for key, size in layers.items()
            for layer in range(size[0])
        }
    assert weights == theirs
    moments = {f"optimizer.state.{kind}.{key}" for kind in ("fp32_param", "exp_avg", "exp_avg_sq") for key in weights}
    assert moments <= set(ours)


def test_an_exported_checkpoint_holds_the_masters_under_hugging_face_names(launch: Launch, tmp_path: Path) -> None:
    from drivetrain_backend_megatron.checkpoint import export_checkpoint

    for saved, (model, _, _) in SAVES.items():
        launch.found(f"save-{saved}")
        out = tmp_path / saved
        export_checkpoint(launch.root / saved, launch.models[model], out, torch.float32)
        found = load_file(out / "model.safetensors")
        needed = [hf for place in places(read_shape(launch.models[model])) for hf in place.hf]
        assert sorted(found) == sorted(name for name, _ in needed)
        assert [name for name, size in needed if not torch.equal(found[name], hf_values("main", name, size))] == []
        assert json.loads((out / "config.json").read_text())["dtype"] == "float32"


def test_a_large_export_is_split_and_takes_the_dtypes_of_the_model_folder(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from drivetrain_backend_megatron.checkpoint import export_checkpoint

    launch.found("save-moe")
    source = Path(shutil.copytree(launch.models["moe"], tmp_path / "source"))
    stored = {name: one.bfloat16() for name, one in load_file(source / "model.safetensors").items()}
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr("drivetrain_backend_api.hf_export.SHARD_BYTES", 8000)
    export_checkpoint(launch.root / "moe", source, tmp_path / "out")
    files = sorted((tmp_path / "out").glob("model-*-of-*.safetensors"))
    assert len(files) > 1
    found = {name: one for file in files for name, one in load_file(file).items()}
    assert sorted(found) == sorted(stored)
    # the same values: this model's weights are what the ranks were filled with
    assert [name for name, one in stored.items() if not torch.equal(found[name], one)] == []


def test_a_checkpoint_of_another_model_is_refused_by_tensor(launch: Launch) -> None:
    (found,) = launch.found("another-model")
    assert found["error"] == (
        f"{launch.root / 'tied'} is a checkpoint of another model: tensor 'output_layer.weight' has shape none there "
        "and (67, 32) in the model; give the --hf-checkpoint that training began with"
    )
    (found,) = launch.found("another-plain-model")
    assert f"{launch.root / 'plain-mixed'} is a checkpoint of another model: tensor " in found["error"]


def test_a_damaged_checkpoint_is_refused_by_file_on_all_ranks(launch: Launch) -> None:
    said = {one["error"] for one in launch.found("damaged")}
    assert len(said) == 1
    assert " is damaged, or of another checkpoint: its checksum is not the one in manifest.json" in said.pop()


def test_a_folder_of_no_kind_is_refused_with_the_three_kinds(launch: Launch) -> None:
    (found,) = launch.found("nothing")
    for kind in ("trainer_state.json", "latest_checkpointed_iteration.txt", "Hugging Face model folder"):
        assert kind in found["error"]


def test_kinds_are_told_apart_by_their_files(launch: Launch, tmp_path: Path) -> None:
    launch.found("save-dense")
    launch.found("save-plain-dense")
    plain = launch.root / "plain-dense"
    assert find_source(launch.root / "dense").kind is LoadKind.DRIVETRAIN
    assert find_source(plain).kind is LoadKind.MEGATRON
    assert find_source(launch.models["dense"]).kind is LoadKind.HUGGING_FACE
    shutil.copytree(plain, tmp_path / "iter_0000012")
    with pytest.raises(DataError, match="holds nothing to load"):
        find_source(tmp_path)
    latest = tmp_path / "latest_checkpointed_iteration.txt"
    latest.write_text("12\n")
    source = find_source(tmp_path)
    assert (source.kind, source.folder) == (LoadKind.MEGATRON, tmp_path / "iter_0000012")
    latest.write_text("13")
    with pytest.raises(DataError, match=f"{latest} names iter_0000013, which is no torch_dist checkpoint"):
        find_source(tmp_path)
    latest.write_text("soon")
    with pytest.raises(DataError, match=f"{latest} names no iteration"):
        find_source(tmp_path)


def test_what_is_whole_is_found_whole_and_what_is_not_is_named(launch: Launch, tmp_path: Path) -> None:
    launch.found("save-plain-dense")
    launch.found("save-dense")
    assert check_checkpoint(launch.root / "dense", world_size=4) == []
    assert check_checkpoint(launch.root / "dense", world_size=None) == []
    assert check_checkpoint(launch.models["dense"], world_size=1) == []
    copy = Path(shutil.copytree(launch.root / "plain-dense", tmp_path / "copy"))
    assert check_checkpoint(copy, world_size=1) == []
    shard = sorted(copy.glob("*.distcp"))[0]
    shard.unlink()
    assert check_checkpoint(copy, world_size=1) == [f"{shard} is missing; use another checkpoint of the run"]
    ours = Path(shutil.copytree(launch.root / "dense", tmp_path / "ours"))
    state = json.loads((ours / "trainer_state.json").read_text())
    (ours / "trainer_state.json").write_text(json.dumps(state | {"backend": "fsdp"}))
    (found,) = check_checkpoint(ours, world_size=4)
    assert found.startswith(f"{ours} was written by the fsdp backend, and megatron cannot read it")
    assert "drivetrain export" in found
