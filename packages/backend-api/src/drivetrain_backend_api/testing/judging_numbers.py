"""Tests of what a step computes: against the plain reference, under every layout, split and precision."""

import math
from collections.abc import Mapping
from typing import Any

import pytest

from drivetrain_backend_api.testing import comparing, tolerances
from drivetrain_backend_api.testing.algorithms import RAISED
from drivetrain_backend_api.testing.cases import SPLITS, Case, packed
from drivetrain_backend_api.testing.judge import Action, Check, Judge, act
from drivetrain_backend_api.testing.layouts import Layout
from drivetrain_backend_api.testing.ranks import RanksFailedError
from drivetrain_backend_api.testing.reference import Trained, load_plain, response_log_probs
from drivetrain_backend_api.testing.rollouts import RolloutSpec, draw_rollout

ROLLOUT: Mapping[str, Any] = {"samples": 8}

FEW_STEPS: Mapping[str, Any] = {"global_batch_size": 4, **packed(64)}
"""Two optimizer steps of one or two micro-batches, where how a batch is cut is beside the point."""

_FIRST_STEP = {"ratio": "|ratio - 1|", "kl": "|KL|", "log_ratio": "|log ratio| to the reference"}


class NumbersTests:
    """Loss, log-probs, entropy, gradient norm and weights."""

    def test_training_equals_a_plain_model(self, judge: Judge, layout: Layout, case: Case) -> None:
        """One rollout, of one or several optimizer steps, in fp32."""
        check_training(judge, layout, case, f"{layout.label}, {case.name}")

    def test_options_keep_the_numbers(
        self, judge: Judge, layout: Layout, neutral: Mapping[str, Any], case: Case
    ) -> None:
        """Options that say where and when things are computed do not change what comes out."""
        where = f"{layout.label}, {', '.join(f'{name}={value}' for name, value in neutral.items())}"
        check_training(judge, layout, case, where, **neutral)

    def test_one_global_batch_gives_one_step(self, judge: Judge, layout: Layout, split: str) -> None:
        """Any layout, order of samples and split into micro-batches come to the same step."""
        with judge.check(layout.label) as check:
            base = _weights_after(judge, Layout(), {}, {})
            found = _weights_after(judge, layout, *SPLITS[split])
            check.close(f"weights: {split}", comparing.tensors(found, base), tolerances.BETWEEN_LAYOUTS)

    def test_low_precision_follows_fp32(self, judge: Judge, layout: Layout, low_precision: str) -> None:
        """bf16 and fp16 compute with fp32 masters: small updates are not lost, small gradients do not underflow."""
        model = judge.model("qwen3")
        options = {"global_batch_size": 4, "lr": 1e-4, **packed(64)}
        expected = judge.reference(model, ROLLOUT, options=options)
        folder = judge.folder / f"masters-{layout.label}-{low_precision}"
        actions = [act("setup"), act("log_probs", rollout=ROLLOUT), act("train", rollout=ROLLOUT)]
        actions.append(act("save", folder=str(folder)) if judge.spec.export_checkpoint else _export_fp32())
        results = judge.play(layout, actions, precision=low_precision, options=options)
        # live weights may be rounded ones; a checkpoint has the masters
        found = judge.exported(folder, model) if judge.spec.export_checkpoint else results[0]["export"]["tensors"]
        with judge.check(f"{layout.label}, {low_precision}") as check:
            before, _ = comparing.merged_log_probs([one["log_probs"] for one in results])
            bound = tolerances.LOW_PRECISION[low_precision]
            check.close("log-probs", comparing.values(before, expected.before), bound)
            metrics = results[0]["train"]["metrics"]
            for name, theirs in (("loss", expected.losses), ("entropy", expected.entropies)):
                check.close(name, comparing.scalars([one[name] for one in metrics], theirs), bound)
            norms = comparing.relative([one["grad_norm"] for one in metrics], expected.grad_norms, floor=1e-3)
            check.close("gradient norm", norms, bound)
            off = comparing.updates(found, expected.weights, expected.initial)
            check.close("the whole update", off, tolerances.LOW_PRECISION_UPDATE[low_precision])

    def test_the_first_step_is_on_policy(self, judge: Judge, layout: Layout, precision: str) -> None:
        """Against its own weights a step has ratio 1, and no distance from a reference with the same weights."""
        model = judge.model("qwen3")
        with judge.check(f"{layout.label}, {precision}") as check:
            for with_ref in (False, True) if judge.capabilities.reference else (False,):
                actions = [
                    act("setup", with_ref=with_ref),
                    act("first_step", rollout={"samples": 6}, with_ref=with_ref),
                ]
                ref = {"ref_load": str(model)} if with_ref else {}
                results = judge.play(layout, actions, precision=precision, options=ref)
                found = [one["first_step"] for one in results]
                check.true("loss tokens were seen", sum(one["tokens"] for one in found) > 0)
                where = "with a reference" if with_ref else "without a reference"
                for what, words in _FIRST_STEP.items() if with_ref else [("ratio", _FIRST_STEP["ratio"])]:
                    off = comparing.worst(one[what] for one in found)
                    check.close(f"{words}, {where}", off, tolerances.FIRST_STEP)

    def test_an_engine_with_the_same_weights_agrees(self, judge: Judge, layout: Layout) -> None:
        """What was exported after training, loaded by transformers, gives the trainer's log-probs."""
        model = judge.model("qwen2-tied")
        actions = [
            act("setup"),
            act("train", rollout=ROLLOUT),
            act("log_probs", rollout=ROLLOUT),
            act("export"),
        ]
        results = judge.play(layout, actions, model=model, options=packed(64))
        engine = load_plain(model)
        state = results[0]["export"]["tensors"]
        missing = engine.load_state_dict(state, strict=False)
        engine.tie_weights()
        rollout = draw_rollout(RolloutSpec(**ROLLOUT))
        theirs = {one: response_log_probs(engine, rollout, one, 1.0)[0].detach() for one in range(len(rollout))}
        ours, _ = comparing.merged_log_probs([one["log_probs"] for one in results])
        with judge.check(layout.label) as check:
            extra = [name for name in missing.missing_keys if name != "lm_head.weight"] + missing.unexpected_keys
            check.true("transformers finds every weight in the export", not extra, extra)
            check.close("log-probs of engine and trainer", comparing.values(ours, theirs), tolerances.FP32)

    def test_reference_and_teacher_are_their_own_models(self, judge: Judge, layout: Layout, frozen: str) -> None:
        """They give their own log-probs, before and after training, and training does not notice them."""
        folder = judge.model("qwen3", seed=5 if frozen == "ref" else 6)
        flag = {"ref": "ref_load", "teacher": "opd_teacher_load"}[frozen]
        wanted = {"ref": "with_ref", "teacher": "with_opd_teacher"}[frozen]
        asked = act("log_probs", "before", rollout=ROLLOUT, under=frozen)
        again = act("log_probs", "after", rollout=ROLLOUT, under=frozen)
        train = act("train", rollout=ROLLOUT)
        results = judge.play(
            layout,
            [act("setup", **{wanted: True}), asked, train, again, _export_fp32()],
            options={flag: str(folder), **FEW_STEPS},
        )
        alone = judge.play(layout, [act("setup"), asked, train, _export_fp32()], once=True, options=FEW_STEPS)
        expected = judge.reference(folder, ROLLOUT).before
        with judge.check(f"{layout.label}, {frozen}") as check:
            found, unequal = comparing.merged_log_probs([one["before"] for one in results])
            check.close("log-probs", comparing.values(found, expected), tolerances.FP32)
            check.same("log-probs on all ranks of a replica", unequal)
            after, _ = comparing.merged_log_probs([one["after"] for one in results])
            check.same("log-probs after training", comparing.different(after, found))
            check.true("without one there are none", all(one["before"] is None for one in alone))
            pairs = [(one["export"]["tensors"], other["export"]["tensors"]) for one, other in zip(results, alone)]
            names = [name for one, other in pairs for name in comparing.different(one, other)]
            check.same("weights trained beside it", names)

    def test_a_rank_that_raises_ends_the_others(self, judge: Judge, layout: Layout) -> None:
        """The others raise too, long before the deadline, and the first error is the one that is shown."""
        actions = [act("setup"), act("train", rollout=ROLLOUT, failure="raise")]
        grace = tolerances.RAISED_SECONDS.value
        with judge.check(layout.label) as check:
            with pytest.raises(RanksFailedError) as failed:
                judge.play(layout, actions, grace=grace, options={"distributed_timeout_minutes": 0.4})
            error = failed.value
            check.true("every rank ends by itself", not error.killed and len(error.ended) == layout.ranks, error)
            times = error.ended.values()
            check.close("seconds", max(times, default=9e9) - min(times, default=0), tolerances.RAISED_SECONDS)
            first = error.errors[0].message if error.errors else "none"
            check.true("the first error is the one raised", RAISED in first, first)
            count = sum(RAISED in one.message for one in error.errors)
            check.true("one rank alone raised by itself", count == 1, count)


