"""Tests of the contract itself: the seven methods, what is refused, what leaves no trace."""

import pytest

from drivetrain_backend_api.backend import TrainBackend
from drivetrain_backend_api.testing import comparing
from drivetrain_backend_api.testing.judge import Action, Judge, act
from drivetrain_backend_api.testing.judging_state import FIRST, OPTIONS, SECOND
from drivetrain_backend_api.testing.layouts import Layout

SEVEN = frozenset(
    {"setup", "forward_backward", "optimizer_step", "export_weights", "save_checkpoint", "sleep", "wake_up"}
)

CALLS = (
    *("setup", "forward_backward", "forward_only", "optimizer_step", "train", "export_weights", "save_checkpoint"),
    *("sleep", "wake_up", "backup_weights", "restore_weights", "switch_weights"),
)
ILLEGAL = {
    "NEW": [one for one in CALLS if one != "setup"],
    "AWAKE": ["setup", "wake_up", "optimizer_step"],
    "WEIGHTS_ONLY": ["setup", "forward_backward", "train", "optimizer_step", "save_checkpoint"],
    "ASLEEP": [one for one in CALLS if one != "wake_up"],
    "CLOSED": list(CALLS),
}
"""State -> calls that it forbids."""


class ContractTests:
    """Methods, states, traces."""

    def test_the_seven_methods_are_enforced(self, judge: Judge) -> None:
        """The contract has seven abstract methods; the backend has them all; one less cannot be made."""
        backend = judge.spec.load()
        with judge.check("class") as check:
            check.true("it is a TrainBackend", issubclass(backend, TrainBackend))
            check.true("the contract has seven methods", TrainBackend.__abstractmethods__ == SEVEN)
            left = sorted(backend.__abstractmethods__)
            check.true("none of them is left abstract", not left, left)
            check.true("the spec's capabilities are the class's", backend.capabilities == judge.spec.capabilities)
            for name in sorted(SEVEN):
                lesser = type("Lesser", (backend,), {name: getattr(TrainBackend, name)})
                with pytest.raises(TypeError, match=name):
                    lesser(judge.spec.config_class(hf_checkpoint="none"), "policy", 0, 1, "cpu")
                check.true(f"without {name} it cannot be made", True)

    def test_illegal_calls_name_both_states(self, judge: Judge, layout: Layout) -> None:
        """In every state of the lifecycle: refused, with the state it is in and the one it needs; nothing changes."""
        ways = {"NEW": [], "AWAKE": [act("setup")]}
        ways |= {
            "WEIGHTS_ONLY": [act("sleep", keep_weights=True)],
            "ASLEEP": [act("sleep")],
            "CLOSED": [act("close")],
        }
        actions: list[Action] = []
        for state, calls in ILLEGAL.items():
            actions += ways[state]
            actions += [act("refused", f"{state} {call}", action=act("bare", call=call)) for call in calls]
            if state == "AWAKE":
                pending = act("bare", call="sleep"), act("bare", call="forward_backward")
                actions.append(act("pend", rollout={"samples": 4}))
                actions += [act("refused", f"pending {one['call']}", action=one) for one in pending]
                actions.append(act("optimizer_step"))
        results = judge.play(layout, actions)
        with judge.check(layout.label) as check:
            for one in results:
                for state, calls in ILLEGAL.items():
                    for call in calls:
                        seen = one[f"{state} {call}"]
                        named = call == "optimizer_step" and state == "AWAKE"  # there it lacks gradients, not a state
                        told = seen["kind"] == "IllegalStateError" and (
                            named or (state in seen["message"] and _names_another(seen["message"], state))
                        )
                        check.true(f"{call} while {state}", told and seen["after"] == state, seen["message"])
                for call in ("sleep", "forward_backward"):
                    seen = one[f"pending {call}"]
                    told = seen["kind"] == "IllegalStateError" and "gradients" in seen["message"]
                    check.true(f"{call} while gradients are pending", told, seen["message"])

    def test_forward_only_leaves_no_trace(self, judge: Judge, layout: Layout) -> None:
        """Pending gradients, random state, train or eval mode and optimizer are as before it."""
        rollout = {"samples": 8}

        def step(look: bool) -> list[Action]:
            taken = [act("split_step", f"step {one}", rollout=rollout, look_between=look) for one in (0, 1)]
            return [act("setup"), *taken, act("export", dtype="float32"), act("random_state"), act("modes")]

        looked, plain = judge.play(layout, step(True)), judge.play(layout, step(False))
        with judge.check(layout.label) as check:
            for rank, (one, other) in enumerate(zip(looked, plain)):
                check.same(f"steps, weights, random state and modes on rank {rank}", comparing.different(one, other))
                for name in ("step 0", "step 1"):
                    check.true(f"train and eval modes on rank {rank}", one[name]["modes_kept"])
                    check.true(f"random state on rank {rank}", one[name]["rng_kept"])
                    given = one[name]["results"]
                    expected = one[name]["micro_batches"] if one["setup"]["last_stage"] else 0
                    check.true(f"a result for each micro-batch on rank {rank}", given == expected, given)

    def test_a_step_that_is_not_finite_changes_nothing(self, judge: Judge, layout: Layout, poison: str) -> None:
        """Skipped on all ranks and reported; weights, optimizer and schedule go on as if it had not been."""
        one_step = {**OPTIONS, "global_batch_size": 8}
        first, second = act("train", rollout=FIRST), act("train", "next", rollout=SECOND, rollout_id=1)
        results = judge.play(
            layout,
            [
                act("setup"),
                first,
                act("export", "before", dtype="float32"),
                act("pend", rollout=SECOND, failure=poison),
                act("optimizer_step"),
                act("export", "after", dtype="float32"),
                second,
                act("export", dtype="float32"),
            ],
            options=one_step,
        )
        plain = judge.play(
            layout, [act("setup"), first, second, act("export", dtype="float32")], once=True, options=one_step
        )
        with judge.check(f"{layout.label}, {poison}") as check:
            for rank, (one, other) in enumerate(zip(results, plain)):
                outcome = one["optimizer_step"]
                check.true(f"skipped on rank {rank}", outcome["skipped"] and not outcome["grad_norm"] < 1e30, outcome)
                check.true(f"the reason is told on rank {rank}", bool(outcome["reason"]), outcome)
                check.same(f"weights on rank {rank}", comparing.different(one["after"], one["before"]))
                for what in ("next", "export"):
                    check.same(f"{what} after it on rank {rank}", comparing.different(one[what], other[what]))

    def test_a_loss_without_a_model_is_refused(self, judge: Judge) -> None:
        """A loss that does not depend on the model is an error of the contract, not a step without gradients."""
        action = act("disconnected_loss", rollout={"samples": 4})
        results = judge.play(Layout(), [act("setup"), act("refused", action=action)])
        with judge.check("single") as check:
            seen = results[0]["refused"]
            check.true("refused, and the loss is named", bool(seen["kind"]) and "loss" in seen["message"], seen)


def _names_another(message: str, state: str) -> bool:
    return any(other in message for other in ILLEGAL if other != state)
