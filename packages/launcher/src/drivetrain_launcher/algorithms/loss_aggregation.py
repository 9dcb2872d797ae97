"""How per-token losses become one number: the weight of each token in the mean over the whole optimizer step.

The weights of all micro-batches and ranks sum to 1, so a weighted sum of anything per token is this rank's part of its
mean. Knows nothing of what is averaged.
"""

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from drivetrain_backend_api.batch import MicroBatch
from drivetrain_backend_api.reductions import per_sequence_sum


def mean_over_step(
    batch: MicroBatch, *, of_tokens: bool, cp_group: dist.ProcessGroup | None
) -> Callable[[Tensor], Tensor]:
    """Return the function that takes values [T] to this micro-batch's part of their mean over the step.

    Args:
        batch: the micro-batch, laid out as this rank's tokens.
        of_tokens: weigh by `token_mean_weights`; else by `sequence_mean_weights`.
        cp_group: the ranks that hold other tokens of the same sequences.
    """
    weights = token_mean_weights(batch) if of_tokens else sequence_mean_weights(batch, cp_group=cp_group)
    return lambda values: (values * weights).sum()


def token_mean_weights(batch: MicroBatch) -> Tensor:
    """Give every loss token of the step the same weight, float32 [T]; long sequences count for more."""
    return batch.loss_mask / batch.require_denominators().tokens


def sequence_mean_weights(batch: MicroBatch, *, cp_group: dist.ProcessGroup | None) -> Tensor:
    """Give every sequence of the step the same weight, shared evenly by its loss tokens, float32 [T].

    Args:
        batch: the micro-batch, laid out as this rank's tokens.
        cp_group: the ranks that hold other tokens of the same sequences.
    """
    loss_tokens = per_sequence_sum(batch.loss_mask, batch, group=cp_group).clamp(min=1.0)
    return batch.loss_mask / loss_tokens[batch.sequence_ids] / batch.require_denominators().sequences
