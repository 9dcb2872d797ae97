"""Estimators of the KL divergence of one policy from another, from the log-probs of sampled tokens alone."""

from typing import Literal

import torch
from torch import Tensor

KlType = Literal["k1", "k2", "k3", "low_var_kl"]

LOG_RATIO_BOUND = 20.0
"""Log-ratios are cut here before exp(): far beyond any meaning, and short of infinities whose gradient is nan."""

LOW_VAR_KL_BOUND = 10.0
"""Largest estimate of one token under `low_var_kl`."""


def kl_estimate(log_ratio: Tensor, kind: KlType) -> Tensor:
    """Estimate KL(policy || reference) for each token; differentiable (http://joschu.net/blog/kl-approx.html).

    k1 is unbiased but noisy and of any sign, and its gradient is 0 on average; k2 is biased and never negative; k3 is
    unbiased and never negative. low_var_kl is k3 with each token's estimate bounded.

    Args:
        log_ratio: [T], log-prob under the policy that sampled minus log-prob under the reference.
        kind: the estimator.
    """
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return log_ratio.square() / 2
    inverse = (-log_ratio).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    estimate = torch.expm1(inverse) - inverse
    return estimate.clamp(max=LOW_VAR_KL_BOUND) if kind == "low_var_kl" else estimate
