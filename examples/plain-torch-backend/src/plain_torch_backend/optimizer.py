"""AdamW and the learning-rate schedule. Knows nothing of models or losses."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from drivetrain_backend_api import ConfigError, TrainConfig


def learning_rate(step: int, config: TrainConfig) -> float:
    """Return the rate of optimizer step `step`, counted from 0.

    Linear from 0 during the warm-up, then constant, linear or cosine down to `min_lr` at `lr_decay_iters`.
    """
    if step < config.lr_warmup_iters:
        return config.lr * step / config.lr_warmup_iters
    if config.lr_decay_style == "constant":
        return config.lr
    if config.lr_decay_iters is None:
        raise ConfigError(f"--lr-decay-style {config.lr_decay_style} needs --lr-decay-iters")
    done = min(1.0, (step - config.lr_warmup_iters) / (config.lr_decay_iters - config.lr_warmup_iters))
    left = 1.0 - done if config.lr_decay_style == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.min_lr + (config.lr - config.min_lr) * left


class AdamW:
    """torch's AdamW with weight decay on matrices only, and state that has names."""

    def __init__(self, trained: Mapping[str, Tensor], config: TrainConfig) -> None:
        """Bind to the parameters, which are stepped in place by their `grad`."""
        self._trained = dict(trained)
        self._steps = 0
        self._adam = torch.optim.AdamW(
            [
                {"params": [one for one in trained.values() if one.ndim >= 2], "weight_decay": config.weight_decay},
                {"params": [one for one in trained.values() if one.ndim < 2], "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
        )
        # Made at once, so that a checkpoint and a sleep find the same tensors before and after the first step.
        for one in trained.values():
            self._adam.state[one] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(one),
                "exp_avg_sq": torch.zeros_like(one),
            }

    @property
    def steps(self) -> int:
        """How many steps were taken, skipped ones not counted; settable, for loading."""
        return self._steps

    @steps.setter
    def steps(self, value: int) -> None:
        self._steps = value
        for state in self._adam.state.values():
            state["step"].fill_(value)

    def moments(self) -> dict[str, Tensor]:
        """Return the live moments, each under a name of its own."""
        return {
            f"{kind}.{name}": self._adam.state[one][kind]
            for name, one in self._trained.items()
            for kind in ("exp_avg", "exp_avg_sq")
        }

    def step(self, lr: float) -> None:
        """Take one step."""
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        self._steps += 1
