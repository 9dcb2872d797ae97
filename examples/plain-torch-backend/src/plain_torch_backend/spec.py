"""What this backend says about itself. Never imports torch or transformers."""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from drivetrain_backend_api import BackendSpec, Capabilities, ProbeResult
from plain_torch_backend.config import PlainTorchConfig

CAPABILITIES = Capabilities(
    parallelism=(),
    precisions=("fp32",),
    devices=("cpu",),
    reference="tag",
    teacher="tag",
)


def validate(config: Any) -> list[str]:
    """Refuse more than one process before any is started."""
    ranks = config.placement.actor_num_nodes * config.placement.actor_num_gpus_per_node
    if ranks == 1:
        return []
    return [
        f"--train-backend plain-torch trains in one process, and {ranks} are asked for; "
        "give --actor-num-nodes 1 and --actor-num-gpus-per-node 1, or choose another backend"
    ]


def probe() -> ProbeResult:
    """Look for the heavy dependencies by their metadata."""
    found, missing = [], []
    for name in ("torch", "transformers", "safetensors"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        return ProbeResult(available=False, detail=f"pip install {' '.join(missing)}")
    return ProbeResult(available=True, detail=", ".join(found))


SPEC = BackendSpec(
    name="plain-torch",
    api_version=1,
    target="plain_torch_backend.backend:PlainTorchBackend",
    config_class=PlainTorchConfig,
    capabilities=CAPABILITIES,
    validate=validate,
    probe=probe,
    export_checkpoint="plain_torch_backend.checkpoint:export_checkpoint",
    check_checkpoint="plain_torch_backend.checkpoint_files:check_checkpoint",
)
