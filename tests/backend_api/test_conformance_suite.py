"""The conformance suite itself: what it draws and compares with, what it lets nobody leave out, what it reports."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from drivetrain_backend_api.batch import RolloutBatch, from_samples
from drivetrain_backend_api.config import TrainConfig, option
from drivetrain_backend_api.spec import BackendSpec
from drivetrain_backend_api.testing import comparing
from drivetrain_backend_api.testing.algorithms import ENTROPY_COEF, RAISED
from drivetrain_backend_api.testing.claims import Claims, Tolerance, Verdict, from_plain, to_plain, write_report
from drivetrain_backend_api.testing.damage import DAMAGES, files_of
from drivetrain_backend_api.testing.drawing import SPARSE, Axis, Drawn, product, refusal, thin, untaken_sets
from drivetrain_backend_api.testing.judge import Judge, act
from drivetrain_backend_api.testing.layouts import Layout, claimed_expert_layouts, claimed_layouts
from drivetrain_backend_api.testing.models import VOCABULARY, make_model
from drivetrain_backend_api.testing.ranks import Ranks, RanksFailedError
from drivetrain_backend_api.testing.reference import reference_train, scheduled_lr
from drivetrain_backend_api.testing.rollouts import RolloutSpec, draw_rollout
from drivetrain_backend_api.testing.suite import ConformanceSuite, changed_tests

NAN, INF = float("nan"), float("inf")


# -- what nobody may leave out -----------------------------------------------------------------------------------------

REMOVED = "test_sleep_keeps_every_bit"


def test_a_suite_that_changes_nothing_has_no_problems() -> None:
    class Mine(ConformanceSuite):
        world_sizes = (1,)
        options: ClassVar[Mapping[str, Any]] = {"grad_clip": 0.5}

        def test_of_my_own(self) -> None:
            raise AssertionError

    assert changed_tests(Mine) == []


@pytest.mark.parametrize(
    ("name", "replacement"),
    [
        (REMOVED, None),
        (REMOVED, lambda self, judge, layout, sleep_order: None),
        ("judge", pytest.fixture(lambda self: None)),
        ("pytest_generate_tests", lambda self, metafunc: None),
    ],
    ids=["removed", "overridden", "another judge", "other layouts"],
)
def test_a_standard_test_is_changed_only_with_a_reason(name: str, replacement: Any) -> None:
    changed = type("Mine", (ConformanceSuite,), {name: replacement})
    (problem,) = changed_tests(changed)
    assert problem.startswith(f"Mine removed or overrode {name}; ")
    assert f'exceptions = {{"{name}": "..."}}' in problem
    changed.exceptions = {name: " "}
    assert changed_tests(changed) == [problem]
    changed.exceptions = {name: "this backend never sleeps"}
    assert changed_tests(changed) == []


def test_a_change_further_up_is_found_too() -> None:
    class Base(ConformanceSuite):
        test_sleep_keeps_every_bit = None  # type: ignore[assignment]

    class Mine(Base):
        pass

    (problem,) = changed_tests(Mine)
    assert problem.startswith(f"Mine removed or overrode {REMOVED}; ")


def test_an_exception_for_an_unknown_test_is_told() -> None:
    class Mine(ConformanceSuite):
        exceptions: ClassVar[Mapping[str, str]] = {"test_sleep_keeps_most_bits": "misspelt"}

    assert changed_tests(Mine) == [
        "Mine.exceptions names 'test_sleep_keeps_most_bits', which is no standard test",
    ]


# -- layouts -----------------------------------------------------------------------------------------------------------


def labels(parallelism: tuple[str, ...], ranks: int) -> set[str]:
    layouts = claimed_layouts(parallelism, ranks)
    assert all(one.ranks == ranks for one in layouts)
    found = {one.label for one in layouts}
    assert len(found) == len(layouts)
    return found


@pytest.mark.parametrize(
    ("parallelism", "ranks", "expected"),
    [
        ((), 1, {"single"}),
        ((), 2, set()),
        (("dp",), 1, {"single"}),
        (("dp",), 4, {"dp4"}),
        (("dp",), 3, {"dp3"}),
        (("tp",), 4, {"tp4"}),
        (("dp", "sp"), 2, {"dp2"}),
        (("dp", "tp"), 4, {"dp4", "tp4", "dp2-tp2"}),
        (
            ("dp", "tp", "sp", "pp", "cp", "ep"),
            4,
            {"dp4", "tp4", "tp4-sp", "pp4", "cp4", "dp2-tp2", "dp2-tp2-sp", "dp2-pp2", "dp2-cp2"}
            | {"tp2-pp2", "tp2-pp2-sp", "tp2-cp2", "tp2-cp2-sp", "pp2-cp2"},
        ),
    ],
)
def test_layouts_are_all_that_is_claimed(parallelism: tuple[str, ...], ranks: int, expected: set[str]) -> None:
    assert labels(parallelism, ranks) == expected


def test_expert_layouts_are_those_whose_ranks_have_tokens_of_their_own() -> None:
    assert claimed_expert_layouts(("dp", "tp", "sp", "pp", "cp"), 4) == []
    every = ("dp", "tp", "sp", "pp", "cp", "ep")
    assert [one.label for one in claimed_expert_layouts(every, 1)] == ["single"]
    assert {one.label for one in claimed_expert_layouts(every, 2)} == {
        *("dp2", "dp2-ep2", "tp2-sp", "tp2-sp-ep2", "pp2", "cp2", "cp2-ep2"),
    }
    four = claimed_expert_layouts(every, 4)
    assert all(one.ranks == 4 and one.ranks // one.pp % one.ep == 0 and (one.tp == 1 or one.sp) for one in four)
    assert {"dp4-ep4", "dp2-tp2-sp-ep4", "dp2-pp2-ep2", "tp2-pp2-sp-ep2"} <= {one.label for one in four}
    assert "dp2-pp2-ep4" not in {one.label for one in four}
    assert Layout(dp=2, ep=2).options == {"expert_model_parallel_size": 2}


# -- thinning ----------------------------------------------------------------------------------------------------------

EVERY_KIND = ("dp", "tp", "sp", "pp", "cp")
FEW, MANY = claimed_layouts(EVERY_KIND, 2), claimed_layouts(EVERY_KIND, 4)


def drawn(layouts: list[Layout], others: int) -> list[Drawn]:
    return product(
        [
            Axis(names=("layout",), values=[(one,) for one in layouts], ids=[one.label for one in layouts]),
            Axis(names=("case",), values=[(one,) for one in range(others)], ids=[str(one) for one in range(others)]),
        ]
    )


@pytest.mark.parametrize("others", [1, 2, 9, 14, 30])
@pytest.mark.parametrize("test", ["test_one", "test_other"])
def test_turns_leave_out_no_layout_and_no_case(test: str, others: int) -> None:
    whole = drawn(FEW + MANY, others)
    kept = thin(whole, test, 4)
    many = [one for one in kept if one.layout in MANY]
    assert [one for one in kept if one.layout in FEW] == [one for one in whole if one.layout in FEW]
    assert {one.layout for one in many} == set(MANY)
    assert {one.values[1] for one in many} == set(range(others))
    assert len(many) == max(len(MANY), others)
    assert thin(whole, test, 4) == kept
    assert kept == [one for one in whole if one in kept]


def test_tests_begin_their_turns_elsewhere() -> None:
    whole = drawn(MANY, 9)
    assert thin(whole, "test_one", 4) != thin(whole, "test_other", 4)


def test_what_does_not_fit_takes_no_turn() -> None:
    pipelines = [one for one in MANY if one.pp > 1]
    kept = thin(drawn(MANY, 7), "test_one", 4, lambda one: one.values[1] != 6 or one.layout in pipelines)
    assert {one.layout for one in kept} == set(MANY)
    assert {one.values[1] for one in kept} == set(range(7))
    assert all(one.layout in pipelines for one in kept if one.values[1] == 6)


def test_options_that_no_layout_takes_are_told_from_those_that_some_do() -> None:
    sets = ({"grad_clip": 0.5}, {"grad_clip": -1.0}, {"tensor_model_parallel_size": 3})
    spec = BackendSpec(name="mine", api_version=1, target="no:no", config_class=PickyConfig, neutral_options=sets)
    single, pair = Layout(), Layout(pp=2)
    assert untaken_sets(spec, {}, [single]) == [sets[1], sets[2]]
    assert untaken_sets(spec, {}, [single, pair]) == [sets[1]]
    assert untaken_sets(spec, {"grad_clip": -1.0}, [pair]) == [sets[1], sets[2]]
    assert "--grad-clip" in refusal(spec, single, sets[1])
    assert refusal(spec, single, sets[0]) == ""


@dataclass(frozen=True, kw_only=True)
class PickyConfig(TrainConfig):
    tensor_model_parallel_size: int = option(1, help="ranks")
    pipeline_model_parallel_size: int = option(1, help="stages")

    def findings(self) -> list[str]:
        odd = self.tensor_model_parallel_size == 3 and self.pipeline_model_parallel_size == 1
        return super().findings() + ["three ranks need two stages"] * odd


@pytest.mark.slow
def test_options_that_no_layout_takes_fail_the_run(tmp_path: Path) -> None:
    program = """
