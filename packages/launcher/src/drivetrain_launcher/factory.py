"""From a prepared stage to running processes: Ray, places, train workers, engines, the weight session.

Everything started here is ended here, whatever happens in between.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch

from drivetrain_backend_api import DrivetrainError, merge_environments
from drivetrain_backend_api.parallel import Role
from drivetrain_infra.config import PlacementConfig
from drivetrain_infra.engines.actor import EngineHandle, launch_engines
from drivetrain_infra.engines.base import EngineSettings
from drivetrain_infra.engines.positions import usable_positions
from drivetrain_infra.placement import Placement, Slot, create_placement_groups, logical_cpus
from drivetrain_infra.ray_runtime import ray_session
from drivetrain_infra.weight_sync.session import WeightSession
from drivetrain_launcher.config import DrivetrainConfig
from drivetrain_launcher.custom_generate import load_custom_generate
from drivetrain_launcher.engine_pool import EnginePool
from drivetrain_launcher.last_lines import print_stuck
from drivetrain_launcher.response_checks import ResponseLimits
from drivetrain_launcher.rollout import Generator
from drivetrain_launcher.train_group import TrainGroup, setup_train_group
from drivetrain_launcher.worker import TrainWorker, WorkerSettings

if TYPE_CHECKING:
    from drivetrain_launcher.run import PreparedStage

_CLOSE_SECONDS = 30.0
"""How long train workers may take to end by themselves before they are killed."""

_ENGINE_DTYPE = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What a stage runs with; engines, generator and weights are None where nothing is generated."""

    trainer: TrainGroup
    engines: EnginePool | None
    generator: Generator | None
    weights: WeightSession | None


@contextmanager
def start_cluster(placements: Sequence[PlacementConfig], *, folder: Path) -> Iterator[None]:
    """Start Ray here, large enough for every stage, or join the cluster that --ray-address names."""
    with ray_session(
        folder,
        address=placements[0].ray_address,
        num_cpus=max(logical_cpus(one) for one in placements),
        on_stuck=partial(print_stuck, folder),
    ):
        yield


@contextmanager
def start_resources(stage: "PreparedStage") -> Iterator[Resources]:
    """Start all processes of a stage, wait until they are ready, and end them on the way out."""
    config = stage.config
    with ExitStack() as stack:
        placement = create_placement_groups(config.placement, num_engines=None if stage.uses_engines else 0)
        stack.callback(placement.remove)
        _check_devices(config, placement)
        workers = [_start_worker(stage, slot, stack) for slot in placement.train]
        engines = _start_engines(config, placement.engines, stack)
        trainer = setup_train_group(
            workers, start_seconds=config.placement.start_timeout, seconds=config.survival.train_timeout
        )
        pool = generator = weights = None
        if stage.uses_engines:
            pool = _pool(stage, engines, placement.engines, stack)
            generator = _generator(stage, pool)
            weights = WeightSession(
                workers,
                engines,
                config.weight_sync,
                dtype=_ENGINE_DTYPE[config.train.precision],
                folder=stage.folder.root / "weights",
            )
        yield Resources(trainer=trainer, engines=pool, generator=generator, weights=weights)
        # ends the process groups on all ranks together; killing the processes one by one would look like a failure
        ray.wait([one.close.remote() for one in workers], num_returns=len(workers), timeout=_CLOSE_SECONDS)


@contextmanager
def start_engines(stage: "PreparedStage") -> Iterator[Generator]:
    """Start the rollout engines of a stage alone, with the weights of `--hf-checkpoint`; end them on the way out."""
    config = stage.config
    with ExitStack() as stack:
        placement = create_placement_groups(config.placement)
        stack.callback(placement.remove)
        _check_devices(config, placement)
        engines = _start_engines(config, placement.engines, stack)
        yield _generator(stage, _pool(stage, engines, placement.engines, stack), is_synced=False)


def _check_devices(config: DrivetrainConfig, placement: Placement) -> None:
    """Refuse devices that the train backend or the engine does not claim to run on."""
    for slots, what, devices in (
        (placement.train, f"train backend {config.backend.name}", config.backend.capabilities.devices),
        (placement.engines, f"rollout engine {config.engine.name}", config.engine.devices),
    ):
        for device in sorted({slot.device.partition(":")[0] for slot in slots} - set(devices)):
            raise DrivetrainError(f"{what} runs on {', '.join(devices)}, but the cluster places it on {device}")


