"""The states of a train backend, and which call is legal in which.

An illegal call is refused by name here, before it can become a CUDA error or a hang.
"""

from enum import StrEnum

from drivetrain_backend_api.errors import IllegalStateError


class State(StrEnum):
    """Where a backend is in its life."""

    NEW = "NEW"
    AWAKE = "AWAKE"
    WEIGHTS_ONLY = "WEIGHTS_ONLY"
    ASLEEP = "ASLEEP"
    CLOSED = "CLOSED"


_LEGAL: dict[str, tuple[State, ...]] = {
    "setup": (State.NEW,),
    "forward_backward": (State.AWAKE,),
    "optimizer_step": (State.AWAKE,),
    "train": (State.AWAKE,),
    "forward_only": (State.AWAKE, State.WEIGHTS_ONLY),
    "export_weights": (State.AWAKE, State.WEIGHTS_ONLY),
    "save_checkpoint": (State.AWAKE,),
    "sleep": (State.AWAKE, State.WEIGHTS_ONLY),
    "wake_up": (State.ASLEEP, State.WEIGHTS_ONLY),
    "switch_weights": (State.AWAKE, State.WEIGHTS_ONLY),
    "close": (State.NEW, State.AWAKE, State.WEIGHTS_ONLY, State.ASLEEP, State.CLOSED),
}


class Lifecycle:
    """State machine of one backend on one rank."""

    def __init__(self) -> None:
        self.state = State.NEW
        self.has_gradients = False

    def require(self, call: str) -> None:
        """Refuse `call` unless the present state allows it.

        Raises:
            IllegalStateError: names the call, the present state and the states that allow it.
        """
        legal = _LEGAL[call]
        if self.state not in legal:
            raise IllegalStateError(
                f"{call}() is illegal while the backend is {self.state}; "
                f"it needs {' or '.join(legal)}{self._way_to(legal)}"
            )

    def move(self, call: str, to: State) -> None:
        """Check `call` as `require` does, then enter `to`."""
        self.require(call)
        self.state = to

    def begin_gradients(self) -> None:
        """Note a training `forward_backward`.

        Raises:
            IllegalStateError: a second one before `optimizer_step`.
        """
        self.require("forward_backward")
        if self.has_gradients:
            raise IllegalStateError(
                "forward_backward() is illegal while gradients of an earlier one are pending; it needs a backend whose "
                "last call was optimizer_step(): pass all micro-batches of a step to one forward_backward()"
            )
        self.has_gradients = True

    def end_gradients(self) -> None:
        """Note an `optimizer_step`.

        Raises:
            IllegalStateError: no `forward_backward` came before it.
        """
        self.require("optimizer_step")
        if not self.has_gradients:
            raise IllegalStateError(
                "optimizer_step() is illegal while there are no gradients; it needs one forward_backward() before it"
            )
        self.has_gradients = False

    def _way_to(self, legal: tuple[State, ...]) -> str:
        if self.state is State.NEW:
            return ": call setup() first"
        if self.state in (State.ASLEEP, State.WEIGHTS_ONLY) and State.AWAKE in legal:
            return ": call wake_up() first"
        return ""
