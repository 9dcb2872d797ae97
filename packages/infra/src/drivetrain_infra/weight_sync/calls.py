"""Calls of one phase to train workers and engines: wait for all, and blame the one at fault when some fail."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from drivetrain_backend_api import DrivetrainError
from drivetrain_backend_api.errors import WeightExportAbortedError
from drivetrain_infra.weight_sync.deadline import Deadline
from drivetrain_infra.weight_sync.errors import Phase, TransferError, WeightSyncError

_GRACE = 5.0
"""Seconds that the others have to end after the first failure, so that the cause is told apart from its effects."""


@dataclass(frozen=True, kw_only=True)
class Party:
    """Who was called: a train rank or an engine."""

    rank: int | None = None
    engine: str | None = None

    def __str__(self) -> str:
        return f"engine {self.engine}" if self.engine is not None else f"train rank {self.rank}"


@dataclass(frozen=True, kw_only=True)
class _Failure:
    """Attributes: blame: 0 is most surely the cause, larger ones are more likely an effect."""

    party: Party
    blame: int
    problem: str
    bucket: int | None
    cause: BaseException | None


def gather(calls: Mapping[Party, "ray.ObjectRef[Any]"], *, phase: Phase, deadline: Deadline) -> dict[Party, Any]:
    """Return everybody's result.

    Raises:
        WeightSyncError: somebody died, failed or did not answer in time; names the one most surely at fault.
    """
    waiting = {reference: party for party, reference in calls.items()}
    results: dict[Party, Any] = {}
    failures: list[_Failure] = []
    limit = deadline
    while waiting:
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=limit.left)
        if not ready:
            break
        party = waiting.pop(ready[0])
        try:
            results[party] = ray.get(ready[0])
        except RayError as error:
            failures.append(_failure(party, error))
            if len(failures) == 1:
                limit = Deadline(min(_GRACE, deadline.left))
    late = f"no answer within --update-weight-timeout {deadline.seconds:g} s"
    if failures:
        late = "no answer either"
    failures += [_Failure(party=one, blame=2, problem=late, bucket=None, cause=None) for one in waiting.values()]
    if failures:
        raise _error(failures, phase)
    return results


def _failure(party: Party, error: RayError) -> _Failure:
    if isinstance(error, RayTaskError):
        cause = error.cause
        effect = isinstance(cause, TransferError | WeightExportAbortedError)
        ours = isinstance(cause, DrivetrainError)
        return _Failure(
            party=party,
            blame=3 if effect else 1,
            problem=str(cause) if ours else f"{type(cause).__name__}: {cause}",
            bucket=getattr(cause, "bucket", None),
            cause=error,
        )
    if isinstance(error, RayActorError):
        reason = str(error).strip().splitlines()[0]
        return _Failure(party=party, blame=0, problem=f"its process died ({reason})", bucket=None, cause=error)
    return _Failure(party=party, blame=1, problem=str(error), bucket=None, cause=error)


def _error(failures: list[_Failure], phase: Phase) -> WeightSyncError:
    # of equally likely ones an engine: a rank that waits for it cannot answer
    ordered = sorted(failures, key=lambda one: (one.blame, one.party.engine is None))
    first, others = ordered[0], ordered[1:]
    bucket = next((one.bucket for one in ordered if one.bucket is not None), None)
    also = "".join(f"; {one.party}: {one.problem}" for one in others)
    error = WeightSyncError(
        f"{first.problem}{also}", phase=phase, rank=first.party.rank, bucket=bucket, engine=first.party.engine
    )
    error.__cause__ = first.cause
    return error
