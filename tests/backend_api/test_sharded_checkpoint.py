"""Sharded tensors: flat ranges as rectangles, and pieces that are written and read in place."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from drivetrain_backend_api.checkpoint_files import read_metadata
from drivetrain_backend_api.errors import DataError, DrivetrainError
from drivetrain_backend_api.sharded_checkpoint import Piece, read_pieces, rectangles, write_pieces

SHAPES = ((1,), (7,), (1, 1), (1, 5), (5, 1), (3, 4), (4, 3), (2, 3, 2), (3, 1, 2), (2, 2, 2, 2))


def piece(key: str, whole: Tensor, offsets: Sequence[int], tensor: Tensor) -> Piece:
    return Piece(key=key, shape=tuple(whole.shape), offsets=tuple(offsets), tensor=tensor)


def slices_of(key: str, whole: Tensor, flat: Tensor, cuts: Sequence[int]) -> list[Piece]:
    """Pieces of a flat tensor that is cut at some places, as ranks own them."""
    return [
        piece(key, whole, one.offsets, flat[start + one.start : start + one.start + one.count].view(one.sizes))
        for start, end in itertools.pairwise((0, *cuts, whole.numel()))
        for one in rectangles(start, end - start, whole.shape)
    ]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rectangles_are_the_range_and_nothing_else(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(math.prod(shape))
    for start, end in itertools.combinations_with_replacement(range(len(numbers) + 1), 2):
        found = rectangles(start, end - start, shape)
        at = 0
        for one in found:
            assert one.start == at
            index = tuple(slice(offset, offset + size) for offset, size in zip(one.offsets, one.sizes, strict=True))
            inside = numbers.view(shape)[index]
            assert inside.shape == one.sizes
            assert inside.flatten().tolist() == list(range(start + at, start + at + one.count))
            at += one.count
        assert at == end - start
        assert len(found) <= 2 * len(shape) - 1


def test_pieces_cut_in_one_way_are_read_cut_in_another(tmp_path: Path) -> None:
    whole = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    write_pieces(tmp_path / "dcp", slices_of("one", whole, whole.flatten(), (3, 17, 18)), None)
    metadata = read_metadata(tmp_path)
    for cuts in ((), (1,), (5, 10), (4, 6, 33)):
        live = torch.full((whole.numel(),), torch.nan)
        read_pieces(tmp_path, slices_of("one", whole, live, cuts), None, metadata=metadata)
        assert torch.equal(live.view_as(whole), whole)


def test_other_dtypes_are_cast_and_several_may_ask_for_the_same(tmp_path: Path) -> None:
    whole = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    write_pieces(tmp_path / "dcp", [piece("one", whole, (0, 0), whole)], None)
    narrow, same = torch.zeros(4, 3, dtype=torch.bfloat16), torch.zeros(4, 3)
    wanted = [piece("one", whole, (0, 0), narrow), piece("one", whole, (0, 0), same)]
    read_pieces(tmp_path, wanted, None, metadata=read_metadata(tmp_path))
    assert torch.equal(narrow, whole.bfloat16())
    assert torch.equal(same, whole)


def test_a_part_of_one_layer_is_read_alone(tmp_path: Path) -> None:
    whole = torch.arange(24.0).view(2, 4, 3)
    write_pieces(
        tmp_path / "dcp", [piece("one", whole, (layer, 0, 0), whole[layer : layer + 1]) for layer in (0, 1)], None
    )
    live = torch.zeros(6)
    read_pieces(tmp_path, [piece("one", whole, (1, 1, 0), live.view(1, 2, 3))], None, metadata=read_metadata(tmp_path))
    assert live.tolist() == whole[1, 1:3].flatten().tolist()


@pytest.mark.parametrize(
    ("key", "shape", "message"),
    [
        ("two", (4, 3), "it has no tensor 'two'"),
        ("one", (4, 4), r"tensor 'one' has shape \(4, 3\) there and \(4, 4\) here"),
    ],
)
def test_what_is_not_stored_so_is_refused(tmp_path: Path, key: str, shape: tuple[int, ...], message: str) -> None:
    whole = torch.zeros(4, 3)
    write_pieces(tmp_path / "dcp", [piece("one", whole, (0, 0), whole)], None)
    wanted = [piece(key, torch.zeros(shape), (0, 0), torch.zeros(shape))]
    with pytest.raises(DataError, match=f"^reading the checkpoint {tmp_path} failed .{message}.; use another"):
        read_pieces(tmp_path, wanted, None, metadata=read_metadata(tmp_path))


def test_pieces_that_leave_a_gap_or_overlap_are_not_written(tmp_path: Path) -> None:
    whole = torch.zeros(4, 3)
    gap = [piece("one", whole, (0, 0), whole[:2])]
    overlap = [piece("one", whole, (0, 0), whole[:2]), piece("one", whole, (1, 0), whole[1:3])]
    for pieces in (gap, overlap):
        with pytest.raises(DrivetrainError, match=f"^writing the checkpoint {tmp_path} failed: .*'?one"):
            write_pieces(tmp_path, pieces, None)


def test_metadata_that_lost_a_chunk_is_refused(tmp_path: Path) -> None:
    whole = torch.zeros(4, 3)
    write_pieces(
        tmp_path / "dcp", [piece("one", whole, (0, 0), whole[:2]), piece("one", whole, (2, 0), whole[2:])], None
    )
    metadata = read_metadata(tmp_path)
    del metadata.state_dict_metadata["one"].chunks[1]  # type: ignore[union-attr]
    with pytest.raises(DataError, match="tensor 'one' is stored with gaps"):
        read_pieces(tmp_path, [piece("one", whole, (0, 0), whole)], None, metadata=metadata)
