"""The loop: what it does in which order, when it stops before its end, and when it gives a run up.

Its runs are real but for Ray: a train backend of one rank and a rollout engine in this process, real files, and a clock
that the test sets.
"""

import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from scratch import OneRank, inside, one_rank, prepared, state_at_start
from transformers import AutoTokenizer

from drivetrain_backend_api import ALGORITHMS, DrivetrainError, TrainConfig, load_implementation
from drivetrain_backend_api.packing import RolloutShard
from drivetrain_infra.calls import LostProcessError
from drivetrain_infra.checkpoint_writer import CheckpointWriter, Saved
from drivetrain_infra.engines.actor import EngineHandle
from drivetrain_infra.engines.base import (
    ROLLOUT_ENGINES,
    EngineSettings,
    GenerateRequest,
    Generation,
    RolloutEngine,
)
from drivetrain_infra.run_state import RUN_STATE, RunState
from drivetrain_infra.tracking.jsonl import JsonlTracker
from drivetrain_infra.wall_clock import WallClock
from drivetrain_launcher.data import PromptSource
from drivetrain_launcher.engine_pool import EnginePool
from drivetrain_launcher.loop import COMPLETED, Divergence, Pace, Phases, Plan, Run, train
from drivetrain_launcher.progress import Display
from drivetrain_launcher.response_checks import ResponseLimits
from drivetrain_launcher.rewards import Reward, RewardInput
from drivetrain_launcher.rollout import Generator
from drivetrain_launcher.rollout_store import RolloutStore
from drivetrain_launcher.run import open_folder
from drivetrain_launcher.stopping import Stopping

GOOD = {"skipped_steps": 0.0, "loss": 0.5}
SKIPPED = {"skipped_steps": 1.0, "loss": 0.5}
NOT_FINITE = {"skipped_steps": 0.0, "loss": math.nan}


def config(**options: object) -> TrainConfig:
    return TrainConfig(hf_checkpoint="M", **options)  # type: ignore[arg-type]


def test_lost_steps_with_good_ones_between_them_are_bad_luck() -> None:
    divergence = Divergence(config())
    for rollout_id in range(30):
        divergence.check(rollout_id, [SKIPPED] * 9 if rollout_id % 2 else [GOOD])


@pytest.mark.parametrize("lost", [SKIPPED, NOT_FINITE])
def test_a_run_whose_last_ten_steps_were_lost_ends(lost: dict[str, float]) -> None:
    divergence = Divergence(config())
    divergence.check(0, [lost, GOOD])
    for rollout_id in range(1, 10):
        divergence.check(rollout_id, [lost])
    with pytest.raises(
        DrivetrainError, match=r"the last 10 optimizer steps, from rollout 1 to rollout 10, .*lower --lr"
    ):
        divergence.check(10, [lost])


def test_fp16_may_first_bring_its_loss_scale_down() -> None:
    divergence = Divergence(config(fp16=True, initial_loss_scale=2.0**16, min_loss_scale=2.0))
    divergence.check(0, [SKIPPED] * 24)
    with pytest.raises(DrivetrainError, match="the last 25 optimizer steps"):
        divergence.check(1, [SKIPPED])


def test_an_algorithm_that_reports_no_loss_is_judged_by_its_steps() -> None:
    Divergence(config()).check(0, [{"skipped_steps": 0.0}] * 20)


# -- which rollouts ----------------------------------------------------------------------------------------------------


def plan(**changes: Any) -> Plan:
    given = {"start": 0, "stop": 7, "evaluate_every": None, "evaluate_start": False, "save_every": None}
    return Plan(**(given | changes))


@pytest.mark.parametrize(("every", "expected"), [(None, []), (1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6, 7]), (9, [7])])
@pytest.mark.parametrize("start", [0, 2])
def test_evaluations_and_checkpoints_fall_on_the_same_rollouts_wherever_a_run_begins(
    every: int | None, expected: list[int], start: int
) -> None:
    one = plan(start=start, evaluate_every=every, save_every=every)
    after = [done for done in expected if done > start]
    assert [made + 1 for made in range(start, 7) if one.evaluates_after(made)] == after
    # there is always a checkpoint at the end
    assert [made + 1 for made in range(start, 7) if one.saves_after(made)] == (after or [7])


