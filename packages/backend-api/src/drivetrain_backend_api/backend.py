"""`TrainBackend`: the contract between a training loop and whatever trains.

Seven abstract methods, no more. What every backend does alike is concrete here, each a thin call of a plain function in
`training`. Knows no engine, no Ray and no file layout.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor

from drivetrain_backend_api import training
from drivetrain_backend_api.algorithm import Algorithm, ModelOutput
from drivetrain_backend_api.batch import MicroBatch, RolloutBatch
from drivetrain_backend_api.config import TrainConfig
from drivetrain_backend_api.lifecycle import Lifecycle, State
from drivetrain_backend_api.packing import Batching, RolloutShard
from drivetrain_backend_api.parallel import ParallelLayout, ProcessGroups, Role
from drivetrain_backend_api.spec import Capabilities
from drivetrain_backend_api.weights import Holders, WeightExport, WeightManager

StepFn = Callable[[ModelOutput, MicroBatch], tuple[Tensor, dict[str, Tensor]]]
"""(model output, micro-batch) -> (unscaled scalar loss, detached tensors). Called once a micro-batch, in order, only
where `parallel.is_last_stage`; it may use the tp and cp groups, never pp, dp or world, and never waits for the host."""


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What an optimizer step did.

    Attributes:
        grad_norm: global L2 norm before clipping, unscaled; inf or nan when skipped for that.
        lr: learning rate that was used.
        skipped: True when weights and optimizer are untouched.
        reason: why it was skipped, "" otherwise.
    """

    grad_norm: float
    lr: float
    skipped: bool = False
    reason: str = ""


class SaveHandle:
    """A checkpoint on its way to storage. Both methods are collective: all ranks, in the same order."""

    def poll(self) -> bool:
        """Return True when every rank's part is written. The default is a save that ended before it was returned."""
        return True

    def finalize(self) -> None:
        """Wait until every rank's part is written. Raises the first failure, on all ranks."""


