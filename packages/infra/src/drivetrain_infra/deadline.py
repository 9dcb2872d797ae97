"""One deadline, shared by several waits."""

import time


class Deadline:
    """A moment by which something must have ended; never sent between machines, only what is left of it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until the deadline, never below 0."""
        return max(0.0, self._end - time.monotonic())
