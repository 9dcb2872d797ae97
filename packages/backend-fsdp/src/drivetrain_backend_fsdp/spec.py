"""What this backend says about itself. Never imports torch or transformers."""

from importlib.metadata import PackageNotFoundError, version

from drivetrain_backend_api import BackendSpec, Capabilities, ProbeResult
from drivetrain_backend_fsdp.config import FsdpConfig

CAPABILITIES = Capabilities(
    parallelism=("dp",),
    precisions=("bf16", "fp16", "fp32"),
    devices=("cpu", "cuda"),
    cpu_offload=True,
    reference="model",
    teacher="model",
    resharding=True,
    async_save=True,
)


def probe() -> ProbeResult:
    """Look for the heavy dependencies by their metadata."""
    found, missing = [], []
    for name in ("torch", "transformers", "safetensors"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        return ProbeResult(
            available=False, detail=f"{', '.join(missing)} not installed; pip install {' '.join(missing)}"
        )
    return ProbeResult(available=True, detail=", ".join(found))


SPEC = BackendSpec(
    name="fsdp",
    api_version=1,
    target="drivetrain_backend_fsdp.backend:FsdpBackend",
    config_class=FsdpConfig,
    capabilities=CAPABILITIES,
    neutral_options=(
        {"gradient_checkpointing": True},
        {"fsdp_cpu_offload": True, "fsdp_reshard_after_forward": "never"},
    ),
    preference=10,
    probe=probe,
    export_checkpoint="drivetrain_backend_fsdp.checkpoint:export_checkpoint",
    check_checkpoint="drivetrain_backend_fsdp.checkpoint_files:check_checkpoint",
    tested_with=(
        "images/newest.txt: all tests and a training run from wheels, on CPUs",
        "images/lowest.txt: a training run from wheels, on CPUs; on its torch and transformers: the gpu tests",
        "images/sglang.txt: a training run from wheels, on CPUs",
    ),
)