import dataclasses, sys, pytest
from drivetrain_backend_api.testing import suite
given = suite.load_spec
suite.load_spec = lambda group, name: dataclasses.replace(given(group, name), neutral_options=({"grad_clip": -1.0},))
sys.exit(pytest.main(sys.argv[1:]))
"""
    words = ["-k", "taken_somewhere", "--train-backend", "fsdp", "--conformance-ranks", "1"]
    words += [*PYTEST[3:], "-m", "not slow"]
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=250, cwd=tmp_path
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert "FAILED" in done.stdout
    assert "test_each_set_of_neutral_options_is_taken_somewhere[grad_clip=-1.0]" in done.stdout


def test_a_sparse_test_has_some_of_the_layouts() -> None:
    test, few = next(iter(SPARSE.items()))
    kept = thin(drawn(FEW + MANY, 2), test, 4)
    assert len({one.layout for one in kept if one.layout in MANY}) == few
    assert {one.values[1] for one in kept if one.layout in MANY} == {0, 1}
    assert all(hasattr(ConformanceSuite, one) for one in SPARSE)


def test_a_layout_is_asked_for_by_megatrons_options() -> None:
    assert Layout(dp=4).options == {}
    assert Layout(dp=2, tp=2, pp=4, cp=8, sp=True).options == {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 4,
        "context_parallel_size": 8,
        "sequence_parallel": True,
    }


# -- the reference -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_the_reference_schedules_as_transformers_does(style: str) -> None:
    config = TrainConfig(hf_checkpoint="x", lr=0.5, lr_decay_style=style, lr_warmup_iters=3, lr_decay_iters=11)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    schedule = {
        "constant": lambda: get_constant_schedule_with_warmup(optimizer, 3),
        "linear": lambda: get_linear_schedule_with_warmup(optimizer, 3, 11),
        "cosine": lambda: get_cosine_schedule_with_warmup(optimizer, 3, 11),
    }[style]()
    for step in range(12):
        assert scheduled_lr(step, config) == pytest.approx(schedule.get_last_lr()[0], abs=1e-12)  # float64
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize(("style", "half"), [("linear", 0.3), ("cosine", 0.3), ("constant", 0.5)])
def test_the_reference_decays_to_the_minimum_and_stays_there(style: str, half: float) -> None:
    config = TrainConfig(hf_checkpoint="x", lr=0.5, min_lr=0.1, lr_decay_style=style, lr_decay_iters=4)
    end = 0.5 if style == "constant" else 0.1
    assert [scheduled_lr(step, config) for step in (0, 2, 4, 9)] == pytest.approx([0.5, half, end, end])


@pytest.fixture(scope="module")
def uniform(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that gives every token the same probability."""
    folder = make_model(tmp_path_factory.mktemp("models") / "uniform", "llama")
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.nn.init.zeros_(model.lm_head.weight)
    model.save_pretrained(folder)
    return folder


