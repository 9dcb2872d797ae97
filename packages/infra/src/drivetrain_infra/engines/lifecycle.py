"""The states of a rollout engine, and which call is legal in which.

A half-updated engine never serves: from the start of a weight update until its commit the only ways on are the rest of
that update or a whole new one.
"""

from enum import StrEnum

from drivetrain_backend_api import IllegalStateError


class EngineState(StrEnum):
    """Where an engine is in its life."""

    NEW = "NEW"
    SERVING = "SERVING"
    PAUSED = "PAUSED"
    UPDATING = "UPDATING"
    CLOSED = "CLOSED"


_LOADED = (EngineState.SERVING, EngineState.PAUSED, EngineState.UPDATING)

_LEGAL: dict[str, tuple[EngineState, ...]] = {
    "start": (EngineState.NEW,),
    "generate": (EngineState.SERVING,),
    "pause": _LOADED,
    "resume": (EngineState.PAUSED,),
    "flush_cache": (EngineState.PAUSED, EngineState.UPDATING),
    "begin_weight_update": (EngineState.PAUSED, EngineState.UPDATING),
    "load_weights": (EngineState.UPDATING,),
    "weight_checksum": _LOADED,
    "commit_weight_update": (EngineState.UPDATING,),
}

_WAY_OUT = {
    EngineState.NEW: "call start() first",
    EngineState.SERVING: "call pause() first",
    EngineState.PAUSED: "call resume() first",
    EngineState.UPDATING: (
        "its weights are part old, part new; only a whole weight update (begin_weight_update, all of load_weights, "
        "commit_weight_update) makes it serve again"
    ),
    EngineState.CLOSED: "make a new engine",
}


class EngineLifecycle:
    """State machine of one engine."""

    def __init__(self) -> None:
        self.state = EngineState.NEW

    def require(self, call: str) -> None:
        """Refuse `call` unless the present state allows it.

        Raises:
            IllegalStateError: names the call, the present state, the states that allow it and the way there.
        """
        legal = _LEGAL[call]
        if self.state in legal:
            return
        if legal == (EngineState.UPDATING,) and self.state in _LOADED:
            way_out = "call begin_weight_update() first"
        elif legal == (EngineState.NEW,):
            way_out = "an engine starts once"
        elif call == "resume" and self.state is EngineState.SERVING:
            way_out = "it already serves"
        else:
            way_out = _WAY_OUT[self.state]
        raise IllegalStateError(
            f"{call}() is illegal while the engine is {self.state}; it needs {' or '.join(legal)}: {way_out}"
        )

    def move(self, call: str, to: EngineState) -> None:
        """Check `call` as `require` does, then enter `to`."""
        self.require(call)
        self.state = to
