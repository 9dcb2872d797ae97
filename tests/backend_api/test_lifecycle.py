"""Which call is legal in which state, and what the refusal says."""

import pytest

from drivetrain_backend_api.errors import IllegalStateError
from drivetrain_backend_api.lifecycle import Lifecycle, State

LEGAL = {
    "setup": "NEW",
    "forward_backward": "AWAKE",
    "optimizer_step": "AWAKE",
    "train": "AWAKE",
    "forward_only": "AWAKE WEIGHTS_ONLY",
    "export_weights": "AWAKE WEIGHTS_ONLY",
    "save_checkpoint": "AWAKE",
    "sleep": "AWAKE WEIGHTS_ONLY",
    "wake_up": "ASLEEP WEIGHTS_ONLY",
    "switch_weights": "AWAKE WEIGHTS_ONLY",
    "close": "NEW AWAKE WEIGHTS_ONLY ASLEEP CLOSED",
}


@pytest.mark.parametrize("call", LEGAL)
@pytest.mark.parametrize("state", list(State))
def test_the_table_of_states_and_calls(call: str, state: State) -> None:
    lifecycle = Lifecycle()
    lifecycle.state = state
    if state in LEGAL[call].split():
        lifecycle.require(call)
    else:
        with pytest.raises(IllegalStateError) as caught:
            lifecycle.require(call)
        message = str(caught.value)
        assert message.startswith(f"{call}() is illegal while the backend is {state}; it needs ")
        assert all(one in message for one in LEGAL[call].split())


def test_the_refusal_says_what_to_call_first() -> None:
    lifecycle = Lifecycle()
    with pytest.raises(IllegalStateError, match=r"call setup\(\) first"):
        lifecycle.require("train")
    lifecycle.move("setup", State.AWAKE)
    lifecycle.move("sleep", State.ASLEEP)
    with pytest.raises(
        IllegalStateError, match=r"train\(\) is illegal .* ASLEEP; it needs AWAKE: call wake_up\(\) first"
    ):
        lifecycle.require("train")
    assert lifecycle.state is State.ASLEEP


def test_gradients_and_steps_alternate() -> None:
    lifecycle = Lifecycle()
    lifecycle.move("setup", State.AWAKE)
    with pytest.raises(IllegalStateError, match="there are no gradients"):
        lifecycle.end_gradients()
    lifecycle.begin_gradients()
    with pytest.raises(IllegalStateError, match="pending"):
        lifecycle.begin_gradients()
    lifecycle.end_gradients()
    lifecycle.begin_gradients()
