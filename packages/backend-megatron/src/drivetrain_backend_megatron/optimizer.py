"""AdamW over the slices of the flat weight buffers that this rank owns, with state in the dtypes and place asked for.

Gradients are summed and scattered before, weights are gathered after, both by others. Works on plain tensors; the only
thing it knows of other ranks is that their slices are elsewhere.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from drivetrain_backend_megatron.config import MegatronConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KINDS = ("main", "exp_avg", "exp_avg_sq")
"""What is kept of each slice: the master weights and Adam's two moments."""

_CHUNK = 1 << 22
"""Elements that are updated at one time where state is not float32 on the device: bounds what is converted."""


@dataclass(frozen=True, kw_only=True)
class OwnedSlice:
    """One parameter's slice.

    Attributes:
        start: of the slice, in elements of the flattened parameter on this tensor-parallel rank.
        weight: [n], of the compute dtype.
        gradient: float32 [n], summed over all ranks.
        decays: whether weight decay acts on it.
    """

    start: int
    weight: Tensor
    gradient: Tensor
    decays: bool


class SlicedAdamW:
    """AdamW (arXiv:1711.05101) with decoupled weight decay.

    Masters, moments and step are float32 unless a precision-aware optimizer was asked for; the update is computed in
    float32 in any case. With `--optimizer-cpu-offload` all state is in pinned host memory and the step runs there.
    """

    def __init__(self, slices: Mapping[str, OwnedSlice], config: MegatronConfig) -> None:
        """Bind to slices by parameter name; masters begin as their weights."""
        self._slices = dict(slices)
        self._config = config
        self.steps = 0
        self._dtypes = {
            "main": DTYPES[config.main_params_dtype],
            "exp_avg": DTYPES[config.exp_avg_dtype],
            "exp_avg_sq": DTYPES[config.exp_avg_sq_dtype],
        }
        self._state = {name: {kind: self._make(kind, one.weight) for kind in KINDS} for name, one in slices.items()}
        self.take_weights()

    def take_master(self, name: str, values: Tensor) -> None:
        """Set a parameter's master to values that are more precise than the live weight.

        Args:
            name: of the parameter; passed over where this rank owns no slice of it.
            values: float32, in the parameter's shape on this tensor-parallel rank.
        """
        if (one := self._slices.get(name)) is not None:
            self._state[name]["main"].copy_(values.view(-1)[one.start : one.start + len(one.weight)])

    def take_weights(self) -> None:
        """Make the masters equal to the live weights, as after these were loaded."""
        for name, one in self._slices.items():
            main = self._state[name]["main"]
            if main is not one.weight:
                main.copy_(one.weight)

    def give_weights(self) -> None:
        """Make the live weights equal to the masters, as after these were loaded."""
        for name, one in self._slices.items():
            main = self._state[name]["main"]
            if main is not one.weight:
                one.weight.copy_(main)

    def state(self) -> dict[str, Tensor]:
        """Return every live tensor of the state under a name of its own, but for masters that are weights."""
        return {
            f"{kind}.{name}": kept
            for name, state in self._state.items()
            for kind, kept in state.items()
            if kept is not self._slices[name].weight
        }

    def slice_state(self, name: str) -> Mapping[str, Tensor]:
        """Return the live state of one slice, by kind."""
        return self._state[name]

    def gradients(self, names: Iterable[str]) -> list[Tensor]:
        """Return the gradients of the named slices."""
        return [self._slices[name].gradient for name in names]

    @torch.no_grad()
    def step(self, lr: float, factor: float) -> None:
        """Take one step.

        Args:
            lr: learning rate.
            factor: on the gradients, which are overwritten.
        """
        self.steps += 1
        if factor != 1.0 and self._slices:
            torch._foreach_mul_([one.gradient for one in self._slices.values()], factor)
        for decays in (True, False):
            names = [name for name, one in self._slices.items() if one.decays is decays]
            decay = self._config.weight_decay if decays else 0.0
            if self._is_plain:
                self._update([self._tensors(name) for name in names], lr, decay)
            else:
                for name in names:
                    self._update_in_pieces(name, lr, decay)
        self.give_weights()

    @property
    def _is_plain(self) -> bool:
        """Whether all state is float32 beside the weights, so that many slices are updated in one call."""
        return not self._config.optimizer_cpu_offload and set(self._dtypes.values()) == {torch.float32}

    def _make(self, kind: str, weight: Tensor) -> Tensor:
        dtype = self._dtypes[kind]
        if kind == "main" and weight.dtype == dtype and not self._config.optimizer_cpu_offload:
            return weight
        if self._config.optimizer_cpu_offload:
            return torch.zeros(weight.shape, dtype=dtype, pin_memory=weight.device.type == "cuda")
        return torch.zeros_like(weight, dtype=dtype)

    def _tensors(self, name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        state = self._state[name]
        return state["main"], self._slices[name].gradient, state["exp_avg"], state["exp_avg_sq"]

    def _update_in_pieces(self, name: str, lr: float, decay: float) -> None:
        kept = self._tensors(name)
        device = kept[2].device
        for pieces in _pieces(kept):
            wide = tuple(one.to(device=device, dtype=torch.float32) for one in pieces)
            self._update([(wide[0], wide[1], wide[2], wide[3])], lr, decay)
            if pieces[0].dtype is torch.float16:
                # to the nearest, most updates of a master would be lost: they are smaller than its last bit
                _round_at_random(wide[0])
            for stored, new in zip(pieces, wide):
                if new is not stored and stored is not pieces[1]:
                    stored.copy_(new)

    def _update(self, tensors: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]], lr: float, decay: float) -> None:
        if not tensors:
            return
        mains, gradients, averages, squares = (list(one) for one in zip(*tensors))
        before = torch.tensor(float(self.steps - 1), device=mains[0].device)
        adamw(
            mains,
            gradients,
            averages,
            squares,
            [],
            [before.clone() for _ in mains],
            foreach=False,
            fused=True,
            amsgrad=False,
            beta1=self._config.adam_beta1,
            beta2=self._config.adam_beta2,
            lr=lr,
            weight_decay=decay,
            eps=self._config.adam_eps,
            maximize=False,
        )


def _round_at_random(values: Tensor) -> None:
    """Round float32 to what float16 holds, up or down so that the mean is kept (arXiv:1502.02551), in place."""
    bits, dropped = values.view(torch.int32), 13  # bits of the fraction that float16 lacks
    bits += torch.randint(0, 1 << dropped, bits.shape, dtype=torch.int32, device=bits.device)
    bits &= -(1 << dropped)


def _pieces(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    yield from zip(*(torch.split(one, _CHUNK) for one in tensors))
