"""The files of a checkpoint folder, and whether all of them are what was written. Never imports torch.

Tensors lie in safetensors files, scalars in `state.json`, size and checksum of every file in the contract's manifest,
to which others may add files of their own.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from drivetrain_backend_api import DataError
from drivetrain_backend_api.manifest import (
    MANIFEST,
    OTHER_CHECKPOINT,
    manifest_findings,
    read_manifest,
    record_of,
    write_manifest,
)

FORMAT = 1
"""Version of the folder's layout."""

WEIGHTS, OPTIMIZER, RANDOM = "weights.safetensors", "optimizer.safetensors", "random.safetensors"
STATE = "state.json"


@dataclass(frozen=True, kw_only=True)
class State:
    """What `state.json` holds.

    Attributes:
        format: layout of the folder.
        next_rollout_id: how many rollouts the weights were trained on.
        optimizer_steps: steps taken, which is also the schedule's position.
        moments: Adam's are there; without them no run can go on from it.
    """

    format: int
    next_rollout_id: int
    optimizer_steps: int
    moments: bool

    @property
    def files(self) -> tuple[str, ...]:
        """What the folder holds beside the manifest."""
        return (WEIGHTS, RANDOM, STATE, *([OPTIMIZER] if self.moments else []))


def write_state(folder: Path, state: State) -> None:
    """Seal a folder whose other files are written."""
    (folder / STATE).write_text(json.dumps(asdict(state), indent=2) + "\n")
    write_manifest(folder, {name: record_of(folder / name) for name in state.files})


def read_state(folder: Path) -> State:
    """Read the scalars of a checkpoint.

    Raises:
        DataError: missing, damaged, or of another format.
    """
    path = folder / STATE
    if not path.is_file():
        raise DataError(f"{folder} is no checkpoint of the plain-torch backend: {path} is missing; {OTHER_CHECKPOINT}")
    try:
        table = json.loads(path.read_bytes())
        if table["format"] != FORMAT:
            raise ValueError(f"it has format {table['format']}, and this release reads {FORMAT}")
        return State(**table)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error}; {OTHER_CHECKPOINT}") from error


def check_checkpoint(folder: Path, *, world_size: int | None = None, full: bool = False) -> list[str]:
    """Return one sentence for each file that is missing or not what was written; reads bytes, never tensors.

    Args:
        folder: should have been written by `save_checkpoint`.
        world_size: ranks that will load it, or None; there is only one, so it changes nothing.
        full: read every byte, not only those of small files.
    """
    if findings := manifest_findings(folder, full=full):
        return findings
    try:
        unlisted = set(read_state(folder).files) - read_manifest(folder).keys()
    except DataError as error:
        return [str(error)]
    return [f"{folder / MANIFEST} does not cover {name}; {OTHER_CHECKPOINT}" for name in sorted(unlisted)]


def require_whole(folder: Path, *, full: bool) -> State:
    """Read the scalars of a checkpoint whose files are all what was written.

    Raises:
        DataError: names every file that is not.
    """
    if findings := check_checkpoint(folder, full=full):
        raise DataError("\n".join(findings))
    return read_state(folder)
