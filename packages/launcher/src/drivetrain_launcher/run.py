"""A run from the request to its last checkpoint: recipe, checks, data, Ray, warm-up stage, main stage; its restarts."""

import dataclasses
import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.console import Console

from drivetrain_backend_api import (
    ConfigError,
    DataError,
    DiscoveryError,
    DrivetrainError,
    OptionGroup,
    TrainConfig,
    options,
)
from drivetrain_backend_api.errors import in_one_line
from drivetrain_infra import daemons
from drivetrain_infra.calls import LostProcessError
from drivetrain_infra.checkpoint_writer import CheckpointWriter
from drivetrain_infra.ray_runtime import refuse_if_running
from drivetrain_infra.run_folder import RunFolder
from drivetrain_infra.run_state import RunState
from drivetrain_infra.tracking.base import Tracker, Trackers
from drivetrain_infra.tracking.jsonl import JsonlTracker, read_metrics
from drivetrain_infra.wall_clock import WallClock
from drivetrain_infra.weight_sync.errors import WeightSyncError
from drivetrain_launcher.config import DrivetrainConfig
from drivetrain_launcher.preflight import check_lengths, check_vocabulary, preflight, unwritable, wall_clock
from drivetrain_launcher.recipes import arithmetic
from drivetrain_launcher.resuming import Begin, begin_at, facts, find_point, lineage, require_optimizer
from drivetrain_launcher.rewards import Reward, load_reward
from drivetrain_launcher.sources import Request, Stage, build_config, config_values
from drivetrain_launcher.stopping import Stopping, StopRequested

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from drivetrain_launcher.data import Prompt, PromptDataset, PromptSource
    from drivetrain_launcher.factory import Resources
    from drivetrain_launcher.loop import Plan, Run
    from drivetrain_launcher.progress import Display
    from drivetrain_launcher.rollout_store import RolloutStore

_MAKERS = {"arithmetic": arithmetic}
"""What a recipe's `make` may name."""

_WARMUP = "warmup"
"""Folder of the warm-up stage inside the run's."""

_ONCE: dict[str, Any] = {"ckpt-step": None, "load-fallback": False, "accept-change": []}
"""What one start was told, and a file for later ones must not repeat."""

_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 300.0
"""Seconds before the first restart after a failure, doubled for each further one, and their bound."""


@dataclass(frozen=True, kw_only=True)
class PreparedStage:
    """One stage of a run, checked, with its data read; nothing is started yet.

    Attributes:
        evaluation: held-out prompts, empty for none.
        reward: None where nothing is generated, neither in rollouts nor in evaluations.
        stop: the rollout id after the last.
        begin: where it begins.
    """

    title: str
    config: DrivetrainConfig
    folder: RunFolder
    tokenizer: "PreTrainedTokenizerBase"
    dataset: "PromptDataset"
    evaluation: "Sequence[Prompt]"
    reward: Reward | None
    stop: int
    begin: Begin

    @property
    def uses_engines(self) -> bool:
        """Whether rollout engines are started."""
        return self.reward is not None and not self.config.rollout.debug_train_only

    @property
    def train(self) -> TrainConfig:
        """What the train workers are given: with what they load, which is verified already where that was asked for."""
        load = None if self.begin.load is None else str(self.begin.load)
        return dataclasses.replace(self.config.train, load=load, finetune=self.begin.finetune, verify_checkpoint=False)

    @property
    def plan(self) -> "Plan":
        """Which rollouts are made, evaluated and saved, from where the stage begins."""
        return plan_rollouts(self.config, self.begin, stop=self.stop, folder=self.folder)


