"""The cases of training that a backend is held to: model, options, rollout and algorithm.

What they leave out of `options` is in `BASE`. Never imports torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BASE: Mapping[str, Any] = {
    "lr": 1e-2,
    # so large that rounding of tiny gradients cannot turn an update round
    "adam_eps": 1e-4,
    "log_probs_chunk_size": 16,
    "distributed_timeout_minutes": 1.0,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One rollout of training.

    Attributes:
        name: for a person.
        model: its name, as in `models.ARCHITECTURES`.
        options: of `TrainConfig`, over `BASE`.
        rollout: arguments of `RolloutSpec`.
        algorithm: "TokenMean" or "SequenceMean".
    """

    name: str
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    rollout: Mapping[str, Any] = field(default_factory=dict)
    algorithm: str = "TokenMean"


def packed(tokens: int) -> dict[str, Any]:
    """Options that fill micro-batches up to so many tokens."""
    return {"use_dynamic_batch_size": True, "max_tokens_per_gpu": tokens}


CASES = (
    Case(name="packed", model="qwen3", options={"global_batch_size": 4, **packed(50)}),
    # the third sample has no loss token, so one micro-batch is masked throughout
    Case(name="one-by-one", model="llama-tied", options={"global_batch_size": 4}),
    Case(name="by-count", model="qwen2", options={"micro_batch_size": 3}),
    # all data-parallel ranks but one have fillers only, and the third step has no loss token anywhere
    Case(name="one-sample-steps", model="qwen3-tied", options={"global_batch_size": 1}, rollout={"samples": 3}),
    Case(name="short-shard", model="llama", rollout={"short_shard": True}),
    Case(
        name="sequence-mean",
        model="qwen2-tied",
        options={"global_batch_size": 4, **packed(50)},
        algorithm="SequenceMean",
    ),
    Case(
        name="cosine-and-clip",
        model="llama",
        options={
            "global_batch_size": 2,
            "lr_decay_style": "cosine",
            "lr_warmup_iters": 2,
            "lr_decay_iters": 6,
            "min_lr": 1e-3,
            "grad_clip": 0.05,
        },
    ),
    Case(
        name="linear-and-decay",
        model="qwen3",
        options={
            "global_batch_size": 2,
            "lr_decay_style": "linear",
            "lr_decay_iters": 3,
            "grad_clip": 0.0,
            "weight_decay": 1.0,
        },
    ),
    Case(name="temperature", model="qwen2", options={"rollout_temperature": 0.6, **packed(64)}),
)

EXPERT_CASES = (
    Case(name="packed", model="qwen3_moe", options={"global_batch_size": 4, **packed(50)}, rollout={"seed": 31}),
    Case(
        name="one-by-one",
        model="qwen3_moe-mixed",
        options={"global_batch_size": 2, "grad_clip": 0.05, "weight_decay": 1.0},
        rollout={"seed": 25},
        algorithm="SequenceMean",
    ),
)
"""Training of mixtures of experts. No token of these rollouts is near a tie between experts: where the router's values
are equal but for rounding, another order of sums takes another expert."""

SPLITS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "one by one": ({}, {}),
    "by count": ({"micro_batch_size": 3}, {}),
    "packed": (packed(60), {}),
    "packed, opposite order": (packed(60), {"backwards": True}),
}
"""Ways to cut one global batch: name -> (options, arguments of `RolloutSpec`)."""
