"""The list of a checkpoint folder's files, with the size and the checksum of each: is the folder what was written?

Whoever adds a file rewrites the list with one more record; nobody needs to know what all of the files are. Never
imports torch, and knows nothing of what the files hold.
"""

import json
import os
import stat
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain_backend_api.errors import DataError

MANIFEST = "manifest.json"

OTHER_CHECKPOINT = "use another checkpoint of the run"
"""What to do about a damaged one."""

SMALL_BYTES = 2**20
"""Files of up to this size are compared byte for byte always."""

_READ_BYTES = 16 * 2**20

_READERS = 4
"""Threads that compute checksums: zlib lets go of the interpreter lock."""


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """What is known of a file.

    Attributes:
        size: in bytes.
        crc32: of all bytes.
    """

    size: int
    crc32: int


def record_of(path: Path) -> FileRecord:
    """Read a file through. Raises OSError."""
    size, crc32 = 0, 0
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            size += len(part)
            crc32 = zlib.crc32(part, crc32)
    return FileRecord(size=size, crc32=crc32)


def write_manifest(folder: Path, records: Mapping[str, FileRecord]) -> None:
    """Write the list of a folder's files, durably and in one go: an older list is there until the new one is.

    Args:
        folder: where the files are.
        records: by the file's path in the folder, with "/" between its parts.
    """
    aside = folder / f".{MANIFEST}.partial"
    with aside.open("w", encoding="utf-8") as file:
        file.write(_rendered(records))
        file.flush()
        os.fsync(file.fileno())
    aside.replace(folder / MANIFEST)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_manifest(folder: Path) -> dict[str, FileRecord]:
    """Read the list of a folder's files.

    Raises:
        DataError: it is missing or damaged.
    """
    path = folder / MANIFEST
    if finding := not_a_file(path):
        raise DataError(finding)
    try:
        text = path.read_text("utf-8")
        records = {name: _record(name, one) for name, one in json.loads(text)["files"].items()}
        whole = text == _rendered(records)
    except FileNotFoundError as error:
        raise DataError(f"{folder} is no complete checkpoint: {path} is missing; {OTHER_CHECKPOINT}") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error}; {OTHER_CHECKPOINT}") from error
    if not whole:
        raise DataError(f"{path} is damaged: its own checksum does not fit; {OTHER_CHECKPOINT}")
    return records


def manifest_findings(folder: Path, *, full: bool = False) -> list[str]:
    """Say what is wrong with a folder's files: one sentence for each. See `file_findings`."""
    return list(file_findings(folder, full=full).values())


def file_findings(
    folder: Path,
    *,
    full: bool = False,
    skip: Callable[[str], bool] = lambda name: False,
    share: tuple[int, int] = (0, 1),
) -> dict[str, str]:
    """Compare a folder's files with their list.

    Args:
        folder: a checkpoint.
        full: read every byte, not only those of small files.
        skip: says of a file's path in the folder that it does not matter.
        share: (rank, ranks) to look at every `ranks`-th file only, where others look at the rest.

    Returns: by its path in the folder, one sentence for each file that is missing, of another size, of another content
        or not in the list; empty when the folder is what was written.
    """
    rank, ranks = share
    try:
        records = read_manifest(folder)
        unlisted = [] if rank else sorted(_files(folder, "") - records.keys() - {MANIFEST})
    except DataError as error:
        return {MANIFEST: str(error)}
    except OSError as error:
        return {MANIFEST: f"{folder} cannot be read: {error}; {OTHER_CHECKPOINT}"}
    names = [name for name in sorted(records) if not skip(name)][rank::ranks]
    with ThreadPoolExecutor(_READERS) as pool:
        found = zip(names, pool.map(lambda name: _finding(folder / name, records[name], full=full), names))
        findings = {name: one for name, one in found if one}
    return findings | {
        name: f"{folder / name} is not in {MANIFEST}, so something else wrote it; move it away, or {OTHER_CHECKPOINT}"
        for name in unlisted
        if not skip(name)
    }


def not_a_file(path: Path) -> str | None:
    """Say that something is there and no file: to open a pipe is to wait."""
    try:
        if stat.S_ISREG(path.stat().st_mode):
            return None
    except OSError:  # whoever opens it says what is wrong
        return None
    return f"{path} cannot be read: it is not a file; {OTHER_CHECKPOINT}"


def _finding(path: Path, record: FileRecord, *, full: bool) -> str | None:
    if finding := not_a_file(path):
        return finding
    try:
        size = path.stat().st_size
        if size < record.size:
            return f"{path} is cut short: it has {size} bytes of {record.size}; {OTHER_CHECKPOINT}"
        if size > record.size:
            return f"{path} is not what was written: it has {size} bytes, not {record.size}; {OTHER_CHECKPOINT}"
        if (full or size <= SMALL_BYTES) and record_of(path) != record:
            return (
                f"{path} is damaged, or of another checkpoint: its checksum is not the one in {MANIFEST}; "
                f"{OTHER_CHECKPOINT}"
            )
    except FileNotFoundError:
        return f"{path} is missing; {OTHER_CHECKPOINT}"
    except OSError as error:
        return f"{path} cannot be read: {error}; {OTHER_CHECKPOINT}"
    return None


def _rendered(records: Mapping[str, FileRecord]) -> str:
    table = {name: {"size": one.size, "crc32": one.crc32} for name, one in sorted(records.items())}
    return json.dumps({"files": table, "crc32": zlib.crc32(json.dumps(table).encode())}, indent=1) + "\n"


def _record(name: str, one: Mapping[str, Any]) -> FileRecord:
    if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
        raise ValueError(f"{name!r:.60} is no place in this folder")
    if type(one["size"]) is not int or type(one["crc32"]) is not int:
        raise ValueError(f"size and checksum of {name!r:.60} are no whole numbers")
    return FileRecord(size=one["size"], crc32=one["crc32"])


def _files(folder: Path, inside: str) -> set[str]:
    """List everything but folders, by the path in the folder; links are not followed."""
    found: set[str] = set()
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                found |= _files(folder / entry.name, f"{inside}{entry.name}/")
            elif not entry.name.startswith(".nfs"):  # what NFS keeps of a removed file that someone has open
                found.add(inside + entry.name)
    return found
