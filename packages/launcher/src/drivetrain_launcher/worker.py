"""The train worker: one process of a train backend, driven only through the contract.

Runs as a Ray actor. Which backend it is comes in as a name; nothing here knows more of it than `TrainBackend`.
"""

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain_backend_api import ALGORITHMS, TRAIN_BACKENDS, OptionGroup, TrainConfig, load_implementation, load_spec
from drivetrain_backend_api.backend import SaveHandle, TrainBackend
from drivetrain_backend_api.packing import Batching, RolloutShard
from drivetrain_backend_api.parallel import Role
from drivetrain_infra.process_groups import WorkerPlace
from drivetrain_infra.ray_runtime import LOOPBACK, this_node
from drivetrain_infra.weight_sync.distributed import open_store
from drivetrain_infra.weight_sync.sender import WeightSender
from drivetrain_launcher.stopping import SIGNALS

_LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """What every train worker of a group is started with."""

    backend: str
    algorithm: str
    train: TrainConfig
    algorithm_options: OptionGroup
    role: Role
    world_size: int
    cpu_threads: int


@dataclass(frozen=True, kw_only=True)
class SetupResult:
    """What a worker knows once its backend is ready.

    Attributes:
        notes: what the backend logged meanwhile.
    """

    next_rollout_id: int
    place: WorkerPlace
    batching: Batching
    notes: tuple[str, ...]


class _Notes(logging.Handler):
    """Collects what a logger says."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def _notes_of(backend: TrainBackend) -> Iterator[list[str]]:
    """Collect what a backend's package logs inside the block, from INFO on."""
    logger = logging.getLogger(type(backend).__module__.partition(".")[0])
    notes, level = _Notes(), logger.level
    logger.addHandler(notes)
    logger.setLevel(logging.INFO)
    try:
        yield notes.lines
    finally:
        logger.setLevel(level)
        logger.removeHandler(notes)


class TrainWorker:
    """Hosts one rank of a train backend."""

    def __init__(self, settings: WorkerSettings, rank: int, device: str) -> None:
        """Construct the backend; `setup` does the work.

        Args:
            settings: equal on all ranks.
            rank: from 0.
            device: torch device of this process.
        """
        import torch

        self._signal: str | None = None
        self._keep_signals()
        self._settings = settings
        self._rank = rank
        self._store: Any = None
        if device == "cpu":
            torch.set_num_threads(settings.cpu_threads)
        backend_class: type[TrainBackend] = load_implementation(
            TRAIN_BACKENDS, load_spec(TRAIN_BACKENDS, settings.backend)
        )
        self._backend = backend_class(settings.train, settings.role, rank, settings.world_size, device)
        algorithm_class = load_implementation(ALGORITHMS, load_spec(ALGORITHMS, settings.algorithm))
        self._algorithm = algorithm_class(settings.algorithm_options)
        self._sender: WeightSender | None = None
        self._saving: SaveHandle | None = None

    def open_rendezvous(self) -> tuple[str, int]:
        """Open the group's rendezvous store here, on rank 0.

        Returns: host and port; the port is bound by the system, never guessed, and on this node's address only.
        """
        host = this_node().host
        self._store = open_store(host, 60 * self._settings.train.distributed_timeout_minutes)
        return host, int(self._store.port)

    def setup(self, master_address: str, master_port: int) -> SetupResult:
        """Set the backend up; collective over all workers."""
        os.environ.update(
            MASTER_ADDR=master_address,
            MASTER_PORT=str(master_port),
            RANK=str(self._rank),
            WORLD_SIZE=str(self._settings.world_size),
            # rank 0's store exists already: torch's own agents say so with these two
            TORCHELASTIC_USE_AGENT_STORE="True",
            TORCHELASTIC_RESTART_COUNT="0",
        )
        if master_address == LOOPBACK:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK_INTERFACE)
        with _notes_of(self._backend) as notes:
            next_rollout_id = self._backend.setup(
                with_ref=self._algorithm.needs_ref_log_probs, with_opd_teacher=self._algorithm.needs_teacher_log_probs
            )
        self._sender = WeightSender(self._backend)
        return SetupResult(
            next_rollout_id=next_rollout_id,
            place=WorkerPlace(layout=self._backend.parallel, node_id=this_node().node_id),
            batching=self._backend.batching,
            notes=tuple(notes),
        )

    def train(self, rollout_id: int, shard: RolloutShard) -> list[dict[str, float]]:
        """Train on this rank's shard of a rollout; collective. Returns the metrics of each optimizer step."""
        return self._backend.train(rollout_id, self._backend.preprocess_rollout_data(shard), self._algorithm)

    def begin_save(self, folder: Path) -> None:
        """Begin to write a checkpoint into the folder; collective."""
        self._saving = self._backend.save_checkpoint(folder)

    def poll_save(self) -> bool:
        """Say whether all of the checkpoint is written; collective. Raises what went wrong with it."""
        return self._saving is None or self._saving.poll()

    def finish_save(self) -> None:
        """Wait until all of the checkpoint is written; collective. Raises what went wrong with it."""
        if self._saving is not None:
            self._saving.finalize()

    def stop_signal(self) -> str | None:
        """Name the signal that this process was sent, None as long as there was none."""
        return self._signal

    def weight_sender(self, method: str, *arguments: Any) -> Any:
        """Call the sending side of a weight update."""
        return getattr(self._sender, method)(*arguments)

    def close(self) -> None:
        """End the backend."""
        self._backend.close()

    def _keep_signals(self) -> None:
        """Keep a first signal for `stop_signal`, so that the run saves before this process ends; a second ends it."""

        def keep(number: int, frame: object) -> None:
            self._signal = signal.Signals(number).name
            for one in SIGNALS:
                signal.signal(one, signal.SIG_DFL)

        for one in SIGNALS:
            signal.signal(one, keep)
