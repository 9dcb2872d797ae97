"""What this backend says about itself. Never imports torch, transformers or Megatron."""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from drivetrain_backend_api import BackendSpec, Capabilities, ProbeResult
from drivetrain_backend_megatron.checks import validate
from drivetrain_backend_megatron.config import MegatronConfig
from drivetrain_backend_megatron.sleep import SleepTier, memory_saver_env

CAPABILITIES = Capabilities(
    parallelism=("dp", "tp", "sp", "pp", "cp", "ep"),
    precisions=("bf16", "fp16", "fp32"),
    devices=("cpu", "cuda"),
    cpu_offload=True,
    reference="tag",
    teacher="tag",
    resharding=True,
    async_save=True,
)


def probe() -> ProbeResult:
    """Look for the heavy dependencies by their metadata, and say which layers are used."""
    found, missing = [], []
    for name in ("torch", "megatron-core", "transformers", "safetensors"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        return ProbeResult(
            available=False, detail=f"{', '.join(missing)} not installed; pip install {' '.join(missing)}"
        )
    return ProbeResult(available=True, detail=f"{', '.join(found)}; {_layers()}")


def _layers() -> str:
    try:
        found = version("transformer-engine")
    except PackageNotFoundError:
        return "layers: local (TransformerEngine is not installed)"
    return f"layers: local (--transformer-impl transformer_engine takes those of TransformerEngine {found})"


def worker_env(config: Any) -> Mapping[str, str]:
    """Ask for torch-memory-saver's library in the worker where its tier of sleep was asked for."""
    return memory_saver_env() if config.sleep_tier == SleepTier.MEMORY_SAVER else {}


SPEC = BackendSpec(
    name="megatron",
    api_version=1,
    target="drivetrain_backend_megatron.backend:MegatronBackend",
    config_class=MegatronConfig,
    capabilities=CAPABILITIES,
    neutral_options=(
        {"recompute_granularity": "selective"},
        {"recompute_granularity": "full"},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
        {"overlap_grad_reduce": True, "overlap_param_gather": True},
        {"make_vocab_size_divisible_by": 32},
        {"num_layers_per_virtual_pipeline_stage": 1},
    ),
    # above FSDP's: the default where both are installed
    preference=20,
    validate=validate,
    probe=probe,
    worker_env=worker_env,
    export_checkpoint="drivetrain_backend_megatron.checkpoint:export_checkpoint",
    check_checkpoint="drivetrain_backend_megatron.checkpoint_files:check_checkpoint",
    takes_weights_of="drivetrain_backend_megatron.load_kind:takes_weights_of",
    tested_with=(
        "images/newest.txt: all tests with megatron-core 0.16, its core with 0.19; training runs from wheels; on CPUs",
        "images/lowest.txt: a training run from wheels, on CPUs",
    ),
)
