"""The options of the Megatron backend and which combinations of them are refused."""

import subprocess
import sys
from typing import Any

import pytest

from drivetrain_backend_api import ConfigError, options
from drivetrain_backend_megatron.config import MegatronConfig


def refused(**values: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        MegatronConfig(hf_checkpoint="model", **values)
    return str(caught.value)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"sequence_parallel": True}, "--sequence-parallel needs --tensor-model-parallel-size of 2 or more"),
        (
            {"num_layers_per_virtual_pipeline_stage": 1},
            "--num-layers-per-virtual-pipeline-stage needs --pipeline-model-parallel-size of 2 or more",
        ),
        ({"overlap_param_gather": True}, "--overlap-param-gather needs --overlap-grad-reduce"),
        ({"recompute_method": "block"}, "--recompute-method acts only with --recompute-granularity full"),
        (
            {"recompute_granularity": "selective", "recompute_num_layers": 2},
            "--recompute-num-layers acts only with --recompute-granularity full",
        ),
        ({"experimental_diffusion": True}, "--experimental-diffusion: experimental, not built"),
        ({"attention_backend": "varlen", "fp32": True}, "--attention-backend varlen has no kernel for --fp32"),
        ({"optimizer": "sgd"}, "--optimizer sgd: not one of adam"),
        ({"tensor_model_parallel_size": 0}, "--tensor-model-parallel-size 0: must be at least 1"),
        ({"main_params_dtype": "bf16"}, "--main-params-dtype bf16: not one of fp32, fp16"),
    ],
)
def test_what_cannot_work_is_refused_with_its_flag(values: dict[str, Any], sentence: str) -> None:
    assert sentence in refused(**values)


def test_all_findings_are_raised_at_once() -> None:
    assert len(refused(sequence_parallel=True, overlap_param_gather=True, grad_clip=-1).splitlines()) == 3


@pytest.mark.parametrize(
    "values",
    [
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1},
        {"overlap_grad_reduce": True, "overlap_param_gather": True},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
    ],
)
def test_what_belongs_together_is_taken(values: dict[str, Any]) -> None:
    config = MegatronConfig(hf_checkpoint="model", **values)
    assert all(getattr(config, name) == value for name, value in values.items())


def test_dtypes_of_optimizer_state_act_only_with_the_precision_aware_optimizer() -> None:
    tied_to = {one.name: one.acts_with for one in options(MegatronConfig)}
    assert {tied_to[name] for name in ("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype")} == {
        "use_precision_aware_optimizer"
    }


@pytest.mark.parametrize(("layers_a_chunk", "chunks"), [(None, 1), (4, 1), (2, 2), (1, 4)])
def test_layers_a_chunk_give_the_chunks_of_a_stage(layers_a_chunk: int | None, chunks: int) -> None:
    config = MegatronConfig(
        hf_checkpoint="model", pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=layers_a_chunk
    )
    assert config.model_chunks(8) == chunks


def test_a_replica_spans_tensor_pipeline_and_context_ranks() -> None:
    config = MegatronConfig(
        hf_checkpoint="m",
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=3,
        context_parallel_size=5,
        expert_model_parallel_size=7,
    )
    assert config.model_parallel_size == 30


def test_options_and_checks_import_nothing_heavy() -> None:
    code = (
        "import sys, drivetrain_backend_megatron.config, drivetrain_backend_megatron.checks\n"
        "print([one for one in ('torch', 'transformers', 'megatron', 'pydantic') if one in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
