"""Rollouts on disk: what was generated, kept so that a run which goes on need not generate it again.

A file holds tensors and plain values only, and is read without running any code. It is complete or absent.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
"""Version of the file's layout."""


@dataclass(frozen=True, kw_only=True)
class SavedRollout:
    """A rollout file, read back.

    Attributes:
        rollout_id: of the rollout.
        lineage: fingerprint of all that the rollout was made from; one of another lineage is another rollout.
        content: what was saved: tensors and plain values by name.
    """

    rollout_id: int
    lineage: str
    content: Mapping[str, Any]


def rollout_file(folder: Path, rollout_id: int) -> Path:
    """Return where a rollout lies."""
    return folder / f"rollout_{rollout_id}.pt"


def save_rollout(folder: Path, rollout_id: int, plain: Mapping[str, Any], *, lineage: str) -> Path:
    """Write a rollout, durably and in one go; the folder is made where it is missing, its parent is not.

    Args:
        folder: of the run's rollouts.
        rollout_id: of the rollout.
        plain: tensors, numbers, text, booleans, None, and lists, tuples and tables of them.
        lineage: fingerprint of all that the rollout was made from.

    Returns: the file.

    Raises:
        DataError: something in it is neither tensor nor plain.
        DrivetrainError: it cannot be written.
    """
    raise NotImplementedError


def load_rollout(path: Path) -> SavedRollout:
    """Read a rollout, without running any code that the file may hold.

    Raises:
        DataError: missing, damaged, or no rollout; names the file and what to do.
    """
    raise NotImplementedError
