"""Which part of the work a rank does: its frozen layout, and the process groups that go with it."""

from dataclasses import dataclass
from enum import StrEnum

import torch.distributed as dist


class Role(StrEnum):
    """What a train worker group is for."""

    POLICY = "policy"
    REFERENCE = "reference"
    VALUE = "value"
    REWARD = "reward"
    TEACHER = "teacher"


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Rank and size of a process along every dimension of parallelism; plain data that can be sent anywhere.

    Attributes:
        device: torch device string, for example "cuda:0" or "cpu".
    """

    rank: int
    world_size: int
    device: str
    dp_rank: int = 0
    dp_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1

    @property
    def is_first_stage(self) -> bool:
        """True where token ids enter the pipeline."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """True where the loss is computed."""
        return self.pp_rank == self.pp_size - 1

    @property
    def is_stage_lead(self) -> bool:
        """True on one rank of each pipeline stage: the one whose other ranks are all 0."""
        return self.dp_rank == 0 and self.tp_rank == 0 and self.cp_rank == 0


@dataclass(frozen=True, kw_only=True)
class ProcessGroups:
    """The groups of one rank. None stands for a group of this rank alone.

    Attributes:
        world: all ranks of the backend.
        dp: ranks that hold other samples.
        cp: ranks that hold other tokens of the same samples.
        tp: ranks that hold other slices of the same weights.
        pp: the stages of one pipeline, in stage order.
        dp_cp: dp and cp together, over which gradients and metrics are summed.
        control: a CPU group of all ranks for agreement on small facts.
    """

    world: dist.ProcessGroup | None = None
    dp: dist.ProcessGroup | None = None
    cp: dist.ProcessGroup | None = None
    tp: dist.ProcessGroup | None = None
    pp: dist.ProcessGroup | None = None
    dp_cp: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None
