"""The train loop: generate, train, log, save, evaluate; and when it stops before its end. One page, top to bottom."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from drivetrain_backend_api import DrivetrainError, TrainConfig
from drivetrain_backend_api.packing import shard_rollout
from drivetrain_infra.calls import LostProcessError
from drivetrain_infra.checkpoint_writer import CheckpointWriter, Saved
from drivetrain_infra.engines.base import SamplingParams
from drivetrain_infra.run_folder import RunFolder
from drivetrain_infra.run_state import LastSave, RunState
from drivetrain_infra.tracking.base import Tracker
from drivetrain_infra.wall_clock import WallClock
from drivetrain_infra.weight_sync.errors import WeightSyncError
from drivetrain_launcher.config import DrivetrainConfig
from drivetrain_launcher.data import Prompt, PromptSource, sft_samples
from drivetrain_launcher.engine_pool import EnginePool
from drivetrain_launcher.last_lines import DivergedError
from drivetrain_launcher.progress import Display
from drivetrain_launcher.rollout import Generator, Rollout, labelled_rollout
from drivetrain_launcher.rollout_store import RolloutStore
from drivetrain_launcher.stopping import Stopping, StopRequested
from drivetrain_launcher.train_group import TRAIN_RANK, TrainGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from drivetrain_infra.weight_sync.session import WeightSession

T = TypeVar("T")

_MOST_LOST_STEPS = 10
"""Optimizer steps in a row without a finite loss and gradient that are still bad luck."""

_REMEMBERED = 5
"""Rollouts whose slowest says how long the next one may take."""

COMPLETED = "completed"
"""Exit reason of a run that made all its rollouts."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which rollouts a run makes.

    Attributes:
        start: the first rollout id.
        stop: the id after the last.
        evaluate_every: rollouts between evaluations, None for none.
        evaluate_start: evaluate the weights that the run starts with.
        save_every: rollouts between checkpoints; there is always one at the end.
    """

    start: int
    stop: int
    evaluate_every: int | None
    evaluate_start: bool
    save_every: int | None

    def evaluates_after(self, rollout_id: int) -> bool:
        """Say whether the weights that rollout `rollout_id` made are evaluated."""
        done = rollout_id + 1
        return self.evaluate_every is not None and (done % self.evaluate_every == 0 or done == self.stop)

    def saves_after(self, rollout_id: int) -> bool:
        """Say whether a checkpoint follows rollout `rollout_id`."""
        done = rollout_id + 1
        return done == self.stop or (self.save_every is not None and done % self.save_every == 0)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything the loop drives, ready to be used.

    Attributes:
        state: of the run as it starts; what it holds beside the position is saved with every checkpoint.
        divergence: knows the steps that were lost so far.
        evaluation: held-out prompts, empty for none.
        engines, generator, weights: None where the run has no engines.
        metrics_bytes: returns the length of metrics.jsonl.
        is_first: this start of the command has done nothing before.
    """

    config: DrivetrainConfig
    plan: Plan
    folder: RunFolder
    state: RunState
    divergence: "Divergence"
    prompts: PromptSource
    evaluation: Sequence[Prompt]
    tokenizer: "PreTrainedTokenizerBase"
    trainer: TrainGroup
    engines: EnginePool | None
    generator: Generator | None
    weights: "WeightSession | None"
    rollouts: RolloutStore
    writer: CheckpointWriter
    tracker: Tracker
    metrics_bytes: Callable[[], int]
    display: Display
    stopping: Stopping
    clock: WallClock
    is_first: bool = True


