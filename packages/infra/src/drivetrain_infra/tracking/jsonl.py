"""Metrics as JSON lines: one object a line, each with `rollout_id`."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from drivetrain_backend_api import DataError, DrivetrainError
from drivetrain_infra.tracking.base import row_of


class JsonlTracker:
    """Appends to a file, each line at once, so that a reader never waits for the end of the run.

    Every line is written whole or not at all. A file that is replaced or removed meanwhile, as editors and `sed -i` do,
    is opened again; one whose folder is no longer the same has no place to go.
    """

    def __init__(self, path: Path, keep_bytes: int | None = None) -> None:
        """Open the file, which is made where it does not exist.

        Args:
            path: the file.
            keep_bytes: length that belongs to the checkpoint that a run goes on from; what is behind it, half a line
                too, is cut off, since the run writes it again. None keeps all.

        Raises:
            DrivetrainError: it cannot be opened.
            DataError: it holds less than `keep_bytes`, or no line ends there.
        """
        self._path = path
        if keep_bytes is not None:
            require_lines(path, keep_bytes)
        try:
            self._file = path.open("ab", buffering=0)
            # open, so that no other folder gets its number
            self._folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise self._failure(error) from error
        if keep_bytes is not None:
            self._cut(keep_bytes)

    @property
    def nbytes(self) -> int:
        """Length of the file, all of which is on the disk by then: what a checkpoint may name.

        Raises:
            DrivetrainError: it cannot be written to the disk.
        """
        try:
            self._stay_in_place()
            os.fsync(self._file.fileno())
            return os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise self._failure(error) from error

    def log(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """Append one line; a value that is not finite becomes null, since JSON has no other word for it.

        Raises:
            DrivetrainError: it cannot be written, or the folder was removed or replaced since the file was opened.
        """
        line = json.dumps(row_of(rollout_id, metrics), allow_nan=False) + "\n"
        try:
            self._stay_in_place()
            self._append(line.encode())
        except OSError as error:
            raise self._failure(error) from error

    def close(self) -> None:
        """Close the file."""
        if not self._file.closed:
            self._file.close()
            os.close(self._folder)

    def _stay_in_place(self) -> None:
        """See that what is written is found: not in a file or folder that has no name any more."""
        file, folder = self._file.fileno(), self._path.parent
        if not _is_at(self._folder, folder):
            raise DrivetrainError(
                f"{self._path}: metrics have no place to go, because {folder} was removed or replaced while the run "
                "went on; start again with a --save that nothing removes"
            )
        if not _is_at(file, self._path):
            self._file.close()
            self._file = self._path.open("ab", buffering=0)

    def _append(self, line: bytes) -> None:
        begin = os.fstat(self._file.fileno()).st_size
        try:
            while line:
                line = line[self._file.write(line) or 0 :]
        except OSError:
            with suppress(OSError):  # no file that can be cut
                self._file.truncate(begin)
            raise

    def _cut(self, nbytes: int) -> None:
        try:
            self._file.truncate(nbytes)
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> DrivetrainError:
        return DrivetrainError(
            f"{self._path}: metrics cannot be written ({error.strerror}); make room there, or choose another --save"
        )


def require_lines(path: Path, nbytes: int) -> None:
    """Refuse a file that does not hold this many bytes of whole lines any more.

    Raises:
        DataError: with the way out.
        DrivetrainError: it cannot be read.
    """
    try:
        kept = path.read_bytes()[:nbytes]
    except FileNotFoundError:
        kept = b""
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); make it readable") from error
    if len(kept) < nbytes or (kept and not kept.endswith(b"\n")):
        raise DataError(
            f"{path}: was changed since the checkpoint was saved, when it had {nbytes} bytes of whole lines; put the "
            "file of then back, or go on from the checkpoint in a new --save with --load"
        )


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read a metrics file back, one dict a line."""
    with path.open() as file:
        return [json.loads(line) for line in file]
