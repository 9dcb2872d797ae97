"""Trackers: small interchangeable objects that each send metrics to one place."""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol


def row_of(rollout_id: int, metrics: Mapping[str, float]) -> dict[str, Any]:
    """Make the row that every tracker records; a value that is not finite is None, since JSON has no other word."""
    return {"rollout_id": rollout_id} | {
        name: value if math.isfinite(value) else None for name, value in metrics.items()
    }


class Tracker(Protocol):
    """One place where metrics go."""

    def log(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """Record metrics of a rollout: one line more."""
        ...

    def close(self) -> None:
        """Flush, and end."""
        ...


class Trackers:
    """Sends the same metrics to several trackers, in order."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    def log(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """Record metrics of a rollout everywhere."""
        for tracker in self._trackers:
            tracker.log(rollout_id, metrics)

    def close(self) -> None:
        """Close all, also where one of them fails to."""
        with ExitStack() as stack:
            for tracker in reversed(self._trackers):
                stack.callback(tracker.close)
