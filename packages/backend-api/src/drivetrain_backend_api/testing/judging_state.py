"""Tests of what lasts: checkpoints, sleep and wake-up, weights under tags. Same layout, same bits."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from drivetrain_backend_api.testing import comparing, tolerances
from drivetrain_backend_api.testing.cases import packed
from drivetrain_backend_api.testing.damage import DAMAGES, SHOWN_BY_SIZE, files_of
from drivetrain_backend_api.testing.judge import Action, Check, Judge, act
from drivetrain_backend_api.testing.layouts import Layout
from drivetrain_backend_api.testing.ranks import RanksFailedError

FIRST: Mapping[str, Any] = {"samples": 8, "seed": 1}
SECOND: Mapping[str, Any] = {"samples": 8, "seed": 2}

OPTIONS: Mapping[str, Any] = {
    "global_batch_size": 4,
    "lr_decay_style": "cosine",
    "lr_warmup_iters": 1,
    "lr_decay_iters": 6,
    **packed(64),
}
"""A schedule whose every step has another rate."""

# The scale falls from where every step overflows to where none does: one that is not restored overflows again.
FP16: Mapping[str, Any] = {"initial_loss_scale": 2.0**24, "loss_scale_window": 3, "global_batch_size": 1}

SLEEPS: Mapping[str, tuple[Action, ...]] = {
    "sleep, wake": (act("sleep"), act("wake")),
    "weights only, wake": (act("sleep", keep_weights=True), act("wake")),
    "weights only, export, sleep, wake": (
        act("sleep", keep_weights=True),
        act("export", "while asleep"),
        act("sleep"),
        act("wake"),
    ),
    "weights only, sleep, weights only, wake": (
        act("sleep", keep_weights=True),
        act("sleep"),
        act("wake", weights_only=True),
        act("wake"),
    ),
}


class StateTests:
    """Checkpoints, sleep, tags."""

    def test_a_resumed_run_is_the_same_run(self, judge: Judge, layout: Layout, precision: str) -> None:
        """Save, end, load in fresh processes: the next steps are bitwise those of the run that went on."""
        check_resume(judge, layout, precision, "qwen3")

    def test_a_checkpoint_loads_under_another_layout(self, judge: Judge, layout: Layout, source: Layout) -> None:
        """Weights are exact, and the next steps are within tolerance."""
        check_resharding(judge, layout, source, "qwen3")

    def test_a_damaged_checkpoint_is_refused(self, judge: Judge, layout: Layout, damage: str) -> None:
        """A file that is missing, cut short, empty, changed in one byte or another checkpoint's is named.

        What sizes do not show, only a run that verifies checkpoints has to find.
        """
        whole, other = (judge.folder / f"whole-{layout.label}-{one}" for one in ("this", "that"))
        for folder, rollout in ((whole, FIRST), (other, SECOND)):
            judge.play(
                layout, [act("setup"), act("train", rollout=rollout), act("save", folder=str(folder))], once=True
            )
        options = {"verify_checkpoint": damage not in SHOWN_BY_SIZE}
        damaged_files = 0
        with judge.check(f"{layout.label}, {damage}") as check:
            for name in files_of(whole):
                damaged = judge.folder / f"damaged-{layout.label}"
                shutil.rmtree(damaged, ignore_errors=True)
                shutil.copytree(whole, damaged)
                if not DAMAGES[damage](damaged / name, other / name):
                    continue
                damaged_files += 1
                said = f"{name} is named"
                check_refusal(check, judge, layout, damaged, said, Path(name).name, options=options)
            check.true("there were files to damage", damaged_files > 0)

    def test_a_checkpoint_of_another_model_is_refused(self, judge: Judge, layout: Layout) -> None:
        """The error names the folder."""
        folder = judge.folder / f"another-model-{layout.label}"
        judge.play(layout, [act("setup"), act("save", folder=str(folder))], model=judge.model("llama"))
        with judge.check(layout.label) as check:
            check_refusal(check, judge, layout, folder, "the folder is named", str(folder))

    def test_sleep_keeps_every_bit(self, judge: Judge, layout: Layout, sleep_order: str, sleep_precision: str) -> None:
        """Training goes on after sleep and wake-up as if nothing had happened, on all ranks."""
        check_sleep(judge, layout, sleep_order, sleep_precision, "qwen3")

    def test_weights_alone_are_enough_for_an_export(self, judge: Judge, layout: Layout) -> None:
        """After sleep(keep_weights) and after wake_up(weights_only) an export gives the same bits; states are right."""
        actions = [
            act("setup"),
            act("train", rollout=FIRST),
            act("export", "awake"),
            act("sleep", "kept", keep_weights=True),
            act("export", "weights kept"),
            act("sleep", "asleep"),
            act("wake", "woken", weights_only=True),
            act("export", "weights woken"),
            act("wake", "awake again"),
            act("export", "awake at last"),
        ]
        results = judge.play(layout, actions)
        with judge.check(layout.label) as check:
            for rank, one in enumerate(results):
                for what in ("weights kept", "weights woken", "awake at last"):
                    check.same(f"{what} on rank {rank}", comparing.different(one[what], one["awake"]))
                states = [one[name] for name in ("kept", "asleep", "woken", "awake again")]
                expected = ["WEIGHTS_ONLY", "ASLEEP", "WEIGHTS_ONLY", "AWAKE"]
                check.true(f"states on rank {rank}", states == expected, states)

    def test_sleep_does_not_grow(self, judge: Judge, layout: Layout) -> None:
        """Twelve cycles end with the memory that the second one ended with."""
        actions = [
            act("setup"),
            act("train", rollout=FIRST),
            act("cycle", times=12),
            act("train", "next", rollout=SECOND),
        ]
        results = judge.play(layout, actions)
        with judge.check(layout.label) as check:
            for rank, one in enumerate(results):
                check_growth(check, one["cycle"], rank)

    def test_tags_switch_bit_for_bit(self, judge: Judge, layout: Layout) -> None:
        """Weights come and go under tags; the optimizer does not notice; no training under another tag."""
        tag = "spare"
        train = act("train", rollout=FIRST)
        ending = [act("train", "next", rollout=SECOND, rollout_id=1), act("export", "end", dtype="float32")]
        results = judge.play(
            layout,
            [
                act("setup"),
                act("export", "initial", dtype="float32"),
                act("log_probs", "under initial", rollout=FIRST),
                act("weights_tag", call="backup_weights", tag=tag),
                train,
                act("export", "trained", dtype="float32"),
                act("weights_tag", "live", call="switch_weights", tag=tag),
                act("export", "switched", dtype="float32"),
                act("log_probs", "under spare", rollout=FIRST),
                act("refused", "no training", action=act("train", rollout=FIRST)),
                act("refused", "no save", action=act("bare", call="save_checkpoint")),
                act("refused", "unknown", action=act("weights_tag", call="switch_weights", tag="nobody")),
                act("weights_tag", call="switch_weights", tag="policy"),
                act("export", "back", dtype="float32"),
                *ending,
                act("weights_tag", call="restore_weights", tag=tag),
                act("export", "restored", dtype="float32"),
            ],
            options=OPTIONS,
        )
        plain = judge.play(layout, [act("setup"), train, *ending], once=True, options=OPTIONS)
        pairs = (
            ("switched", "initial"),
            ("under spare", "under initial"),
            ("back", "trained"),
            ("restored", "initial"),
        )
        with judge.check(layout.label) as check:
            for rank, (one, other) in enumerate(zip(results, plain)):
                for found, expected in pairs:
                    names = comparing.different(one[found], one[expected])
                    check.same(f"{found} as {expected} on rank {rank}", names)
                check.same(f"weights trained on rank {rank}", comparing.different(one["end"], other["end"]))
                check.true("the live tag is told", one["live"] == tag, one["live"])
                for name in ("no training", "no save"):
                    told = one[name]["kind"] == "IllegalStateError" and tag in one[name]["message"]
                    check.true(f"{name} under another tag", told, one[name]["message"])
                told = "nobody" in one["unknown"]["message"] and one["unknown"]["kind"] == "IllegalStateError"
                check.true("an unknown tag is named", told, one["unknown"]["message"])


def check_resume(judge: Judge, layout: Layout, precision: str, model: str) -> None:
    """Save, end, load and go on; `model` is its name."""
    options = {**OPTIONS, **(FP16 if precision == "fp16" else {})}
    folder = judge.folder / f"checkpoint-{model}-{layout.label}-{precision}"
    went_on = judge.play(
        layout,
        [
            act("setup"),
            act("train", rollout=FIRST),
            act("draw_random"),
            act("save", folder=str(folder)),
            act("random_state"),
            act("export", "saved", dtype="float32"),
            act("train", "next", rollout=SECOND, rollout_id=1),
            act("export", dtype="float32"),
        ],
        model=judge.model(model),
        precision=precision,
        options=options,
    )
    resumed = judge.play(
        layout,
        [
            act("setup"),
            act("random_state"),
            act("export", "saved", dtype="float32"),
            act("train", "next", rollout=SECOND, rollout_id=1),
            act("export", dtype="float32"),
        ],
        model=judge.model(model),
        precision=precision,
        options={**options, "load": str(folder)},
    )
    with judge.check(f"{layout.label}, {precision}") as check:
        for rank, (one, other) in enumerate(zip(resumed, went_on)):
            found = one["setup"]["next_rollout_id"]
            check.true(f"the next rollout id on rank {rank} is 1", found == 1, found)
            for what in ("random_state", "saved"):
                check.same(f"{what} on rank {rank}", comparing.different(one[what], other[what]))
            metrics = comparing.different(one["next"]["metrics"], other["next"]["metrics"])
            check.same(f"metrics of the next steps on rank {rank}", metrics)
            check.same(f"weights after them on rank {rank}", comparing.different(one["export"], other["export"]))
        if precision == "fp16":
            first, then = (went_on[0][name]["metrics"] for name in ("train", "next"))
            check.true("the first step overflows", first[0]["skipped_steps"] == 1, first[0])
            taken = [one for one in then if not one["skipped_steps"]]
            check.true("after the save a step is taken", bool(taken), then)


def check_resharding(judge: Judge, layout: Layout, source: Layout, model: str) -> None:
    """Load the checkpoint of a source under a layout and go on; `model` is its name."""
    folder = judge.folder / f"checkpoint-of-{model}-{source.label}"
    last = [
        act("export", "saved", dtype="float32"),
        act("train", "next", rollout=SECOND, rollout_id=1),
        act("export", dtype="float32"),
    ]
    first = [act("setup"), act("train", rollout=FIRST), act("save", folder=str(folder))]
    went_on = judge.play(source, [*first, *last], model=judge.model(model), once=True, options=OPTIONS)
    moved = judge.play(
        layout, [act("setup"), *last], model=judge.model(model), options={**OPTIONS, "load": str(folder)}
    )
    with judge.check(f"from {source.label} to {layout.label}") as check:
        names = comparing.different(moved[0]["saved"]["tensors"], went_on[0]["saved"]["tensors"])
        check.same("weights", names)
        found, expected = moved[0]["next"]["metrics"], went_on[0]["next"]["metrics"]
        bounds = {"grad_norm": tolerances.GRAD_NORM, "lr": tolerances.LEARNING_RATE, "loss": tolerances.FP32}
        for name, bound in bounds.items():
            floor = 1.0 if name == "loss" else 1e-3
            off = comparing.relative([one[name] for one in found], [one[name] for one in expected], floor)
            check.close(f"{name} of the next steps", off, bound)
        weights = comparing.tensors(moved[0]["export"]["tensors"], went_on[0]["export"]["tensors"])
        check.close("weights after them", weights, tolerances.BETWEEN_LAYOUTS)
        ids = [one["setup"]["next_rollout_id"] for one in moved]
        check.true("the next rollout id is 1 on all ranks", set(ids) == {1}, ids)


def check_sleep(judge: Judge, layout: Layout, order: str, precision: str, model: str) -> None:
    """Sleep and wake by one of `SLEEPS`, and go on; `model` is its name."""
    first, second = act("train", rollout=FIRST), act("train", "next", rollout=SECOND, rollout_id=1)
    ending = [second, act("export", dtype="float32")]
    awake_actions = [act("setup"), first, *ending]
    awake = judge.play(layout, awake_actions, once=True, model=judge.model(model), precision=precision, options=OPTIONS)
    # the second time reuses the host's buffers
    actions = [act("setup"), *SLEEPS[order], first, *SLEEPS[order], *ending]
    slept = judge.play(layout, actions, model=judge.model(model), precision=precision, options=OPTIONS)
    with judge.check(f"{layout.label}, {order}, {precision}") as check:
        for rank, (one, other) in enumerate(zip(slept, awake)):
            for what in ("next", "export"):
                check.same(f"{what} on rank {rank}", comparing.different(one[what], other[what]))


def check_growth(check: Check, held: Mapping[str, list[int]], rank: int) -> None:
    """Claim that the last of many times ended with what the second one ended with."""
    growth = {what: seen[-1] - seen[1] for what, seen in held.items()}
    check.close(f"open files and threads on rank {rank}", growth["handles"], tolerances.HANDLES)
    check.close(f"bytes of tensors on rank {rank}", growth["tensors"], tolerances.TENSOR_BYTES)
    check.close(f"bytes resident on rank {rank}", growth["resident"], tolerances.RESIDENT_BYTES)


def check_refusal(
    check: Check,
    judge: Judge,
    layout: Layout,
    folder: Path,
    claim: str,
    *names: str,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Load a folder; claim that every rank refuses it with an error of the contract, in which `names` stand."""
    try:
        actions = [act("refused", action=act("setup"))]
        results = judge.play(layout, actions, options={**options, "load": str(folder)})
    except RanksFailedError as error:
        check.true(f"{claim}, in an error of the contract", False, error)
        return
    for rank, one in enumerate(results):
        seen = one["refused"]
        told = bool(seen["kind"]) and all(name in seen["message"] for name in names)
        check.true(f"{claim} on rank {rank}", told, seen["message"])
