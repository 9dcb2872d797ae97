"""Advantages from the rewards of a whole rollout. Knows nothing of shards, tokens or models."""

import torch
from torch import Tensor

STD_EPSILON = 1e-6
"""Added to a group's standard deviation, so that nearly equal rewards do not blow up."""


def group_advantages(rewards: Tensor, group_ids: Tensor, *, normalise_std: bool) -> Tensor:
    """Compare each sample with the others of its group: GRPO's advantages (arXiv:2402.03300, section 4.1.2).

    Computed in float64 over the whole rollout, so that every rank gets the same bits under any layout. Without the
    standard deviation these are Dr. GRPO's (arXiv:2503.20783).

    Args:
        rewards: [N].
        group_ids: int64 [N], equal for the samples of one prompt; samples of a group need not be neighbours.
        normalise_std: divide by the group's standard deviation (of a sample: n - 1).

    Returns: float32 [N]; exactly 0 in a group whose rewards are all equal, and in a group of one.
    """
    ids, group = torch.unique(group_ids, return_inverse=True)
    rewards = rewards.double()

    def group_sum(values: Tensor) -> Tensor:
        return values.new_zeros(len(ids)).index_add(0, group, values)

    sizes = group_sum(torch.ones_like(rewards))
    centred = rewards - (group_sum(rewards) / sizes)[group]
    lowest = rewards.new_zeros(len(ids)).scatter_reduce(0, group, rewards, "amin", include_self=False)
    highest = rewards.new_zeros(len(ids)).scatter_reduce(0, group, rewards, "amax", include_self=False)
    # The mean of equal numbers may differ from them in the last bit, which the division would magnify.
    centred = torch.where((lowest == highest)[group], torch.zeros_like(centred), centred)
    if normalise_std:
        std = (group_sum(centred.square()) / (sizes - 1).clamp(min=1)).sqrt()
        centred = centred / (std + STD_EPSILON)[group]
    return centred.float()
