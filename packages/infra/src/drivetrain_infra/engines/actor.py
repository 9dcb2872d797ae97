"""The process that hosts one rollout engine: a plain class for `ray.remote`, and the call that starts several.

Keeps the engine's contract: one call at a time, except that a pause may abort a generation. Knows no train backend and
no reward.
"""

import dataclasses
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from drivetrain_backend_api import IllegalStateError, load_implementation, load_spec
from drivetrain_infra.calls import gather
from drivetrain_infra.engines.base import (
    ROLLOUT_ENGINES,
    EngineSettings,
    GenerateRequest,
    Generation,
    PauseMode,
    RolloutEngine,
)
from drivetrain_infra.placement import Slot
from drivetrain_infra.ray_runtime import NodeAddress, this_node
from drivetrain_infra.weight_sync.receiver import WeightReceiver

_CONCURRENCY_GROUPS = {"serve": 1, "weights": 1, "control": 2, "health": 1}
"""Threads of the actor by what they do: a pause (and a second, harder one) and a health check get through always."""


@dataclass(frozen=True, kw_only=True)
class EngineHealth:
    """What an engine says of itself, also while it works.

    Attributes:
        weight_version: of the last committed update; 0 before the first.
        paused: it refuses to generate.
        updating: it is between the begin and the commit of a weight update.
        busy: a call runs in it.
    """

    name: str
    pid: int
    weight_version: int
    paused: bool
    updating: bool
    busy: bool


@dataclass(frozen=True, kw_only=True)
class EngineHandle:
    """A running engine actor, as the driver knows it."""

    name: str
    actor: Any


class EngineActor:
    """Hosts one rollout engine. It ends with the driver that owns it: Ray sees to that."""

    def __init__(self, name: str, engine: str, settings: EngineSettings, num_threads: int | None = None) -> None:
        """Find the engine; `start` loads it.

        Args:
            name: for messages.
            engine: name of its `EngineSpec`.
            settings: what it is constructed with.
            num_threads: torch threads of this process; None leaves torch's own choice.

        Raises:
            DiscoveryError: there is no such engine, or it cannot be imported.
        """
        if num_threads is not None:
            import torch

            torch.set_num_threads(num_threads)
        self._name = name
        engine_class = load_implementation(ROLLOUT_ENGINES, load_spec(ROLLOUT_ENGINES, engine))
        self._engine: RolloutEngine = engine_class(settings)
        self._receiver = WeightReceiver(self._engine)
        self._one_call = threading.Lock()
        self._generating = threading.Event()
        self._paused = threading.Event()

    @ray.method(concurrency_group="weights")
    def start(self) -> None:
        """Load the engine's model; it serves from then on, under weight version 0."""
        with self._one_call:
            self._engine.start()

    @ray.method(concurrency_group="serve")
    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Generate for all requests, results in their order.

        Raises:
            IllegalStateError: the engine is paused.
        """
        self._require_serving()
        with self._one_call:
            self._require_serving()
            self._generating.set()
            try:
                return self._engine.generate(requests)
            finally:
                self._generating.clear()

    @ray.method(concurrency_group="control")
    def pause(self, mode: PauseMode) -> None:
        """Refuse to generate from now on; returns once what runs has ended, by itself or aborted, as `mode` says."""
        self._paused.set()
        if mode is PauseMode.ABORT and self._generating.is_set():
            self._engine.pause(mode)
        with self._one_call:
            self._engine.pause(mode)

    @ray.method(concurrency_group="weights")
    def resume(self) -> None:
        """Serve again.

        Raises:
            IllegalStateError: a weight update is open, so that the weights may be a mixture.
        """
        with self._one_call:
            if self._receiver.updating:
                raise IllegalStateError(
                    f"resume() is illegal while engine {self._name} is between the begin and the commit of a weight "
                    "update; it needs a whole weight update"
                )
            self._engine.resume()
            self._paused.clear()

    @ray.method(concurrency_group="weights")
    def flush_cache(self) -> None:
        """Forget everything computed with the present weights."""
        with self._one_call:
            self._engine.flush_cache()

    @ray.method(concurrency_group="weights")
    def weight_receiver(self, method: str, *arguments: Any) -> Any:
        """Call the receiving side of a weight update; see `weight_sync.session` for who calls what."""
        with self._one_call:
            return getattr(self._receiver, method)(*arguments)

    @ray.method(concurrency_group="health")
    def weight_version(self) -> int:
        """Return the version of the last committed weight update; 0 before the first."""
        return self._engine.weight_version

    @ray.method(concurrency_group="health")
    def node(self) -> NodeAddress:
        """Say where this engine runs."""
        return this_node()

    @ray.method(concurrency_group="health")
    def health(self) -> EngineHealth:
        """Answer at once, whatever the engine does."""
        return EngineHealth(
            name=self._name,
            pid=os.getpid(),
            weight_version=self._engine.weight_version,
            paused=self._paused.is_set(),
            updating=self._receiver.updating,
            busy=self._one_call.locked(),
        )

    def _require_serving(self) -> None:
        if self._paused.is_set():
            raise IllegalStateError(
                f"generate() is illegal while engine {self._name} is paused"
                f"{' in the middle of a weight update' if self._receiver.updating else ''}; it needs a weight update "
                "that ends well, or resume()"
            )


def launch_engines(
    engine: str,
    settings: EngineSettings,
    slots: Sequence[Slot],
    *,
    environment: Mapping[str, str],
    num_threads: int | None,
    seconds: float,
) -> list[EngineHandle]:
    """Start one engine in each slot and wait until all serve.

    Args:
        engine: name of the `EngineSpec`.
        settings: what each is constructed with; the device is the slot's.
        slots: places, by engine.
        environment: variables that their processes start with.
        num_threads: torch threads of each, or None.
        seconds: deadline for all of them together.

    Raises:
        DrivetrainError: one failed, died or was late; names it, and no engine is left.
    """
    # Ray's own annotations lack the option
    remote = ray.remote(concurrency_groups=_CONCURRENCY_GROUPS)(EngineActor)  # type: ignore[call-overload]
    handles = []
    for slot in slots:
        name = f"engine-{slot.index}"
        placed = dataclasses.replace(settings, device=slot.device)
        options = {**slot.actor_options, "runtime_env": {"env_vars": dict(environment)}}
        actor = remote.options(**options).remote(name, engine, placed, None if slot.gpu_ids else num_threads)
        handles.append(EngineHandle(name=name, actor=actor))
    try:
        gather(
            {one.name: one.actor.start.remote() for one in handles},
            what="starting the rollout engines",
            seconds=seconds,
            flag="--start-timeout",
        )
    except BaseException:
        for one in handles:
            ray.kill(one.actor)
        raise
    return handles
