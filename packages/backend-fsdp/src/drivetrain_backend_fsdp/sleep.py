"""Which tensors leave the accelerator, and when: in the two steps of sleep, and a frozen model between its uses.

Bit for bit both ways. Knows no model and no optimizer.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from drivetrain_backend_api.lifecycle import State
from drivetrain_backend_api.offload import HostCopies

Tensors = Callable[[], Mapping[str, Tensor]]


class Sleeper:
    """Moves a backend's tensors to the host and back as its state asks.

    Weights are away in ASLEEP only; everything else (the optimizer) in WEIGHTS_ONLY too.
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


class KeptOnHost:
    """Keeps the tensors of a frozen model on the host, but for the time that they are used."""

    def __init__(self, tensors: Tensors) -> None:
        """Send the tensors away. `tensors` names always the same ones."""
        self._tensors, self._copies = tensors, HostCopies()
        self._copies.send_away(tensors())

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Have the tensors on the accelerator inside the block."""
        self._copies.bring_back()
        try:
            yield
        finally:
            self._copies.send_away(self._tensors())
