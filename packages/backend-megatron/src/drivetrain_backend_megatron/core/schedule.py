"""One pass over the micro-batches by Megatron's schedules: none, plain or interleaved pipeline."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor

from drivetrain_backend_megatron.attention import PackedTokens
from drivetrain_backend_megatron.core.model import CausalLM, Chunks

Results = dict[str, Tensor]

LossOf = Callable[[int, Tensor, Callable[[], Tensor]], tuple[Tensor, Results]]
"""(number of the micro-batch, hidden states [T, 1, H], the head's weight on request) -> (loss, detached results)."""


@dataclass(frozen=True, kw_only=True)
class ChunkInput:
    """One micro-batch as a model chunk reads it.

    Attributes:
        input_ids: int64 [1, T] of this context-parallel rank.
        tokens: for its attention.
    """

    input_ids: Tensor
    tokens: PackedTokens


def run_micro_batches(
    chunks: Chunks,
    inputs: Callable[[int], ChunkInput],
    count: int,
    loss_of: LossOf,
    *,
    loss_scale: float,
    forward_only: bool,
) -> list[Results]:
    """Run the schedule; unless `forward_only`, leave in the gradient buffers the sum of all ranks' gradients.

    Args:
        chunks: of the model on this rank.
        inputs: makes that of a micro-batch by its number; called for each chunk when it runs.
        count: micro-batches, equally many on every rank.
        loss_of: called where the pipeline ends, in order.
        loss_scale: factor on the loss before the backward pass.
        forward_only: whether there is a backward pass.

    Returns: the results in order where the pipeline ends, [] elsewhere.
    """
    config = get_model_config(chunks[0])
    config.grad_scale_func = partial(torch.mul, other=loss_scale)
    config.finalize_model_grads_func = _sum_gradients
    config.no_sync_func = [one.no_sync for one in chunks] if len(chunks) > 1 else chunks[0].no_sync
    if config.virtual_pipeline_model_parallel_size is not None and chunks[0].ddp_config.overlap_grad_reduce:
        config.grad_sync_func = [one.start_grad_sync for one in chunks]
    numbers = [iter(range(count)) for _ in chunks]

    def forward_step(data: Iterator[int], model: DistributedDataParallel) -> tuple[Tensor, Callable[[Tensor], Any]]:
        number = next(data)
        read = inputs(number)
        hidden = model(read.input_ids, read.tokens)
        return hidden, partial(loss_step, number, model.module)

    def loss_step(number: int, chunk: CausalLM, hidden: Tensor) -> tuple[Tensor, Tensor, Results]:
        loss, results = loss_of(number, hidden, chunk.head_weight)
        # the schedule asks for a token count, to divide by what the loss is divided by already
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), results

    if not forward_only:
        for one in chunks:
            one.zero_grad_buffer()
    results: list[Results] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=numbers if len(chunks) > 1 else numbers[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=count,
        # stages tell each other the real lengths
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return results


def _sum_gradients(chunks: Chunks, _num_tokens: Tensor, **others: Any) -> None:
    """Reduce over all who hold a part; without a token count nothing is divided."""
    finalize_model_grads(list(chunks), None, **others)