def token_mean_loss(rollout: RolloutBatch) -> float:
    """Of a uniform model."""
    mask, advantages = rollout.per_token["loss_mask"], rollout.per_token["advantages"]
    gain = (-advantages + ENTROPY_COEF) * math.log(VOCABULARY)
    return -float((gain * mask).sum() / mask.sum())


def test_the_reference_trains_a_uniform_model_as_a_closed_form_says(uniform: Path) -> None:
    rollout = draw_rollout(RolloutSpec(samples=8))
    config = TrainConfig(hf_checkpoint=str(uniform), fp32=True, lr=0.0, global_batch_size=4)  # it stays uniform
    found = reference_train(uniform, rollout, config, algorithm="TokenMean")
    steps = [rollout.select(range(4)), rollout.select(range(4, 8))]
    # fp32: sums of some dozen terms of the order of 4
    assert found.losses == pytest.approx([token_mean_loss(one) for one in steps], rel=1e-5)
    assert found.entropies == pytest.approx([math.log(VOCABULARY)] * 2, rel=1e-6)
    assert list(found.before) == list(range(8))
    assert found.routing_gap == INF  # it has no experts
    assert all(one == pytest.approx(-math.log(VOCABULARY), rel=1e-6) for one in found.log_probs.values())
    assert len(found.log_probs) == int(rollout.per_token["loss_mask"].sum())
    assert comparing.different(found.weights, found.initial) == []
    assert min(found.grad_norms) > 0