def _export_fp32() -> Action:
    return act("export", dtype="float32")


def _weights_after(judge: Judge, layout: Layout, options: Mapping[str, Any], order: Mapping[str, Any]) -> Any:
    rollout = {"samples": 8, **order}
    actions = [act("setup"), act("train", rollout=rollout), _export_fp32()]
    results = judge.play(layout, actions, once=layout == Layout(), options=options)
    return results[0]["export"]["tensors"]


def check_training(judge: Judge, layout: Layout, case: Case, where: str, **more: Any) -> None:
    """Hold one rollout of training, in fp32, to the plain reference.

    Args:
        judge: of the present test.
        layout: to train under.
        case: what is trained on.
        where: names layout and case in claims.
        more: options beside the case's.
    """
    model = judge.model(case.model)
    rollout = {**ROLLOUT, **case.rollout}
    expected = judge.reference(model, rollout, case.algorithm, case.options)
    actions = [
        act("setup"),
        act("log_probs", rollout=rollout),
        act("train", rollout=rollout, algorithm=case.algorithm),
        _export_fp32(),
    ]
    results = judge.play(layout, actions, model=model, options={**case.options, **more})
    with judge.check(where) as check:
        if expected.routing_gap < math.inf:
            gap, least = expected.routing_gap, tolerances.ROUTING_GAP
            check.true(f"the reference's choice of experts is clear by {least:g}", gap > least, gap)
        _check_place(check, layout, results)
        before, unequal = comparing.merged_log_probs([one["log_probs"] for one in results])
        check.same("log-probs on all ranks of a replica", unequal)
        check.close("log-probs before", comparing.values(before, expected.before), tolerances.FP32)
        _check_metrics(check, [one["train"]["metrics"] for one in results], expected)
        trained = [one["train"] for one in results]
        for column, theirs in (("log_prob", expected.log_probs), ("entropy", expected.entropy)):
            found = comparing.merged_tokens(trained, column)
            check.close(f"{column} of every loss token", comparing.tokens(found, theirs), tolerances.FP32)
        found_weights = results[0]["export"]["tensors"]
        off = comparing.tensors(found_weights, expected.weights)
        check.close("weights after training", off, tolerances.FP32_WEIGHTS)