def worker_environment(config: DrivetrainConfig) -> dict[str, str]:
    """Return the variables that must exist before a train worker starts."""
    return merge_environments(
        {
            f"train backend {config.backend.name}": config.backend.worker_env(config.train),
            f"algorithm {config.algorithm.name}": config.algorithm.worker_env(config.algorithm_options),
            "the launcher": _thread_variables(config),
        }
    )


def engine_environment(config: DrivetrainConfig) -> dict[str, str]:
    """Return the variables that must exist before a rollout engine starts."""
    return merge_environments(
        {
            f"rollout engine {config.engine.name}": config.engine.worker_env(config.engine_options),
            "the launcher": _thread_variables(config),
        }
    )


def _thread_variables(config: DrivetrainConfig) -> dict[str, str]:
    return {} if torch.cuda.is_available() else {"OMP_NUM_THREADS": str(config.placement.cpu_threads_per_rank)}


def _start_worker(stage: "PreparedStage", slot: Slot, stack: ExitStack) -> Any:
    config = stage.config
    settings = WorkerSettings(
        backend=config.backend.name,
        algorithm=config.algorithm.name,
        train=stage.train,
        algorithm_options=config.algorithm_options,
        role=Role.POLICY,
        world_size=config.placement.train_world_size,
        cpu_threads=config.placement.cpu_threads_per_rank,
    )
    options = {**slot.actor_options, "runtime_env": {"env_vars": worker_environment(config)}}
    # Ray's own annotations give a handle, or the class itself
    worker: Any = ray.remote(TrainWorker).options(**options).remote(settings, slot.index, slot.device)
    stack.callback(ray.kill, worker)
    return worker


def _start_engines(config: DrivetrainConfig, slots: Sequence[Slot], stack: ExitStack) -> list[EngineHandle]:
    settings = EngineSettings(
        model=config.train.hf_checkpoint,
        device="set for each engine",
        dtype=_ENGINE_DTYPE[config.train.precision],
        trust_remote_code=config.train.trust_remote_code,
        options=config.engine_options,
    )
    engines = launch_engines(
        config.engine.name,
        settings,
        slots,
        environment=engine_environment(config),
        num_threads=config.placement.cpu_threads_per_rank,
        seconds=config.placement.start_timeout,
    )
    for one in engines:
        stack.callback(ray.kill, one.actor)
    return engines


def _pool(
    stage: "PreparedStage", engines: Sequence[EngineHandle], slots: Sequence[Slot], stack: ExitStack
) -> EnginePool:
    running = list(engines)

    def start_again(number: int) -> EngineHandle:
        ray.kill(running[number].actor)  # it may hang, and gives its place back only when it is gone
        running[number] = _start_engines(stage.config, [slots[number]], stack)[0]
        return running[number]

    return EnginePool(
        engines,
        seconds=stage.config.rollout.rollout_timeout,
        vocab_size=response_limits(stage.config).vocab_size,
        start_again=start_again,
        most_restarts=stage.config.survival.max_engine_restarts,
    )


def _generator(stage: "PreparedStage", pool: EnginePool, *, is_synced: bool = True) -> Generator:
    rollout = stage.config.rollout
    custom = rollout.custom_generate
    assert stage.reward is not None
    return Generator(
        call=pool.generate,
        tokenizer=stage.tokenizer,
        reward=stage.reward,
        custom_generate=(custom, load_custom_generate(custom)) if custom else None,
        limits=response_limits(stage.config),
        seed=stage.config.train.seed,
        seconds=rollout.rollout_timeout,
        is_synced=is_synced,
        save=stage.folder.root,
    )


def response_limits(config: DrivetrainConfig) -> ResponseLimits:
    """Return what the model that a stage starts from, and its micro-batches, take."""
    from transformers import AutoConfig

    train = config.train
    model = AutoConfig.from_pretrained(train.hf_checkpoint, trust_remote_code=train.trust_remote_code)
    text = model.get_text_config()
    return ResponseLimits(
        vocab_size=getattr(text, "vocab_size", None),
        max_positions=usable_positions(model),
        max_tokens=train.micro_batch_tokens,
    )