def train(run: Run) -> str:
    """Run the loop from the first rollout to the last, or to a stop; its last checkpoint is durable when it returns.

    Returns: why it ended: `COMPLETED`, a signal, or the wall time.
    """
    plan, pace = run.plan, Pace(run.state.last_save)
    done, reason = plan.start, COMPLETED
    prompts_read = run.prompts.read
    try:
        phases = Phases()
        if plan.evaluate_start:
            evaluate(run, done, phases)
        for rollout_id in range(plan.start, plan.stop):
            stop_in_time(run, pace, is_first=run.is_first and rollout_id == plan.start)
            phases = Phases(sync=phases.evaluation_sync)
            rollout = make_rollout(run, rollout_id, phases)
            note_saved(run, pace, run.writer.poll())
            with phases("train"):
                steps = train_on(run, rollout_id, rollout)
            done, prompts_read = rollout_id + 1, run.prompts.read
            note_saved(run, pace, run.writer.poll())
            log(run, rollout_id, rollout, steps, phases, pace)
            run.divergence.check(rollout_id, steps)
            if plan.saves_after(rollout_id):
                save(run, pace, state_after(run, done, prompts_read))
            if plan.evaluates_after(rollout_id):
                evaluate(run, done, phases)
            pace.stepped(phases)
    except StopRequested as stop:
        reason = stop.reason
        if done > plan.start and not plan.saves_after(done - 1):
            save(run, pace, state_after(run, done, prompts_read))
    except Exception as error:
        keep_save(run, error)
        raise
    except BaseException:
        run.writer.abandon()
        raise
    note_saved(run, pace, run.writer.finish())
    return reason


def make_rollouts(
    config: DrivetrainConfig,
    plan: Plan,
    prompts: PromptSource,
    generator: Generator,
    rollouts: RolloutStore,
    display: Display,
    stopping: Stopping,
) -> str:
    """Make rollouts and save them, without anything that trains. Returns why it ended."""
    options = config.rollout
    try:
        for rollout_id in range(plan.start, plan.stop):
            taken = prompts.next_prompts(options.rollout_batch_size)
            with stopping.abandoning():
                if rollouts.find(rollout_id) is None:
                    rollout = generator.generate(
                        rollout_id,
                        taken,
                        samples_per_prompt=options.n_samples_per_prompt,
                        sampling=sampling_params(config),
                    )
                    rollouts.save(rollout_id, rollout)
                    display.generated(rollout_id, rollout.metrics)
    except StopRequested as stop:
        return stop.reason
    return COMPLETED


def keep_save(run: Run, error: Exception) -> None:
    """Finish the save that goes on while the run fails, if the train workers are there to do it."""
    if (isinstance(error, LostProcessError) and error.who.startswith(TRAIN_RANK)) or (
        isinstance(error, WeightSyncError) and error.rank is not None
    ):
        run.writer.abandon()
        return
    try:
        run.writer.finish()
    except Exception as second:
        error.add_note(f"and the checkpoint that was being written is lost: {second}")


def stop_in_time(run: Run, pace: "Pace", *, is_first: bool) -> None:
    """Stop here, between two rollouts, if somebody asked for it or there is no time for another one.

    Args:
        is_first: this start of the command has made no rollout yet.

    Raises:
        StopRequested: it stops.
        DrivetrainError: there was not even time for one rollout, nor would there be in a next start.
    """
    run.stopping.check()
    if signal := run.trainer.stop_signal():
        run.stopping.ask(signal)
    if run.clock.must_stop(pace.step_seconds, pace.save_seconds):
        if is_first:
            raise DrivetrainError(
                f"no time for a single rollout: {run.clock} when all was started; raise --wall-time-limit, or lower "
                "--wall-time-reserve"
            )
        run.stopping.ask(f"wall time limit ({run.clock})")
    run.stopping.check()


def make_rollout(run: Run, rollout_id: int, phases: "Phases") -> Rollout:
    """Make the samples of a rollout, or take them from an earlier start of this run that made them already.

    They are durable before anything is trained on them, where engines have made them.
    """
    options = run.config.rollout
    prompts = run.prompts.next_prompts(options.rollout_batch_size)
    with phases("rollout"):
        if not run.config.algorithm.generates:
            return labelled_rollout(sft_samples(prompts, run.tokenizer))
        if (made := run.rollouts.find(rollout_id)) is not None:
            return made
    sampling = sampling_params(run.config)

    def generate() -> Rollout:
        assert run.generator is not None
        return run.generator.generate(
            rollout_id, prompts, samples_per_prompt=options.n_samples_per_prompt, sampling=sampling
        )

    rollout = on_engines(run, rollout_id, generate, phases)
    with phases("rollout"):
        run.rollouts.save(rollout_id, rollout)
    return rollout


