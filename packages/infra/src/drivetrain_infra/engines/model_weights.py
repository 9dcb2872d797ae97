"""A model's tensors as the target of a weight update: is the plan right, copy, checksum, is anything missing.

Names are those of `model.state_dict()`. Tensors that are tied in the model are one tensor with several names, of which
a plan may use any one. Knows no transport and no engine state.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from drivetrain_backend_api import DataError
from drivetrain_backend_api.weights import WeightEntry, WeightPlan
from drivetrain_infra.weight_sync.checksum import checksum_tensors


class ModelWeights:
    """The tensors of one model, and the plan that is being loaded into them."""

    def __init__(self, model: nn.Module) -> None:
        """Take the model's tensors; it must stay on its device and keep its parameters."""
        self._tensors: dict[str, Tensor] = model.state_dict(keep_vars=True)
        self._required = {id(one) for one in model.parameters()}
        self._plan: dict[str, WeightEntry] = {}
        self._missing: set[str] = set()

    def begin(self, plan: WeightPlan) -> None:
        """Check a plan against the model and start to expect its tensors; changes no weight.

        A dtype other than the model's is right only where the model's holds all its values (bfloat16 into float32):
        otherwise the model would hold other weights than the trainer sent, and no checksum could tell.

        Raises:
            DataError: a tensor is unknown, sent twice, not sent, or of another shape or dtype; the first one is named.
        """
        seen: dict[int, str] = {}
        for entry in plan.entries:
            self._check(entry)
            identity = id(self._tensors[entry.name])
            if identity in seen:
                raise DataError(
                    f"the weight plan holds {entry.name} and {seen[identity]}, which are one tensor in the engine's "
                    "model; send it once"
                )
            seen[identity] = entry.name
        for name, tensor in self._tensors.items():
            if id(tensor) in self._required and id(tensor) not in seen:
                raise DataError(f"the weight plan lacks {name}, which the engine's model has; send every parameter")
        self._plan = {one.name: one for one in plan.entries}
        self._missing = set(self._plan)

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy tensors of the plan into the model, in place.

        Raises:
            DataError: a tensor is not as the plan said.
        """
        for name, tensor in tensors:
            entry = self._plan.get(name)
            if entry is None:
                raise DataError(f"the engine was sent {name}, which is not in the weight plan it was given")
            if tuple(tensor.shape) != entry.shape or tensor.dtype != entry.torch_dtype:
                raise DataError(
                    f"the engine was sent {name} as {_describe(tuple(tensor.shape), tensor.dtype)}, but the weight "
                    f"plan says {_describe(entry.shape, entry.torch_dtype)}"
                )
            self._tensors[name].copy_(tensor)
            self._missing.discard(name)

    def checksum(self, entries: Sequence[WeightEntry]) -> int:
        """Return the checksum of the model's tensors in the entries' dtypes, in their order.

        Raises:
            DataError: an entry does not fit the model.
        """
        for entry in entries:
            self._check(entry)
        return checksum_tensors(self._tensors[one.name].detach().to(one.torch_dtype) for one in entries)

    def finish(self) -> None:
        """End the update.

        Raises:
            DataError: tensors of the plan were not loaded; the first one is named.
        """
        if self._missing:
            first = next(name for name in self._plan if name in self._missing)
            raise DataError(
                f"the weight update lacks {len(self._missing)} of {len(self._plan)} tensors, first {first}; "
                "load all of them before the commit"
            )
        self._plan = {}

    def _check(self, entry: WeightEntry) -> None:
        held = self._tensors.get(entry.name)
        if held is None:
            raise DataError(
                f"the weight plan holds {entry.name}, which the engine's model does not have; trainer and engine must "
                "load the same model folder"
            )
        if tuple(held.shape) != entry.shape:
            raise DataError(
                f"the weight plan gives {entry.name} shape {list(entry.shape)}, the engine's model has "
                f"{list(held.shape)}; trainer and engine must load the same model folder"
            )
        if not _holds_exactly(held.dtype, entry.torch_dtype):
            raise DataError(
                f"the weight plan gives {entry.name} as {entry.dtype}, which the engine's "
                f"{str(held.dtype).removeprefix('torch.')} cannot hold without rounding; export the weights in the "
                "engine's dtype, so that the trainer rounds them before it sends them"
            )


def _holds_exactly(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Say whether every value of `narrow` is a value of `wide`."""
    both_floating = wide.is_floating_point and narrow.is_floating_point
    return wide == narrow or (both_floating and torch.promote_types(wide, narrow) == wide)


def _describe(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
