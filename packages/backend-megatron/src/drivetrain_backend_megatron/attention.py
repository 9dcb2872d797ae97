"""What happens between the projections of a layer: rotary positions, context parallelism, packed causal attention.

Works on one rank's tokens [T, heads, size]. Context parallelism gives each rank a run of consecutive tokens of the
packed batch; attention trades tokens for heads and back by two all-to-alls (DeepSpeed-Ulysses, arXiv:2309.14509), so
that each rank attends over whole sequences with some of the heads. Knows no Megatron class.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain_backend_api.attention import PackedSequences, packed_causal_attention


@dataclass(frozen=True, kw_only=True)
class PackedTokens:
    """What the attention of every layer needs to know of one micro-batch.

    Attributes:
        sequences: where the sequences of the whole padded batch lie.
        cos: [T, 1, D] of this rank's tokens, D the part of a head that is rotated; sin alike.
        cp: the context-parallel group; None for a group of this rank alone.
    """

    sequences: PackedSequences
    cos: Tensor
    sin: Tensor
    cp: dist.ProcessGroup | None


def packed_attention(query: Tensor, key: Tensor, value: Tensor, packed: PackedTokens, *, scale: float) -> Tensor:
    """Rotate queries and keys, then attend causally within each sequence.

    Args:
        query: [T, heads, size] of this rank's tokens.
        key: [T, key heads, size]; value alike.
        packed: of the micro-batch.
        scale: factor on the scores.

    Returns: [T, heads, size].
    """
    query, key = rotate(query, packed), rotate(key, packed)
    if packed.cp is None:
        return packed_causal_attention(query, key, value, packed.sequences, scale=scale)
    query, key, value = tokens_to_heads((query, key, value), packed.cp)
    return heads_to_tokens(packed_causal_attention(query, key, value, packed.sequences, scale=scale), packed.cp)


def rotate(heads: Tensor, packed: PackedTokens) -> Tensor:
    """Rotate [T, heads, size] by position (RoFormer, arXiv:2104.09864), halves as Hugging Face has them."""
    cos, sin = packed.cos.to(heads.dtype), packed.sin.to(heads.dtype)
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


def tokens_to_heads(tensors: tuple[Tensor, ...], group: dist.ProcessGroup) -> list[Tensor]:
    """Trade tokens for heads: [T / cp, H, D] each -> [T, H / cp, D] each, in one all-to-all.

    Heads that are fewer than ranks are repeated; their gradients are added up.
    """
    ranks = group.size()
    blocks = []
    for one in tensors:
        if one.shape[1] % ranks:
            one = one.repeat_interleave(ranks // one.shape[1], dim=1)
        blocks.append(one.reshape(len(one), ranks, -1, one.shape[-1]).transpose(0, 1))
    widths = [one.shape[2] for one in blocks]
    mixed = _AllToAll.apply(torch.cat(blocks, dim=2), group)
    return list(mixed.flatten(0, 1).split(widths, dim=1))


def heads_to_tokens(heads: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Undo `tokens_to_heads` for one tensor: [T, H / cp, D] -> [T / cp, H, D]."""
    parts: Tensor = _AllToAll.apply(heads.reshape(group.size(), -1, *heads.shape[1:]), group)
    return parts.transpose(0, 1).flatten(1, 2)


class _AllToAll(torch.autograd.Function):
    """Equal parts along the first dimension change places; its own adjoint."""

    @staticmethod
    def forward(ctx, parts: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[no-untyped-def] # noqa: ANN001
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def] # noqa: ANN001
        return _all_to_all(gradient, ctx.group), None


def _all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received
