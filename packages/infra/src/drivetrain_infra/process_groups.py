"""Who is where: answers about a group of train workers from the layouts that they report, for any backend.

Plain data in, plain data out; knows no backend, no Ray and no torch.distributed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from drivetrain_backend_api import DrivetrainError
from drivetrain_backend_api.parallel import ParallelLayout


@dataclass(frozen=True, kw_only=True)
class WorkerPlace:
    """What one train worker reports.

    Attributes:
        layout: its part of the work.
        node_id: the node it runs on.
    """

    layout: ParallelLayout
    node_id: str


class ProcessGroupManager:
    """The ranks of one group of train workers, by replica and node."""

    def __init__(self, places: Sequence[WorkerPlace]) -> None:
        """Take the reports of all workers, in any order.

        Raises:
            DrivetrainError: they do not describe one whole group.
        """
        self._places = sorted(places, key=lambda one: one.layout.rank)
        ranks = [one.layout.rank for one in self._places]
        sizes = {(one.layout.world_size, one.layout.dp_size, one.layout.pp_size) for one in self._places}
        if len(sizes) != 1 or ranks != list(range(next(iter(sizes))[0])):
            raise DrivetrainError(
                f"train workers report ranks {ranks} with (world, dp, pp) sizes {sorted(sizes)}, which is not one "
                "whole group; each rank of one world must report once, so end all workers and start them together"
            )
        self.world_size, self.dp_size, self.pp_size = next(iter(sizes))

    @property
    def sizes(self) -> dict[str, int]:
        """The group's layout as plain numbers: world_size, and the size of each kind of parallelism."""
        layout = self._places[0].layout
        return {
            "world_size": layout.world_size,
            "tp": layout.tp_size,
            "pp": layout.pp_size,
            "cp": layout.cp_size,
            "ep": layout.ep_size,
            "dp": layout.dp_size,
        }

    def dp_rank(self, rank: int) -> int:
        """Return the data-parallel replica that a rank belongs to: the shard it trains on."""
        return self._places[rank].layout.dp_rank

    def node(self, rank: int) -> str:
        """Return the id of the node that a rank runs on."""
        return self._places[rank].node_id