def train_on(run: Run, rollout_id: int, rollout: Rollout) -> list[dict[str, float]]:
    """Cut the rollout into one shard a data-parallel rank and train on it; each rank fetches only its own."""
    shards = shard_rollout(rollout.batch, dp_size=run.trainer.ranks.dp_size, batching=run.trainer.batching)
    return run.trainer.train(rollout_id, shards)


def on_engines(run: Run, rollout_id: int, do: Callable[[], T], phases: "Phases") -> T:
    """Do something with engines that serve the weights of rollout `rollout_id`, which is weight version + 1.

    An engine that died is replaced, gets these weights like the others, and it is done again. A stop that is asked for
    meanwhile ends it at once.
    """
    assert run.engines is not None
    with run.stopping.abandoning(), run.stopping.watching(run.trainer.stop_signal):
        while True:
            try:
                with phases("sync"):
                    sync(run, version=rollout_id + 1)
                with phases("rollout"):
                    return do()
            except DrivetrainError as error:
                if not run.engines.replace(error):
                    raise
                run.display.replaced(error)


def sync(run: Run, *, version: int) -> None:
    """Give the engines the trainer's weights as `version`, unless they have them."""
    assert run.engines is not None
    if run.weights is None:
        return
    run.weights.engines = list(run.engines.engines)
    if not run.weights.has_synced(version):
        run.display.synced(run.weights.sync(version))


def evaluate(run: Run, rollout_id: int, phases: "Phases") -> None:
    """Evaluate the weights that rollout `rollout_id` is made with, and log the result under that id.

    The next rollout finds them on the engines already; what that took is noted in `phases` for it.
    """
    if not run.clock.may_evaluate():
        run.display.skipped_evaluation(rollout_id, run.clock)
        return
    options = run.config.evaluation

    def generate() -> Rollout:
        assert run.generator is not None
        return run.generator.generate(
            rollout_id,
            run.evaluation,
            samples_per_prompt=options.n_samples_per_eval_prompt,
            sampling=sampling_params(run.config, evaluation=True),
            evaluation=True,
        )

    own = Phases()
    result = on_engines(run, rollout_id, generate, own)
    phases.evaluation_sync = own.seconds["sync"]
    metrics = {f"eval/{name}": value for name, value in result.metrics.items()}
    run.tracker.log(rollout_id, metrics)
    run.display.evaluated(rollout_id, metrics)


def state_after(run: Run, next_rollout_id: int, prompts_read: int) -> RunState:
    """Return all that a start from a checkpoint needs to know beside what the train backend saves.

    Args:
        prompts_read: by the rollouts that were trained on; one that was abandoned has read more.
    """
    return replace(
        run.state,
        next_rollout_id=next_rollout_id,
        checkpoint=run.folder.checkpoint(next_rollout_id).name,
        weight_version=next_rollout_id + 1,
        prompts_read=prompts_read,
        metrics_bytes=run.metrics_bytes(),
        lost_steps=run.divergence.lost,
        lost_since=run.divergence.since,
        wall_seconds=run.state.wall_seconds + run.clock.elapsed,
    )


def save(run: Run, pace: "Pace", state: RunState) -> None:
    """Begin a checkpoint; one that is not written in the background is durable when this returns."""
    note_saved(run, pace, run.writer.begin(state))
    note_saved(run, pace, run.writer.poll())


def note_saved(run: Run, pace: "Pace", saved: Saved | None) -> None:
    """Take note of a checkpoint that has become durable."""
    if saved is not None:
        pace.saved = saved
        run.display.saved(saved.checkpoint)