def test_the_reference_whitens_advantages_over_tokens_and_averages_over_sequences(uniform: Path) -> None:
    rollout = from_samples(
        [[1], [2], [3]],
        [[4], [5, 6, 7], [8, 9]],
        per_token={"loss_mask": [[1.0], [1.0] * 3, [0.0] * 2], "advantages": [[0.0], [0.0] * 3, [0.0] * 2]},
        per_sample={"index": [0, 1, 2], "group_id": [0, 0, 1], "reward": [1.0, 0.0, 5.0]},
    )
    config = TrainConfig(hf_checkpoint=str(uniform), fp32=True, lr=0.0)
    found = reference_train(uniform, rollout, config, algorithm="SequenceMean")
    # Less their group's mean: 1/2 for one token, -1/2 for three, so mean -1/4 and variance 3/16 over tokens. Whitened:
    # sqrt(3) and -1/sqrt(3), whose mean over the two sequences with loss tokens is 1/sqrt(3). All ratios are 1.
    assert found.losses == pytest.approx([-(1 / math.sqrt(3) + ENTROPY_COEF * math.log(VOCABULARY))], rel=1e-5)


@pytest.mark.parametrize("model", ["qwen3_moe", "qwen3_moe-mixed"])
def test_the_reference_tells_how_clearly_experts_are_chosen(tmp_path: Path, model: str) -> None:
    folder = make_model(tmp_path / "model", model)
    rollout = draw_rollout(RolloutSpec(samples=2))
    config = TrainConfig(hf_checkpoint=str(folder), fp32=True, lr=0.0)
    clear = reference_train(folder, rollout, config, algorithm="TokenMean").routing_gap
    assert 0 < clear < 1
    plain = AutoModelForCausalLM.from_pretrained(folder)
    for name, weight in plain.named_parameters():
        if name.endswith("mlp.gate.weight"):
            torch.nn.init.zeros_(weight)
    plain.save_pretrained(folder)
    assert reference_train(folder, rollout, config, algorithm="TokenMean").routing_gap == 0


