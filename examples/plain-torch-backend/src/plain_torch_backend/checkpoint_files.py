"""The files of a checkpoint folder, and whether all of them are what was written. Never imports torch.

Tensors lie in safetensors files, scalars in `state.json` together with the checksum of every file and one of its own.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from drivetrain_backend_api import DataError

FORMAT = 1
"""Version of the folder's layout."""

WEIGHTS, OPTIMIZER, RANDOM = "weights.safetensors", "optimizer.safetensors", "random.safetensors"
STATE = "state.json"

_OTHER = "use another checkpoint of the run"


@dataclass(frozen=True, kw_only=True)
class State:
    """What `state.json` holds.

    Attributes:
        format: layout of the folder.
        next_rollout_id: how many rollouts the weights were trained on.
        optimizer_steps: steps taken, which is also the schedule's position.
        files: name -> SHA-256 of every other file.
    """

    format: int
    next_rollout_id: int
    optimizer_steps: int
    files: dict[str, str]


def write_state(folder: Path, *, next_rollout_id: int, optimizer_steps: int) -> None:
    """Seal a folder whose other files are written."""
    files = {name: _sha256(folder / name) for name in (WEIGHTS, OPTIMIZER, RANDOM)}
    state = State(format=FORMAT, next_rollout_id=next_rollout_id, optimizer_steps=optimizer_steps, files=files)
    (folder / STATE).write_bytes(_sealed(asdict(state)))


def read_state(folder: Path) -> State:
    """Read the scalars of a checkpoint.

    Raises:
        DataError: missing, damaged, or of another format.
    """
    path = folder / STATE
    if not path.is_file():
        raise DataError(f"{folder} is no checkpoint of the plain-torch backend: {path} is missing; {_OTHER}")
    try:
        content = path.read_bytes()
        table = json.loads(content)
        del table["sha256"]
        # Written again it must be the same, byte by byte: whatever else was changed, its checksum was not.
        if _sealed(table) != content:
            raise ValueError("it does not match its own checksum")
        if table["format"] != FORMAT:
            raise ValueError(f"it has format {table['format']}, and this release reads {FORMAT}")
        return State(**table)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error}; {_OTHER}") from error


def check_checkpoint(folder: Path, *, world_size: int | None = None) -> list[str]:
    """Return one sentence for each file that is missing or not what was written; reads bytes, never tensors.

    Args:
        folder: should have been written by `save_checkpoint`.
        world_size: ranks that will load it, or None; there is only one, so it changes nothing.
    """
    try:
        state = read_state(folder)
        return [
            f"{folder / name} is {wrong}; {_OTHER}"
            for name in (WEIGHTS, OPTIMIZER, RANDOM)
            if (wrong := _wrong(folder / name, state.files.get(name)))
        ]
    except (DataError, OSError) as error:
        return [str(error)]


def require_whole(folder: Path) -> State:
    """Read the scalars of a checkpoint whose files are all what was written.

    Raises:
        DataError: names every file that is not.
    """
    if findings := check_checkpoint(folder):
        raise DataError("\n".join(findings))
    return read_state(folder)


def _wrong(path: Path, expected: str | None) -> str:
    if not path.is_file():
        return "missing"
    if _sha256(path) != expected:
        return f"damaged or from another checkpoint: its checksum is not the one in {STATE}"
    return ""


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sealed(table: dict[str, object]) -> bytes:
    """Render a table with its own checksum in it."""
    checksum = hashlib.sha256(json.dumps(table).encode()).hexdigest()
    return (json.dumps({**table, "sha256": checksum}, indent=2) + "\n").encode()