def phases(seconds: float) -> Phases:
    one = Phases()
    one.seconds = {"rollout": seconds / 4, "train": seconds * 3 / 4}
    return one


def test_the_slowest_of_the_last_five_rollouts_says_how_long_the_next_may_take() -> None:
    pace = Pace()
    assert (pace.step_seconds, pace.save_seconds) == (0.0, 0.0)
    for seconds in (100.0, 8.0, 16.0, 4.0, 2.0):
        pace.stepped(phases(seconds))
    assert pace.step_seconds == 100.0
    pace.stepped(phases(1.0))
    assert pace.step_seconds == 16.0
    pace.saved = Saved(next_rollout_id=1, checkpoint=Path("iter_0000001"), blocked_seconds=1.0, seconds=5.0)
    assert pace.save_seconds == 5.0


# -- whole runs --------------------------------------------------------------------------------------------------------

STOP = 4
READ = 4
"""Prompts a rollout."""


class SetClock(WallClock):
    """A wall clock that the test sets."""

    seconds_left = 1e6

    @property
    def left(self) -> float:
        return self.seconds_left


class Trainer(OneRank):
    """A train group of one rank in this process, as the loop knows it.

    Attributes:
        trained: rollouts, in order.
        before: is called before each.
        signal: what `stop_signal` returns.
        slow: saves are not done before somebody waits for them.
    """

    ranks = SimpleNamespace(dp_size=1)

    def __init__(self, backend: Any, algorithm: Any) -> None:
        super().__init__(backend)
        self._backend, self._algorithm = backend, algorithm
        self.batching = backend.batching
        self.trained: list[int] = []
        self.before: Callable[[int], object] = lambda rollout_id: None
        self.signal: str | None = None
        self.slow = False
        self._aside: Path | None = None

    def train(self, rollout_id: int, shards: Sequence[RolloutShard]) -> list[dict[str, float]]:
        self.before(rollout_id)
        self.trained.append(rollout_id)
        shard = self._backend.preprocess_rollout_data(shards[0])
        steps: list[dict[str, float]] = self._backend.train(rollout_id, shard, self._algorithm)
        return steps

    def stop_signal(self) -> str | None:
        return self.signal

    def begin_save(self, folder: Path) -> None:
        self._aside = folder
        if not self.slow:
            super().begin_save(folder)

    def poll_save(self) -> bool:
        return not self.slow

    def finish_save(self) -> None:
        if self.slow and self._aside is not None:
            super().begin_save(self._aside)


