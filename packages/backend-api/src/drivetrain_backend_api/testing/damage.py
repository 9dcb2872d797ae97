"""Ways to damage one file of a checkpoint."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path


def files_of(folder: Path) -> list[str]:
    """List every file under a folder, hidden ones too, relative to it."""
    return sorted(str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file())


def _delete(path: Path, foreign: Path) -> bool:
    path.unlink()
    return True


def _empty(path: Path, foreign: Path) -> bool:
    path.write_bytes(b"")
    return True


def _cut(path: Path, foreign: Path) -> bool:
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    return True


def _change_a_byte(path: Path, foreign: Path) -> bool:
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1
    path.write_bytes(bytes(whole))
    return True


def _exchange(path: Path, foreign: Path) -> bool:
    if not foreign.is_file() or foreign.read_bytes() == path.read_bytes():
        return False
    shutil.copyfile(foreign, path)
    return True


DAMAGES: Mapping[str, Callable[[Path, Path], bool]] = {
    "missing": _delete,
    "empty": _empty,
    "cut short": _cut,
    "one byte changed": _change_a_byte,
    "another checkpoint's": _exchange,
}
"""Name -> function of the file and of the same file of another checkpoint; returns False where nothing changed."""

SHOWN_BY_SIZE = ("missing", "empty", "cut short")
"""Those that are found without reading a file through."""
