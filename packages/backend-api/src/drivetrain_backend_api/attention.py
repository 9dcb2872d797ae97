"""Exact causal attention over sequences packed end to end, without padding.

Tensors are token-major: [T, heads, size]. Knows no model class, no backend and nothing of sharding.
"""

import inspect
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drivetrain_backend_api.errors import ConfigError


class Kernel(StrEnum):
    """How packed attention is computed: one fused call, or one exact call for sequences of similar length."""

    VARLEN = "varlen"
    PER_SEQUENCE = "per_sequence"


_FILL = 0.8
"""Sequences are attended together when the shortest has at least this share of the longest one's length."""


@dataclass(frozen=True, kw_only=True)
class SimilarSequences:
    """N sequences of similar length, side by side.

    Attributes:
        places: int64 [N, L], where each token lies in the packed batch; past a sequence's end, its last token again.
            Causal attention never looks ahead, so what is computed there disturbs nothing and is dropped.
        real: bool [N, L], False past a sequence's end.
    """

    places: Tensor
    real: Tensor


@dataclass(frozen=True, kw_only=True)
class PackedSequences:
    """Where the sequences of a packed batch lie.

    Attributes:
        cu_seqlens: int32 [S + 1], boundaries, on the tokens' device.
        max_seqlen: tokens of the longest sequence.
        similar: all sequences, in groups of similar length; for `Kernel.PER_SEQUENCE` only.
        order: int64 [T], where each token comes out when the groups' real tokens are joined.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    kernel: Kernel
    similar: tuple[SimilarSequences, ...] = ()
    order: Tensor | None = None


def packed_sequences(cu_seqlens: Tensor, max_seqlen: int, kernel: Kernel) -> PackedSequences:
    """Describe a packed batch; reads the lengths back to the host only where the kernel needs them."""
    if kernel is Kernel.VARLEN:
        return PackedSequences(cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, kernel=kernel)
    device = cu_seqlens.device
    starts = cu_seqlens.to(torch.int64)
    lengths = starts.diff()
    similar = []
    for members in _similar_lengths(lengths.tolist()):
        rows = torch.tensor(members, device=device)
        steps = torch.arange(int(lengths[members[0]]), device=device)
        real = steps < lengths[rows, None]
        places = starts[rows, None] + torch.minimum(steps, lengths[rows, None] - 1)
        similar.append(SimilarSequences(places=places, real=real))
    joined = torch.cat([one.places[one.real] for one in similar])
    return PackedSequences(
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
        kernel=kernel,
        similar=tuple(similar),
        order=torch.argsort(joined),
    )


def _similar_lengths(lengths: list[int]) -> list[list[int]]:
    """Group sequences, longest first, so that little is computed past their ends."""
    groups: list[list[int]] = []
    for one in sorted(range(len(lengths)), key=lambda sequence: -lengths[sequence]):
        if not groups or lengths[one] < _FILL * lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(one)
    return groups


def choose_kernel(requested: str, *, device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernel:
    """Resolve `--attention-backend`.

    Raises:
        ConfigError: varlen was asked for where torch has no such kernel.
    """
    fits = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= 256
    if requested == Kernel.VARLEN and not fits:
        raise ConfigError(
            f"--attention-backend varlen needs a CUDA device, bf16 or fp16 and a head size that is a multiple of 8 up "
            f"to 256, not {device.type}, {dtype} and {head_dim}; use --attention-backend auto"
        )
    if requested == "auto":
        return Kernel.VARLEN if fits else Kernel.PER_SEQUENCE
    return Kernel(requested)


def packed_causal_attention(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, *, scale: float | None = None
) -> Tensor:
    """Attend causally within each packed sequence.

    Args:
        query: [T, heads, size].
        key: [T, key heads, size], in query's dtype; key heads divide heads, and each serves as many neighbours.
        value: as key.
        packed: where the sequences lie.
        scale: factor on the scores; None is 1 / sqrt(size).

    Returns: [T, heads, size].
    """
    if packed.kernel is Kernel.VARLEN:
        return _varlen(query, key, value, packed, scale)
    return _per_sequence(query, key, value, packed, scale)


def _varlen(query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, scale: float | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # Older releases take fewer key heads than query heads without being told.
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    out = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        packed.cu_seqlens,
        packed.cu_seqlens,
        packed.max_seqlen,
        packed.max_seqlen,
        scale=scale,
        window_size=(-1, 0),
        **grouped,
    )
    assert isinstance(out, Tensor)
    return out


def _per_sequence(query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, scale: float | None) -> Tensor:
    outs = []
    for one in packed.similar:
        q, k, v = (_side_by_side(tensor, one.places) for tensor in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        outs.append(out.transpose(1, 2)[one.real])  # [tokens, heads, size]
    assert packed.order is not None
    return torch.cat(outs).index_select(0, packed.order)


def _side_by_side(tokens: Tensor, places: Tensor) -> Tensor:
    """Gather [T, heads, size] by places [N, L] into [N, heads, L, size]."""
    # index_select, whose backward adds rows, is many times faster than indexing, whose backward sorts them
    # heads first: a CPU's half-precision backward takes half as long again on rows that lie a whole token apart
    rows = tokens.transpose(0, 1).index_select(1, places.flatten())
    return rows.view(len(rows), *places.shape, -1).transpose(0, 1)
