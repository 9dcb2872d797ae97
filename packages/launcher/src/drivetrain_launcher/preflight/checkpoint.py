"""The checkpoint that a run starts from, or that is exported: is it there, and is it whole?

What a checkpoint holds is the train backend's own; its spec names the function that looks into one.
"""

from pathlib import Path

from drivetrain_backend_api import BackendSpec, DataError
from drivetrain_infra.run_folder import resolve_checkpoint
from drivetrain_launcher.config import DrivetrainConfig

_SHOWN = 3
"""How many other checkpoints are listed, the newest ones."""


def find_load(config: DrivetrainConfig) -> tuple[Path | None, list[str]]:
    """Return the checkpoint that `--load` means, None where there is none, and what is wrong with it."""
    load, stop = config.train.load, config.loop.num_rollout
    if load is None:
        return None, []
    if not Path(load).is_dir():
        return None, [f"--load {load}: no such folder; give the folder of a run, or of one of its checkpoints"]
    try:
        checkpoint = resolve_checkpoint(Path(load))
    except DataError as error:
        return None, [f"--load {error}"]
    except OSError as error:  # `latest` names what the system cannot look up
        return None, [f"--load {load}: {error.strerror or error}; give the folder of a run that saved a checkpoint"]
    world_size = config.placement.train_world_size
    findings = checkpoint_findings(config.backend, checkpoint, what="--load", world_size=world_size)
    start = trained_rollouts(checkpoint)
    if stop is not None and start >= stop:
        findings.append(
            f"--load {checkpoint} was trained on {start} rollouts already, and --num-rollout ends the run at {stop}; "
            f"raise it above {start}"
        )
    return checkpoint, findings


def checkpoint_findings(backend: BackendSpec, checkpoint: Path, *, what: str, world_size: int | None) -> list[str]:
    """Return what the train backend finds wrong with a checkpoint, and which others lie beside it.

    Args:
        checkpoint: as `resolve_checkpoint` returned it.
        what: how the user gave it, for messages.
        world_size: ranks that will load it, None to export it.
    """
    findings = backend.load_check_checkpoint()(checkpoint, world_size=world_size)
    if not findings:
        return []
    folders = [one.name for one in sorted(checkpoint.parent.glob("iter_*")) if one.is_dir() and not one.suffix]
    others = [name for name in folders if name != checkpoint.name][-_SHOWN:]
    beside = f" (beside it: {', '.join(others)})" if others else ""
    return [f"{what} {finding}{beside}" for finding in findings]


def trained_rollouts(checkpoint: Path) -> int:
    """Return how many rollouts a checkpoint was trained on, as its name says."""
    return int(checkpoint.name.removeprefix("iter_"))
