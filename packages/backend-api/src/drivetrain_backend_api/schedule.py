"""What changes from step to step: the learning rate and the fp16 loss scale.

Plain numbers; knows no tensor, no optimizer and no other rank, and imports no torch.
"""

import math

from drivetrain_backend_api.config import TrainConfig
from drivetrain_backend_api.errors import ConfigError


def learning_rate(step: int, config: TrainConfig) -> float:
    """Return the rate of optimizer step `step`, counted from 0, as Megatron-LM counts it.

    Linear from 0 during the warm-up, then constant, linear or cosine down to `min_lr` at `lr_decay_iters`.
    """
    if step < config.lr_warmup_iters:
        return config.lr * step / config.lr_warmup_iters
    if config.lr_decay_style == "constant":
        return config.lr
    end = require_decay_iters(config)
    done = min(1.0, (step - config.lr_warmup_iters) / (end - config.lr_warmup_iters))
    left = 1.0 - done if config.lr_decay_style == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.min_lr + (config.lr - config.min_lr) * left


def require_decay_iters(config: TrainConfig) -> int:
    """Return the step at which the decay ends.

    Raises:
        ConfigError: nobody said.
    """
    if config.lr_decay_iters is None:
        raise ConfigError(f"--lr-decay-style {config.lr_decay_style} needs --lr-decay-iters")
    return config.lr_decay_iters


class LossScaler:
    """Dynamic loss scale: halves on overflow, doubles after `window` steps without one; 1 for ever unless fp16."""

    def __init__(self, config: TrainConfig) -> None:
        self.enabled = config.precision == "fp16"
        self.scale = config.initial_loss_scale if self.enabled else 1.0
        self.good_steps = 0
        self._minimum = config.min_loss_scale
        self._window = config.loss_scale_window

    def update(self, *, overflow: bool) -> None:
        """Note how a step went."""
        if not self.enabled:
            return
        if overflow:
            self.scale, self.good_steps = max(self._minimum, self.scale / 2), 0
            return
        self.good_steps += 1
        if self.good_steps == self._window:
            self.scale, self.good_steps = self.scale * 2, 0