@dataclass
class Place:
    """A run that can be started again and again, and what happens in it.

    Attributes:
        generated: (rollout id, whether it is an evaluation) of all that engines made.
        before: is called before each, with both.
        replaced: engines that were started again.
    """

    engine: RolloutEngine
    tokenizer: Any
    generated: list[tuple[int, bool]] = field(default_factory=list)
    before: Callable[[int, bool], object] = lambda rollout_id, evaluation: None
    replaced: list[int] = field(default_factory=list)
    out: Console = field(default_factory=lambda: Console(record=True, file=io.StringIO()))

    def start(self, stack: ExitStack, *more: str, most_restarts: int = 3) -> Run:
        """Assemble a start of the command, which goes on where the run stopped."""
        stage = prepared("run", "--num-rollout", str(STOP), "--eval-prompt-data", "held_out.jsonl", *more)
        stage = open_folder(stage)
        config, begin = stage.config, stage.begin
        backend = stack.enter_context(one_rank(stage.train))
        backend.setup()
        trainer = Trainer(backend, load_implementation(ALGORITHMS, config.algorithm)(config.algorithm_options))
        state = state_at_start(stage)
        prompts = PromptSource(stage.dataset, shuffle=False, seed=config.train.seed)
        prompts.next_prompts(state.prompts_read)
        jsonl = JsonlTracker(stage.folder.metrics, keep_bytes=begin.metrics_bytes)
        stack.callback(jsonl.close)
        handle = EngineHandle(name="engine-0", actor=None)
        return Run(
            config=config,
            plan=stage.plan,
            folder=stage.folder,
            state=state,
            divergence=Divergence(config.train),
            prompts=prompts,
            evaluation=stage.evaluation,
            tokenizer=self.tokenizer,
            trainer=trainer,  # type: ignore[arg-type]
            engines=EnginePool(
                [handle],
                seconds=60,
                vocab_size=None,
                start_again=lambda number: self.replaced.append(number) or handle,  # type: ignore[func-returns-value]
                most_restarts=most_restarts,
            ),
            generator=Generator(
                call=self._call,
                tokenizer=self.tokenizer,
                reward=Reward(name="length", function=length),
                custom_generate=None,
                limits=ResponseLimits(),
                seed=config.train.seed,
                seconds=60,
            ),
            weights=None,
            rollouts=RolloutStore(folder=stage.folder.rollouts, lineage=state.lineage),
            writer=CheckpointWriter(stage.folder, trainer),
            tracker=jsonl,
            metrics_bytes=lambda: jsonl.nbytes,
            display=Display(self.out, title="run", start=begin.start, stop=STOP),
            stopping=Stopping(),
            clock=SetClock(1e6, 10.0),
        )

    def _call(
        self, requests: Sequence[GenerateRequest], *, samples: Sequence[str], weight_version: int
    ) -> list[Generation]:
        evaluation = len(requests[0].seed) == 4
        self.before(weight_version - 1, evaluation)
        self.generated.append((weight_version - 1, evaluation))
        self.engine.weight_version = weight_version
        return self.engine.generate(requests)


def length(sample: RewardInput) -> float:
    return float(sample.response_length)


@pytest.fixture(scope="module")
def engine(good_scratch: Path) -> RolloutEngine:
    from drivetrain_backend_api import load_spec

    spec = load_spec(ROLLOUT_ENGINES, "transformers")
    engine: RolloutEngine = load_implementation(ROLLOUT_ENGINES, spec)(
        EngineSettings(
            model=str(good_scratch / "model"),
            device="cpu",
            dtype="float32",
            trust_remote_code=False,
            options=spec.config_class(),
        )
    )
    engine.start()
    return engine


@pytest.fixture
def place(good_scratch: Path, engine: RolloutEngine, tmp_path: Path) -> Iterator[Place]:
    (tmp_path / "model").symlink_to(good_scratch / "model")
    lines = (good_scratch / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(lines))
    (tmp_path / "held_out.jsonl").write_text("".join(lines[:2]))
    with inside(tmp_path, {}):
        yield Place(engine, AutoTokenizer.from_pretrained(good_scratch / "model"))


EVERY = ("--save-interval", "1", "--eval-interval", "2")


def rows(run: Run) -> list[tuple[int, str]]:
    """Return (rollout id, "train" or "eval") of every line that was logged."""
    found = [json.loads(line) for line in run.folder.metrics.read_text().splitlines()]
    return [(row["rollout_id"], "eval" if "eval/reward" in row else "train") for row in found]


def state(run: Run, done: int) -> RunState:
    return RunState.read(run.folder.checkpoint(done) / RUN_STATE)


ALL_ROWS = [(0, "eval"), (0, "train"), (1, "train"), (2, "eval"), (2, "train"), (3, "train"), (4, "eval")]