def test_rollouts_are_drawn_from_their_seed() -> None:
    first, again, other = (draw_rollout(RolloutSpec(samples=5, seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(first.tokens, again.tokens)
    assert not torch.equal(first.tokens, other.tokens)
    assert not first.sample_column("loss_mask", 2).any()
    backwards = draw_rollout(RolloutSpec(samples=5, backwards=True))
    assert backwards.per_sample["index"].tolist() == [4, 3, 2, 1, 0]
    assert torch.equal(backwards.sample_tokens(0), first.sample_tokens(4))


# -- differences -------------------------------------------------------------------------------------------------------

A, B = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (comparing.scalars([1.0, 30.0], [1.0, 20.0]), 0.5),
        (comparing.scalars([0.5], [0.25]), 0.25),
        (comparing.scalars([1.0], [1.0, 2.0]), INF),
        (comparing.scalars([NAN, 1.0], [1.0, 1.0]), NAN),
        (comparing.relative([0.5], [0.25], 0.001), 1.0),
        (comparing.relative([0.5], [0.0], 0.25), 2.0),
        (comparing.relative([], [1.0], 0.25), INF),
        (comparing.tensors({"a": B}, {"a": A}), 0.1),
        (comparing.tensors({"a": A}, {"a": A, "b": A}), INF),
        (comparing.tensors({"a": A}, {"a": A[:1]}), INF),
        (comparing.tensors({"a": A * NAN}, {"a": A}), NAN),
        (comparing.updates({"a": B}, {"a": A}, {"a": torch.tensor([3.0, 3.0])}), 0.5),
        (comparing.updates({"a": A}, {"a": A}, {}), INF),
        (comparing.updates({"a": A, "b": A * NAN}, {"a": A, "b": A}, {"a": B, "b": B}), NAN),
        (comparing.values({0: B}, {0: A}), 0.125),
        (comparing.values({0: A}, {1: A}), INF),
        (comparing.values({0: torch.tensor([3.0, NAN])}, {0: A}), NAN),
        (comparing.tokens({(0, 0, 0): [0.5, 0.25]}, {(0, 0, 0): 0.5}), 0.25),
        (comparing.tokens({}, {(0, 0, 0): 0.5}), INF),
        (comparing.tokens({(0, 0, 0): [NAN]}, {(0, 0, 0): 0.5}), NAN),
    ],
)
def test_differences_are_what_they_say(found: float, expected: float) -> None:
    assert found == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    "difference",
    [
        lambda: comparing.scalars([1.0, NAN], [1.0, 1.0]),
        lambda: comparing.relative([1.0, NAN], [1.0, 1.0], 1.0),
        lambda: comparing.tensors({"a": A, "b": A * NAN}, {"a": A, "b": A}),
        lambda: comparing.values({0: A, 1: A * NAN}, {0: A, 1: A}),
        lambda: comparing.tokens({(0, 0, 0): [0.5, NAN]}, {(0, 0, 0): 0.5}),
    ],
    ids=["scalars", "relative", "tensors", "values", "tokens"],
)
def test_what_is_not_a_number_is_not_lost_behind_what_is(difference: Callable[[], float]) -> None:
    assert not difference() <= INF


def test_bits_are_compared_and_not_values() -> None:
    zero = torch.zeros(2)
    assert comparing.different({"a": -zero}, {"a": zero}) == ["a"]
    assert comparing.different({"a": zero * NAN}, {"a": zero * NAN}) == []
    assert comparing.different({"a": zero.double()}, {"a": zero}) == ["a"]
    assert comparing.different({"a": torch.zeros(2, 1)}, {"a": zero}) == ["a"]
    assert comparing.different({"a": [0.0, 0.0]}, {"a": zero}) == ["a"]


