"""Calls on Ray actors with a deadline, whose failures come back as one clear error instead of a Ray traceback."""

import time
from collections.abc import Mapping
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from drivetrain_backend_api import DrivetrainError

Key = TypeVar("Key")


def gather(calls: Mapping[Key, "ray.ObjectRef[Any]"], *, what: str, seconds: float | None) -> dict[Key, Any]:
    """Wait for calls on several actors, and fail with the first that fails.

    Args:
        calls: who was called (for the message) -> the result to come.
        what: what they are doing, for the message.
        seconds: deadline, None for none.

    Raises:
        DrivetrainError: one failed or died, or the deadline passed; names who and what.
    """
    ends = None if seconds is None else time.monotonic() + seconds
    who = {reference: key for key, reference in calls.items()}
    waiting, results = list(who), {}
    while waiting:
        left = None if ends is None else max(0.0, ends - time.monotonic())
        ready, waiting = ray.wait(waiting, num_returns=1, timeout=left)
        if not ready:
            late = ", ".join(str(who[one]) for one in waiting)
            raise DrivetrainError(f"{what}: no answer from {late} within {seconds:g} s")
        for reference in ready:
            try:
                results[who[reference]] = ray.get(reference)
            except RayError as error:
                raise explain(error, what=what, who=str(who[reference])) from error
    return results


def explain(error: RayError, *, what: str, who: str) -> DrivetrainError:
    """Turn Ray's error into one sentence that names who failed and why."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        reason = str(cause) if isinstance(cause, DrivetrainError) else f"{type(cause).__name__}: {cause}"
        return DrivetrainError(f"{what}: {who} failed: {reason}")
    if isinstance(error, RayActorError):
        return DrivetrainError(f"{what}: {who} died ({str(error).splitlines()[0]}); its log is in Ray's session folder")
    return DrivetrainError(f"{what}: {who}: {error}")