def test_a_run_logs_then_saves_then_evaluates(place: Place) -> None:
    with ExitStack() as stack:
        run = place.start(stack, *EVERY)
        assert train(run) == COMPLETED
    assert run.trainer.trained == [0, 1, 2, 3]  # type: ignore[attr-defined]
    assert rows(run) == ALL_ROWS
    assert place.generated == [(0, True), (0, False), (1, False), (2, True), (2, False), (3, False), (4, True)]
    assert run.folder.checkpoints() == [1, 2, 3, 4]
    lines = run.folder.metrics.read_bytes().splitlines(keepends=True)
    for done, logged in [(1, 2), (2, 3), (3, 5), (4, 6)]:
        # the rollout's own line belongs to its checkpoint, and the evaluation of its weights does not yet
        assert state(run, done).metrics_bytes == len(b"".join(lines[:logged]))
        assert (state(run, done).prompts_read, state(run, done).weight_version) == (READ * done, done + 1)
    newest = RunState.read(run.folder.state)
    assert (newest.checkpoint, newest.next_rollout_id) == ("iter_0000004", 4)
    assert newest.last_save is not None
    assert "perf/save_seconds" in json.loads(lines[-2])


def test_without_an_interval_a_run_saves_at_its_end(place: Place) -> None:
    with ExitStack() as stack:
        run = place.start(stack, "--skip-eval-before-train")
        train(run)
    assert run.folder.checkpoints() == [4]
    assert rows(run) == [(0, "train"), (1, "train"), (2, "train"), (3, "train"), (4, "eval")]


# -- stopped -----------------------------------------------------------------------------------------------------------


def go_on(place: Place, *more: str) -> Run:
    """Start the run again, and see that it comes to its end as if it had never stopped."""
    with ExitStack() as stack:
        run = place.start(stack, *(more or EVERY))
        assert train(run) == COMPLETED
    return run


def weights(run: Run) -> bytes:
    return (run.folder.checkpoint(STOP) / "dcp" / "__0_0.distcp").read_bytes()


def test_a_stop_while_generating_abandons_the_rollout_and_saves_those_before(place: Place) -> None:
    with ExitStack() as stack:
        run = place.start(stack, "--skip-eval-before-train")
        place.before = lambda rollout_id, evaluation: rollout_id == 2 and run.stopping.ask("SIGTERM")
        assert train(run) == "SIGTERM"
    assert rows(run) == [(0, "train"), (1, "train")]
    assert run.folder.checkpoints() == [2]
    assert sorted(one.name for one in run.folder.rollouts.iterdir()) == ["rollout_0.pt", "rollout_1.pt"]
    # prompts of the abandoned rollout are read again
    assert run.prompts.read == 3 * READ
    assert state(run, 2).prompts_read == 2 * READ
    place.before, place.generated = (lambda rollout_id, evaluation: None), []
    run = go_on(place, "--skip-eval-before-train")
    assert place.generated == [(2, False), (3, False), (4, True)]
    assert rows(run) == [(0, "train"), (1, "train"), (2, "train"), (3, "train"), (4, "eval")]


def test_a_stop_while_training_finishes_the_rollout(place: Place) -> None:
    with ExitStack() as stack:
        run = place.start(stack, "--skip-eval-before-train")
        run.trainer.before = lambda rollout_id: rollout_id == 1 and run.stopping.ask("SIGINT")  # type: ignore[attr-defined]
        assert train(run) == "SIGINT"
    assert rows(run) == [(0, "train"), (1, "train")]
    assert run.folder.checkpoints() == [2]
    assert state(run, 2).prompts_read == 2 * READ


def test_a_stop_in_an_evaluation_loses_nothing_but_the_evaluation_which_comes_first_next_time(place: Place) -> None:
    with ExitStack() as stack:
        run = place.start(stack, *EVERY)
        place.before = lambda rollout_id, evaluation: evaluation and rollout_id == 2 and run.stopping.ask("SIGUSR1")
        assert train(run) == "SIGUSR1"
    assert run.folder.checkpoints() == [1, 2]
    assert rows(run) == ALL_ROWS[:3]
    place.before, place.generated = (lambda rollout_id, evaluation: None), []
    assert rows(go_on(place)) == ALL_ROWS
    assert place.generated[0] == (2, True)


