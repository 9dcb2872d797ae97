"""The phases of a weight update, and the errors that name them."""

from enum import StrEnum
from typing import Any

from drivetrain_backend_api import DataError, DrivetrainError


class Phase(StrEnum):
    """The steps of a weight update, in order."""

    CONNECT = "connect"
    PAUSE = "pause"
    FLUSH = "flush"
    PLAN = "plan"
    STREAM = "stream"
    VERIFY = "verify"
    COMMIT = "commit"
    PUBLISH = "publish"
    RESUME = "resume"


class WeightSyncError(DrivetrainError):
    """A weight update that failed. No engine serves a part of it.

    Attributes:
        phase: the step that failed.
        rank: the train rank at fault, or None.
        bucket: the bucket on its way, or None.
        engine: name of the engine at fault, or None.
        is_lost: whether the process is at fault, so that a new one may do better.
        died: whether it is gone.
    """

    def __init__(
        self,
        problem: str,
        *,
        phase: Phase,
        rank: int | None = None,
        bucket: int | None = None,
        engine: str | None = None,
        is_lost: bool = False,
        died: bool = False,
    ) -> None:
        self.problem, self.phase, self.rank, self.bucket, self.engine = problem, phase, rank, bucket, engine
        self.is_lost, self.died = is_lost, died
        where = [f"phase {phase}"]
        where += [f"bucket {bucket}"] if bucket is not None else []
        where += [f"train rank {rank}"] if rank is not None else []
        where += [f"engine {engine}"] if engine is not None else []
        super().__init__(f"weight update failed ({', '.join(where)}): {problem}")

    def __reduce__(self) -> tuple[Any, ...]:
        where = {"phase": self.phase, "rank": self.rank, "bucket": self.bucket, "engine": self.engine}
        return _rebuild, (self.problem, {**where, "is_lost": self.is_lost, "died": self.died})


def _rebuild(problem: str, rest: dict[str, Any]) -> WeightSyncError:
    return WeightSyncError(problem, **rest)


class BucketError(DrivetrainError):
    """Something that went wrong with one bucket.

    Attributes:
        bucket: its index.
    """

    def __init__(self, problem: str, bucket: int) -> None:
        super().__init__(problem, bucket)
        self.bucket = bucket

    def __str__(self) -> str:
        return f"bucket {self.bucket}: {self.args[0]}"


class TransferError(BucketError):
    """A bucket that could not be moved, mostly because the other side failed; the other side's error says why."""


class CorruptBucketError(BucketError, DataError):
    """A bucket that arrived other than it was sent."""
