"""The checkpoint that a run starts from, or that is exported: is it there, and is it whole?

What a checkpoint holds is the train backend's own; its spec names the function that looks into one, and the function
that knows other folders whose weights it takes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from drivetrain_backend_api import BackendSpec, DataError
from drivetrain_infra.run_folder import RunFolder, checkpoint_id, resolve_checkpoint
from drivetrain_launcher.config import DrivetrainConfig

_SHOWN = 3
"""How many other checkpoints are listed, the newest ones."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What `--load` means.

    Attributes:
        folder: that the train backend is given.
        run: that wrote it as a checkpoint; None for a folder of weights alone.
        rollouts: that its weights were trained on in that run.
    """

    folder: Path
    run: Path | None
    rollouts: int


def resolve_load(backend: BackendSpec, load: str, step: int | None = None) -> Loaded:
    """Return what a value of `--load` means.

    Args:
        step: `--ckpt-step`: which checkpoint of the run to take, None for its newest.

    Raises:
        DataError: neither a run, nor one of its checkpoints, nor a folder that the backend takes weights from; or the
            run has no checkpoint of that number.
    """
    if backend.load_takes_weights_of()(Path(load)):
        if step is not None:
            raise DataError(f"{load} is a folder of weights, with no checkpoints to choose from; leave --ckpt-step out")
        return Loaded(folder=Path(load), run=None, rollouts=0)
    checkpoint = resolve_checkpoint(Path(load))
    if step is not None:
        run = RunFolder(checkpoint.parent)
        found = run.find(step)
        if found is None:
            there = ", ".join(map(str, run.checkpoints()))
            raise DataError(f"{run.root} holds no checkpoint {step} (--ckpt-step); it holds {there}")
        checkpoint = found
    return Loaded(folder=checkpoint, run=checkpoint.parent, rollouts=checkpoint_id(checkpoint))


def load_is_save(config: DrivetrainConfig) -> bool:
    """Say whether `--load` names the run in `--save`, which goes on from there anyway."""
    load, save = config.train.load, Path(config.run_folder.save)
    return load is not None and Path(load).resolve() == save.resolve() and RunFolder(save).is_used()


def checkpoint_verifier(config: DrivetrainConfig) -> Callable[[Path], Sequence[str]]:
    """Return what looks for everything wrong with a checkpoint that this run may load."""
    check, full = config.backend.load_check_checkpoint(), config.train.verify_checkpoint
    world_size = config.placement.train_world_size
    return lambda checkpoint: check(checkpoint, world_size=world_size, full=full)


def find_load(config: DrivetrainConfig) -> tuple[Loaded | None, list[str]]:
    """Return what `--load` means to a new run, None where that is nothing, and what is wrong with it."""
    load, stop, step = config.train.load, config.loop.num_rollout, config.run_folder.ckpt_step
    if load is None or load_is_save(config):
        if step is None:
            return None, []
        save = config.run_folder.save
        return None, [f"--ckpt-step {step}: --save {save} holds no run; leave it out, or give the folder of the run"]
    if not Path(load).is_dir():
        wrong = "not a folder" if Path(load).exists() else "no such folder"
        return None, [f"--load {load}: {wrong}; give the folder of a run, or of one of its checkpoints"]
    try:
        loaded = resolve_load(config.backend, load, step)
    except DataError as error:
        return None, [f"--load {error}"]
    except OSError as error:  # `latest` names what the system cannot look up
        return None, [f"--load {load}: {error.strerror or error}; give the folder of a run that saved a checkpoint"]
    world_size = config.placement.train_world_size
    full = config.train.verify_checkpoint
    findings = checkpoint_findings(config.backend, loaded.folder, what="--load", world_size=world_size, full=full)
    if stop is not None and loaded.rollouts >= stop and not config.train.finetune:
        findings.append(
            f"--load {loaded.folder} was trained on {loaded.rollouts} rollouts already, and --num-rollout ends the run "
            f"at {stop}; raise it above {loaded.rollouts}"
        )
    return loaded, findings


def checkpoint_findings(
    backend: BackendSpec, checkpoint: Path, *, what: str, world_size: int | None, full: bool = False
) -> list[str]:
    """Return what the train backend finds wrong with a checkpoint, and which others lie beside it.

    Args:
        checkpoint: as `resolve_checkpoint` or `resolve_load` returned it.
        what: how the user gave it, for messages.
        world_size: ranks that will load it, None to export it.
        full: compare every byte with its checksums.
    """
    findings = backend.load_check_checkpoint()(checkpoint, world_size=world_size, full=full)
    if not findings:
        return []
    folders = [one.name for one in sorted(checkpoint.parent.glob("iter_*")) if one.is_dir() and not one.suffix]
    others = [name for name in folders if name != checkpoint.name][-_SHOWN:]
    beside = f" (beside it: {', '.join(others)})" if others else ""
    return [f"{what} {finding}{beside}" for finding in findings]
