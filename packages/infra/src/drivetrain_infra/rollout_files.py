"""Rollouts on disk: what was generated, kept so that a run which goes on need not generate it again.

A file holds tensors and plain values only, and is read without running any code. It is complete or absent.
"""

import io
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drivetrain_backend_api import DataError, DrivetrainError
from drivetrain_backend_api.errors import in_one_line
from drivetrain_infra.run_folder import sync, write_atomically

FORMAT = 1
"""Version of the file's layout."""

REMAKE = "remove it, and the rollout is made again"
"""What to do about a damaged one, in a run."""


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


def save_rollout(
    folder: Path, rollout_id: int, plain: Mapping[str, Any], *, lineage: str, flag: str = "--save"
) -> Path:
    """Write a rollout, durably and in one go; the folder is made where it is missing, its parent is not.

    Args:
        folder: of the run's rollouts.
        rollout_id: of the rollout.
        plain: tensors, numbers, text, booleans, None, and lists, tuples and tables of them.
        lineage: fingerprint of all that the rollout was made from.
        flag: which chose the folder, for messages.

    Returns: the file.

    Raises:
        DataError: something in it is neither tensor nor plain.
        DrivetrainError: it cannot be written.
    """
    path = rollout_file(folder, rollout_id)
    try:
        content = _plain_copy(plain, "")
    except ValueError as error:
        raise DataError(
            f"rollout {rollout_id} cannot be saved: {error}; what makes it must return tensors and plain values"
        ) from error
    buffer = io.BytesIO()  # PyTorch's own file writer does not say that a disk is full
    torch.save({"format": FORMAT, "rollout_id": rollout_id, "lineage": lineage, "content": content}, buffer)
    try:
        if not folder.is_dir():
            folder.mkdir()
            sync(folder.parent)
        write_atomically(path, buffer.getbuffer())
    except OSError as error:
        raise DrivetrainError(
            f"{flag} {folder}: {path.name} could not be written ({error.strerror}); make room there, or choose another "
            "folder"
        ) from error
    return path


def load_rollout(path: Path, *, rollout_id: int | None = None, fix: str = REMAKE) -> SavedRollout:
    """Read a rollout, without running any code that the file may hold.

    Args:
        path: what `save_rollout` wrote.
        rollout_id: that it must have, None for any.
        fix: what the user can do about a file that is no good.

    Raises:
        DataError: missing, damaged, or no such rollout; names the file and the fix.
    """
    if not path.is_file():  # to open a pipe is to wait
        raise DataError(f"{path}: {'is no file' if path.exists() else 'is missing'}; {fix}")
    try:
        with zipfile.ZipFile(path) as archive:  # PyTorch does not compare the checksums it writes
            if (part := archive.testzip()) is not None:
                raise ValueError(f"the checksum of {part} does not fit")
        table = torch.load(path, map_location="cpu", weights_only=True)
        return _checked(table, rollout_id)
    except pickle.UnpicklingError as error:
        raise DataError(f"{path}: holds more than tensors and plain values; {fix}") from error
    except _OtherFormatError as error:
        raise DataError(f"{path}: {error}") from error
    except Exception as error:  # which one depends on the bytes that are read
        reason = in_one_line(error) or type(error).__name__
        raise DataError(f"{path}: is damaged, or no rollout ({reason:.200}); {fix}") from error


class _OtherFormatError(Exception):
    pass


def _checked(table: Any, rollout_id: int | None) -> SavedRollout:
    if not isinstance(table, dict):
        raise ValueError(f"it holds a {type(table).__name__}")
    if table.get("format", FORMAT) != FORMAT:
        raise _OtherFormatError(
            f"has format {table['format']!r:.60}, and this release reads {FORMAT}; use the release that wrote it"
        )
    if table.keys() != {"format", "rollout_id", "lineage", "content"}:
        raise ValueError(f"it holds {', '.join(map(str, table)) or 'nothing'}"[:200])
    found, lineage, content = table["rollout_id"], table["lineage"], table["content"]
    if type(found) is not int or not isinstance(lineage, str) or not isinstance(content, dict):
        raise ValueError("its fields are not of their types")
    if rollout_id is not None and found != rollout_id:
        raise ValueError(f"it holds rollout {found}, not {rollout_id}")
    return SavedRollout(rollout_id=found, lineage=lineage, content=_plain_copy(content, ""))


def _plain_copy(value: Any, place: str) -> Any:
    """Copy tables, lists and tuples, and put each tensor on the CPU with a storage of its own size.

    Raises:
        ValueError: something is neither tensor nor plain; names its place.
    """
    kind = type(value)
    if kind is torch.Tensor:
        return _compact(value)
    if kind in (list, tuple):
        return kind(_plain_copy(one, f"{place}[{at}]") for at, one in enumerate(value))
    if isinstance(value, Mapping) and (place == "" or kind is dict):
        if strange := [one for one in value if type(one) not in (str, int)]:
            raise ValueError(f"{place or 'it'} has the key {strange[0]!r:.60}, which is neither text nor number")
        return {name: _plain_copy(one, f"{place}[{name!r:.60}]") for name, one in value.items()}
    if value is None or kind in (str, int, float, bool):
        return value
    raise ValueError(f"{place} is a {kind.__module__}.{kind.__qualname__}")


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose storage holds nothing else: a view would take all that it is a view of along."""
    tensor = tensor.detach().cpu()
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone()
