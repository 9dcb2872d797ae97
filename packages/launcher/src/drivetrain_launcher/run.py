"""A run from the request to its last checkpoint: recipe, checks, data, Ray, warm-up stage, main stage."""

import dataclasses
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.console import Console

from drivetrain_backend_api import ConfigError, DataError, DiscoveryError, DrivetrainError, OptionGroup, options
from drivetrain_backend_api.errors import in_one_line
from drivetrain_infra.ray_runtime import refuse_if_running
from drivetrain_infra.run_folder import RunFolder
from drivetrain_infra.tracking.base import Tracker, Trackers
from drivetrain_infra.tracking.jsonl import JsonlTracker
from drivetrain_launcher.config import DrivetrainConfig
from drivetrain_launcher.preflight import check_lengths, check_vocabulary, preflight, resolve_load, unwritable
from drivetrain_launcher.recipes import arithmetic
from drivetrain_launcher.rewards import Reward, load_reward
from drivetrain_launcher.sources import Request, Stage, build_config, config_values

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from drivetrain_launcher.data import Prompt, PromptDataset
    from drivetrain_launcher.loop import Plan

_MAKERS = {"arithmetic": arithmetic}
"""What a recipe's `make` may name."""

_WARMUP = "warmup"
"""Folder of the warm-up stage inside the run's."""


@dataclass(frozen=True, kw_only=True)
class PreparedStage:
    """One stage of a run, checked, with its data read; nothing is started yet.

    Attributes:
        evaluation: held-out prompts, empty for none.
        reward: None where nothing is generated, neither in rollouts nor in evaluations.
        stop: the rollout id after the last.
    """

    title: str
    config: DrivetrainConfig
    folder: RunFolder
    tokenizer: "PreTrainedTokenizerBase"
    dataset: "PromptDataset"
    evaluation: "Sequence[Prompt]"
    reward: Reward | None
    stop: int


