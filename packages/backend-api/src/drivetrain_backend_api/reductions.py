"""Sums over tokens, sequences and ranks. Every reduction names its group; None is a group of this rank alone."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain_backend_api.batch import MicroBatch
from drivetrain_backend_api.parallel import ParallelLayout, ProcessGroups


class _SumOverRanks(torch.autograd.Function):
    """All-reduce whose backward all-reduces too: the objective is the sum of every rank's loss."""

    @staticmethod
    def forward(ctx, values: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[no-untyped-def] # noqa: ANN001
        ctx.group = group
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def] # noqa: ANN001
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def sum_over_ranks(values: Tensor, *, group: dist.ProcessGroup | None) -> Tensor:
    """Sum a tensor over a group, differentiably, where the loss is the sum of all ranks' losses."""
    return values if group is None else _SumOverRanks.apply(values, group)


def per_sequence_sum(values: Tensor, batch: MicroBatch, *, group: dist.ProcessGroup | None) -> Tensor:
    """Sum per-token values of each sequence, over the ranks that hold its tokens; differentiable.

    Args:
        values: [T] of this rank.
        batch: the micro-batch they belong to.
        group: the context-parallel group.

    Returns: [S], equal on all ranks of the group.
    """
    sums = values.new_zeros(batch.num_sequences).index_add(0, batch.sequence_ids, values)
    return sum_over_ranks(sums, group=group)


def sum_scalars(values: Sequence[float], *, group: dist.ProcessGroup | None, device: str) -> list[float]:
    """Sum a few host numbers over a group, in float64."""
    if group is None:
        return list(values)
    packed = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(packed, group=group)
    return [float(one) for one in packed.tolist()]


def reduce_metrics(
    results: Sequence[Mapping[str, Tensor]], *, groups: ProcessGroups, layout: ParallelLayout
) -> dict[str, float]:
    """Sum the step_fn's scalar metrics over micro-batches, then over dp x cp, then send them to every stage.

    Args:
        results: what `forward_backward` returned; empty off the last stage.
    """
    names = sorted(results[0]) if results else []
    sums: list[float] = []
    if names:
        packed = torch.stack([torch.stack([one[name].double() for name in names]) for one in results]).sum(0)
        if groups.dp_cp is not None:
            dist.all_reduce(packed, group=groups.dp_cp)
        sums = packed.tolist()
    message = [dict(zip(names, sums))]
    if groups.pp is not None:
        dist.broadcast_object_list(message, group=groups.pp, group_src=layout.pp_size - 1)
    return message[0]


def gather_packed(values: Tensor, batch: MicroBatch, *, group: dist.ProcessGroup | None) -> Tensor:
    """Put this rank's tokens and those of the other context-parallel ranks together, in packed order.

    Args:
        values: [T local].

    Returns: [T of the whole packed batch], bit-equal on all ranks of the group.
    """
    if group is None:
        return values
    whole = values.new_zeros(int(batch.cu_seqlens[-1]))
    whole[batch.token_index] = values
    dist.all_reduce(whole, group=group)
    return whole