def test_every_leaf_that_differs_is_named() -> None:
    expected = {"loss": [1.0, NAN], "deep": {"a": A, "b": 1}, "text": "x"}
    assert comparing.different(expected, expected) == []
    found = {"loss": [1.0, 2.0], "deep": {"a": B, "b": 1}, "text": "y"}
    assert comparing.different(found, expected) == ["loss[1]", "deep.a", "text"]
    assert comparing.different({**expected, "more": 1}, expected) == ["names"]
    assert comparing.different({**expected, "loss": [1.0]}, expected) == ["loss"]
    assert comparing.different([1], [1, 2]) == ["length"]


def test_ranks_that_disagree_on_a_sample_are_found() -> None:
    whole, unequal = comparing.merged_log_probs(
        [{"index": [0, 1], "values": [A, A]}, {"index": [1, 0], "values": [B, A]}, {"index": [2], "values": [B]}]
    )
    assert (list(whole), unequal) == ([0, 1, 2], ["sample 1"])


# -- claims and their report -------------------------------------------------------------------------------------------

CLOSE = Tolerance(value=0.5, why="rounding")


def test_a_difference_holds_up_to_its_tolerance_and_nan_never_does() -> None:
    claims = Claims("mine")
    assert claims.close("test_x", "loss", "dp2", 0.5, CLOSE) is None
    assert (
        claims.close("test_x", "loss", "dp2", 0.75, CLOSE)
        == "loss (dp2): off by 0.75; allowed is 0.5, because: rounding"
    )
    assert (
        claims.close("test_x", "loss", "dp2", NAN, CLOSE) == "loss (dp2): off by nan; allowed is 0.5, because: rounding"
    )
    assert claims.close("test_x", "loss", "dp2", INF, CLOSE) is not None
    assert [one.verdict for one in claims.found] == [Verdict.HOLDS, *[Verdict.BROKEN] * 3]


def test_the_report_holds_every_claim(tmp_path: Path) -> None:
    first, second, other = Claims("mine"), Claims("mine"), Claims("other")
    first.close("test_x", "loss", "dp2", 0.25, CLOSE)
    first.close("test_x", "loss", "dp4", NAN, CLOSE)
    second.true("test_y", "states", "single", False, "seen")
    second.not_claimed("test_z", "tp")
    second.thinned("test_y", "dp2-tp2-packed")
    other.true("test_y", "states", "single", True)
    write_report(tmp_path / "report.json", [first, second, other], {"mine": {"version": "1.2"}})
    assert [one.name for one in tmp_path.iterdir()] == ["report.json"]
    report = json.loads((tmp_path / "report.json").read_text())
    mine, theirs = report["backends"]
    assert report["format"] == 1
    assert (mine["backend"], mine["facts"], theirs["backend"]) == ("mine", {"version": "1.2"}, "other")
    assert mine["counts"] == {"holds": 1, "broken": 2, "not claimed": 1, "claimed, not judged": 0, "thinned": 1}
    assert mine["claims"][0] == {
        "test": "test_x",
        "what": "loss",
        "where": "dp2",
        "verdict": "holds",
        "difference": 0.25,
        "tolerance": 0.5,
        "why": "rounding",
    }
    assert [one["verdict"] for one in mine["claims"]] == ["holds", "broken", "broken", "not claimed", "thinned"]
    assert mine["claims"][1]["difference"] == "nan"  # which JSON has no number for
    assert theirs["counts"] == {"holds": 1, "broken": 0, "not claimed": 0, "claimed, not judged": 0, "thinned": 0}


def test_workers_hand_over_all_that_they_found() -> None:
    claims, facts = Claims("mine"), {"mine": {"version": "1.2"}}
    claims.close("test_x", "loss", "dp2", 0.25, CLOSE)
    claims.true("test_y", "states", "single", False, "seen")
    claims.not_claimed("test_z", "tp")
    sent = json.loads(json.dumps(to_plain([claims], facts)))
    (received,), received_facts = from_plain(sent)
    assert (received.backend, received.found, received_facts) == ("mine", claims.found, facts)


