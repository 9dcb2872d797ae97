"""Micro-batches through a sharded model: one root forward covers embedding, head and loss.

The same runner serves the policy and frozen models. Knows nothing of optimizers or of a backend's state.
"""

import types
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import PreTrainedModel

from drivetrain_backend_api.algorithm import HiddenOutput
from drivetrain_backend_api.attention import Kernel, PackedSequences, packed_sequences
from drivetrain_backend_api.backend import StepFn
from drivetrain_backend_api.batch import MicroBatch
from drivetrain_backend_api.errors import DrivetrainError, IllegalStateError
from drivetrain_backend_api.parallel import ParallelLayout, ProcessGroups
from drivetrain_backend_fsdp.causal_lm import head_of, hidden_states
from drivetrain_backend_fsdp.model import ShardedModel


@dataclass(kw_only=True)
class MicroBatchRunner:
    """Runs the micro-batches of one model.

    Attributes:
        model: the shards.
        parallel: this rank's layout.
        groups: this rank's groups.
        kernel: packed attention kernel.
        temperature: of log-probs.
        chunk_size: tokens whose logits exist at one time.
    """

    model: ShardedModel
    parallel: ParallelLayout
    groups: ProcessGroups
    kernel: Kernel
    temperature: float
    chunk_size: int

    def __post_init__(self) -> None:
        module = self.model.module
        setattr(module, "run_micro_batch", types.MethodType(_run_micro_batch, module))  # noqa: B010 - unknown to types
        register_fsdp_forward_method(module, "run_micro_batch")

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], step_fn: StepFn, forward_only: bool = False
    ) -> list[dict[str, Tensor]]:
        """Run micro-batches without gradients; see `TrainBackend.forward_backward`.

        Raises:
            IllegalStateError: gradients were asked for; the policy gets them by `accumulate`.
        """
        if not forward_only:
            raise IllegalStateError("forward_backward() of a frozen model is illegal; it needs forward_only=True")
        with torch.no_grad():
            results = [self._run(one, step_fn)[1] for one in micro_batches]
        # The root keeps its parameters gathered after a forward, expecting a backward.
        self.model.reshard()
        return results

    def accumulate(
        self, micro_batches: Sequence[MicroBatch], step_fn: StepFn, *, loss_scale: float
    ) -> list[dict[str, Tensor]]:
        """Add every micro-batch's gradients, times `loss_scale`, into the fp32 shards, reduced one by one.

        Raises:
            DrivetrainError: a loss that is no scalar, or that does not depend on the model.
        """
        results = []
        for batch in micro_batches:
            loss, metrics = self._run(batch, step_fn)
            if not loss.requires_grad or loss.ndim:
                raise DrivetrainError(
                    f"step_fn returned a loss of shape {list(loss.shape)} with requires_grad={loss.requires_grad}; it "
                    "must be a scalar computed from the model output, also for micro-batches without loss tokens"
                )
            (loss * loss_scale).backward()  # type: ignore[no-untyped-call]
            results.append(metrics)
        return results

    def _run(self, batch: MicroBatch, step_fn: StepFn) -> tuple[Tensor, dict[str, Tensor]]:
        packed = packed_sequences(batch.cu_seqlens, batch.max_seqlen, self.kernel)
        result: tuple[Tensor, dict[str, Tensor]] = self.model.module.run_micro_batch(  # type: ignore[operator]
            batch, step_fn, packed, self.temperature, self.chunk_size
        )
        return result


def _run_micro_batch(
    module: PreTrainedModel,
    batch: MicroBatch,
    step_fn: StepFn,
    packed: PackedSequences,
    temperature: float,
    chunk_size: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Forward of the root as FSDP sees it: the head's weight is whole in here, tied or not."""
    head = head_of(module)
    hidden = hidden_states(module, batch.input_ids, batch.position_ids, packed)
    output = HiddenOutput(
        hidden=hidden.to(head.weight.dtype),
        head=head,
        labels=batch.labels,
        temperature=temperature,
        chunk_size=chunk_size,
    )
    return step_fn(output, batch)
