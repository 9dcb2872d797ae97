"""The train workers as the loop sees them: one object whose calls go to every rank at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from drivetrain_backend_api import DrivetrainError
from drivetrain_backend_api.packing import Batching, RolloutShard
from drivetrain_launcher.remote import gather
from drivetrain_launcher.worker import SetupResult

if TYPE_CHECKING:
    from ray.actor import ActorHandle


@dataclass(frozen=True, kw_only=True)
class TrainGroup:
    """All ranks of one train backend, set up.

    Attributes:
        workers: actor handles by rank.
        results: what `setup` returned, by rank.
    """

    workers: Sequence["ActorHandle[Any]"]
    results: Sequence[SetupResult]

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks."""
        return self.results[0].layout.dp_size

    @property
    def batching(self) -> Batching:
        """How the backend wants its micro-batches."""
        return self.results[0].batching

    @property
    def next_rollout_id(self) -> int:
        """How many rollouts the loaded weights were trained on."""
        return self.results[0].next_rollout_id

    def train(self, rollout_id: int, shards: Sequence[RolloutShard]) -> list[dict[str, float]]:
        """Train on a rollout. Each data-parallel shard is put into the object store once; its ranks fetch it."""
        stored = [ray.put(shard) for shard in shards]
        results = gather(
            {
                f"train rank {rank}": worker.train.remote(rollout_id, stored[self.results[rank].layout.dp_rank])
                for rank, worker in enumerate(self.workers)
            },
            what=f"training on rollout {rollout_id}",
            seconds=None,
        )
        steps: list[dict[str, float]] = results["train rank 0"]
        return steps

    def save(self, folder: Path) -> None:
        """Write a checkpoint into the folder, all ranks together."""
        gather(
            {f"train rank {rank}": worker.save.remote(folder) for rank, worker in enumerate(self.workers)},
            what=f"saving {folder.name}",
            seconds=None,
        )


def setup_workers(workers: Sequence["ActorHandle[Any]"], *, host: str, seconds: float) -> list[SetupResult]:
    """Rendezvous on a port bound by rank 0 and set every rank up.

    Args:
        workers: actor handles by rank.
        host: address of rank 0's node, as the other ranks reach it.
        seconds: deadline of the rendezvous; setting up has the backend's own deadlines.

    Raises:
        DrivetrainError: a rank failed, or the ranks disagree on the next rollout id.
    """
    opened = gather({"train rank 0": workers[0].open_rendezvous.remote(host)}, what="rendezvous", seconds=seconds)
    port = opened["train rank 0"]
    results = gather(
        {f"train rank {rank}": worker.setup.remote(host, port) for rank, worker in enumerate(workers)},
        what="setting the train backend up",
        seconds=None,
    )
    ordered = [results[f"train rank {rank}"] for rank in range(len(workers))]
    ids = {one.next_rollout_id for one in ordered}
    if len(ids) > 1:
        raise DrivetrainError(
            f"train ranks disagree on the next rollout id ({sorted(ids)}); the checkpoint is not whole"
        )
    return ordered
