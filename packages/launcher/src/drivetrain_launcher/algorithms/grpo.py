"""GRPO: group-relative policy optimisation (arXiv:2402.03300).

No critic: a sample's advantage is its reward compared with the other samples of its prompt. Knows no backend, no engine
and no reward function.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from drivetrain_backend_api.algorithm import Algorithm, ModelOutput
from drivetrain_backend_api.batch import MicroBatch, RolloutBatch
from drivetrain_backend_api.errors import DataError
from drivetrain_backend_api.packing import RolloutShard
from drivetrain_backend_api.parallel import ProcessGroups
from drivetrain_launcher.algorithms.advantages import group_advantages
from drivetrain_launcher.algorithms.grpo_spec import GrpoConfig
from drivetrain_launcher.algorithms.kl import kl_estimate
from drivetrain_launcher.algorithms.loss_aggregation import mean_over_step
from drivetrain_launcher.algorithms.policy_loss import clipped_policy_loss, importance_weights, truncate_weights


class Grpo(Algorithm):
    """Clipped policy gradient on group-normalised advantages.

    The samples need per-token "rollout_log_probs" (what the engine sampled with) and per-sample "reward" and
    "group_id". Where a rollout makes one optimizer step, the policy in training is the old policy, so its own log-probs
    stand for the old ones and no pass is spent on them.
    """

    config: GrpoConfig

    def __init__(self, config: GrpoConfig) -> None:
        super().__init__(config)
        self.needs_old_log_probs_off_policy = True
        self.needs_ref_log_probs = config.use_kl_loss

    def compute_advantages(self, shard: RolloutShard) -> RolloutBatch:
        """Add the "advantages" column: each sample's group-normalised reward on all its response tokens.

        Raises:
            DataError: a column that GRPO reads is missing.
        """
        have = {*shard.rollout_per_sample, *shard.batch.per_token}
        if missing := [name for name in ("reward", "group_id", "rollout_log_probs") if name not in have]:
            raise DataError(f"grpo needs {', '.join(missing)} on its samples; whatever generates them must set it")
        advantages = group_advantages(
            shard.rollout_per_sample["reward"],
            shard.rollout_per_sample["group_id"],
            normalise_std=not self.config.disable_grpo_std_normalization,
        )
        batch = shard.batch
        mine = advantages[list(shard.positions)].to(batch.tokens.device)
        return batch.with_per_token("advantages", torch.repeat_interleave(mine, batch.response_lengths))

    def extract_model_output(self, output: ModelOutput, batch: MicroBatch) -> Mapping[str, Tensor]:
        """Ask for log-probs and entropy of the labels, each [T]; the entropy carries a gradient only if it is used."""
        result = output.label_log_probs(with_entropy=True)
        if result.entropy is None:
            raise DataError("the backend's model output has no entropy, though it was asked for")
        entropy = result.entropy if self.config.entropy_coef else result.entropy.detach()
        return {"log_probs": result.log_probs, "entropy": entropy}

    def compute_loss(
        self, outputs: Mapping[str, Tensor], batch: MicroBatch, groups: ProcessGroups
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss and its metrics, each a mean over the step's tokens of the kind that the loss is."""
        options = self.config
        log_probs, entropy = outputs["log_probs"], outputs["entropy"]
        old_log_probs = batch.per_token.get("log_probs", log_probs.detach())
        mean = mean_over_step(batch, of_tokens=options.calculate_per_token_loss, cp_group=groups.cp)

        policy_log_ratio = _where_trained(log_probs - old_log_probs, batch)
        policy = clipped_policy_loss(
            policy_log_ratio,
            batch.per_token["advantages"],
            eps_clip=options.eps_clip,
            eps_clip_high=options.eps_clip if options.eps_clip_high is None else options.eps_clip_high,
        )
        engine_log_ratio = _where_trained(old_log_probs - batch.per_token["rollout_log_probs"], batch)
        metrics = {
            "pg_clipfrac_low": mean(policy.clipped_low),
            "pg_clipfrac_high": mean(policy.clipped_high),
            "ppo_kl": mean(kl_estimate(-policy_log_ratio, "k3")),
            "entropy": mean(entropy),
            "train_rollout_logprob_abs_diff": mean(engine_log_ratio.abs()),
        }
        policy_loss = policy.loss
        if options.use_tis:
            raw = importance_weights(engine_log_ratio)
            weights = truncate_weights(raw, low=options.tis_clip_low, high=options.tis_clip)
            policy_loss = policy_loss * weights
            metrics["tis"] = mean(raw)
            metrics["tis_clipfrac"] = mean((weights != raw).float())
        loss = metrics["pg_loss"] = mean(policy_loss)
        if options.entropy_coef:
            loss = loss - options.entropy_coef * metrics["entropy"]
        if options.use_kl_loss:
            ref_log_ratio = _where_trained(log_probs - batch.per_token["ref_log_probs"], batch)
            metrics["kl_loss"] = mean(kl_estimate(ref_log_ratio, options.kl_loss_type))
            loss = loss + options.kl_loss_coef * metrics["kl_loss"]
        metrics["loss"] = loss
        return loss, {name: value.detach() for name, value in metrics.items()}


def _where_trained(log_ratio: Tensor, batch: MicroBatch) -> Tensor:
    """Put 0 where the loss mask is off: a tool's tokens have no log-probs worth comparing, and exp() may overflow."""
    return torch.where(batch.loss_mask > 0, log_ratio, torch.zeros_like(log_ratio))
