"""Sharded tensors to and from the files of PyTorch DCP: each rank writes and reads its own pieces, nothing is gathered.

A piece is a rectangle of a whole tensor and the live memory that holds it. What was written under one layout is so read
under any other: DCP intersects the rectangles. Knows nothing of models, optimizers or parallelism.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

from drivetrain_backend_api.checkpoint_files import TENSORS, read_metadata
from drivetrain_backend_api.errors import DataError, DrivetrainError
from drivetrain_backend_api.manifest import OTHER_CHECKPOINT


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A rectangle of a whole tensor, and where it is in memory.

    Attributes:
        key: name of the whole tensor in the checkpoint.
        shape: of the whole tensor.
        offsets: of the rectangle's first element.
        tensor: live and contiguous; its shape is the rectangle's. Read into and written from in place.
    """

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The rectangle as DCP says it."""
        return ChunkStorageMetadata(offsets=torch.Size(self.offsets), sizes=self.tensor.shape)


@dataclass(frozen=True, kw_only=True)
class Rectangle:
    """Part of a tensor that is contiguous both in the tensor and as a rectangle.

    Attributes:
        offsets: of its first element.
        sizes: along each dimension.
        start: of its first element in the flat range that it is part of.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def count(self) -> int:
        """Its elements."""
        return math.prod(self.sizes)


def rectangles(start: int, count: int, shape: Sequence[int]) -> list[Rectangle]:
    """Cut a range of a flattened tensor into rectangles: of a matrix the end of a row, whole rows, the begin of a row.

    Args:
        start: first element of the range.
        count: its elements.
        shape: of the tensor.

    Returns: in the order of the range, without gaps; none for an empty range.
    """
    return [
        Rectangle(offsets=offsets, sizes=sizes, start=first - start)
        for first, offsets, sizes in _cut(start, start + count, tuple(shape))
    ]


def _cut(start: int, end: int, shape: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Yield (first element, offsets, sizes)."""
    if start >= end:
        return
    if len(shape) < 2:
        yield start, (start,) * len(shape), (end - start,) * len(shape)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row
    if first > last:  # inside one row
        yield from _cut_row(start, end, last, row, shape)
        return
    if start < first * row:
        yield from _cut_row(start, first * row, first - 1, row, shape)
    if first < last:
        yield first * row, (first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])
    if last * row < end:
        yield from _cut_row(last * row, end, last, row, shape)


def _cut_row(
    start: int, end: int, index: int, row: int, shape: tuple[int, ...]
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    for first, offsets, sizes in _cut(start - index * row, end - index * row, shape[1:]):
        yield first + index * row, (index, *offsets), (1, *sizes)


# -- writing -----------------------------------------------------------------------------------------------------------


def write_pieces(folder: Path, pieces: Sequence[Piece], group: dist.ProcessGroup | None) -> None:
    """Write all ranks' pieces, each of them once; collective.

    Args:
        folder: of DCP's files; made where it is not there.
        pieces: of this rank. Those of all ranks together are whole tensors without overlap.
        group: of all ranks, on CPUs; None where this process is alone.

    Raises:
        DrivetrainError: writing failed on some rank, or the pieces do not add up; raised on all ranks.
    """
    writer = FileSystemWriter(folder)
    if all(one.tensor.device.type == "cpu" for one in pieces):
        # else it waits for the accelerator, which may be training, though nothing is copied from there
        writer.per_thread_copy_ahead = 0
    try:
        # `save` itself, less a warning to one rank: filters of warnings are not for a thread to change
        _save_state_dict(
            {},
            writer,
            process_group=group,
            no_dist=group is None,
            planner=_SavePlanner(pieces),
        )
    except CheckpointException as error:
        raise DrivetrainError(f"writing the checkpoint {folder} failed: {first_failure(error)}") from error


class _SavePlanner(DefaultSavePlanner):
    """Plans to write pieces; its base checks that they do not overlap."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = {(one.key, one.offsets): one for one in pieces}

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(one) for one in self._pieces.values()])
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        # before the base drops what two ranks write alike
        _require_whole([item for plan in all_plans for item in plan.items])
        return super().create_global_plan(all_plans)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        index = write_item.index
        return self._pieces[index.fqn, tuple(index.offset or ())].tensor.detach()


