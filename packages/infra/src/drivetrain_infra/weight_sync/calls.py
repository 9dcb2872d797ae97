"""The calls of one phase of a weight update: whom they went to, and the error that names who failed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray

from drivetrain_infra.calls import Blame, Failure, collect
from drivetrain_infra.deadline import Deadline
from drivetrain_infra.weight_sync.errors import Phase, TransferError, WeightSyncError


@dataclass(frozen=True, kw_only=True)
class Party:
    """Who was called: a train rank or an engine."""

    rank: int | None = None
    engine: str | None = None

    def __str__(self) -> str:
        return f"engine {self.engine}" if self.engine is not None else f"train rank {self.rank}"


def gather(calls: Mapping[Party, "ray.ObjectRef[Any]"], *, phase: Phase, deadline: Deadline) -> dict[Party, Any]:
    """Return everybody's result.

    Raises:
        WeightSyncError: somebody died, failed or did not answer in time; names the one most surely at fault.
    """
    results, failures = collect(calls, deadline, effects=(TransferError,))
    if failures:
        raise _error(failures, phase, deadline)
    return results


def _error(failures: list[Failure[Party]], phase: Phase, deadline: Deadline) -> WeightSyncError:
    # of equally likely ones an engine: a rank that waits for it cannot answer
    ordered = sorted(failures, key=lambda one: (one.blame, one.who.engine is None))
    first = ordered[0]
    late = f" within --update-weight-timeout {deadline.seconds:g} s" if first.blame is Blame.LATE else ""
    problem = "; ".join([f"{first.who} {first.problem}{late}", *(f"{one.who} {one.problem}" for one in ordered[1:])])
    buckets = [getattr(one.raised, "bucket", None) for one in ordered]
    bucket = next((one for one in buckets if one is not None), None)
    error = WeightSyncError(
        problem,
        phase=phase,
        rank=first.who.rank,
        bucket=bucket,
        engine=first.who.engine,
        is_lost=first.is_lost,
        died=first.blame is Blame.DIED,
    )
    error.__cause__ = first.error
    return error