def log(
    run: Run,
    rollout_id: int,
    rollout: Rollout,
    steps: Sequence[Mapping[str, float]],
    phases: "Phases",
    pace: "Pace",
) -> None:
    """Log a rollout: its samples, the mean of its optimizer steps, and where the time went."""
    seconds = sum(phases.seconds.values())
    metrics = {f"rollout/{name}": value for name, value in rollout.metrics.items()}
    metrics |= {f"train/{name}": sum(step[name] for step in steps) / len(steps) for name in steps[0]}
    metrics["train/skipped_steps"] = sum(step["skipped_steps"] for step in steps)
    metrics |= {f"perf/{name}_seconds": value for name, value in phases.seconds.items()}
    metrics["perf/seconds"] = seconds
    metrics["perf/tokens_per_second"] = len(rollout.batch.tokens) / seconds
    if pace.saved is not None:  # the newest that is durable, which may be of some rollouts ago
        metrics["perf/save_blocked_seconds"] = pace.saved.blocked_seconds
        metrics["perf/save_seconds"] = pace.saved.seconds
    run.tracker.log(rollout_id, metrics)
    run.display.trained(rollout_id, metrics)


def sampling_params(config: DrivetrainConfig, *, evaluation: bool = False) -> SamplingParams:
    """Return how tokens are drawn in rollouts, or in evaluations."""
    rollout, other = config.rollout, config.evaluation
    longest = other.eval_max_response_len if evaluation else None
    return SamplingParams(
        temperature=other.eval_temperature if evaluation else config.train.rollout_temperature,
        top_p=rollout.rollout_top_p,
        top_k=rollout.rollout_top_k,
        max_new_tokens=longest or rollout.rollout_max_response_len,
        stop=rollout.rollout_stop,
        stop_token_ids=rollout.rollout_stop_token_ids,
    )


class Divergence:
    """Ends a run that does not learn any more: one whose last optimizer steps were all lost."""

    def __init__(self, config: TrainConfig, *, lost: int = 0, since: int = 0) -> None:
        """Take as many lost steps as fp16 needs to bring its loss scale down, and some.

        Args:
            lost: steps that the run has lost in a row before it was started again.
            since: rollout of the first of them.
        """
        halvings = math.log2(config.initial_loss_scale / config.min_loss_scale) if config.precision == "fp16" else 0.0
        self._most = _MOST_LOST_STEPS + max(0, math.ceil(halvings))
        self.lost = lost
        self.since = since

    def check(self, rollout_id: int, steps: Sequence[Mapping[str, float]]) -> None:
        """Note how the optimizer steps of a rollout went.

        Raises:
            DivergedError: too many in a row were skipped, or had a loss that is not finite.
        """
        for step in steps:
            lost = step["skipped_steps"] > 0 or not math.isfinite(step.get("loss", 0.0))
            if lost and not self.lost:
                self.since = rollout_id
            self.lost = self.lost + 1 if lost else 0
        if self.lost >= self._most:
            raise DivergedError(
                f"training has diverged: the last {self.lost} optimizer steps, from rollout {self.since} to rollout "
                f"{rollout_id}, had a loss or gradient that is not finite; lower --lr or --grad-clip, and start anew "
                f"or from a checkpoint of well before rollout {self.since}"
            )


class Phases:
    """Seconds spent in each phase of a rollout.

    Attributes:
        seconds: phase -> how long it took, all its turns together.
        evaluation_sync: what the weight update took that the evaluation after this rollout made for the next one.
    """

    def __init__(self, *, sync: float = 0.0) -> None:
        """Begin with nothing but the weight update that the evaluation before this rollout made."""
        self.seconds = {"rollout": 0.0, "train": 0.0, "sync": sync}
        self.evaluation_sync = 0.0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the block under `name`."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] += time.monotonic() - began


class Pace:
    """How long the last rollouts and saves took, for decisions that need to know it.

    Attributes:
        saved: the newest checkpoint that this process has made durable.
    """

    def __init__(self, last_save: LastSave | None = None) -> None:
        """Begin with the last save of an earlier start, None where there was none."""
        self.saved: Saved | None = None
        self._last_save = last_save
        self._steps: list[float] = []

    def stepped(self, phases: Phases) -> None:
        """Take note of a rollout."""
        self._steps = [*self._steps[1 - _REMEMBERED :], sum(phases.seconds.values())]

    @property
    def step_seconds(self) -> float:
        """The slowest of the last rollouts; 0 before the first."""
        return max(self._steps, default=0.0)

    @property
    def save_seconds(self) -> float:
        """The last save from its begin until it was durable, of an earlier start too; 0 before the first."""
        last = self.saved or self._last_save
        return last.seconds if last else 0.0
