"""Agreement of all ranks on small facts and on failures, over a CPU group; None is a group of one rank."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from drivetrain_backend_api.errors import DrivetrainError

T = TypeVar("T")


def from_rank0(make: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Run `make` on rank 0 and give its result to all; its DrivetrainError is raised on all ranks."""
    if group is None:
        return make()
    message: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            message[0] = make()
        except DrivetrainError as error:
            message[1] = error
    dist.broadcast_object_list(message, group=group, group_src=0)
    if message[1] is not None:
        raise message[1]
    result: T = message[0]
    return result


def together(do: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Run `do` on every rank; when it raised a DrivetrainError or OSError anywhere, all ranks raise the first one."""
    result, failure = None, None
    try:
        result = do()
    except (DrivetrainError, OSError) as error:
        failure = error if isinstance(error, DrivetrainError) else DrivetrainError(str(error))
    failures = gathered(failure, group)
    first = next((one for one in failures if one is not None), None)
    if first is not None:
        raise first
    return result  # type: ignore[return-value]


def gathered(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Return every rank's value, in rank order."""
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def all_agree(mine: bool, group: dist.ProcessGroup | None) -> bool:
    """Return True when every rank passed True."""
    if group is None:
        return mine
    vote = torch.tensor(int(mine), dtype=torch.int32)
    dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=group)
    return bool(vote.item())
