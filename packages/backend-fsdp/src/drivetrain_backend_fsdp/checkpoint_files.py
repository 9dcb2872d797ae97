"""The files of a checkpoint folder: what they are called, how they are read, and whether all of them are whole.

A folder holds `dcp/` (weights and Adam's moments, sharded), `trainer_state.json` (the scalars) and one
`rng_rank*.safetensors` a rank. Nothing in it is trusted: the metadata of `dcp/` passes through an unpickler that knows
DCP's own classes only. Knows nothing of models, optimizers or process groups.
"""

import json
import math
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from drivetrain_backend_api.errors import DataError

FORMAT = 1
"""Version of the folder's layout."""

TENSORS = "dcp"
STATE = "trainer_state.json"

OTHER_CHECKPOINT = "use another checkpoint of the run"
"""What to do about a damaged one."""

_METADATA = ".metadata"

_ARCHIVE_START = b"PK\x03\x04"
"""First bytes of everything that `torch.save` writes, and so of each tensor in a shard."""

_METADATA_CLASSES = frozenset(
    (
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        *((module, "PosixPath") for module in ("pathlib", "pathlib._local")),
    )
)


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """The scalars of a checkpoint.

    Attributes:
        format: layout of the folder.
        next_rollout_id: how many rollouts the weights were trained on.
        optimizer_steps: steps taken, which is also the schedule's position.
        loss_scale: of fp16, 1 otherwise.
        loss_scale_good_steps: steps since the scale last changed.
        world_size: ranks that wrote it.
    """

    format: int
    next_rollout_id: int
    optimizer_steps: int
    loss_scale: float
    loss_scale_good_steps: int
    world_size: int

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            smallest = 1 if one.name == "world_size" else 0
            if isinstance(value, bool) or not isinstance(value, int | float if one.type is float else int):
                raise ValueError(f"{one.name} is {value!r:.60}, which is no number of its kind")
            if not (math.isfinite(value) and value >= smallest):
                raise ValueError(f"{one.name} is {value}, out of range")


def rng_file(folder: Path, rank: int) -> Path:
    """Return where a rank's random states lie."""
    return folder / f"rng_rank{rank:05d}.safetensors"


def read_state(folder: Path) -> TrainerState:
    """Read the scalars of a checkpoint.

    Raises:
        DataError: there is none, or it is damaged or of another format.
    """
    path = folder / STATE
    if not path.is_file():
        raise DataError(f"{folder} is no checkpoint of the fsdp backend: it has no {STATE}; {OTHER_CHECKPOINT}")
    try:
        table = json.loads(path.read_text("utf-8"))
        if isinstance(table, dict) and table.get("format", FORMAT) != FORMAT:
            raise DataError(
                f"{path} has format {table['format']!r:.60}, this release reads {FORMAT}; use the release that wrote it"
            )
        return TrainerState(**table)
    except (OSError, ValueError, TypeError, RecursionError, OverflowError) as error:
        raise DataError(f"{path} is damaged: {error}; {OTHER_CHECKPOINT}") from error


def read_metadata(folder: Path) -> Metadata:
    """Read what DCP says of a checkpoint's tensors, by an unpickler that builds nothing but DCP's own classes.

    Raises:
        DataError: it is missing, damaged, or holds anything else.
    """
    path = folder / TENSORS / _METADATA
    _require_file(path)
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except FileNotFoundError as error:
        raise DataError(f"{folder} is no complete checkpoint: {path} is missing; {OTHER_CHECKPOINT}") from error
    except Exception as error:  # which one depends on the bytes that are unpickled
        reason = str(error) or type(error).__name__  # a MemoryError has no words
        raise DataError(f"{path} is damaged: {reason}; {OTHER_CHECKPOINT}") from error
    if not isinstance(metadata, Metadata):
        raise DataError(f"{path} is damaged: it holds a {type(metadata).__name__}; {OTHER_CHECKPOINT}")
    return metadata


