"""Rollouts drawn from a seed: uneven lengths, masks with holes, rewards and groups."""

from dataclasses import dataclass

import torch

from drivetrain_backend_api.batch import RolloutBatch, from_samples
from drivetrain_backend_api.testing.models import VOCABULARY


@dataclass(frozen=True, kw_only=True)
class RolloutSpec:
    """What to draw.

    Attributes:
        samples: how many.
        seed: of everything drawn.
        short_shard: all samples but the first are of two tokens, so that the other ranks have nearly nothing to do.
        backwards: the same samples in the opposite order.
    """

    samples: int = 8
    seed: int = 1
    short_shard: bool = False
    backwards: bool = False


def draw_rollout(spec: RolloutSpec) -> RolloutBatch:
    """Draw a rollout. Masks have holes, and the third sample has no loss token at all."""
    generator = torch.Generator().manual_seed(spec.seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    def tokens(count: int) -> list[int]:
        return [draw(0, VOCABULARY) for _ in range(count)]

    prompts = [tokens(draw(1, 9)) for _ in range(spec.samples)]
    responses = [tokens(draw(1, 14)) for _ in range(spec.samples)]
    if spec.short_shard:
        prompts = [tokens(8), *(tokens(1) for _ in prompts[1:])]
        responses = [tokens(60), *(tokens(1) for _ in prompts[1:])]
    masks = [[float(draw(0, 5) > 0) for _ in one] for one in responses]
    if spec.samples > 2:
        masks[2] = [0.0] * len(masks[2])
    rewards = torch.randn(spec.samples, generator=generator).tolist()
    rollout = from_samples(
        prompts,
        responses,
        per_token={
            "loss_mask": masks,
            "advantages": [[reward] * len(one) for reward, one in zip(rewards, responses)],
        },
        per_sample={
            "index": list(range(spec.samples)),
            "group_id": [one // 2 for one in range(spec.samples)],
            "reward": rewards,
        },
    )
    return rollout.select(range(spec.samples)[::-1]) if spec.backwards else rollout
