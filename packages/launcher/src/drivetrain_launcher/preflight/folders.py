"""The folders that a run writes: not on top of what it reads, writable, and with room for what will be written.

Room is reckoned roughly: parameters times bytes a parameter, against what the file system gives a user.
"""

import os
import tempfile
from pathlib import Path

from drivetrain_launcher.config import DrivetrainConfig
from drivetrain_launcher.preflight.checkpoint import trained_rollouts
from drivetrain_launcher.preflight.size import RunSize, gib

CHECKPOINT_BYTES = 12
"""Of one parameter in a checkpoint: weight and both of Adam's moments in fp32."""


def folder_findings(config: DrivetrainConfig, size: RunSize, loaded: Path | None) -> list[str]:
    """Return what is wrong with `--save` and `--update-weight-disk-dir`.

    Args:
        loaded: the checkpoint that `--load` means, None without one.
    """
    folders = {"--save": config.run_folder.save, "--update-weight-disk-dir": config.weight_sync.update_weight_disk_dir}
    findings = [
        finding
        for flag, folder in folders.items()
        if folder is not None and (finding := _unwritable(flag, Path(folder)))
    ]
    findings += _overlap_findings(config, loaded)
    return findings or _room_findings(config, size, loaded)


def _unwritable(flag: str, folder: Path) -> str | None:
    nearest = _nearest(folder)
    if not nearest.is_dir():
        return f"{flag} {folder}: {nearest} is a file, not a folder; choose another"
    try:
        with tempfile.TemporaryFile(dir=nearest):
            return None
    except OSError as error:
        return f"{flag} {folder}: cannot write in {nearest}: {error.strerror or error}"


def _nearest(folder: Path) -> Path:
    """Return the folder itself, or that of its parents where it will be made."""
    return next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())


# -- overlaps ----------------------------------------------------------------------------------------------------------


def _overlap_findings(config: DrivetrainConfig, loaded: Path | None) -> list[str]:
    train, disk_dir = config.train, config.weight_sync.update_weight_disk_dir
    save, real_save = config.run_folder.save, _real(config.run_folder.save)
    if real_save == Path(real_save.anchor):
        return [f"--save {save}: is the root of the file system; choose a folder of its own for the run"]
    findings = []
    models = {
        "--hf-checkpoint": train.hf_checkpoint,
        "--ref-load": train.ref_load,
        "--opd-teacher-load": train.opd_teacher_load,
    }
    for flag, model in models.items():
        if model is None:
            continue
        real_model = _real(model)
        if real_save == real_model or real_model in real_save.parents:
            findings.append(f"--save {save}: lies in the model folder of {flag} {model}; choose a folder outside of it")
        elif real_save in real_model.parents and not _made_by_recipe(config, flag):
            findings.append(f"--save {save}: holds the model folder of {flag} {model}; choose a folder of its own")
        if disk_dir is not None and real_model in (_real(disk_dir), *_real(disk_dir).parents):
            findings.append(
                f"--update-weight-disk-dir {disk_dir}: lies in the model folder of {flag} {model}; choose a folder "
                "outside of it"
            )
    if loaded is not None:
        checkpoint = _real(str(loaded))
        if real_save == checkpoint.parent or checkpoint in (real_save, *real_save.parents):
            findings.append(
                f"--save {save}: is the run that --load {train.load} starts from; choose a new folder for this run"
            )
    return findings


def _made_by_recipe(config: DrivetrainConfig, flag: str) -> bool:
    """Say whether a recipe makes this model, which it does inside the run's folder."""
    return config.sources[flag.removeprefix("--").replace("-", "_")].startswith("recipe ")


def _real(path: str) -> Path:
    return Path(os.path.realpath(path))


# -- room --------------------------------------------------------------------------------------------------------------


def _room_findings(config: DrivetrainConfig, size: RunSize, loaded: Path | None) -> list[str]:
    save, sync = Path(config.run_folder.save), config.weight_sync
    checkpoint, weights = CHECKPOINT_BYTES * size.parameters, size.compute_bytes * size.parameters
    synced_by_disk = sync.update_weight_transport == "disk" and size.engines > 0
    findings = []
    free = _free_bytes(save)
    if free is not None and checkpoint > free:
        findings.append(
            f"--save {save}: a checkpoint of {size.parameters} parameters takes about {gib(checkpoint)}, and its file "
            f"system has {gib(free)} free; make room, or choose a folder on another file system"
        )
    elif free is not None and (count := _checkpoints(config, loaded)) * checkpoint > free:
        interval = config.run_folder.save_interval
        findings.append(
            f"--save-interval {interval}: the {count} checkpoints of this run take about {gib(count * checkpoint)}, "
            f"and the file system of --save {save} has {gib(free)} free; raise it, or make room"
        )
    folder = Path(sync.update_weight_disk_dir or save)
    free = _free_bytes(folder)
    if synced_by_disk and free is not None and weights > free:
        flag = "--save" if sync.update_weight_disk_dir is None else "--update-weight-disk-dir"
        findings.append(
            f"{flag} {folder}: --update-weight-transport disk writes about {gib(weights)} of weights, and its file "
            f"system has {gib(free)} free; make room, or give --update-weight-transport distributed"
        )
    return findings


def _free_bytes(folder: Path) -> int | None:
    """Return what a user may still write into the folder's file system; None where it does not say."""
    found = os.statvfs(_nearest(folder))
    return found.f_bavail * found.f_frsize if found.f_blocks else None


def _checkpoints(config: DrivetrainConfig, loaded: Path | None) -> int:
    """Count the checkpoints that the run will write, at least: one where its length is not known yet."""
    stop, every = config.loop.num_rollout, config.run_folder.save_interval
    if stop is None or every is None:
        return 1
    start = 0 if loaded is None else trained_rollouts(loaded)
    return stop // every - start // every + (stop % every > 0)