def read_random_state(path: Path) -> dict[str, Tensor]:
    """Read a rank's random states by device type: "cpu", and "cuda" where it trained on a GPU.

    Raises:
        DataError: missing or damaged.
    """
    _require_file(path)
    try:
        states = load_file(path)
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing; {OTHER_CHECKPOINT}") from error
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} is damaged: {error}; {OTHER_CHECKPOINT}") from error
    here, found = torch.get_rng_state(), states.get("cpu")
    if found is None or (found.dtype, found.shape) != (here.dtype, here.shape):
        raise DataError(f"{path} is damaged: it holds no random state of a CPU; {OTHER_CHECKPOINT}")
    return states


def check_checkpoint(folder: Path) -> list[str]:
    """Look for everything that would keep a checkpoint from being loaded: files missing, cut short or unreadable.

    Of the tensors only the sizes and the first bytes are looked at.

    Args:
        folder: should have been written by `save_checkpoint`.

    Returns: one sentence for each thing wrong, empty when the checkpoint is whole.
    """
    findings = []
    try:
        state = read_state(folder)
        findings += _random_state_findings(folder, state.world_size)
    except DataError as error:
        findings.append(str(error))
    try:
        findings += _shard_findings(folder, read_metadata(folder))
    except DataError as error:
        findings.append(str(error))
    return findings


def _require_file(path: Path) -> None:
    """Refuse what is there and no file: to open a pipe is to wait."""
    try:
        if path.exists() and not path.is_file():
            raise DataError(f"{path} cannot be read: it is not a file; {OTHER_CHECKPOINT}")
    except OSError:  # whoever opens it says what is wrong
        return


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _METADATA_CLASSES:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{f'{module}.{name}'!r} has no place in a checkpoint's metadata")


def _random_state_findings(folder: Path, world_size: int) -> list[str]:
    """Stop at the first missing file: a damaged world size may promise any number of them."""
    findings = []
    for rank in range(world_size):
        path = rng_file(folder, rank)
        try:
            read_random_state(path)
        except DataError as error:
            findings.append(str(error))
            if not path.exists():
                break
    return findings


def _shard_findings(folder: Path, metadata: Metadata) -> Iterator[str]:
    for name, pieces in sorted(_pieces_by_file(folder, metadata).items()):
        path = folder / TENSORS / name
        promised = max(offset + length for offset, length in pieces)
        try:
            _require_file(path)
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                if size < promised:
                    yield f"{path} is cut short: it has {size} bytes of {promised}; {OTHER_CHECKPOINT}"
                elif not all(_begins_archive(file, offset) for offset, _ in (min(pieces), max(pieces))):
                    yield f"{path} is damaged: it holds something else than tensors; {OTHER_CHECKPOINT}"
        except DataError as error:
            yield str(error)
        except FileNotFoundError:
            yield f"{path} is missing; {OTHER_CHECKPOINT}"
        except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
            yield f"{path} cannot be read: {error}; {OTHER_CHECKPOINT}"


def _begins_archive(file: BinaryIO, offset: int) -> bool:
    file.seek(offset)
    return file.read(len(_ARCHIVE_START)) == _ARCHIVE_START


def _pieces_by_file(folder: Path, metadata: Metadata) -> dict[str, list[tuple[int, int]]]:
    """Return (offset, length) of each stored piece of a tensor, by file.

    Raises:
        DataError: the metadata contradicts itself.
    """
    files: dict[str, list[tuple[int, int]]] = {}
    try:
        for info in metadata.storage_data.values():
            name, offset, length = info.relative_path, info.offset, info.length
            if Path(name).name != name or type(offset) is not int or not 0 <= offset <= offset + length:
                raise ValueError(f"{name!r:.60} at {offset!r:.60} is no place in this folder")
            files.setdefault(name, []).append((offset, length))
        for name, one in metadata.state_dict_metadata.items():
            chunks = one.chunks if isinstance(one, TensorStorageMetadata) else []
            if any(MetadataIndex(name, chunk.offsets) not in metadata.storage_data for chunk in chunks):
                raise ValueError(f"it does not say where all of tensor {name!r:.60} lies")
    except (AttributeError, TypeError, ValueError) as error:
        raise DataError(f"{folder / TENSORS / _METADATA} is damaged: {error}; {OTHER_CHECKPOINT}") from error
    return files
