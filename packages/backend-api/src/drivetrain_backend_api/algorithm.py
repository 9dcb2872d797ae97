"""The algorithm that drives any backend through four hooks, and the model output it reads.

An algorithm is composed into the training loop; it never subclasses a backend, and it never sees logits.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from drivetrain_backend_api.batch import MicroBatch, RolloutBatch
from drivetrain_backend_api.log_probs import Head, LabelLogProbs, VocabShard, label_log_probs
from drivetrain_backend_api.packing import RolloutShard
from drivetrain_backend_api.parallel import ProcessGroups


class ModelOutput(ABC):
    """What a backend's model made of one micro-batch, on this rank's tokens."""

    @abstractmethod
    def label_log_probs(self, *, with_entropy: bool = False) -> LabelLogProbs:
        """Compute the labels' log-probs, float32 [T], at the run's temperature; differentiable while training.

        The backend computes them from hidden states and head weight in chunks, over vocabulary shards where it has any.
        """


@dataclass(frozen=True, kw_only=True)
class HiddenOutput(ModelOutput):
    """Model output that keeps hidden states and head, and computes log-probs in chunks.

    Attributes:
        hidden: [T, H].
        head: whole, or this rank's rows of it where `shard` says which.
        labels: int64 [T].
        temperature: divides the logits.
        chunk_size: tokens whose logits exist at one time.
        shard: how the vocabulary is cut over ranks; then what flows back into `hidden` is this rank's part.
    """

    hidden: Tensor
    head: Head
    labels: Tensor
    temperature: float
    chunk_size: int
    shard: VocabShard | None = None

    def label_log_probs(self, *, with_entropy: bool = False) -> LabelLogProbs:
        """See `ModelOutput.label_log_probs`."""
        return label_log_probs(
            self.hidden,
            self.head,
            self.labels,
            temperature=self.temperature,
            chunk_size=self.chunk_size,
            with_entropy=with_entropy,
            shard=self.shard,
        )


class Algorithm(ABC):
    """Turns rewards into a loss. One object drives both backends."""

    needs_old_log_probs: bool = False
    """Compute "log_probs" of the policy before training on a rollout."""

    needs_old_log_probs_off_policy: bool = False
    """Compute them only for a rollout of several optimizer steps: in a single one they would equal the step's own."""

    needs_ref_log_probs: bool = False
    """Compute "ref_log_probs" with the frozen reference."""

    needs_teacher_log_probs: bool = False
    """Compute "teacher_log_probs" with the distillation teacher."""

    def __init__(self, config: Any) -> None:
        """Keep the options: an instance of the config class that the algorithm's spec names."""
        self.config = config

    def compute_advantages(self, shard: RolloutShard) -> RolloutBatch:
        """Once per rollout, on all ranks: return the shard's batch, usually with an "advantages" column."""
        return shard.batch

    def prepare_batch(self, batch: RolloutBatch, groups: ProcessGroups) -> RolloutBatch:
        """Once per optimizer step, on all ranks: return this rank's samples of the step, same count and lengths.

        Statistics over a step's samples go over `groups.dp`. Denominators are counted after this hook.
        """
        return batch

    @abstractmethod
    def extract_model_output(self, output: ModelOutput, batch: MicroBatch) -> Mapping[str, Tensor]:
        """Once per micro-batch, inside `step_fn`: ask the output for what the loss needs, each [T]."""

    @abstractmethod
    def compute_loss(
        self, outputs: Mapping[str, Tensor], batch: MicroBatch, groups: ProcessGroups
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Once per micro-batch, inside `step_fn`: the loss and detached metrics.

        Returns:
            This rank's part of a sum over `batch.denominators`, a scalar connected to every output; and metrics that
            are such parts too, 0-d tensors with the same names on all ranks: their sum over micro-batches and ranks
            is what is logged.
        """