def _write_item(piece: Piece) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(piece.key, torch.Size(piece.offsets)),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=piece.chunk,
            properties=TensorProperties.create_from_tensor(piece.tensor),
            size=torch.Size(piece.shape),
        ),
    )


def _require_whole(items: Sequence[WriteItem]) -> None:
    sizes: dict[str, int] = {}
    written: dict[str, int] = {}
    for item in items:
        assert item.tensor_data is not None
        key = item.index.fqn
        sizes[key] = math.prod(item.tensor_data.size)
        written[key] = written.get(key, 0) + math.prod(item.tensor_data.chunk.sizes)
    for key, size in sizes.items():
        if written[key] != size:
            raise DrivetrainError(f"of the {size} elements of tensor {key!r} all ranks together hold {written[key]}")


# -- reading -----------------------------------------------------------------------------------------------------------


def read_pieces(
    folder: Path,
    pieces: Sequence[Piece],
    group: dist.ProcessGroup | None,
    *,
    metadata: Metadata,
    tensors: str = TENSORS,
) -> None:
    """Fill pieces from a checkpoint, whatever rectangles it was written in; collective. Other dtypes are cast.

    Args:
        folder: of the checkpoint.
        pieces: of this rank; several may ask for the same part of a tensor.
        group: of all ranks, on CPUs; None where this process is alone.
        metadata: of the checkpoint, by `read_metadata`.
        tensors: where in the folder DCP's files lie.

    Raises:
        DataError: a tensor is missing or has another shape, or cannot be read; raised on all ranks.
    """
    try:
        with _quiet_if_alone(group):
            load(
                {},
                storage_reader=Reader(folder, metadata=metadata, tensors=tensors),
                planner=_LoadPlanner(pieces),
                process_group=group,
                no_dist=group is None,
            )
    except CheckpointException as error:
        raise DataError(
            f"reading the checkpoint {folder} failed ({first_failure(error)}); {OTHER_CHECKPOINT}"
        ) from error


class Reader(FileSystemReader):
    """DCP's reader of folders, with metadata that was read without trust."""

    def __init__(self, folder: Path, *, metadata: Metadata | None = None, tensors: str = TENSORS) -> None:
        super().__init__(folder / tensors)
        self._metadata = metadata
        self._place = folder, tensors

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """See `FileSystemReader.read_metadata`."""
        metadata = self._metadata or read_metadata(*self._place)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces: dict[str, list[Piece]] = {}
        for one in pieces:
            self._pieces.setdefault(one.key, []).append(one)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for key, pieces in self._pieces.items():
            stored = self.metadata.state_dict_metadata.get(key)
            items += _read_items(key, pieces, stored)
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = read_item.dest_index
        assert index.index is not None
        target = self._pieces[index.fqn][index.index].tensor.detach()
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths)):
            target = target.narrow(dim, offset, length)
        return target


def _read_items(key: str, pieces: Sequence[Piece], stored: object) -> list[ReadItem]:
    if not isinstance(stored, TensorStorageMetadata):
        raise DataError(f"it has no tensor {key!r}")
    shapes = {one.shape for one in pieces}
    if shapes != {tuple(stored.size)}:
        raise DataError(f"tensor {key!r} has shape {tuple(stored.size)} there and {shapes.pop()} here")
    items: list[ReadItem] = create_read_items_for_chunk_list(key, stored, [one.chunk for one in pieces])
    if sum(math.prod(one.lengths) for one in items) != sum(one.tensor.numel() for one in pieces):
        raise DataError(f"tensor {key!r} is stored with gaps, or in parts twice")
    return items


def stored_tensors(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """Return the tensors of a checkpoint by name, without whatever else it holds."""
    return {name: one for name, one in metadata.state_dict_metadata.items() if isinstance(one, TensorStorageMetadata)}


def first_failure(error: CheckpointException) -> str:
    """Put DCP's report of what went wrong on which ranks into one line."""
    rank, (cause, _) = next(iter(error.failures.items()))
    if isinstance(cause, DrivetrainError):
        return str(cause)
    # torch goes on for a page about what one could do instead
    first_line = next(iter(str(cause).splitlines()), "")
    return f"rank {rank}: {type(cause).__name__}: {first_line}"


@contextmanager
def _quiet_if_alone(group: dist.ProcessGroup | None) -> Iterator[None]:
    with warnings.catch_warnings():
        if group is None:
            # DCP warns that no process group is used, which is the point.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield
