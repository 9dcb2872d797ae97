"""The folder of a run: what its files are called, and how a checkpoint becomes durable.

A checkpoint is complete or absent, whatever is killed when: it is written into a folder of another name, synced, and
renamed; `latest` names the newest durable one and is written last. One that goes is renamed before it is deleted. What
a killed process leaves has names of its own, and the next start of the run removes it:

    iter_0000012.partial     being written; never read
    iter_0000012.removed     being deleted; never read
    iter_0000012.replaced    whole, and stands for iter_0000012 where that is not there
    .latest.4711             half a small file

A backend reads and writes only inside the folder it is given. Knows nothing of what is in a checkpoint.
"""

import errno
import fcntl
import json
import os
import re
import shutil
import socket
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from drivetrain_backend_api import ConfigError, DataError, DrivetrainError

_CHECKPOINT = re.compile(r"iter_([0-9]{7,})")
_ROLLOUT = re.compile(r"rollout_([0-9]+)\.pt")
_HALF_WRITTEN = re.compile(r"\.(latest|config\.json|resume_state\.json|rollout_[0-9]+\.pt)\.[0-9]+")
"""A file that `write_atomically` did not come to rename."""

_PARTIAL, _REMOVED, _REPLACED = ".partial", ".removed", ".replaced"

_STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE)
_STORAGE_TROUBLE = re.compile("|".join(re.escape(os.strerror(one)) for one in _STORAGE_ERRORS), re.IGNORECASE)
"""What the message of a backend says when it is the file system that failed."""

_TORCH_WRITER = "inline_container"
"""Names PyTorch's file writer, whose messages leave the system's reason out: "unexpected pos 704 vs 598"."""


