"""The folder of a run: what its files are called, and how a checkpoint becomes durable.

A checkpoint is complete or absent: it is written into a folder of another name, synced, and renamed; `latest` names the
newest durable one and is written last. A backend reads and writes only inside the folder it is given.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from drivetrain_backend_api import ConfigError, DataError, DrivetrainError

_CHECKPOINT = re.compile(r"iter_(\d{7,})")
_PARTIAL_SUFFIX = ".partial"

_STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE)
_STORAGE_TROUBLE = re.compile("|".join(re.escape(os.strerror(one)) for one in _STORAGE_ERRORS), re.IGNORECASE)
"""What the message of a backend says when it is the file system that failed."""

_TORCH_WRITER = "inline_container"
"""Names PyTorch's file writer, whose messages leave the system's reason out: "unexpected pos 704 vs 598"."""


class RunFolder:
    """Names and protocol of the files under `--save`."""

    def __init__(self, root: Path) -> None:
        """Refer to a run; nothing is touched."""
        self.root = root
        self.metrics = root / "metrics.jsonl"
        self.config = root / "config.json"
        self._latest = root / "latest"

    def refuse_if_used(self) -> None:
        """Refuse a folder that holds a run already.

        Raises:
            ConfigError: it has metrics or a checkpoint.
        """
        try:
            used = self._latest.exists() or (self.metrics.exists() and self.metrics.stat().st_size > 0)
        except (OSError, ValueError) as error:  # ValueError: a NUL byte
            raise ConfigError(f"--save {self.root}: is no usable path ({error}); choose another folder") from error
        if used:
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
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            write_atomically(self.config, json.dumps(config, indent=2) + "\n")
        except OSError as error:
            raise ConfigError(f"--save {self.root}: cannot be written ({error}); choose a writable folder") from error

    def checkpoint(self, next_rollout_id: int) -> Path:
        """Path of the checkpoint after which `next_rollout_id` comes next."""
        return self.root / f"iter_{next_rollout_id:07d}"

    @contextmanager
    def new_checkpoint(self, next_rollout_id: int) -> Iterator[Path]:
        """Yield the empty folder that a backend writes into; at the end make it durable, then name it in `latest`.

        Whatever fails, older checkpoints and `latest` stay as they were, and what was half written is removed.

        Raises:
            DataError: the backend wrote nothing into the folder.
            DrivetrainError: the file system failed, or the run folder is gone; what else the block raises passes.
        """
        aside, final = self._aside(next_rollout_id), self.checkpoint(next_rollout_id)
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()  # not its parents: a run folder that is gone took the run's metrics with it
            yield aside
            self._commit(aside, final)
        except BaseException as error:
            shutil.rmtree(aside, ignore_errors=True)
            if sentence := self._storage_failure(error, final):
                raise DrivetrainError(sentence) from error
            raise

    def _commit(self, aside: Path, final: Path) -> None:
        if not any(aside.iterdir()):
            raise DataError(
                f"{aside} is empty though the train workers wrote a checkpoint; --save must be a folder on a file "
                "system that all nodes share"
            )
        for path in sorted(aside.rglob("*")):
            _sync(path)
        _sync(aside)
        if final.exists():
            shutil.rmtree(final)
        aside.rename(final)
        _sync(self.root)
        write_atomically(self._latest, final.name + "\n")

    def _storage_failure(self, error: BaseException, final: Path) -> str | None:
        """Return the sentence for an error that lies with the run folder's file system, None for any other."""
        if not isinstance(error, Exception):
            return None
        if not os.path.isdir(self.root):  # which, unlike Path.is_dir, never raises
            return (
                f"--save {self.root}: the folder is gone, so checkpoint {final.name} cannot be written; start again "
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
            f"--save {self.root}: checkpoint {final.name} could not be written ({reason}); make room there, or choose "
            "another --save"
        )

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
        if not _CHECKPOINT.fullmatch(name) or not (self.root / name).is_dir():
            raise DataError(
                f"{self._latest} names {name!r}, which is no checkpoint in {self.root}; write the right name into it"
            )
        return self.root / name

    def _aside(self, next_rollout_id: int) -> Path:
        final = self.checkpoint(next_rollout_id)
        return final.with_name(final.name + _PARTIAL_SUFFIX)


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


def write_atomically(path: Path, text: str) -> None:
    """Replace a small text file so that a reader sees the old or the new content, never a part."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        with suppress(OSError):
            aside.unlink()
        raise
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
