"""Micro-batches as this rank's part of the model reads them, and what the algorithm gets to see of the output.

A packed batch is padded at its end until it divides over context-parallel and sequence-parallel ranks; each
context-parallel rank holds a run of consecutive tokens. Padding is a sequence of its own, cut off before the head.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain_backend_api.attention import Kernel, packed_sequences
from drivetrain_backend_api.batch import MicroBatch
from drivetrain_backend_api.parallel import ParallelLayout
from drivetrain_backend_megatron.attention import PackedTokens
from drivetrain_backend_megatron.rotary import Rotary


@dataclass(frozen=True, kw_only=True)
class RankBatch:
    """One micro-batch on one rank.

    Attributes:
        input_ids: int64 [1, T], padding included.
        positions: int64 [T], of each token in its sequence.
        boundaries: int32 [S + 1], of the sequences of the whole padded batch.
        max_seqlen: tokens of the longest sequence.
        batch: the micro-batch with this rank's real tokens in its per-token fields; the first ones of T.
    """

    input_ids: Tensor
    positions: Tensor
    boundaries: Tensor
    max_seqlen: int
    batch: MicroBatch

    def tokens(self, *, cp: dist.ProcessGroup | None, kernel: Kernel, rotary: Rotary) -> PackedTokens:
        """Make what attention needs; made when the micro-batch is run, since it is larger than all the rest."""
        cos, sin = rotary.angles(self.positions)
        return PackedTokens(
            sequences=packed_sequences(self.boundaries, self.max_seqlen, kernel), cos=cos, sin=sin, cp=cp
        )


def cut_batch(batch: MicroBatch, *, layout: ParallelLayout, multiple: int) -> RankBatch:
    """Pad a packed micro-batch and take this context-parallel rank's tokens.

    Args:
        batch: the whole packed micro-batch.
        layout: of this rank.
        multiple: what a rank's tokens are a multiple of: the tensor-parallel size under sequence parallelism.
    """
    total = len(batch.input_ids)
    unit = layout.cp_size * multiple
    padding = -total % unit
    part = (total + padding) // layout.cp_size
    first = layout.cp_rank * part
    real = slice(min(first, total), min(first + part, total))
    positions = torch.cat((batch.position_ids, torch.arange(padding, device=batch.position_ids.device)))
    boundaries = batch.cu_seqlens
    if padding:
        boundaries = torch.cat((boundaries, boundaries[-1:] + padding))
    return RankBatch(
        input_ids=torch.nn.functional.pad(batch.input_ids, (0, padding))[None, first : first + part],
        positions=positions[first : first + part],
        boundaries=boundaries,
        max_seqlen=max(batch.max_seqlen, padding),
        batch=batch if layout.cp_size == 1 else _cut_fields(batch, real),
    )


def _cut_fields(batch: MicroBatch, real: slice) -> MicroBatch:
    return replace(
        batch,
        input_ids=batch.input_ids[real],
        position_ids=batch.position_ids[real],
        labels=batch.labels[real],
        loss_mask=batch.loss_mask[real],
        sequence_ids=batch.sequence_ids[real],
        token_index=batch.token_index[real],
        per_token={name: column[real] for name, column in batch.per_token.items()},
    )