class RunFolder:
    """Names and protocol of the files under `--save`.

    Attributes:
        root: the folder.
        metrics: every logged scalar, one JSON object a line.
        config: the resolved configuration.
        state: the newest `RunState`.
        rollouts: folder of the rollouts that were made, each saved before it is trained on.
    """

    def __init__(self, root: Path) -> None:
        """Refer to a run; nothing is touched."""
        self.root = root
        self.metrics = root / "metrics.jsonl"
        self.config = root / "config.json"
        self.state = root / "resume_state.json"
        self.rollouts = root / "rollout_ckpts"
        self._latest = root / "latest"
        self._lock = root / "lock"

    # -- the run -------------------------------------------------------------------------------------------------------

    def is_used(self) -> bool:
        """Say whether the folder holds a run: a state, a metric, a rollout or a checkpoint; its configuration is none.

        Raises:
            ConfigError: the path cannot be looked at.
        """
        try:
            return (
                any(one.exists() for one in (self._latest, self.state))
                or (self.metrics.exists() and self.metrics.stat().st_size > 0)
                or bool(self.checkpoints())
                or any(_ROLLOUT.fullmatch(name) for name in _names(self.rollouts))
            )
        except (OSError, ValueError) as error:  # ValueError: a NUL byte
            raise ConfigError(f"--save {self.root}: is no usable path ({error}); choose another folder") from error

    def refuse_if_used(self) -> None:
        """Refuse a folder that holds a run already.

        Raises:
            ConfigError: it does, as `is_used` says.
        """
        if self.is_used():
            raise ConfigError(
                f"--save {self.root}: holds a run already; choose another folder, or remove this one"
                + (f". To go on from its checkpoint: --load {self.root} --save NEW" if self._latest.exists() else "")
            )

    def create(self, config: Mapping[str, Any]) -> None:
        """Make the folder of a new run and write its resolved configuration.

        Raises:
            ConfigError: the folder holds a run already, or cannot be written.
        """
        self.refuse_if_used()
        self._write_config(config)

    def reopen(self, config: Mapping[str, Any]) -> None:
        """Write the resolved configuration of a run that goes on, which may differ from what it began with.

        Raises:
            ConfigError: the folder cannot be written.
        """
        self._write_config(config)

    def _write_config(self, config: Mapping[str, Any]) -> None:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            write_atomically(self.config, json.dumps(config, indent=2) + "\n")
        except OSError as error:
            raise ConfigError(f"--save {self.root}: cannot be written ({error}); choose a writable folder") from error

    def remove_leftovers(self) -> None:
        """Remove what a killed process left half written or half deleted, and put a replaced checkpoint back.

        Only for who holds the run: what lives would lose the files it is writing.

        Raises:
            DrivetrainError: something cannot be removed.
        """
        try:
            for name in _names(self.root):
                stem, suffix = os.path.splitext(name)
                path = self.root / name
                if _HALF_WRITTEN.fullmatch(name):
                    path.unlink()
                elif not _CHECKPOINT.fullmatch(stem):
                    continue
                elif suffix == _REPLACED and not (self.root / stem).exists():
                    path.rename(self.root / stem)
                    sync(self.root)
                elif suffix in (_PARTIAL, _REPLACED):
                    _remove(path)
            self._sweep()
            for name in _names(self.rollouts):
                if _HALF_WRITTEN.fullmatch(name):
                    (self.rollouts / name).unlink()
        except OSError as error:
            raise DrivetrainError(
                f"--save {self.root}: {error.filename} is left of a run that was killed, and cannot be removed "
                f"({error.strerror}); remove it by hand"
            ) from error

    # -- one run at a time ---------------------------------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder, which is made where it is missing, against every other start: on other nodes too.

        A file system that has no locks is taken as it is.

        Raises:
            ConfigError: another start holds it, or the folder cannot be written.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            file = self._lock.open("a+")
        except OSError as error:
            raise ConfigError(f"--save {self.root}: cannot be written ({error}); choose a writable folder") from error
        with file:
            self._take(file)
            with suppress(OSError):  # a full disk: nobody can be told who holds it
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
                file.flush()
            yield

    def refuse_if_locked(self) -> None:
        """Refuse a folder that another start holds. Raises ConfigError."""
        try:
            file = self._lock.open("r+")
        except (OSError, ValueError):  # nobody has run here, or what uses the folder says what is wrong with it
            return
        with file:
            self._take(file)

    def _take(self, file: IO[str]) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            who = file.read(200).strip() or "another process"
            raise ConfigError(
                f"--save {self.root}: {who} runs in it; wait for its end, end it, or choose another folder"
            ) from error
        except OSError:
            return

    # -- checkpoints, read ---------------------------------------------------------------------------------------------

    def checkpoint(self, next_rollout_id: int) -> Path:
        """Path of the checkpoint after which `next_rollout_id` comes next."""
        return self.root / f"iter_{next_rollout_id:07d}"

    def checkpoints(self) -> list[int]:
        """Return the ids of all complete checkpoints, ascending: the rollouts that each has behind it."""
        stems = {name.removesuffix(_REPLACED) for name in _names(self.root)}
        ids = {int(match[1]) for match in map(_CHECKPOINT.fullmatch, stems) if match}
        return sorted(one for one in ids if self.find(one) is not None)

    def find(self, next_rollout_id: int) -> Path | None:
        """Return where a complete checkpoint lies, None where there is none."""
        final = self.checkpoint(next_rollout_id)
        places = (final, _named(final, _REPLACED), final)  # again, for it may come back while we look
        return next((one for one in places if one.is_dir()), None)

    def latest(self) -> Path:
        """Return the newest durable checkpoint.

        Raises:
            DataError: there is none, or `latest` names something that is not there.
        """
        if not self._latest.exists():
            raise DataError(
                f"{self.root} holds no checkpoint: {self._latest} is missing; give the folder of a run that saved one"
            )
        if not self._latest.is_file():  # to open a pipe is to wait
            raise DataError(f"{self._latest}: cannot be read; it must be a file")
        try:
            name = self._latest.read_text(errors="replace").strip()
        except OSError as error:
            raise DataError(f"{self._latest}: cannot be read ({error.strerror}); it must be a file") from error
        match = _CHECKPOINT.fullmatch(name)
        found = self.find(int(match[1])) if match else None
        if found is None:
            raise DataError(
                f"{self._latest} names {name!r}, which is no checkpoint in {self.root}; write the right name into it"
            )
        return found

    def newest(self) -> Path | None:
        """Return what `latest` names or, where a kill came before the first `latest`, the newest complete checkpoint.

        Raises:
            DataError: `latest` names something that is not there.
        """
        if self._latest.exists():
            return self.latest()
        ids = self.checkpoints()
        return self.find(ids[-1]) if ids else None

    # -- checkpoints, written ------------------------------------------------------------------------------------------

    def make_aside(self, next_rollout_id: int) -> Path:
        """Make the empty folder that a checkpoint is written into. Raises OSError."""
        aside = self._aside(next_rollout_id)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()  # not its parents: a run folder that is gone took the run's metrics with it
        return aside

    def drop_aside(self, next_rollout_id: int) -> None:
        """Remove what was written of a checkpoint that will not be. Never raises."""
        shutil.rmtree(self._aside(next_rollout_id), ignore_errors=True)

    def commit(self, next_rollout_id: int) -> Path:
        """Make what was written aside durable, give it its name, then name it in `latest`.

        A checkpoint of that name is replaced; at each moment the old or the new one is there, whole.

        Raises:
            DataError: nothing was written.
            OSError: as the file system has it; whatever `latest` named is still there.
        """
        aside, final = self._aside(next_rollout_id), self.checkpoint(next_rollout_id)
        if not any(aside.iterdir()):
            raise DataError(
                f"{aside} is empty though the train workers wrote a checkpoint; --save must be a folder on a file "
                "system that all nodes share"
            )
        folders = []
        for path in sorted(aside.rglob("*")):
            if path.is_dir():
                folders.append(path)
            else:
                sync(path)
        for path in [*reversed(folders), aside]:
            sync(path)
        old = _named(final, _REPLACED)
        if final.exists():
            _remove(old)
            final.rename(old)
        try:
            aside.rename(final)
        except OSError:
            if old.exists():
                old.rename(final)
            raise
        sync(self.root)
        write_atomically(self._latest, final.name + "\n")
        shutil.rmtree(old, ignore_errors=True)  # what stays of it, the next start removes
        return final

    def rewind_to(self, checkpoint: Path) -> None:
        """Make `latest` name the checkpoint that the run goes on from, before anything of a newer one is cut off.

        So a run that goes back is still there when it is killed; newer checkpoints stay until they are saved again.

        Raises:
            DrivetrainError: `latest` cannot be written.
        """
        name = checkpoint_name(checkpoint)
        try:
            if not (self._latest.is_file() and self._latest.read_text(errors="replace").strip() == name):
                write_atomically(self._latest, name + "\n")
        except OSError as error:
            raise DrivetrainError(
                f"--save {self.root}: {self._latest.name} cannot be written ({error.strerror}); make room there, or "
                "make it writable"
            ) from error

    def prune(self, keep: int | None, protect: Collection[Path] = ()) -> list[int]:
        """Remove the oldest checkpoints, then the rollouts that no kept one needs.

        Checkpoints newer than `latest`, of a run that went back, are neither counted nor removed.

        Args:
            keep: checkpoints that may stay, the newest; None for all, and nothing is removed.
            protect: checkpoints that stay and are not counted.

        Returns: ids of what was removed.

        Raises:
            DrivetrainError: one cannot be removed.
        """
        if keep is None or not self._latest.exists():
            return []
        spared = {one.resolve() for one in protect}
        newest = checkpoint_id(self.latest())
        ours = [one for one in self.checkpoints() if one <= newest and self.checkpoint(one).resolve() not in spared]
        old = ours[: max(0, len(ours) - max(keep, 1))]
        self._sweep()
        try:
            for one in old:
                self.checkpoint(one).rename(_named(self.checkpoint(one), _REMOVED))
            if old:
                sync(self.root)
                self._sweep()
            oldest_kept = min(self.checkpoints())
            for name in _names(self.rollouts):
                if (match := _ROLLOUT.fullmatch(name)) and int(match[1]) < oldest_kept:
                    (self.rollouts / name).unlink()
        except OSError as error:
            raise DrivetrainError(
                f"--save {self.root}: {error.filename} cannot be removed ({error.strerror}), as --save-max-to-keep "
                f"{keep} asks; make it removable, or leave that flag out"
            ) from error
        return old

    def _sweep(self) -> None:
        """Delete what `prune` has put aside. A file that someone else reads may stay on NFS, until the next time."""
        for name in _names(self.root):
            stem, suffix = os.path.splitext(name)
            if suffix == _REMOVED and _CHECKPOINT.fullmatch(stem):
                shutil.rmtree(self.root / name, ignore_errors=True)

    @contextmanager
    def new_checkpoint(self, next_rollout_id: int) -> Iterator[Path]:
        """Yield the empty folder that a backend writes into; at the end make it durable, then name it in `latest`.

        Whatever fails, older checkpoints and `latest` stay as they were, and what was half written is removed.

        Raises:
            DataError: the backend wrote nothing into the folder.
            DrivetrainError: the file system failed, or the run folder is gone; what else the block raises passes.
        """
        try:
            yield self.make_aside(next_rollout_id)
            self.commit(next_rollout_id)
        except BaseException as error:
            self.drop_aside(next_rollout_id)
            if sentence := self.storage_failure(error, next_rollout_id):
                raise DrivetrainError(sentence) from error
            raise

    def storage_failure(self, error: BaseException, next_rollout_id: int) -> str | None:
        """Return the sentence for an error that lies with the run folder's file system, None for any other."""
        if not isinstance(error, Exception):
            return None
        name = self.checkpoint(next_rollout_id).name
        if not os.path.isdir(self.root):  # which, unlike Path.is_dir, never raises
            return (
                f"--save {self.root}: the folder is gone, so checkpoint {name} cannot be written; start again "
                "with a folder that nothing removes"
            )
        text = str(error)
        if said := _STORAGE_TROUBLE.search(text):
            reason = said[0]
        elif isinstance(error, OSError):
            reason = text
        elif _TORCH_WRITER in text:
            reason = "PyTorch could not write a file to its end"
        else:
            return None
        return (
            f"--save {self.root}: checkpoint {name} could not be written ({reason}); make room there, or choose "
            "another --save"
        )

    def _aside(self, next_rollout_id: int) -> Path:
        return _named(self.checkpoint(next_rollout_id), _PARTIAL)