def test_a_stop_before_the_first_rollout_saves_nothing(place: Place) -> None:
    with ExitStack() as stack:
        run = place.start(stack, *EVERY)
        place.before = lambda rollout_id, evaluation: run.stopping.ask("SIGTERM")
        assert train(run) == "SIGTERM"
    assert (run.folder.checkpoints(), rows(run)) == ([], [])


def test_a_signal_to_a_train_worker_stops_the_run_between_two_rollouts(place: Place) -> None:
    with ExitStack() as stack:
        run = place.start(stack, *EVERY)

        def sent(rollout_id: int) -> None:
            run.trainer.signal = "SIGTERM to train rank 0"  # type: ignore[attr-defined]

        run.trainer.before = sent  # type: ignore[attr-defined]
        assert train(run) == "SIGTERM to train rank 0"
    assert run.folder.checkpoints() == [1]


def test_a_stopped_run_ends_at_the_bits_of_the_unbroken_one(place: Place) -> None:
    with ExitStack() as stack:
        straight = place.start(stack, *EVERY)
        train(straight)
    expected, metrics = weights(straight), values(straight)
    straight.folder.root.rename("straight")
    for stop in range(1, STOP):
        with ExitStack() as stack:
            run = place.start(stack, *EVERY)
            run.trainer.before = lambda rollout_id: rollout_id == stop - 1 and run.stopping.ask("SIGTERM")  # type: ignore[attr-defined]  # noqa: B023
            train(run)
    run = go_on(place)
    assert weights(run) == expected
    assert values(run) == metrics


def values(run: Run) -> list[Mapping[str, float]]:
    """Return what was logged, without how long things took."""
    return [
        {
            name: value
            for name, value in json.loads(line).items()
            if not name.startswith("perf/") and not name.endswith("_per_second")
        }
        for line in run.folder.metrics.read_text().splitlines()
    ]


# -- the clock ---------------------------------------------------------------------------------------------------------


def test_an_evaluation_is_skipped_where_less_than_twice_the_reserve_is_left(place: Place) -> None:
    with ExitStack() as stack:
        run = place.start(stack, *EVERY)
        leave(run, 19.0)
        assert train(run) == COMPLETED  # for another step and a save there is time enough
    assert rows(run) == [(0, "eval"), (0, "train"), (1, "train"), (2, "train"), (3, "train")]
    assert run.folder.checkpoints() == [1, 2, 3, 4]
    assert "no evaluation after 2 rollouts: less than twice --wall-time-reserve is left" in place.out.export_text()


def test_a_step_that_would_eat_into_the_reserve_is_not_begun(place: Place) -> None:
    with ExitStack() as stack:
        run = place.start(stack, "--skip-eval-before-train")
        leave(run, 10.0)
        reason = train(run)
    assert reason.startswith("wall time limit (")
    assert "10s of it kept for the last save" in reason
    assert run.folder.checkpoints() == [1]
    assert rows(run) == [(0, "train")]


def test_a_start_without_time_for_a_single_rollout_fails_for_the_next_would_be_no_better(place: Place) -> None:
    with ExitStack() as stack:
        run = place.start(stack, "--skip-eval-before-train")
        assert isinstance(run.clock, SetClock)
        run.clock.seconds_left = 9.0
        with pytest.raises(DrivetrainError, match=r"no time for a single rollout: .*raise --wall-time-limit, or lower"):
            train(run)
    assert (run.folder.checkpoints(), place.generated) == ([], [])


def leave(run: Run, seconds: float) -> None:
    """Let this time be left from the first step on; 10 seconds of it are the reserve."""
    clock = run.clock
    assert isinstance(clock, SetClock)
    run.trainer.before = lambda rollout_id: setattr(clock, "seconds_left", seconds)  # type: ignore[attr-defined]


# -- what was made already ---------------------------------------------------------------------------------------------


