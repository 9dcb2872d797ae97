"""Full tensors for the engines: a plan from the model's names, and one gather a bucket.

Each rank sends its rows of every tensor of a bucket in one flat buffer, already in the dtype that is wanted.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from drivetrain_backend_api.collectives import all_agree
from drivetrain_backend_api.weights import Holders, WeightEntry, WeightExport, WeightPlan, flatten, plan_buckets
from drivetrain_backend_fsdp.model import ShardedModel, local_part


def export_weights(
    model: ShardedModel,
    *,
    bucket_bytes: int,
    holders: Holders,
    dtype: torch.dtype | None,
    control: dist.ProcessGroup | None,
    device: torch.device,
) -> WeightExport:
    """Begin an export; see `TrainBackend.export_weights`. There is one stage, so its lead is rank 0."""
    plan = plan_buckets(
        (
            (
                name,
                weight.shape,
                (dtype or model.stored_dtypes[name]) if weight.is_floating_point() else weight.dtype,
                0,
            )
            for name, weight in model.weights.items()
        ),
        bucket_bytes,
    )
    to_all = holders is Holders.ALL

    def gather(index: int) -> Tensor | None:
        return _gather_bucket(model, plan, index, to_all=to_all, device=device)

    return WeightExport(plan, gather, lambda mine: all_agree(mine, control))


def _gather_bucket(
    model: ShardedModel, plan: WeightPlan, index: int, *, to_all: bool, device: torch.device
) -> Tensor | None:
    """Gather one bucket on all ranks, or on rank 0 alone; None on the others."""
    entries = plan.bucket(index)
    ranks, group = model.mesh.size(), model.mesh.get_group()
    cut = [_rows(entry, ranks) if isinstance(model.weights[entry.name], DTensor) else None for entry in entries]
    pieces = _piece_entries(entries, cut)
    mine = _padded_pieces(model, entries, cut, device)
    flat = flatten(mine, pieces, device=device)
    if ranks == 1:
        parts = [flat]
    elif to_all:
        parts = [torch.empty_like(flat) for _ in range(ranks)]
        dist.all_gather(parts, flat, group=group)
    else:
        lead = model.mesh.get_rank() == 0
        parts = [torch.empty_like(flat) for _ in range(ranks)] if lead else []
        dist.gather(flat, parts if lead else None, group=group, group_dst=0)
        if not lead:
            return None
    return flatten(_joined(entries, pieces, cut, parts), entries, device=device)


def _rows(entry: WeightEntry, ranks: int) -> int:
    """Rows of the largest shard; the last ranks may have fewer."""
    return -(-entry.shape[0] // ranks)


def _piece_entries(entries: Sequence[WeightEntry], cut: Sequence[int | None]) -> tuple[WeightEntry, ...]:
    """Lay one rank's padded pieces out in its flat buffer."""
    return plan_buckets(
        (
            (entry.name, entry.shape if rows is None else (rows, *entry.shape[1:]), entry.torch_dtype, 0)
            for entry, rows in zip(entries, cut)
        ),
        bucket_bytes=2**63,
    ).entries


def _padded_pieces(
    model: ShardedModel, entries: Sequence[WeightEntry], cut: Sequence[int | None], device: torch.device
) -> list[Tensor]:
    pieces = []
    for entry, rows in zip(entries, cut):
        local = local_part(model.weights[entry.name]).to(device=device, dtype=entry.torch_dtype)
        if rows is not None and len(local) < rows:
            padded = local.new_zeros(rows, *entry.shape[1:])
            padded[: len(local)] = local
            local = padded
        pieces.append(local)
    return pieces


def _joined(
    entries: Sequence[WeightEntry],
    pieces: Sequence[WeightEntry],
    cut: Sequence[int | None],
    parts: Sequence[Tensor],
) -> list[Tensor]:
    """Put the ranks' pieces of each tensor together and drop the padding."""
    whole = []
    for entry, piece, rows in zip(entries, pieces, cut):
        size = math.prod(piece.shape) * piece.torch_dtype.itemsize
        views = [part[piece.offset : piece.offset + size].view(piece.torch_dtype).view(piece.shape) for part in parts]
        whole.append(views[0] if rows is None else torch.cat(views)[: entry.shape[0]])
    return whole
