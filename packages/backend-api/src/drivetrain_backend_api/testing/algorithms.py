"""The algorithms that drive a backend under test, and a record of what the model said of every token.

Two means, over tokens and over sequences, are written once more for the plain reference in `reference`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from drivetrain_backend_api.algorithm import Algorithm, ModelOutput
from drivetrain_backend_api.batch import MicroBatch, RolloutBatch
from drivetrain_backend_api.packing import RolloutShard
from drivetrain_backend_api.parallel import ProcessGroups
from drivetrain_backend_api.reductions import per_sequence_sum, sum_scalars

ENTROPY_COEF = 0.05

RAISED = "raised on purpose by the conformance suite"
"""Message of the error that a test raises on one rank."""


class TokenMean(Algorithm):
    """Policy gradient with an entropy bonus, the mean over all loss tokens of the step.

    Attributes:
        seen: for each micro-batch, of its tokens on this rank: sample index, position, mask, log-prob and entropy.
        failure: what happens at the first loss: "nan" or "inf" poisons it, "raise" raises.
    """

    def __init__(self, config: Any = None, *, failure: str = "") -> None:
        super().__init__(config)
        self.seen: list[dict[str, Tensor]] = []
        self.failure = failure

    def extract_model_output(self, output: ModelOutput, batch: MicroBatch) -> Mapping[str, Tensor]:
        """Ask for log-probs and entropy, and note them."""
        found = output.label_log_probs(with_entropy=True)
        assert found.entropy is not None
        self.seen.append(
            {
                "index": batch.per_sample["index"][batch.sequence_ids],
                "position": batch.position_ids,
                "loss_mask": batch.loss_mask,
                "log_prob": found.log_probs.detach(),
                "entropy": found.entropy.detach(),
            }
        )
        return {"log_probs": found.log_probs, "entropy": found.entropy}

    def compute_loss(
        self, outputs: Mapping[str, Tensor], batch: MicroBatch, groups: ProcessGroups
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Algorithm.compute_loss`."""
        loss = self.loss(outputs, batch, groups)
        failure, self.failure = self.failure, ""
        if failure == "raise":
            raise RuntimeError(RAISED)
        if failure:
            loss = loss * float(failure)
        entropy = (outputs["entropy"] * batch.loss_mask).sum().detach() / batch.require_denominators().tokens
        return loss, {"loss": loss.detach(), "entropy": entropy}

    def loss(self, outputs: Mapping[str, Tensor], batch: MicroBatch, groups: ProcessGroups) -> Tensor:
        """This rank's part of the mean over tokens."""
        gain = batch.per_token["advantages"] * outputs["log_probs"] + ENTROPY_COEF * outputs["entropy"]
        return -(gain * batch.loss_mask).sum() / batch.require_denominators().tokens


class SequenceMean(TokenMean):
    """Sequence-level ratios (as GSPO's, https://arxiv.org/abs/2507.18071), the mean over sequences.

    Advantages are rewards less their group's mean over the whole rollout, then whitened over the loss tokens of a step.
    """

    needs_old_log_probs = True

    def compute_advantages(self, shard: RolloutShard) -> RolloutBatch:
        """Subtract each group's mean reward, over all ranks' samples."""
        rewards, ids = shard.rollout_per_sample["reward"].double(), shard.rollout_per_sample["group_id"]
        batch = shard.batch
        mine = [
            float(reward - rewards[ids == group].mean())
            for reward, group in zip(batch.per_sample["reward"].cpu(), batch.per_sample["group_id"].cpu())
        ]
        counts = batch.response_lengths.tolist()
        column = torch.tensor([value for value, count in zip(mine, counts) for _ in range(count)], dtype=torch.float32)
        return batch.with_per_token("advantages", column.to(batch.tokens.device))

    def prepare_batch(self, batch: RolloutBatch, groups: ProcessGroups) -> RolloutBatch:
        """Whiten over the step's loss tokens of all data-parallel ranks."""
        values, mask = batch.per_token["advantages"].double(), batch.per_token["loss_mask"].double()
        parts = [float((values**power * mask).sum()) for power in range(3)]
        count, first, second = sum_scalars(parts, group=groups.dp, device=str(batch.tokens.device))
        mean, variance = whitening(count, first, second)
        return batch.with_per_token("advantages", ((values - mean) / (variance**0.5 + 1e-6)).float())

    def loss(self, outputs: Mapping[str, Tensor], batch: MicroBatch, groups: ProcessGroups) -> Tensor:
        """This rank's part: a sequence counts in proportion to the tokens of it that lie here."""
        lengths = per_sequence_sum(batch.loss_mask, batch, group=groups.cp).clamp(min=1)
        moved = (outputs["log_probs"] - batch.per_token["log_probs"]) * batch.loss_mask
        ratios = (per_sequence_sum(moved, batch, group=groups.cp) / lengths).exp()
        share = batch.loss_mask / lengths[batch.sequence_ids]
        gain = ratios[batch.sequence_ids] * batch.per_token["advantages"] + ENTROPY_COEF * outputs["entropy"]
        return -(gain * share).sum() / batch.require_denominators().sequences


class FirstStep(TokenMean):
    """Measures how far the step's log-probs are from those computed before it, and from the reference's.

    Attributes:
        moved: for each micro-batch, the loss tokens' log-probs less those computed before, fp64 [T], 0 elsewhere.
        away: the same, the reference's less the step's; empty without a reference.
        tokens: for each micro-batch, how many loss tokens lay on this rank.
    """

    needs_old_log_probs = True

    def __init__(self, *, with_ref: bool) -> None:
        super().__init__()
        self.needs_ref_log_probs = with_ref
        self.moved: list[Tensor] = []
        self.away: list[Tensor] = []
        self.tokens: list[Tensor] = []

    def loss(self, outputs: Mapping[str, Tensor], batch: MicroBatch, groups: ProcessGroups) -> Tensor:
        """The mean over tokens; measures on the way."""
        log_probs = outputs["log_probs"].detach()
        self.moved.append(((log_probs - batch.per_token["log_probs"]) * batch.loss_mask).double())
        self.tokens.append(batch.loss_mask.sum())
        if self.needs_ref_log_probs:
            self.away.append(((batch.per_token["ref_log_probs"] - log_probs) * batch.loss_mask).double())
        return super().loss(outputs, batch, groups)


def whitening(count: float, first: float, second: float) -> tuple[float, float]:
    """Mean and variance from the count and the sums of values and of their squares."""
    mean = first / max(count, 1.0)
    return mean, max(second / max(count, 1.0) - mean**2, 0.0)