@pytest.fixture
def judge() -> Iterator[Judge]:
    """Of a backend that is never started."""
    spec = BackendSpec(name="mine", api_version=1, target="nowhere:Nothing", config_class=TrainConfig)
    with Ranks("mine", {}) as ranks:
        yield Judge(spec, {}, ranks, Claims("mine"))


def break_claims(judge: Judge) -> None:
    judge.test = "break_claims"
    with judge.check("dp2") as check:
        check.close("loss", NAN, CLOSE)
        check.true("metrics on all ranks", True)
        check.same("weights", ["a", "b"])


def test_a_test_fails_with_every_broken_claim_at_its_end(judge: Judge) -> None:
    with pytest.raises(AssertionError) as failed:
        break_claims(judge)
    assert str(failed.value).splitlines() == [
        "loss (dp2): off by nan; allowed is 0.5, because: rounding",
        "weights, bit for bit (dp2) does not hold: different: a, b",
    ]
    assert [one.verdict for one in judge.claims.found] == [Verdict.BROKEN, Verdict.HOLDS, Verdict.BROKEN]
    assert {one.test for one in judge.claims.found} == {"break_claims"}


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_changes_one_file_or_says_that_it_did_not(tmp_path: Path, damage: str) -> None:
    content = {"whole/.hidden": b"abcdef", "whole/sub/same": b"abc", "other/.hidden": b"ghi", "other/sub/same": b"abc"}
    for name, one in content.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(one)
    assert files_of(tmp_path / "whole") == [".hidden", "sub/same"]
    for name in (".hidden", "sub/same"):
        told = DAMAGES[damage](tmp_path / "whole" / name, tmp_path / "other" / name)
        path = tmp_path / "whole" / name
        assert told == (not path.exists() or path.read_bytes() != content[f"whole/{name}"])
        assert told or (damage, name) == ("another checkpoint's", "sub/same")


# -- the plugin --------------------------------------------------------------------------------------------------------

PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--pyargs", "drivetrain_backend_api.testing"]
UNCLAIMED = "test_what_is_not_claimed or test_no_standard_test_was_removed"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--conformance-ranks", "zero"], "--conformance-ranks zero: give numbers of processes, for example 1,2"),
        (["--conformance-ranks", "1,0"], "--conformance-ranks 1,0: give numbers of processes, for example 1,2"),
        (["--conformance-report", "absent/x.json"], "--conformance-report absent/x.json: its folder must exist"),
        (["--conformance-report", "."], "--conformance-report .: its folder must exist, and it must not be a folder"),
    ],
)
def test_options_that_cannot_be_meant_are_refused_before_anything_is_collected(
    tmp_path: Path, words: list[str], message: str
) -> None:
    done = subprocess.run(
        [*PYTEST, "--train-backend", "fsdp", *words], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"ERROR: {message}" in done.stderr
    assert "collect" not in done.stdout


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Several sessions of the suite in one process of its own, which imports torch but once."""
    folder = tmp_path_factory.mktemp("sessions")
    common = PYTEST[3:]
    sessions = {
        "no backend": [*common, "--collect-only"],
        "unknown": [*common, "--collect-only", "--train-backend", "nobody"],
        "two ranks": [*common, "--collect-only", "-q", "--train-backend", "fsdp", "--conformance-ranks", "2"],
        "report": [*common, "--train-backend", "fsdp", "-k", UNCLAIMED, "--conformance-report", "report.json"],
    }
    program = """
import contextlib, io, json, sys, pytest
done = {}
for name, words in json.loads(sys.argv[1]).items():
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = pytest.main(words)
    done[name] = {"code": code, "output": output.getvalue()}
print(json.dumps(done))
"""
    command = [sys.executable, "-c", program, json.dumps(sessions)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder)
    assert run.returncode == 0, run.stderr
    done: dict[str, dict[str, Any]] = json.loads(run.stdout.splitlines()[-1])
    report = json.loads((folder / "report.json").read_text())
    return {**done, "report": {**done["report"], "report": report}}


def test_without_a_backend_the_installed_ones_are_named(sessions: dict[str, dict[str, Any]]) -> None:
    names = ", ".join(sorted({one.name for one in entry_points(group="drivetrain.train_backends")}))
    output = sessions["no backend"]["output"]
    assert f"which train backend? give --train-backend NAME (installed: {names})" in output
    assert sessions["no backend"]["code"] != 0


def test_an_unknown_backend_is_refused_with_the_way_out(sessions: dict[str, dict[str, Any]]) -> None:
    output = sessions["unknown"]["output"]
    assert "--train-backend nobody: not installed (installed: " in output
    assert "install the wheel that provides it" in output
    assert sessions["unknown"]["code"] != 0


def test_chosen_ranks_narrow_the_layouts_and_resharding_is_judged_from_one_rank_too(
    sessions: dict[str, dict[str, Any]],
) -> None:
    drawn: dict[str, set[str]] = {}
    for test, parameters in re.findall(r"::(test_\w+)\[(.+)\]", sessions["two ranks"]["output"]):
        drawn.setdefault(test, set()).add(parameters)
    assert drawn["test_sleep_does_not_grow"] == {"dp2"}
    assert drawn["test_experts_train_as_a_plain_model"] == {"nothing"}
    assert drawn["test_a_resumed_run_is_the_same_run"] == {"dp2-fp32", "dp2-bf16", "dp2-fp16"}
    assert drawn["test_a_checkpoint_loads_under_another_layout"] == {"single-to-dp2", "dp2-to-single"}
    assert sessions["two ranks"]["code"] == 0


def test_what_is_not_claimed_is_reported(sessions: dict[str, dict[str, Any]]) -> None:
    session = sessions["report"]
    assert session["code"] == 0, session["output"]
    assert "not claimed: tp, sp, pp, cp, ep\n" in session["output"]
    (backend,) = session["report"]["backends"]
    assert (backend["backend"], backend["facts"]["distribution"]) == ("fsdp", "drivetrain-backend-fsdp")
    assert backend["counts"] == {"holds": 0, "broken": 0, "not claimed": 5, "claimed, not judged": 0, "thinned": 0}
    assert [one["what"] for one in backend["claims"]] == ["tp", "sp", "pp", "cp", "ep"]


def test_what_pytest_imports_at_every_start_has_no_torch() -> None:
    names = ("plugin", "claims", "cases", "layouts", "drawing")
    modules = ", ".join(f"drivetrain_backend_api.testing.{one}" for one in names)
    code = f"import sys, {modules}; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


# -- ranks that fail ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_job_that_fails_shows_its_first_error(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3")
    options = {"hf_checkpoint": str(model), "fp32": True, "distributed_timeout_minutes": 0.4}
    actions = [act("setup"), act("train", rollout={"samples": 4}, failure="raise")]
    with Ranks("fsdp", {}) as ranks:
        with pytest.raises(RanksFailedError) as failed:
            ranks.run(2, options=options, actions=actions, grace=30)
        error = failed.value
        assert (error.errors[0].rank, error.errors[0].kind) == (1, "RuntimeError")
        assert f"first error, on rank 1: RuntimeError: {RAISED}" in str(error)
        assert set(error.ended) == {0, 1}
        assert not error.killed
        # the next job has fresh processes
        (result,) = ranks.run(1, options=options, actions=[act("setup")])
        assert result["setup"]["next_rollout_id"] == 0


@pytest.mark.slow
def test_a_backend_that_cannot_be_imported_is_told_with_its_error() -> None:
    with (
        Ranks("nobody", {}) as ranks,
        pytest.raises(AssertionError, match=r"(?s)imports backend 'nobody' ended.*'nobody' is not installed"),
    ):
        ranks.run(1, options={}, actions=[])