def test_a_rollout_that_was_made_before_a_kill_is_not_made_again(place: Place) -> None:
    class KilledError(BaseException):
        pass

    def kill(rollout_id: int) -> None:
        if rollout_id == 2:
            raise KilledError

    with ExitStack() as stack:
        run = place.start(stack, *EVERY)
        run.trainer.before = kill  # type: ignore[attr-defined]
        with pytest.raises(KilledError):
            train(run)
    assert run.folder.checkpoints() == [1, 2]
    place.generated = []
    run = go_on(place)
    assert place.generated == [(2, True), (3, False), (4, True)]
    assert rows(run) == ALL_ROWS


# -- engines that die --------------------------------------------------------------------------------------------------


def died(*at: tuple[int, bool]) -> Callable[[int, bool], None]:
    """Let the engine die as often as something stands in `at`."""
    left = list(at)

    def before(rollout_id: int, evaluation: bool) -> None:
        if (rollout_id, evaluation) in left:
            left.remove((rollout_id, evaluation))
            raise LostProcessError("generating: engine-0 died (process 7)", "engine-0", died=True)

    return before


def test_an_engine_that_died_is_replaced_and_the_rollout_made_again(place: Place) -> None:
    place.before = died((1, False), (2, True))
    with ExitStack() as stack:
        run = place.start(stack, *EVERY)
        assert train(run) == COMPLETED
    assert place.replaced == [0, 0]
    assert rows(run) == ALL_ROWS
    assert "generating: engine-0 died (process 7); it is replaced" in place.out.export_text()


def test_an_engine_that_dies_too_often_ends_the_run_with_the_reason(place: Place) -> None:
    place.before = died(*[(1, False)] * 3)
    with ExitStack() as stack:
        run = place.start(stack, *EVERY, most_restarts=2)
        with pytest.raises(LostProcessError, match="engine-0 died"):
            train(run)
    assert place.replaced == [0, 0]
    assert run.folder.checkpoints() == [1]


# -- a save in the background ------------------------------------------------------------------------------------------


def failing(error: Exception) -> Callable[[int], None]:
    def before(rollout_id: int) -> None:
        if rollout_id == 1:
            raise error

    return before


def test_a_save_that_goes_on_while_the_run_fails_is_finished(place: Place) -> None:
    with ExitStack() as stack:
        run = place.start(stack, *EVERY)
        run.trainer.slow, run.trainer.before = True, failing(DrivetrainError("no such token"))  # type: ignore[attr-defined]
        with pytest.raises(DrivetrainError, match="no such token"):
            train(run)
    assert run.folder.checkpoints() == [1]
    assert run.folder.latest().name == "iter_0000001"


def test_a_save_whose_workers_are_gone_is_given_up(place: Place) -> None:
    with ExitStack() as stack:
        run = place.start(stack, *EVERY)
        run.trainer.slow = True  # type: ignore[attr-defined]
        run.trainer.before = failing(LostProcessError("train rank 0 died", "train rank 0", died=True))  # type: ignore[attr-defined]
        with pytest.raises(LostProcessError):
            train(run)
    assert run.folder.checkpoints() == []
    assert list(run.folder.root.glob("*.partial")) == []


def test_a_save_is_finished_though_an_engine_is_gone(place: Place) -> None:
    place.before = died((1, False))
    with ExitStack() as stack:
        run = place.start(stack, *EVERY, most_restarts=0)
        run.trainer.slow = True  # type: ignore[attr-defined]
        with pytest.raises(LostProcessError, match="engine-0 died"):
            train(run)
    assert run.folder.checkpoints() == [1]


def test_a_slow_save_is_durable_at_the_next_one_and_at_the_end(place: Place) -> None:
    with ExitStack() as stack:
        run = place.start(stack, *EVERY)
        run.trainer.slow = True  # type: ignore[attr-defined]
        seen: list[list[int]] = []
        run.trainer.before = lambda rollout_id: seen.append(run.folder.checkpoints())  # type: ignore[attr-defined]
        assert train(run) == COMPLETED
    assert seen == [[], [], [1], [1, 2]]
    assert run.folder.checkpoints() == [1, 2, 3, 4]
    assert RunState.read(run.folder.state).checkpoint == "iter_0000004"