def resolve_checkpoint(path: Path, *, what: str = "--load") -> Path:
    """Return the checkpoint that a path means: the folder itself if it is one, else the run's latest.

    Args:
        path: of a checkpoint or a run.
        what: how the user gave it, for messages.

    Raises:
        DataError: neither.
    """
    if not path.is_dir():
        raise DataError(f"{what} {path}: no such folder")
    return path if _CHECKPOINT.fullmatch(path.name) else RunFolder(path).latest()


def checkpoint_name(checkpoint: Path) -> str:
    """Return what a checkpoint of `RunFolder` is called, also where a kill left it under another name."""
    return checkpoint.name.removesuffix(_REPLACED)


def checkpoint_id(checkpoint: Path) -> int:
    """Return the rollouts that a checkpoint of `RunFolder` has behind it."""
    return int(checkpoint_name(checkpoint).removeprefix("iter_"))


def write_atomically(path: Path, content: str | memoryview) -> None:
    """Replace a file, durably, so that a reader sees the old or the new content, never a part. Raises OSError."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")  # as `_HALF_WRITTEN` knows it
    try:
        with aside.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        with suppress(OSError):
            aside.unlink()
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Make a file's content, or a folder's names, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _named(checkpoint: Path, suffix: str) -> Path:
    return checkpoint.with_name(checkpoint.name + suffix)


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _remove(folder: Path) -> None:
    """Remove a folder that may not be there. Raises OSError."""
    with suppress(FileNotFoundError):
        shutil.rmtree(folder)
