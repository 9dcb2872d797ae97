"""Training on one rollout as plain functions: shard, log-probs, advantages, optimizer steps.

They drive anything that has the few attributes they use, and are shared by all backends.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain_backend_api.algorithm import Algorithm, ModelOutput
from drivetrain_backend_api.batch import Denominators, MicroBatch, RolloutBatch
from drivetrain_backend_api.errors import DataError, DrivetrainError
from drivetrain_backend_api.packing import Batching, RolloutShard, pack, shard_rollout, unpack
from drivetrain_backend_api.parallel import ParallelLayout, ProcessGroups
from drivetrain_backend_api.reductions import gather_packed, reduce_metrics, sum_scalars

if TYPE_CHECKING:
    from drivetrain_backend_api.backend import StepFn, StepOutcome

_LOG = logging.getLogger(__name__)


class ForwardBackward(Protocol):
    """The part of a backend that runs micro-batches."""

    parallel: ParallelLayout
    groups: ProcessGroups

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], step_fn: "StepFn", forward_only: bool = False
    ) -> list[dict[str, Tensor]]:
        """See `TrainBackend.forward_backward`."""
        ...


class Trainable(ForwardBackward, Protocol):
    """The part of a backend that trains."""

    next_rollout_id: int

    def optimizer_step(self) -> "StepOutcome":
        """See `TrainBackend.optimizer_step`."""
        ...

    def maybe_compute_ref_log_probs(self, shard: RolloutShard) -> list[Tensor] | None:
        """See `TrainBackend.maybe_compute_ref_log_probs`."""
        ...

    def maybe_compute_teacher_log_probs(self, shard: RolloutShard) -> list[Tensor] | None:
        """See `TrainBackend.maybe_compute_teacher_log_probs`."""
        ...


def preprocess_rollout_data(
    rollout: RolloutBatch | RolloutShard, *, layout: ParallelLayout, batching: Batching, device: torch.device
) -> RolloutShard:
    """Take the shard of `layout.dp_rank` (unless it is one already) and copy its batch to the device."""
    if isinstance(rollout, RolloutBatch):
        rollout = shard_rollout(rollout, dp_size=layout.dp_size, batching=batching)[layout.dp_rank]
    return rollout.with_batch(rollout.batch.to(device))


def forward_log_probs(backend: ForwardBackward, shard: RolloutShard) -> list[Tensor]:
    """Compute every sample's response log-probs, in the shard's order, on every rank of the replica."""

    def step_fn(output: ModelOutput, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        log_probs = output.label_log_probs().log_probs
        return log_probs.sum() * 0.0, {"log_probs": log_probs.detach(), "token_index": batch.token_index}

    micro_batches = [pack(shard.batch, samples) for step in shard.steps for samples in step]
    results = backend.forward_backward(micro_batches, step_fn, forward_only=True)
    whole = _on_every_stage(results, micro_batches, backend)
    ordered: dict[int, Tensor] = {}
    for values, batch in zip(whole, micro_batches, strict=True):
        ordered.update(zip(batch.samples, unpack(values, batch), strict=True))
    return [ordered[one] for one in range(len(shard.batch))]


def _on_every_stage(
    results: list[dict[str, Tensor]], micro_batches: Sequence[MicroBatch], backend: ForwardBackward
) -> list[Tensor]:
    """Gather each micro-batch's log-probs over cp on the last stage, then broadcast them over pp."""
    whole = []
    for place, batch in enumerate(micro_batches):
        if backend.parallel.is_last_stage:
            mine = replace(batch, token_index=results[place]["token_index"])  # the backend cut it for its cp rank
            values = gather_packed(results[place]["log_probs"], mine, group=backend.groups.cp)
        else:
            values = torch.empty(int(batch.cu_seqlens[-1]), device=batch.cu_seqlens.device)
        if backend.groups.pp is not None:
            dist.broadcast(values, group=backend.groups.pp, group_src=backend.parallel.pp_size - 1)
        whole.append(values)
    return whole


def train_rollout(
    backend: Trainable, rollout_id: int, shard: RolloutShard, algorithm: Algorithm
) -> list[dict[str, float]]:
    """Train on one rollout; the body of `TrainBackend.train`.

    Raises:
        DrivetrainError: the algorithm needs a reference or teacher that was not loaded.
    """
    off_policy = len(shard.steps) > 1
    if algorithm.needs_old_log_probs or (off_policy and algorithm.needs_old_log_probs_off_policy):
        shard = shard.with_batch(shard.batch.with_per_token("log_probs", forward_log_probs(backend, shard)))
    if algorithm.needs_ref_log_probs:
        shard = _with_log_probs(shard, "ref_log_probs", backend.maybe_compute_ref_log_probs(shard), "--ref-load")
    if algorithm.needs_teacher_log_probs:
        teacher = backend.maybe_compute_teacher_log_probs(shard)
        shard = _with_log_probs(shard, "teacher_log_probs", teacher, "--opd-teacher-load")
    shard = shard.with_batch(algorithm.compute_advantages(shard))
    metrics = [train_step(backend, shard, step, algorithm) for step in shard.steps]
    backend.next_rollout_id = rollout_id + 1
    return metrics


def _with_log_probs(shard: RolloutShard, name: str, values: list[Tensor] | None, flag: str) -> RolloutShard:
    if values is None:
        raise DrivetrainError(f"the algorithm needs {name}, but none was loaded; give {flag} DIR")
    return shard.with_batch(shard.batch.with_per_token(name, values))


def train_step(
    backend: Trainable, shard: RolloutShard, step: Sequence[Sequence[int]], algorithm: Algorithm
) -> dict[str, float]:
    """Run one optimizer step over its micro-batches and return the reduced metrics."""
    groups = backend.groups
    order = [sample for samples in step for sample in samples]
    batch = algorithm.prepare_batch(shard.batch.select(order), groups)
    if len(batch) != len(order):
        raise DataError(
            f"prepare_batch returned {len(batch)} of {len(order)} samples; mask samples instead of dropping them"
        )
    place = {sample: row for row, sample in enumerate(order)}
    denominators = count_denominators(batch, groups)
    micro_batches = [pack(batch, [place[one] for one in samples], denominators=denominators) for samples in step]

    def step_fn(output: ModelOutput, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return algorithm.compute_loss(algorithm.extract_model_output(output, micro_batch), micro_batch, groups)

    results = backend.forward_backward(micro_batches, step_fn)
    metrics = reduce_metrics(results, groups=groups, layout=backend.parallel)
    outcome = backend.optimizer_step()
    if outcome.skipped and backend.parallel.rank == 0:
        _LOG.warning("optimizer step skipped: %s", outcome.reason)
    return {
        **metrics,
        "grad_norm": outcome.grad_norm,
        "lr": outcome.lr,
        "skipped_steps": float(outcome.skipped),
        "loss_tokens": denominators.tokens,
        "micro_batches": float(len(micro_batches)),
    }


def count_denominators(batch: RolloutBatch, groups: ProcessGroups) -> Denominators:
    """Count loss tokens, and samples that have any, over the data-parallel ranks; neither is below 1."""
    mask = batch.per_token["loss_mask"].cpu()
    tokens = int(mask.sum())
    sequences = sum(bool(one.any()) for one in torch.split(mask, batch.response_lengths.tolist()))
    totals = sum_scalars([tokens, sequences], group=groups.dp, device=str(batch.tokens.device))
    return Denominators(tokens=max(totals[0], 1.0), sequences=max(totals[1], 1.0))
