"""What the files of a W&B run on this machine hold, read as `wandb sync` reads them; knows no server."""

import os
import zlib
from collections.abc import Iterator
from pathlib import Path

_IDENT = b":W&B"
_HEADER = 7
"""Bytes before the first block, which is shorter by as many, and before each piece of a record."""

_BLOCK = 32 * 1024

_WHOLE, _FIRST, _LAST = 1, 2, 4
"""Kinds of pieces; the fourth is one in the middle."""


def run_folders(folder: Path) -> list[Path]:
    """List the folders of all starts of W&B in `folder`, oldest first."""
    found = [*folder.glob("offline-run-*-*"), *folder.glob("run-*-*")]
    return sorted((one for one in found if one.is_dir()), key=lambda one: one.name.removeprefix("offline-"))


def id_of(run_folder: Path) -> str:
    """Return the run id that a folder like `offline-run-20260101_120000-abcd1234` is named for."""
    return run_folder.name.removeprefix("offline-").split("-", 2)[2]


def steps_of(folder: Path, run_id: str) -> set[int]:
    """Return the steps of all rows that the files of a run hold, over all its starts.

    A process that is killed leaves a file that ends anywhere; what is behind the last whole record does not count.
    """
    return {step for path in _files(folder, run_id) for step in _steps(path.read_bytes())}


def cut_torn_ends(folder: Path, run_id: str) -> None:
    """Cut off what follows the last whole record of each file, at which `wandb sync` gives up on all later files.

    Only once no process writes them any more.
    """
    for path in _files(folder, run_id):
        data = path.read_bytes()
        end = max((end for end, _ in _records(data)), default=_HEADER)
        if data.startswith(_IDENT) and end < len(data):
            os.truncate(path, end)


def _files(folder: Path, run_id: str) -> Iterator[Path]:
    for run_folder in run_folders(folder):
        if id_of(run_folder) == run_id:
            yield from run_folder.glob("*.wandb")


def _steps(data: bytes) -> Iterator[int]:
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    for _, payload in _records(data):
        record = Record()
        record.ParseFromString(payload)
        if record.WhichOneof("record_type") == "history":
            yield record.history.step.num


def _records(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield where each record ends, and what it holds, up to the first that is not whole.

    The format is LevelDB's log, as W&B varies it: pieces of records in blocks, behind a header of the file.
    """
    if not data.startswith(_IDENT):
        return
    at, record = _HEADER, b""
    while True:
        if _BLOCK - at % _BLOCK < _HEADER:  # no piece begins so late in a block
            at += _BLOCK - at % _BLOCK
        crc, size = int.from_bytes(data[at : at + 4], "little"), int.from_bytes(data[at + 4 : at + 6], "little")
        piece = data[at + 6 : at + _HEADER + size]  # its kind, then what it holds
        if len(piece) != size + 1 or zlib.crc32(piece) != crc:
            return
        at += _HEADER + size
        record = piece[1:] if piece[0] in (_WHOLE, _FIRST) else record + piece[1:]
        if piece[0] in (_WHOLE, _LAST):
            yield at, record