def _check_place(check: Check, layout: Layout, results: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(results):
        place = one["setup"]
        asked = (layout.dp, layout.tp, layout.pp, layout.cp, layout.ep, rank, layout.ranks, 0)
        names = ("dp_size", "tp_size", "pp_size", "cp_size", "ep_size", "rank", "world_size", "next_rollout_id")
        given = tuple(place[name] for name in names)
        check.true(f"rank {rank} has the layout asked for", given == asked, f"{names}: {given}, not {asked}")


def _check_metrics(check: Check, found: list[list[dict[str, float]]], expected: Trained) -> None:
    names = comparing.different(found, [found[0]] * len(found))
    check.same("metrics on all ranks", names)
    mine = found[0]
    check.close("loss", comparing.scalars([one["loss"] for one in mine], expected.losses), tolerances.FP32)
    check.close("entropy", comparing.scalars([one["entropy"] for one in mine], expected.entropies), tolerances.FP32)
    norms = comparing.relative([one["grad_norm"] for one in mine], expected.grad_norms, floor=1e-3)
    check.close("gradient norm", norms, tolerances.GRAD_NORM)
    rates = comparing.relative([one["lr"] for one in mine], expected.lrs, floor=1e-9)
    check.close("learning rate", rates, tolerances.LEARNING_RATE)
    skipped = sum(one["skipped_steps"] for one in mine)
    check.true("no step was skipped", skipped == 0, skipped)
