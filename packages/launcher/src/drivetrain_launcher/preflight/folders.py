"""The folders that a run writes: not on top of what it reads, writable, and with room for what will be written.

Room is reckoned roughly: parameters times bytes a parameter, against what the file system gives a user.
"""

import os
import tempfile
from pathlib import Path

from drivetrain_backend_api import DrivetrainError
from drivetrain_backend_api.manifest import MANIFEST
from drivetrain_infra.run_folder import RunFolder
from drivetrain_launcher.config import DrivetrainConfig
from drivetrain_launcher.preflight.checkpoint import Loaded
from drivetrain_launcher.preflight.size import RunSize, gib

CHECKPOINT_BYTES = 12
"""Of one parameter in a checkpoint: weight and both of Adam's moments in fp32."""


def folder_findings(config: DrivetrainConfig, size: RunSize, loaded: Loaded | None, start: int) -> list[str]:
    """Return what is wrong with `--save` and `--update-weight-disk-dir`.

    Args:
        loaded: what `--load` means, None without one.
        start: the first rollout id.
    """
    folders = {"--save": config.run_folder.save, "--update-weight-disk-dir": config.weight_sync.update_weight_disk_dir}
    findings = [
        finding
        for flag, folder in folders.items()
        if folder is not None and (finding := unwritable(flag, Path(folder)))
    ]
    findings += _overlap_findings(config, loaded)
    if config.placement.ray_address is None and not findings:
        findings += _socket_findings(Path(config.run_folder.save))
    if findings or start == config.loop.num_rollout:  # which has nothing left to write
        return findings
    return _room_findings(config, size)


def _socket_findings(save: Path) -> list[str]:
    from drivetrain_infra.ray_runtime import ray_temp_dir  # imports Ray

    try:
        ray_temp_dir(save.absolute())
    except DrivetrainError as error:
        return [str(error)]
    return []


def folder_notes(config: DrivetrainConfig, size: RunSize, start: int) -> list[str]:
    """Return what is no error, since a user may remove old checkpoints or make room while the run goes on.

    Args:
        start: the first rollout id.
    """
    save, interval = config.run_folder.save, config.run_folder.save_interval
    free, count = _free_bytes(Path(save)), _checkpoints(config, start)
    together = count * CHECKPOINT_BYTES * size.parameters
    if free is None or count < 2 or together <= free:
        return []
    return [
        f"--save-interval {interval}: the {count} checkpoints of this run take about {gib(together)} together, and the "
        f"file system of --save {save} has {gib(free)} free; raise it, or give --save-max-to-keep"
    ]


def unwritable(flag: str, folder: Path) -> str | None:
    """Say why nothing can be written to a folder that may not be there yet, or None."""
    nearest = _nearest(folder)
    if not nearest.is_dir():
        return f"{flag} {folder}: {nearest} is a file, not a folder; choose another"
    try:
        with tempfile.TemporaryFile(dir=nearest):
            return None
    except OSError as error:
        return f"{flag} {folder}: cannot write in {nearest}: {error.strerror or error}; choose another folder"


def _nearest(folder: Path) -> Path:
    """Return the folder itself, or that of its parents where it will be made."""
    return next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())


# -- overlaps ----------------------------------------------------------------------------------------------------------


def _overlap_findings(config: DrivetrainConfig, loaded: Loaded | None) -> list[str]:
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
    run = None
    if loaded is not None and loaded.run is None:
        models["--load"] = str(loaded.folder)
    elif loaded is not None:
        run = _real(str(loaded.folder)).parent
    for flag, folder in {"--save": save, "--update-weight-disk-dir": disk_dir}.items():
        if folder is None:
            continue
        real = _real(folder)
        findings += [
            f"{flag} {folder}: is the model folder of {other} {model}; choose a folder of its own"
            for other, model in models.items()
            if model is not None and real == _real(model)
        ]
        if real == run:
            findings.append(
                f"{flag} {folder}: is the run that --load {train.load} starts from; choose a new folder for this run"
            )
        findings += [
            f"{flag} {folder}: lies in the checkpoint {one}; choose a folder outside of it"
            for one in (real, *real.parents)
            if _is_checkpoint(one) and (one.parent in (run, real_save) or (one / MANIFEST).exists())
        ]
    return findings


def _is_checkpoint(folder: Path) -> bool:
    """Say whether a folder of a run has the name of a checkpoint; it need not be there yet."""
    number = folder.name.removeprefix("iter_")
    return number.isdecimal() and RunFolder(folder.parent).checkpoint(int(number)) == folder


def _real(path: str) -> Path:
    return Path(os.path.realpath(path))


# -- room --------------------------------------------------------------------------------------------------------------


def _room_findings(config: DrivetrainConfig, size: RunSize) -> list[str]:
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


def _checkpoints(config: DrivetrainConfig, start: int) -> int:
    """Count the checkpoints that the run will write, at least: one where its length is not known yet."""
    stop, every = config.loop.num_rollout, config.run_folder.save_interval
    if stop is None or every is None:
        return 1
    count = stop // every - start // every + (stop % every > 0)
    keep = config.run_folder.save_max_to_keep
    return count if keep is None else min(count, keep + 1)  # the new one is whole before the oldest goes