class TrainBackend(ABC):
    """Trains one model over `world_size` processes.

    Attributes:
        config: the backend's own `TrainConfig` subclass.
        role: what the group of workers is for.
        parallel: this rank's layout, set by `setup`.
        groups: this rank's process groups, set by `setup`.
        weights: tagged copies of this rank's weights, set by `setup`.
        lifecycle: the state machine that refuses illegal calls.
        next_rollout_id: how many rollouts these weights were trained on; saved and loaded with a checkpoint.
    """

    capabilities: ClassVar[Capabilities]

    parallel: ParallelLayout
    groups: ProcessGroups
    weights: WeightManager

    def __init__(self, config: TrainConfig, role: Role, rank: int, world_size: int, device: str) -> None:
        """Take the facts; `setup` does the work. MASTER_ADDR and MASTER_PORT are set in the environment.

        Args:
            config: all settings.
            role: what this group of workers is for.
            rank: of this process, from 0.
            world_size: processes of this backend.
            device: torch device of this process, for example "cuda:0" or "cpu".
        """
        self.config = config
        self.role = role
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device(device)
        self.lifecycle = Lifecycle()
        self.next_rollout_id = 0

    # -- the seven ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def setup(self, with_ref: bool = False, with_opd_teacher: bool = False) -> int:
        """Make groups, model, optimizer and scheduler; load `config.load`, or the Hugging Face weights.

        With `config.finetune` only weights are taken from there, and training begins anew; else all that the next step
        depends on. With `config.verify_checkpoint` every byte is compared with its checksum first.

        Args:
            with_ref: also load the frozen reference of `config.ref_load`.
            with_opd_teacher: also load the distillation teacher of `config.opd_teacher_load`.

        Returns: the next rollout id, equal on all ranks.

        Raises:
            UnsupportedModelError: the architecture cannot be trained right, with the reason.
            DrivetrainError: any failure to load; nothing is guessed.
        """

    @abstractmethod
    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], step_fn: StepFn, forward_only: bool = False
    ) -> list[dict[str, Tensor]]:
        """Run the micro-batches; unless `forward_only`, add the gradients of the sum of all ranks' losses.

        All ranks pass equally many. The backend scales the loss for fp16. Gradients are summed over ranks,
        never averaged.

        Returns: step_fn's dicts in order on the last stage, [] elsewhere.

        Raises:
            DrivetrainError: a loss that is no scalar, or that does not depend on the model; the message says so.
        """

    @abstractmethod
    def optimizer_step(self) -> StepOutcome:
        """Clip by the global norm, step, zero the gradients, advance the schedule.

        A non-finite gradient anywhere skips the step on all ranks and leaves weights, optimizer and schedule alone.
        """

    @abstractmethod
    def export_weights(
        self, bucket_bytes: int, holders: Holders = Holders.ALL, dtype: torch.dtype | None = None
    ) -> WeightExport:
        """Begin a collective export of full tensors under Hugging Face names, tied ones once.

        Args:
            bucket_bytes: most bytes in a bucket, except for a single larger tensor.
            holders: which ranks get the data.
            dtype: of floating-point tensors; None takes the checkpoint's. Cast before gathering.
        """

    @abstractmethod
    def save_checkpoint(self, folder: Path) -> SaveHandle:
        """Begin to write weights, optimizer, scheduler, RNG and `next_rollout_id` into an existing empty folder.

        With `config.async_save` this returns as soon as training may go on, and what training changes then is not in
        the checkpoint. A save that is on its way is finalised by the next one, by a sleep that destroys groups, and by
        `close`. With `config.no_save_optim` the optimizer's moments are left out. A `manifest` of all files comes last.
        """

    @abstractmethod
    def sleep(self, keep_weights: bool = False) -> None:
        """Give the accelerator's memory back; with `keep_weights` only what is needed for an export stays."""

    @abstractmethod
    def wake_up(self, weights_only: bool = False) -> None:
        """Undo `sleep`, bit for bit; with `weights_only` only as far as an export needs."""

    # -- shared -------------------------------------------------------------------------------------------------------

    @property
    def batching(self) -> Batching:
        """How this backend's micro-batches are made; pipelines override `minimum` and `multiple`."""
        return Batching(
            global_batch_size=self.config.global_batch_size,
            micro_batch_size=self.config.micro_batch_size,
            max_tokens=self.config.micro_batch_tokens,
        )

    def preprocess_rollout_data(self, rollout: RolloutBatch | RolloutShard) -> RolloutShard:
        """Take this rank's data-parallel shard of a rollout (or a shard cut before) to this rank's device."""
        return training.preprocess_rollout_data(
            rollout, layout=self.parallel, batching=self.batching, device=self.device
        )

    def train(self, rollout_id: int, shard: RolloutShard, algorithm: Algorithm) -> list[dict[str, float]]:
        """Train on one rollout: log-probs and advantages the algorithm needs, then every optimizer step.

        Returns: the metrics of each optimizer step, equal on all ranks.
        """
        self.lifecycle.require("train")
        self.weights.require_policy("train")
        return training.train_rollout(self, rollout_id, shard, algorithm)

    def forward_only(self, shard: RolloutShard) -> list[Tensor]:
        """Compute log-probs of the responses without gradients.

        Returns: for each sample of the shard, in order, its log-probs over the response, float32 1-D; bit-equal on all
            ranks of the data-parallel replica.
        """
        self.lifecycle.require("forward_only")
        return training.forward_log_probs(self, shard)

    def maybe_compute_ref_log_probs(self, shard: RolloutShard) -> list[Tensor] | None:
        """Compute log-probs under the reference, or None when `setup` loaded none."""
        return self._log_probs_under("ref", shard)

    def maybe_compute_teacher_log_probs(self, shard: RolloutShard) -> list[Tensor] | None:
        """Compute log-probs under the distillation teacher, or None when `setup` loaded none."""
        return self._log_probs_under("teacher", shard)

    def backup_weights(self, tag: str) -> None:
        """Keep a host copy of this rank's weights under a tag."""
        self.lifecycle.require("switch_weights")
        self.weights.backup(tag)

    def restore_weights(self, tag: str) -> None:
        """Copy the weights kept under a tag into the live model, bit for bit; optimizer state is left alone."""
        self.lifecycle.require("switch_weights")
        self.weights.restore(tag)

    def switch_weights(self, tag: str) -> None:
        """Make a tag's weights live; leaving the policy keeps it first."""
        self.lifecycle.require("switch_weights")
        self.weights.switch(tag)

    def _log_probs_under(self, tag: str, shard: RolloutShard) -> list[Tensor] | None:
        """Compute log-probs under other weights kept as a tag; a backend with separate models overrides this."""
        if tag not in self.weights.tags:
            return None
        live = self.weights.live_tag
        self.switch_weights(tag)
        try:
            return self.forward_only(shard)
        finally:
            self.switch_weights(live)

    def close(self) -> None:
        """Destroy what `setup` made; legal in every state, and twice."""
        self.lifecycle.state = State.CLOSED

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
