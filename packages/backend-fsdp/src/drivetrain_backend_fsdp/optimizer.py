"""AdamW over this rank's shards, and the gradient norm.

Works on plain local tensors; the only thing it knows of other ranks is the group over which the norm is summed.
"""

import math
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain_backend_api import TrainConfig


def global_norm(shards: Iterable[Tensor], *, group: dist.ProcessGroup | None, device: torch.device) -> float:
    """Return the L2 norm over every rank's shards, summed in fp64; nan or inf when any element is."""
    squares = [torch.linalg.vector_norm(one, dtype=torch.float64).square() for one in shards]
    total = torch.stack(squares).sum().to(device)
    if group is not None:
        dist.all_reduce(total, group=group)
    return math.sqrt(total.item()) if math.isfinite(total.item()) else total.item()


class ShardedAdamW:
    """AdamW with decoupled weight decay, which acts on matrices only (as the whole weight has dimensions).

    With `offload` moments live on the host and the step runs there; the shards stay the one truth.
    """

    def __init__(self, weights: Mapping[str, Tensor], config: TrainConfig, *, offload: bool) -> None:
        """Bind to shards: name -> local part of a trained weight, updated in place."""
        self._shards = dict(weights)
        self._offload = offload
        self._steps = 0
        self._host: dict[str, Tensor] = {}
        if offload:
            pin = any(one.device.type == "cuda" for one in weights.values())
            self._host = {name: torch.empty_like(one, device="cpu", pin_memory=pin) for name, one in weights.items()}
        self._stepped = self._host if offload else self._shards
        matrices = [one for one in self._stepped.values() if one.ndim >= 2]
        vectors = [one for one in self._stepped.values() if one.ndim < 2]
        self._adam = torch.optim.AdamW(
            [
                {"params": params, "weight_decay": decay}
                for params, decay in ((matrices, config.weight_decay), (vectors, 0.0))
                if params
            ],
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            fused=True,
        )
        # Made at once, so that a checkpoint and a sleep find the same tensors before and after the first step.
        for one in self._stepped.values():
            self._adam.state[one] = {
                "step": torch.zeros((), dtype=torch.float32, device=one.device),
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

    def state(self) -> dict[str, Tensor]:
        """Return every tensor of the optimizer's state under a name of its own: the live tensors."""
        return {
            f"{kind}.{name}": self._adam.state[one][kind]
            for name, one in self._stepped.items()
            for kind in ("exp_avg", "exp_avg_sq", "step")
        }

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Return "exp_avg" and "exp_avg_sq" by weight name: the live tensors."""
        return {
            kind: {name: self._adam.state[one][kind] for name, one in self._stepped.items()}
            for kind in ("exp_avg", "exp_avg_sq")
        }

    def step(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        """Take one step with this rank's gradients, by weight name."""
        for group in self._adam.param_groups:
            group["lr"] = lr
        with torch.no_grad():
            for name, one in self._stepped.items():
                if self._offload:
                    one.copy_(self._shards[name])
                one.grad = gradients[name].to(one.device)
            self._adam.step()
            self._steps += 1
            for name, one in self._stepped.items():
                one.grad = None
                if self._offload:
                    self._shards[name].copy_(one)