def run_train(request: Request, stopping: Stopping) -> int:
    """Run what was asked for. Returns the exit code.

    Raises:
        ConfigError: it cannot work, found before anything starts.
        DrivetrainError: it failed while running; what was durable is still there.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    console = Console(soft_wrap=True)
    folder = RunFolder(request.save.absolute())
    refuse_if_running(folder.root)
    folder.refuse_if_locked()
    with ExitStack() as stack:
        made = folder.root / "made"
        if request.dry_run:
            made = Path(stack.enter_context(TemporaryDirectory(prefix="drivetrain-")))
        else:
            stack.enter_context(_removed_if_refused(made))
        try:
            stages = prepare(request, folder, console, made=made)
        except DataError as error:  # nothing is started yet, which is what the exit code of a ConfigError says
            raise ConfigError(str(error)) from error
    if request.dry_run and not (len(stages) == 1 and _has_nothing_left(stages[0])):
        console.print("everything that can be checked is right; nothing was started")
        return 0
    if len(stages) == 1 and _has_nothing_left(stages[0]):
        console.print(f"nothing is left to do: {folder.root} has all its {stages[0].stop} rollouts")
        return 0
    from drivetrain_launcher.factory import start_cluster

    clock = wall_clock(stages[-1].config)
    with stopping.graceful(), too_late_to_refuse():
        try:
            with stopping.abandoning(), ExitStack() as starting:
                console.print("starting Ray ...")
                starting.enter_context(start_cluster([stage.config.placement for stage in stages], folder=folder.root))
                cluster = starting.pop_all()
        except StopRequested as stop:
            console.print(f"stopped by {stop.reason} before anything was started")
            return 0
        with cluster, folder.locked():
            return _run_stages(stages, folder, console, stopping, clock)


def _run_stages(
    stages: Sequence[PreparedStage], folder: RunFolder, console: Console, stopping: Stopping, clock: WallClock
) -> int:
    from drivetrain_launcher.loop import COMPLETED

    for place, (stage, following) in enumerate(zip(stages, [*stages[1:], None])):
        stage = open_folder(stage)  # not before this run holds the folder's lock
        # it may have ended without having been exported
        reason = COMPLETED if _has_nothing_left(stage) else run_stage(stage, console, stopping, clock, first=place == 0)
        if reason != COMPLETED:
            _say_stopped(stage, reason, console)
            return 0
        if following is not None:
            model = folder.root / f"{stage.folder.root.name}_model"
            export = stage.config.backend.load_export_checkpoint()
            export(stage.folder.latest(), Path(stage.config.train.hf_checkpoint), model)
            console.print(f"{stage.title} ended; {following.title} starts from {model}")
    if stages[-1].config.rollout.debug_rollout_only:
        console.print(f"rollouts: {folder.rollouts}")
    else:
        console.print(f"metrics: {folder.metrics}")
        console.print(f"to use the model: drivetrain export {folder.root} --out HF_DIR")
    return 0


def _say_stopped(stage: PreparedStage, reason: str, console: Console) -> None:
    newest = stage.folder.newest()
    where = f"{newest} is durable" if newest else "there is no checkpoint yet"
    console.print(f"{stage.title}: stopped by {reason}: {where}; run the same command again to go on", markup=False)


def _has_nothing_left(stage: PreparedStage) -> bool:
    plan = stage.plan
    return stage.begin.checkpoint is not None and plan.start == plan.stop and not plan.evaluate_start


def open_folder(stage: PreparedStage) -> PreparedStage:
    """Make the folder of a new run, or take the one of a run that goes on; what a killed start left goes first.

    Returns: the stage; its checkpoint may have got its name back, which a killed start had taken from it.
    """
    folder, begin = stage.folder, stage.begin
    values = config_values(stage.config) | _ONCE
    folder.remove_leftovers()
    if not begin.in_place:
        folder.create(values)
        return stage
    if begin.checkpoint is not None:
        begin = dataclasses.replace(begin, load=folder.checkpoint(begin.start))
        folder.rewind_to(folder.checkpoint(begin.start))
    folder.reopen(values)
    return dataclasses.replace(stage, begin=begin)


@contextmanager
def too_late_to_refuse() -> Iterator[None]:
    """Turn a refusal, which says that nothing was started, into a failure.

    Raises:
        DrivetrainError: the same sentence.
    """
    try:
        yield
    except (ConfigError, DiscoveryError) as error:
        raise DrivetrainError(str(error)) from error


@contextmanager
def _removed_if_refused(made: Path) -> Iterator[None]:
    """Remove what a recipe made, and the folders around it that were not there before, where the block fails."""
    missing = list(takewhile(lambda one: not one.exists(), (made, *made.parents)))
    try:
        yield
    except BaseException:
        if missing:
            shutil.rmtree(made, ignore_errors=True)
        with suppress(OSError):  # one that somebody else uses by now stays, and so do those around it
            for one in missing[1:]:
                one.rmdir()
        raise


def prepare(request: Request, folder: RunFolder, console: Console, *, made: Path) -> list[PreparedStage]:
    """Make what a recipe needs in the folder `made`, check and read everything; returns the stages in order."""
    maker = _MAKERS[request.recipe.make] if request.recipe and request.recipe.make else None
    values = maker.options(made) if maker else {}
    config = build_config(request, made=values)
    if maker:
        if problem := unwritable("--save", request.save):
            raise ConfigError(problem)
        try:
            maker.make(made, config.train.seed)
        except OSError as error:
            raise ConfigError(
                f"the recipe's files cannot be written ({error}); make room, or choose another --save"
            ) from error
    title = config.algorithm.name
    if request.warmup is None:
        return [prepare_stage(config, folder, console, title=title)]
    warmed_up = {"hf_checkpoint": str(folder.root / f"{_WARMUP}_model")}
    if Path(warmed_up["hf_checkpoint"]).exists():  # complete or absent
        return [prepare_stage(build_config(request, made=values, overrides=warmed_up), folder, console, title=title)]
    first = RunFolder(folder.root / _WARMUP)
    first_values = {**values, **maker.warmup_options(made)} if maker else {}
    warmup = build_config(request, stage=Stage.WARMUP, made=first_values, overrides={"save": str(first.root)})
    return [
        prepare_stage(warmup, first, console, title="warm-up"),
        prepare_stage(
            config,
            folder,
            console,
            title=title,
            start_from=build_config(request, made=values, overrides=warmed_up),
        ),
    ]


def prepare_stage(
    config: DrivetrainConfig,
    folder: RunFolder,
    console: Console,
    *,
    title: str,
    start_from: DrivetrainConfig | None = None,
) -> PreparedStage:
    """Check one stage and read its data.

    Args:
        config: what is checked now.
        start_from: what is run, where the model it starts from is only made by the stage before.
    """
    by_default = _computes_in_fp32_by_default(config)
    if by_default:
        config, start_from = _in_fp32(config), _in_fp32(start_from) if start_from else None
    point = find_point(config, folder)
    done = point.state.next_rollout_id if point and point.checkpoint and point.state else None
    for note in preflight(config, resumes_at=done):
        console.print(f"note: {note}", markup=False)
    from drivetrain_launcher.data import PromptDataset, sft_samples
    from drivetrain_launcher.factory import engine_environment, worker_environment

    tokenizer = _tokenizer(config)
    dataset = PromptDataset.load(config.data.prompt_data, config.data, tokenizer)
    if dataset.left_out:
        console.print(f"left out {dataset.left_out} prompts longer than --rollout-max-prompt-len")
    held_out: Sequence[Prompt] = ()
    if config.evaluation.eval_prompt_data is not None:
        held_out = PromptDataset.load(config.evaluation.eval_prompt_data, config.data, tokenizer).prompts
    reward = None
    if config.algorithm.generates or held_out:
        reward = load_reward(config.rollout.reward, key=config.rollout.reward_key)
        reward.check_labels([*(dataset.prompts if config.algorithm.generates else ()), *held_out])
    answers = None
    if not config.algorithm.generates:
        answers = [response for _, response in sft_samples(dataset.prompts, tokenizer)]
    check_lengths(config, dataset.prompts, answers=answers, held_out=held_out)
    check_vocabulary(config, [*dataset.prompts, *held_out], answers)
    worker_environment(config)
    if reward is not None:
        engine_environment(config)
    stop = _num_rollouts(config, len(dataset))
    config = _resolved(_absolute(start_from or config), stop)
    begin = begin_at(config, folder, point)
    if begin.start >= stop and not (begin.checkpoint is not None and begin.start == stop):
        raise ConfigError(
            f"{begin.load} was trained on {begin.start} rollouts already, and --num-rollout (or --num-epoch) ends the "
            f"run at {stop}; raise it above {begin.start}"
        )
    if begin.start < stop:
        require_optimizer(begin)
    if begin.load is not None and not begin.in_place:
        what = "the weights alone" if begin.finetune or not begin.start else f"after {begin.start} rollouts"
        console.print(f"{title}: begins from {begin.load}, {what}", markup=False)
    for note in begin.notes:
        console.print(f"{title}: {note}", markup=False)
    if by_default:
        console.print(f"{title}: no GPU here, so computing in fp32, which CPUs do many times faster than bf16")
    return PreparedStage(
        title=title,
        config=config,
        folder=folder,
        tokenizer=tokenizer,
        dataset=dataset,
        evaluation=held_out,
        reward=reward,
        stop=stop,
        begin=begin,
    )


def _tokenizer(config: DrivetrainConfig) -> "PreTrainedTokenizerBase":
    from transformers import AutoConfig, AutoTokenizer

    folder, trust = config.train.hf_checkpoint, config.train.trust_remote_code
    for what, loader in (("config.json", AutoConfig), ("the tokenizer", AutoTokenizer)):
        try:
            loaded = loader.from_pretrained(folder, trust_remote_code=trust, local_files_only=True)
        except Exception as error:  # transformers raises whatever its many loaders do
            reason = in_one_line(error)
            raise DataError(
                f"--hf-checkpoint {folder}: {what} cannot be loaded: {type(error).__name__}: {reason}; "
                "copy the model again"
            ) from error
    return loaded


def run_stage(
    stage: PreparedStage, console: Console, stopping: Stopping, clock: WallClock, *, first: bool = True
) -> str:
    """Train one stage on a running cluster, again from its last checkpoint where processes are lost.

    Args:
        first: this start of the command has done nothing before.

    Returns: why it ended; what it did is durable, and `resume_state.json` says so.
    """
    base = dataclasses.replace(facts(stage.config), next_rollout_id=stage.begin.start)
    attempt, most = 0, stage.config.survival.max_restarts
    while True:
        try:
            return _run_once(stage, base, console, stopping, clock, first=first and attempt == 0)
        except (LostProcessError, WeightSyncError) as error:
            if not isinstance(error, LostProcessError) and not error.is_lost:
                raise
            if attempt == most or daemons.have_died():
                raise
            attempt += 1
            pause = min(_FIRST_PAUSE * 2 ** (attempt - 1), _LONGEST_PAUSE)
            console.print(f"{stage.title}: {in_one_line(error)}", markup=False)
            try:
                with stopping.abandoning():
                    console.print(f"{stage.title}: restart {attempt} of {most} in {pause:g} s")
                    time.sleep(pause)
            except StopRequested as stop:
                return _ended(stage, None, clock, stop.reason)
            stage = open_folder(dataclasses.replace(stage, begin=_begin_again(stage)))


def _begin_again(stage: PreparedStage) -> Begin:
    """Decide where a stage goes on after a failure: at its newest checkpoint."""
    begin = begin_at(stage.config, stage.folder, find_point(_newest(stage.config), stage.folder))
    if begin.state is None:
        return begin
    # time that this start has taken is counted by its clock, in the states saved since too
    return dataclasses.replace(begin, state=dataclasses.replace(begin.state, wall_seconds=_wall_before(stage)))


def _wall_before(stage: PreparedStage) -> float:
    return stage.begin.state.wall_seconds if stage.begin.state is not None else 0.0


def _newest(config: DrivetrainConfig) -> DrivetrainConfig:
    """Drop `--ckpt-step`, which said where this start began."""
    return dataclasses.replace(config, run_folder=dataclasses.replace(config.run_folder, ckpt_step=None))


def _run_once(
    stage: PreparedStage, base: RunState, console: Console, stopping: Stopping, clock: WallClock, *, first: bool
) -> str:
    from drivetrain_launcher.factory import start_engines, start_resources
    from drivetrain_launcher.loop import make_rollouts, train

    config = stage.config
    engines = config.placement.num_engines if stage.uses_engines else 0
    only_rollouts = config.rollout.debug_rollout_only
    workers = 0 if only_rollouts else config.placement.train_world_size
    console.print(
        f"{stage.title}: starting {workers} train workers ({config.backend.name}) and {engines} rollout engines ..."
    )
    state = first_state(base, stage.begin, lineage(config, stage.begin, base))
    state.write(stage.folder.state)
    with ExitStack() as stack:
        try:
            with stopping.abandoning():
                if only_rollouts:
                    generator = stack.enter_context(start_engines(stage))
                else:
                    resources = stack.enter_context(start_resources(stage))
        except StopRequested as stop:
            return _ended(stage, state, clock, stop.reason)
        if only_rollouts:
            display = stack.enter_context(_display(stage, console))
            reason = make_rollouts(
                config, stage.plan, _prompts(stage, state), generator, _store(stage, state), display, stopping
            )
        else:
            assembled = _assembled(stage, state, resources, console, stopping, clock)
            run = dataclasses.replace(stack.enter_context(assembled), is_first=first)
            display = run.display
            reason = train(run)
            state = dataclasses.replace(run.writer.last_state or run.state, metrics_bytes=run.metrics_bytes())
    console.print(display.summary())
    return _ended(stage, state, clock, reason)


def _display(stage: PreparedStage, console: Console) -> "Display":
    from drivetrain_launcher.progress import Display

    return Display(console, title=stage.title, start=stage.plan.start, stop=stage.plan.stop)


def _prompts(stage: PreparedStage, state: RunState) -> "PromptSource":
    from drivetrain_launcher.data import PromptSource

    prompts = PromptSource(stage.dataset, shuffle=stage.config.data.rollout_shuffle, seed=stage.config.train.seed)
    prompts.next_prompts(state.prompts_read)  # what earlier rollouts read
    return prompts


def _store(stage: PreparedStage, state: RunState) -> "RolloutStore":
    from drivetrain_launcher.rollout_store import RolloutStore

    rollout = stage.config.rollout
    return RolloutStore(
        folder=stage.folder.rollouts,
        lineage=state.lineage,
        copy_to=Path(rollout.save_debug_rollout_data) if rollout.save_debug_rollout_data else None,
        replay=Path(rollout.load_debug_rollout_data) if rollout.load_debug_rollout_data else None,
    )


@contextmanager
def _assembled(
    stage: PreparedStage,
    state: RunState,
    resources: "Resources",
    console: Console,
    stopping: Stopping,
    clock: WallClock,
) -> Iterator["Run"]:
    """Put together what the loop drives, and close what was opened for it at the end."""
    from drivetrain_launcher.loop import Divergence, Run

    config, begin, trainer = stage.config, stage.begin, resources.trainer
    for note in trainer.notes:
        console.print(f"{stage.title}: {note}", markup=False)
    if trainer.next_rollout_id != begin.start:
        raise DrivetrainError(
            f"{begin.load} was found to begin at rollout {begin.start}, but the train workers loaded one that begins "
            f"at {trainer.next_rollout_id}; did somebody change it meanwhile? Run the same command again"
        )
    plan = stage.plan
    with (
        open_trackers(config, stage.folder, begin, state) as (tracker, jsonl, run_id),
        _display(stage, console) as display,
    ):
        console.print(f"{stage.title}: all started; {plan.stop - plan.start} rollouts to go")
        yield Run(
            config=config,
            plan=plan,
            folder=stage.folder,
            state=dataclasses.replace(state, layout=trainer.layout, wandb_run_id=run_id),
            divergence=Divergence(config.train, lost=state.lost_steps, since=state.lost_since),
            prompts=_prompts(stage, state),
            evaluation=stage.evaluation,
            tokenizer=stage.tokenizer,
            trainer=trainer,
            engines=resources.engines,
            generator=resources.generator,
            weights=resources.weights,
            rollouts=_store(stage, state),
            writer=CheckpointWriter(stage.folder, trainer, keep=config.run_folder.save_max_to_keep),
            tracker=tracker,
            metrics_bytes=lambda: jsonl.nbytes,
            display=display,
            stopping=stopping,
            clock=clock,
        )


def first_state(base: RunState, begin: Begin, lineage: str) -> RunState:
    """Return the state of a run as it starts: what it is made of now, and where it is."""
    before = begin.state
    if before is None:
        return dataclasses.replace(base, lineage=lineage)
    return dataclasses.replace(
        base,
        lineage=lineage,
        next_rollout_id=begin.start,
        checkpoint=before.checkpoint if begin.in_place else None,
        weight_version=begin.start + 1,
        prompts_read=before.prompts_read,
        metrics_bytes=begin.metrics_bytes,
        lost_steps=before.lost_steps,
        lost_since=before.lost_since,
        wandb_run_id=before.wandb_run_id,
        wall_seconds=before.wall_seconds,
        layout=before.layout,
        last_save=before.last_save if begin.in_place else None,
    )


def _ended(stage: PreparedStage, state: RunState | None, clock: WallClock, reason: str) -> str:
    """Write why this start ended."""
    state = state or RunState.read(stage.folder.state)
    seconds = _wall_before(stage) + clock.elapsed
    dataclasses.replace(state, exit_reason=reason, wall_seconds=seconds).write(stage.folder.state)
    return reason


def plan_rollouts(config: DrivetrainConfig, begin: Begin, *, stop: int, folder: RunFolder) -> "Plan":
    """Decide which rollouts are made, evaluated and saved."""
    from drivetrain_launcher.loop import Plan

    evaluates = config.evaluation.eval_prompt_data is not None
    plan = Plan(
        start=begin.start,
        stop=stop,
        evaluate_every=(config.evaluation.eval_interval or stop) if evaluates else None,
        evaluate_start=False,
        save_every=config.run_folder.save_interval,
    )
    if not evaluates:
        return plan
    if begin.checkpoint is None:
        due = not config.evaluation.skip_eval_before_train
    else:  # the run stopped before the evaluation that follows its last rollout
        due = plan.evaluates_after(begin.start - 1) and not _has_evaluated(folder, begin)
    return dataclasses.replace(plan, evaluate_start=due)


def _has_evaluated(folder: RunFolder, begin: Begin) -> bool:
    try:
        with folder.metrics.open("rb") as file:
            lines = file.read(begin.metrics_bytes).splitlines()
        rows = [json.loads(line) for line in lines[-2:]]  # the last rollout's, and what came after it
        return any(row.get("rollout_id") == begin.start and "eval/reward" in row for row in rows)
    except OSError:
        return False
    except (ValueError, AttributeError) as error:  # no JSON, or no table
        raise DataError(
            f"{folder.metrics}: is damaged ({error}); put the file back that was there, or begin a new run"
        ) from error


@contextmanager
def open_trackers(
    config: DrivetrainConfig, folder: RunFolder, begin: Begin, state: RunState
) -> Iterator[tuple[Tracker, JsonlTracker, str | None]]:
    """Open every place where metrics go, and close them all at the end.

    Yields all together, the one of metrics.jsonl, and the id of the W&B run, None without one.
    """
    jsonl = JsonlTracker(folder.metrics, keep_bytes=begin.metrics_bytes)
    trackers: list[Tracker] = [jsonl]
    run_id = None
    try:
        if config.tracking.use_wandb:
            from drivetrain_infra.tracking.wandb import WandbTracker

            wandb = WandbTracker(
                config.tracking,
                folder.root,
                config_values(config),
                run_id=state.wandb_run_id,
                rows=read_metrics(folder.metrics),
            )
            trackers.append(wandb)
            run_id = wandb.run_id
        yield Trackers(trackers), jsonl, run_id
    finally:
        Trackers(trackers).close()


def _num_rollouts(config: DrivetrainConfig, prompts: int) -> int:
    if config.loop.num_rollout is not None:
        return config.loop.num_rollout
    assert config.loop.num_epoch is not None
    return math.ceil(config.loop.num_epoch * prompts / config.rollout.rollout_batch_size)


def _computes_in_fp32_by_default(config: DrivetrainConfig) -> bool:
    """Say whether nobody chose a precision and this machine, on which Ray will start, has no GPU."""
    import torch

    train = config.train
    chosen = train.bf16 or train.fp16 or train.fp32
    return not chosen and config.placement.ray_address is None and not torch.cuda.is_available()


def _in_fp32(config: DrivetrainConfig) -> DrivetrainConfig:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, fp32=True))


def _absolute(config: DrivetrainConfig) -> DrivetrainConfig:
    """Make every path absolute: train workers and engines may run in another folder than the driver."""
    groups: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        group = getattr(config, field.name)
        if isinstance(group, OptionGroup):
            paths = {
                one.name: os.path.abspath(value)
                for one in options(type(group))
                if one.metavar in ("DIR", "FILE") and (value := getattr(group, one.name)) is not None
            }
            groups[field.name] = dataclasses.replace(group, **paths)
    return dataclasses.replace(config, **groups)


def _resolved(config: DrivetrainConfig, num_rollouts: int) -> DrivetrainConfig:
    """Let the learning rate decay over the whole run unless told otherwise."""
    train = config.train
    if train.lr_decay_style != "constant" and train.lr_decay_iters is None:
        samples = config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt
        steps = num_rollouts * samples // (train.global_batch_size or samples)
        if steps <= train.lr_warmup_iters:
            raise ConfigError(
                f"--lr-decay-style {train.lr_decay_style}: the run has {steps} optimizer steps, no more than its "
                f"--lr-warmup-iters {train.lr_warmup_iters}; lower the warm-up or raise --num-rollout"
            )
        train = dataclasses.replace(train, lr_decay_iters=steps)
    return dataclasses.replace(config, train=train)
