"""Policy-gradient losses of single tokens, as plain functions. Knows nothing of batches, ranks or configuration."""

from dataclasses import dataclass

import torch
from torch import Tensor

from drivetrain_launcher.algorithms.kl import LOG_RATIO_BOUND


@dataclass(frozen=True, kw_only=True)
class ClippedPolicyLoss:
    """The clipped surrogate of each token.

    Attributes:
        loss: [T], to be minimised; differentiable.
        clipped_low: [T], 1 where the lower clip cut the gradient off.
        clipped_high: [T], 1 where the upper clip did.
    """

    loss: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


def clipped_policy_loss(
    log_ratio: Tensor, advantages: Tensor, *, eps_clip: float, eps_clip_high: float
) -> ClippedPolicyLoss:
    """Compute PPO's clipped surrogate (arXiv:1707.06347, eq. 7) with DAPO's separate upper clip (arXiv:2503.14476).

    Args:
        log_ratio: [T], log-prob under the policy in training minus log-prob under the old policy.
        advantages: [T].
        eps_clip: the ratio has no gradient below 1 - eps_clip where the advantage is negative.
        eps_clip_high: nor above 1 + eps_clip_high where it is positive.
    """
    ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    clipped = ratio.clamp(1 - eps_clip, 1 + eps_clip_high)
    return ClippedPolicyLoss(
        loss=torch.maximum(-advantages * ratio, -advantages * clipped),
        clipped_low=((advantages < 0) & (ratio < 1 - eps_clip)).float(),
        clipped_high=((advantages > 0) & (ratio > 1 + eps_clip_high)).float(),
    )


def importance_weights(log_ratio: Tensor) -> Tensor:
    """Weigh tokens that one policy sampled for an expectation under another: the ratio of their probabilities, [T].

    Args:
        log_ratio: [T], log-prob under the trainer's old policy minus log-prob at which the engine sampled.
    """
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def truncate_weights(weights: Tensor, *, low: float, high: float) -> Tensor:
    """Cut importance weights to [low, high], trading a little bias for bounded variance, [T].

    Truncated importance sampling (Ionides 2008, doi:10.1198/106186008X320456), used against the mismatch of rollout
    engine and trainer as in Yao et al. 2025, https://fengyao.notion.site/off-policy-rl.
    """
    return weights.clamp(low, high)
