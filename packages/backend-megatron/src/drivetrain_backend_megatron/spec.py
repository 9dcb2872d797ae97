"""What the Megatron backend says about itself: for now, that it is not built yet. Imports no Megatron and no torch."""

from typing import Any

from drivetrain_backend_api import BackendSpec, Capabilities, ProbeResult, TrainConfig

NOT_BUILT = "the Megatron backend is not built yet; use --train-backend fsdp (pip install drivetrain-backend-fsdp)"


def probe() -> ProbeResult:
    """Report that it cannot work on any machine."""
    return ProbeResult(available=False, detail=NOT_BUILT)


def validate(config: Any) -> list[str]:
    """Refuse every configuration."""
    return [f"--train-backend megatron: {NOT_BUILT}"]


SPEC = BackendSpec(
    name="megatron",
    api_version=1,
    target="drivetrain_backend_megatron.backend:MegatronBackend",
    config_class=TrainConfig,
    capabilities=Capabilities(parallelism=(), precisions=(), devices=()),
    # above FSDP's: the default as soon as it is available
    preference=20,
    validate=validate,
    probe=probe,
)
