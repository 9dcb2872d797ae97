"""Sleep and wake-up: which tensors leave the accelerator, and in which of two steps. Bit for bit both ways."""

from collections.abc import Callable, Mapping

from torch import Tensor

from drivetrain_backend_api.lifecycle import State
from drivetrain_backend_api.offload import HostCopies

Tensors = Callable[[], Mapping[str, Tensor]]


class Sleeper:
    """Moves a backend's tensors to the host and back as its state asks.

    Weights are away in ASLEEP only; everything else (optimizer, frozen models) in WEIGHTS_ONLY too.
    """

    def __init__(self, *, weights: Tensors, others: Tensors) -> None:
        """Take functions that name the live tensors; always the same tensors under the same names."""
        self._weights, self._others = weights, others
        self._weight_copies, self._other_copies = HostCopies(), HostCopies()

    def enter(self, state: State) -> None:
        """Move what must move for `state`; nothing when it is there already."""
        if state is not State.AWAKE and not self._other_copies.away:
            self._other_copies.send_away(self._others())
        if state is State.ASLEEP and not self._weight_copies.away:
            self._weight_copies.send_away(self._weights())
        if state is not State.ASLEEP and self._weight_copies.away:
            self._weight_copies.bring_back()
        if state is State.AWAKE and self._other_copies.away:
            self._other_copies.bring_back()
