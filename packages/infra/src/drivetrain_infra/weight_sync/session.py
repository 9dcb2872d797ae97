"""The weight update as one session, on the driver: all engines get the trainer's weights under one version, or none.

The same protocol for every transport. Each phase has a deadline, `--update-weight-timeout`:

| phase | train workers: `weight_sender.remote(method, *arguments)` | engines |
|---|---|---|
| connect | `place`; then stage leads: `open_channel`, `join_channel` | `node`, R `join_channels` |
| pause | | `pause(mode)` |
| flush | | `flush_cache()` |
| plan | `begin(bucket_bytes, holders, dtype)` | R `begin(plan)` |
| stream | `broadcast(seconds)` or `write(folder, seconds)` | R `receive(seconds)` or `read(folder, seconds)` |
| verify | | R `verify(checksums)` |
| commit | | R `commit(version)` |
| publish | disk only, rank 0: `discard(folder)` | |
| resume | | `resume()` |

R is a method of the weight receiver: `weight_receiver.remote(method, *arguments)`. `begin`, `broadcast` and `write` are
collective over all train ranks. The disk transport has nothing to connect; the distributed one connects once, and again
when the engines change or an update failed.

When a phase fails, `sync` raises and every engine stays paused: one that has begun the update refuses to serve until a
whole update is committed; one that has not holds its old weights under their old version; one that committed before
another failed to is whole, under the new version. So no engine ever serves new weights under an old version, or a
mixture under any. A later `sync`, of the same version too and with other engines in the list, starts afresh; on every
train worker `abandon` ends the failed export first.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from drivetrain_backend_api import ConfigError
from drivetrain_backend_api.weights import Holders
from drivetrain_infra.config import WeightSyncConfig
from drivetrain_infra.deadline import Deadline
from drivetrain_infra.engines.actor import EngineHandle
from drivetrain_infra.engines.base import PauseMode
from drivetrain_infra.weight_sync.calls import Party, gather
from drivetrain_infra.weight_sync.disk import version_folder
from drivetrain_infra.weight_sync.errors import Phase
from drivetrain_infra.weight_sync.sender import SenderPlace, SentBucket

_ABANDON_SECONDS = 10.0
"""How long a failed update waits for train workers to end their part, beyond the failed phase itself."""


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """What a weight update did.

    Attributes:
        version: that all engines now serve.
        seconds: phase -> how long it took.
        nbytes: of all buckets, counted once however many engines took them.
        buckets: how many.
        engines: names of the engines that took it.
    """

    version: int
    seconds: dict[str, float]
    nbytes: int
    buckets: int
    engines: tuple[str, ...]


class WeightSession:
    """Brings the trainer's weights to the engines, again and again.

    Attributes:
        engines: those to update; change the list between updates when engines come and go.
        version: the last one that was published; 0 before the first.
    """

    def __init__(
        self,
        workers: Sequence[Any],
        engines: Sequence[EngineHandle],
        config: WeightSyncConfig,
        *,
        dtype: str,
        folder: Path,
    ) -> None:
        """Take the parties; nothing is called yet.

        Args:
            workers: handles of all train worker actors, by rank.
            engines: all engines.
            config: transport, bucket size, pause and deadline.
            dtype: name of the torch dtype that the engines compute in, in which floating-point weights are sent.
            folder: where the disk transport writes, unless `--update-weight-disk-dir` says otherwise.
        """
        self._workers = list(workers)
        self.engines = list(engines)
        self.version = 0
        self._config = config
        self._dtype = dtype
        self._folder = Path(config.update_weight_disk_dir or folder).absolute()
        self._connected: tuple[EngineHandle, ...] = ()
        self._updated: tuple[EngineHandle, ...] = ()

    def sync(self, version: int) -> SyncReport:
        """Give all engines the trainer's present weights, under `version`.

        Args:
            version: larger than that of the last update, or the same for engines that are not all those of then;
                rollout i is made with version i + 1.

        Raises:
            WeightSyncError: a phase failed; names phase, train rank, bucket and engine where they are known.
            ConfigError: the version is not larger, or there is no engine.
        """
        engines = tuple(self.engines)
        if version < self.version or self.has_synced(version):
            raise ConfigError(f"weight version {version} must be above {self.version}, the last one published")
        if not engines:
            raise ConfigError("there is no rollout engine to update; leave weight updates out of a run without engines")
        update = _Update(self._workers, engines, self._config)
        try:
            return self._run(update, version)
        except BaseException:
            self._connected = ()
            update.abandon(self._disk_folder(version))
            raise

    def has_synced(self, version: int) -> bool:
        """Say whether all engines, as the list is now, serve this version."""
        return version == self.version and tuple(self.engines) == self._updated

    def _run(self, update: "_Update", version: int) -> SyncReport:
        """Run the protocol, top to bottom."""
        config = self._config
        folder = self._disk_folder(version)
        with update.phase(Phase.CONNECT):
            self._connect(update)
        with update.phase(Phase.PAUSE):
            update.on_engines("pause", PauseMode(config.update_weight_pause))
        with update.phase(Phase.FLUSH):
            update.on_engines("flush_cache")
        with update.phase(Phase.PLAN):
            holders = Holders.STAGE_LEAD if folder is None else Holders.RANK0
            plan = update.on_workers("begin", config.update_weight_buffer_size, holders, self._dtype)[0]
            update.on_receivers("begin", plan)
        with update.phase(Phase.STREAM):
            sent = update.broadcast() if folder is None else update.through(folder)
        with update.phase(Phase.VERIFY):
            update.on_receivers("verify", {one.index: one.checksum for one in sent})
        with update.phase(Phase.COMMIT):
            update.on_receivers("commit", version)
        with update.phase(Phase.PUBLISH):
            self.version, self._updated = version, update.engines
            if folder is not None:
                update.on_worker(0, "discard", folder)
        with update.phase(Phase.RESUME):
            update.on_engines("resume")
        return SyncReport(
            version=version,
            seconds=update.seconds,
            nbytes=sum(one.nbytes for one in sent),
            buckets=len(sent),
            engines=tuple(one.name for one in update.engines),
        )

    def _disk_folder(self, version: int) -> Path | None:
        return version_folder(self._folder, version) if self._config.update_weight_transport == "disk" else None

    def _connect(self, update: "_Update") -> None:
        """Build the broadcast groups, when there are none for these engines."""
        if self._config.update_weight_transport == "disk" or self._connected == update.engines:
            return
        places: list[SenderPlace] = update.on_workers("place")
        nodes = update.on_engines("node")
        leads = sorted((one for one in places if one.leads_stage is not None), key=lambda one: one.leads_stage or 0)
        one_node = len({one.node.node_id for one in leads} | {one.node_id for one in nodes}) == 1
        update.connect([one.rank for one in leads], one_node)
        self._connected = update.engines


class _Update:
    """One run of the protocol: who takes part, the phase it is in, and the seconds that each phase took."""

    def __init__(self, workers: Sequence[Any], engines: tuple[EngineHandle, ...], config: WeightSyncConfig) -> None:
        self.engines = engines
        self.seconds: dict[str, float] = {}
        self._workers = workers
        self._timeout = config.update_weight_timeout
        self._phase = Phase.CONNECT
        self._deadline = Deadline(self._timeout)

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Run the block as a phase, with a deadline of its own."""
        self._phase, self._deadline = phase, Deadline(self._timeout)
        began = time.monotonic()
        yield
        self.seconds[phase.value] = time.monotonic() - began

    def on_engines(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every engine actor; results in the order of the engines."""
        return self._gather(self._engine_calls(lambda actor: getattr(actor, method).remote(*arguments)))

    def on_receivers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every engine's weight receiver."""
        return self._gather(self._engine_calls(lambda actor: actor.weight_receiver.remote(method, *arguments)))

    def on_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every train worker's weight sender; results by rank."""
        return self._gather(self._worker_calls(method, *arguments))

    def on_worker(self, rank: int, method: str, *arguments: Any) -> Any:
        """Call a method of one train worker's weight sender."""
        call = self._workers[rank].weight_sender.remote(method, *arguments)
        return self._gather({Party(rank=rank): call})[0]

    def connect(self, leads: Sequence[int], one_node: bool) -> None:
        """Let stage leads and engines meet; leads are told first, since they choose the ports."""
        addresses = [
            self.on_worker(rank, "open_channel", len(self.engines), one_node, self._remote_seconds) for rank in leads
        ]
        seconds = self._remote_seconds
        calls = {Party(rank=rank): self._workers[rank].weight_sender.remote("join_channel", seconds) for rank in leads}
        for member, engine in enumerate(self.engines, start=1):
            calls[Party(engine=engine.name)] = engine.actor.weight_receiver.remote(
                "join_channels", addresses, member, seconds
            )
        self._gather(calls)

    def broadcast(self) -> list[SentBucket]:
        """Stream from stage leads to engines, all at once."""
        seconds = self._remote_seconds
        calls = self._worker_calls("broadcast", seconds)
        calls |= self._engine_calls(lambda actor: actor.weight_receiver.remote("receive", seconds))
        return [bucket for sent in self._gather(calls)[: len(self._workers)] for bucket in sent]

    def through(self, folder: Path) -> list[SentBucket]:
        """Stream through a folder: all of it is written before any of it is read."""
        sent = self.on_workers("write", folder, self._remote_seconds)
        self.on_receivers("read", folder, self._remote_seconds)
        return [bucket for buckets in sent for bucket in buckets]

    def abandon(self, folder: Path | None) -> None:
        """End a failed update on the train workers, and let engines leave; waits a little, raises nothing."""
        calls = list(self._worker_calls("abandon").values())
        if folder is not None:
            calls.append(self._workers[0].weight_sender.remote("discard", folder))
        for one in self.engines:
            one.actor.weight_receiver.remote("leave_channels")
        with suppress(RayError):
            ray.wait(calls, num_returns=len(calls), timeout=_ABANDON_SECONDS)

    @property
    def _remote_seconds(self) -> float:
        """What others may take: a little less, so that they can still say what went wrong."""
        left = self._deadline.left
        return left - min(1.0, 0.1 * left)

    def _engine_calls(self, call: Callable[[Any], Any]) -> dict[Party, Any]:
        return {Party(engine=one.name): call(one.actor) for one in self.engines}

    def _worker_calls(self, method: str, *arguments: Any) -> dict[Party, Any]:
        return {
            Party(rank=rank): worker.weight_sender.remote(method, *arguments)
            for rank, worker in enumerate(self._workers)
        }

    def _gather(self, calls: dict[Party, Any]) -> list[Any]:
        results = gather(calls, phase=self._phase, deadline=self._deadline)
        return [results[one] for one in calls]
