"""The train workers as the loop sees them: one object whose calls go to every rank at once."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from drivetrain_backend_api import DrivetrainError
from drivetrain_backend_api.packing import Batching, RolloutShard
from drivetrain_infra.calls import gather
from drivetrain_infra.process_groups import ProcessGroupManager

TRAIN_RANK = "train rank"
"""What messages call a train worker, before its number."""

_FLAG = "--train-timeout"

_SIGNAL_SECONDS = 2.0
"""How long to wait for the answer of workers that have nothing else to do."""


@dataclass(frozen=True, kw_only=True)
class TrainGroup:
    """All ranks of one train backend, set up.

    Attributes:
        workers: actor handles by rank.
        ranks: who is where.
        batching: how the backend wants its micro-batches.
        next_rollout_id: how many rollouts the loaded weights were trained on.
        notes: what the backend of rank 0 logged while it was set up.
        seconds: deadline of training on one rollout, and of one save.
    """

    workers: Sequence[Any]
    ranks: ProcessGroupManager
    batching: Batching
    next_rollout_id: int
    notes: tuple[str, ...]
    seconds: float

    @property
    def layout(self) -> dict[str, int]:
        """How the ranks share model and data, for the record."""
        return self.ranks.sizes

    def train(self, rollout_id: int, shards: Sequence[RolloutShard]) -> list[dict[str, float]]:
        """Train on a rollout. Each data-parallel shard is put into the object store once; its ranks fetch it."""
        stored = [ray.put(shard) for shard in shards]
        results = gather(
            {
                f"{TRAIN_RANK} {rank}": worker.train.remote(rollout_id, stored[self.ranks.dp_rank(rank)])
                for rank, worker in enumerate(self.workers)
            },
            what=f"training on rollout {rollout_id}",
            seconds=self.seconds,
            flag=_FLAG,
        )
        steps: list[dict[str, float]] = results[f"{TRAIN_RANK} 0"]
        return steps

    def begin_save(self, folder: Path) -> None:
        """Begin to write a checkpoint into the folder, all ranks together; see `CheckpointWriter`."""
        self._gather("begin_save", folder, what=f"saving {folder.name}")

    def poll_save(self) -> bool:
        """Say whether all of it is written."""
        return all(self._gather("poll_save", what="saving in the background"))

    def finish_save(self) -> None:
        """Wait until all of it is written."""
        self._gather("finish_save", what="saving in the background")

    def stop_signal(self) -> str | None:
        """Say which rank was sent which signal, None where none was or they are too busy to say."""
        calls = {worker.stop_signal.remote(): rank for rank, worker in enumerate(self.workers)}
        ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=_SIGNAL_SECONDS)
        for one in ready:
            with suppress(RayError):  # that a worker is gone is said by whoever needs it
                if name := ray.get(one):
                    return f"{name} to {TRAIN_RANK} {calls[one]}"
        return None

    def _gather(self, method: str, *arguments: Any, what: str) -> list[Any]:
        names = [f"{TRAIN_RANK} {rank}" for rank in range(len(self.workers))]
        calls = {
            name: getattr(worker, method).remote(*arguments) for name, worker in zip(names, self.workers, strict=True)
        }
        results = gather(calls, what=what, seconds=self.seconds, flag=_FLAG)
        return [results[name] for name in names]


def setup_train_group(workers: Sequence[Any], *, start_seconds: float, seconds: float) -> TrainGroup:
    """Rendezvous on a port bound by rank 0 and set every rank up.

    Args:
        workers: actor handles by rank.
        start_seconds: deadline of starting the processes.
        seconds: deadline of setting up, and later of each rollout and save.

    Raises:
        DrivetrainError: a rank failed, or the ranks disagree on the next rollout id.
    """
    names = [f"{TRAIN_RANK} {rank}" for rank in range(len(workers))]
    opened = gather(
        {names[0]: workers[0].open_rendezvous.remote()},
        what="starting the train workers",
        seconds=start_seconds,
        flag="--start-timeout",
    )
    host, port = opened[names[0]]
    results = gather(
        {name: worker.setup.remote(host, port) for name, worker in zip(names, workers, strict=True)},
        what="setting the train backend up",
        seconds=seconds,
        flag=_FLAG,
    )
    ids = sorted({one.next_rollout_id for one in results.values()})
    if len(ids) > 1:
        raise DrivetrainError(f"train ranks disagree on the next rollout id ({ids}); the checkpoint is not whole")
    return TrainGroup(
        workers=workers,
        ranks=ProcessGroupManager([one.place for one in results.values()]),
        batching=results[names[0]].batching,
        next_rollout_id=ids[0],
        notes=results[names[0]].notes,
        seconds=seconds,
    )