def run_train(request: Request) -> int:
    """Run what was asked for. Returns the exit code.

    Raises:
        ConfigError: it cannot work, found before anything starts.
        DrivetrainError: it failed while running; what was durable is still there.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    console = Console(soft_wrap=True)
    folder = RunFolder(request.save.absolute())
    folder.refuse_if_used()
    if request.warmup is not None and (folder.root / _WARMUP).exists():
        raise ConfigError(
            f"--save {folder.root}: holds a run that was interrupted; choose another folder, or remove it"
        )
    refuse_if_running(folder.root)
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
    if request.dry_run:
        console.print("everything that can be checked is right; nothing was started")
        return 0
    from drivetrain_launcher.factory import start_cluster

    console.print("starting Ray ...")
    with start_cluster([stage.config.placement for stage in stages], folder=folder.root), too_late_to_refuse():
        for stage in stages:  # not before this run holds the folder's lock
            stage.folder.create(config_values(stage.config))
        for stage, following in zip(stages, [*stages[1:], None]):
            checkpoint = run_stage(stage, console)
            if following is not None:
                model = folder.root / f"{stage.folder.root.name}_model"
                stage.config.backend.load_export_checkpoint()(checkpoint, Path(stage.config.train.hf_checkpoint), model)
                console.print(f"{stage.title} ended; {following.title} starts from {model}")
    console.print(f"metrics: {folder.metrics}")
    console.print(f"to use the model: drivetrain export {folder.root} --out HF_DIR")
    return 0


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
    if request.warmup is None:
        return [prepare_stage(config, folder, console, title=config.algorithm.name)]
    first = RunFolder(folder.root / _WARMUP)
    first_values = {**values, **maker.warmup_options(made)} if maker else {}
    warmup = build_config(request, stage=Stage.WARMUP, made=first_values, overrides={"save": str(first.root)})
    warmed_up = {"hf_checkpoint": str(folder.root / f"{_WARMUP}_model")}
    return [
        prepare_stage(warmup, first, console, title="warm-up"),
        prepare_stage(
            config,
            folder,
            console,
            title=config.algorithm.name,
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
    for note in preflight(config):
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


def run_stage(stage: PreparedStage, console: Console) -> Path:
    """Train one stage on a running cluster; returns its last checkpoint."""
    from drivetrain_launcher.data import PromptSource
    from drivetrain_launcher.factory import start_resources
    from drivetrain_launcher.loop import Run, train
    from drivetrain_launcher.progress import Display

    config = stage.config
    engines = config.placement.num_engines if stage.reward else 0
    console.print(
        f"{stage.title}: starting {config.placement.train_world_size} train workers ({config.backend.name}) and "
        f"{engines} rollout engines ..."
    )
    prompts = PromptSource(stage.dataset, shuffle=config.data.rollout_shuffle, seed=config.train.seed)
    with start_resources(stage) as resources:
        for note in resources.trainer.notes:
            console.print(f"{stage.title}: {note}", markup=False)
        plan = plan_rollouts(config, start=resources.trainer.next_rollout_id, stop=stage.stop)
        prompts.next_prompts(plan.start * config.rollout.rollout_batch_size)  # what earlier rollouts read
        with (
            open_trackers(config, stage.folder) as tracker,
            Display(console, title=stage.title, start=plan.start, stop=plan.stop) as display,
        ):
            console.print(f"{stage.title}: all started; {plan.stop - plan.start} rollouts to go")
            train(
                Run(
                    config=config,
                    plan=plan,
                    folder=stage.folder,
                    prompts=prompts,
                    evaluation=stage.evaluation,
                    tokenizer=stage.tokenizer,
                    trainer=resources.trainer,
                    generator=resources.generator,
                    weights=resources.weights,
                    tracker=tracker,
                    display=display,
                )
            )
    console.print(display.summary())
    return stage.folder.latest()


def plan_rollouts(config: DrivetrainConfig, *, start: int, stop: int) -> "Plan":
    """Decide which rollouts are made, evaluated and saved.

    Raises:
        ConfigError: the loaded weights have had them all.
    """
    from drivetrain_launcher.loop import Plan

    _require_rollouts(config, start, stop)
    evaluates = config.evaluation.eval_prompt_data is not None
    return Plan(
        start=start,
        stop=stop,
        evaluate_every=(config.evaluation.eval_interval or stop) if evaluates else None,
        evaluate_first=evaluates and not config.evaluation.skip_eval_before_train,
        save_every=config.run_folder.save_interval,
    )


def _require_rollouts(config: DrivetrainConfig, start: int, stop: int) -> None:
    if start >= stop:
        raise ConfigError(
            f"--load {config.train.load} was trained on {start} rollouts already, and --num-rollout (or --num-epoch) "
            f"ends the run at {stop}; raise it above {start}"
        )


@contextmanager
def open_trackers(config: DrivetrainConfig, folder: RunFolder) -> Iterator[Tracker]:
    """Open every place where metrics go, and close them all at the end."""
    trackers: list[Tracker] = [JsonlTracker(folder.metrics)]
    if config.tracking.use_wandb:
        from drivetrain_infra.tracking.wandb import WandbTracker

        trackers.append(WandbTracker(config.tracking, folder.root, config_values(config)))
    together = Trackers(trackers)
    try:
        yield together
    finally:
        together.close()


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
                one.name: str(Path(value).absolute())
                for one in options(type(group))
                if one.metavar in ("DIR", "FILE") and (value := getattr(group, one.name)) is not None
            }
            groups[field.name] = dataclasses.replace(group, **paths)
    return dataclasses.replace(config, **groups)


def _resolved(config: DrivetrainConfig, num_rollouts: int) -> DrivetrainConfig:
    """Resolve `--load` to a folder, and let the learning rate decay over the whole run unless told otherwise."""
    train = config.train
    if train.load is not None:
        loaded = resolve_load(config.backend, train.load)
        _require_rollouts(config, loaded.rollouts, num_rollouts)
        train = dataclasses.replace(train, load=str(loaded.folder))
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
