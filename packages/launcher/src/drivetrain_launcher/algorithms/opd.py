"""OPD: on-policy distillation (arXiv:2306.13649; https://thinkingmachines.ai/blog/on-policy-distillation).

The policy samples, and a teacher says of each token how likely it would have been there: an advantage a token, where
a reward gives one a sample. Everything behind the advantages is GRPO's. Knows no backend, no engine and no model.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from drivetrain_backend_api.algorithm import Algorithm, ModelOutput
from drivetrain_backend_api.batch import MicroBatch, RolloutBatch
from drivetrain_backend_api.errors import DataError
from drivetrain_backend_api.packing import RolloutShard
from drivetrain_backend_api.parallel import ProcessGroups
from drivetrain_launcher.algorithms.grpo import Grpo
from drivetrain_launcher.algorithms.loss_aggregation import mean_over_step
from drivetrain_launcher.algorithms.opd_spec import OpdConfig


class Opd(Algorithm):
    """Clipped policy gradient on the reverse KL to the teacher, with GRPO's advantages beside it where asked for.

    The samples need per-token "rollout_log_probs"; with `opd_reward_coef`, per-sample "reward" and "group_id" too.
    """

    config: OpdConfig

    def __init__(self, config: OpdConfig) -> None:
        super().__init__(config)
        self._grpo = Grpo(config)
        self.needs_old_log_probs_off_policy = self._grpo.needs_old_log_probs_off_policy
        self.needs_ref_log_probs = self._grpo.needs_ref_log_probs
        self.needs_teacher_log_probs = True

    def compute_advantages(self, shard: RolloutShard) -> RolloutBatch:
        """Add the columns "opd_reverse_kl" and "advantages".

        A token's reverse KL is its log-prob under the policy that sampled it minus that under the teacher, whose mean
        over samples is KL(policy || teacher); no token answers for what follows it. The policy's are recomputed
        ones where there are any, else the engine's.

        Raises:
            DataError: a column that OPD reads is missing.
        """
        batch = shard.batch
        if missing := [name for name in ("rollout_log_probs", "teacher_log_probs") if name not in batch.per_token]:
            raise DataError(f"opd needs {', '.join(missing)} on its samples; whatever generates them must set it")
        old_log_probs = batch.per_token.get("log_probs", batch.per_token["rollout_log_probs"])
        log_ratio = old_log_probs - batch.per_token["teacher_log_probs"]
        reverse_kl = torch.where(batch.per_token["loss_mask"] > 0, log_ratio, torch.zeros_like(log_ratio))
        advantages = -self.config.opd_kl_coef * reverse_kl
        if self.config.opd_reward_coef:
            rewarded = self._grpo.compute_advantages(shard).per_token["advantages"]
            advantages = advantages + self.config.opd_reward_coef * rewarded
        return batch.with_per_token("opd_reverse_kl", reverse_kl).with_per_token("advantages", advantages)

    def extract_model_output(self, output: ModelOutput, batch: MicroBatch) -> Mapping[str, Tensor]:
        """See `Grpo.extract_model_output`."""
        return self._grpo.extract_model_output(output, batch)

    def compute_loss(
        self, outputs: Mapping[str, Tensor], batch: MicroBatch, groups: ProcessGroups
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute GRPO's loss and metrics, and the mean reverse KL in nats a token as "opd_reverse_kl"."""
        loss, metrics = self._grpo.compute_loss(outputs, batch, groups)
        mean = mean_over_step(batch, of_tokens=self.config.calculate_per_token_loss, cp_group=groups.cp)
        return loss, {**metrics, "opd_reverse_kl": mean(batch.per_token["opd_reverse_kl"])}
