"""Notice that one of Ray's own daemons has died, and get the driver out of what it waits for.

Knows the names of Ray's daemons and how a call is waited for; does not start or end them.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil
import ray

from drivetrain_backend_api import DrivetrainError
from drivetrain_infra.deadline import Deadline
from drivetrain_infra.guard import is_gone

_DAEMONS = {
    "gcs_server": ("/gcs_server",),
    "raylet": ("/raylet",),
    # before and after they have set their titles
    "DashboardAgent": ("/dashboard/agent.py", "ray::DashboardAgent"),
    "RuntimeEnvAgent": ("/runtime_env/agent/main.py", "ray::RuntimeEnvAgent"),
}
"""The processes that Ray cannot go on without, and how a word at the start of their command lines ends. Without the
first, calls retry for a minute before Ray aborts the driver; without an agent the raylet ends, and then all else."""

_FIRST_WORDS = 3
"""Interpreter, its option, script; what follows may name the others."""

_LOOK_SECONDS = 0.5
"""How often the driver looks whether they live."""

UNWIND_SECONDS = 15.0
"""How long the driver may take to end by itself once one of them has died; some calls to Ray never return then.

From the moment when the driver knows, only the time inside of Ray counts: closing files and trackers takes its own.
"""


class Daemons:
    """Ray's daemons that this process has started, and whether they live.

    Their end is noticed here rather than by Ray, which retries for a minute inside calls that nothing can interrupt.

    Attributes:
        is_known: whether the driver was told that one has died.
    """

    def __init__(self) -> None:
        self._found: dict[str, psutil.Process] = {}
        self._are_started = False
        self._end_is_expected = False
        self._problem: str | None = None
        self.is_known = False
        self._looking = threading.Lock()

    def require_alive(self) -> None:
        """Raise a DrivetrainError that names the daemon that has died."""
        if problem := self.problem():
            self.is_known = True
            raise DrivetrainError(problem)

    def problem(self) -> str | None:
        """Name the daemon that has died, in a sentence; None while all live or where their end is expected."""
        with self._looking:
            if self._problem is None and not self._end_is_expected:
                if not self._are_started:
                    self._find()
                # one may have taken others with it already
                gone = [f"{name} (process {one.pid})" for name, one in self._found.items() if is_gone(one)]
                if gone:
                    self._problem = (
                        f"Ray's {' and '.join(gone)} died, which ends the run; unless somebody ended it, look whether "
                        "the machine ran out of memory; then run the same command again"
                    )
            return self._problem

    def expect_all(self) -> None:
        """Look for them a last time: Ray has started."""
        with self._looking:
            self._find()
            self._are_started = True

    def expect_end(self) -> None:
        """From now on they end because they are told to."""
        with self._looking:  # not while the watch is between finding them alive and finding them ended
            self._end_is_expected = True

    def _find(self) -> None:
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = child.cmdline()[:_FIRST_WORDS]
                for name, ends in _DAEMONS.items():
                    if any(word.endswith(ends) for word in words):
                        self._found.setdefault(name, child)


_daemons: Daemons | None = None
"""Of the Ray that this process has started; there is at most one, as Ray's own state is global."""


@contextlib.contextmanager
def watched_daemons(on_stuck: Callable[[str], object]) -> Iterator[Daemons]:
    """Watch Ray's daemons; end this process with code 1 when one has died and the block is not left in time.

    Args:
        on_stuck: called with a sentence before this process ends so, since nobody else gets to say it.
    """
    global _daemons
    daemons = _daemons = Daemons()
    left = threading.Event()
    watch = threading.Thread(
        target=_watch, args=(daemons, left, threading.get_ident(), on_stuck), name="ray-daemons", daemon=True
    )
    watch.start()
    try:
        yield daemons
    finally:
        left.set()
        watch.join()
        _daemons = None


def _watch(daemons: Daemons, left: threading.Event, driver: int, on_stuck: Callable[[str], object]) -> None:
    while not (problem := daemons.problem()):
        if left.wait(_LOOK_SECONDS):
            return
    stuck = 0.0
    while stuck < UNWIND_SECONDS:
        began = time.monotonic()
        if left.wait(_LOOK_SECONDS):
            return
        if not daemons.is_known or _is_in_ray(driver):
            stuck += time.monotonic() - began
    try:
        on_stuck(problem)
    finally:
        os._exit(1)


def _is_in_ray(thread: int) -> bool:
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] == "ray":
            return True
        frame = frame.f_back
    return False


def have_died() -> bool:
    """Whether one of the daemons of the Ray that this process has started died: calls to Ray may never return then."""
    return _daemons is not None and _daemons.problem() is not None


def wait(references: "Sequence[ray.ObjectRef[Any]]", *, seconds: float | None) -> "list[ray.ObjectRef[Any]]":
    """Wait for the first of several calls as `ray.wait` does, but no longer than Ray lives.

    Args:
        references: results to come.
        seconds: deadline, None for none.

    Returns:
        The one that has ended, or nothing at the deadline.

    Raises:
        DrivetrainError: one of the daemons of the Ray that this process has started died.
    """
    deadline = None if seconds is None else Deadline(seconds)
    while True:
        step = _LOOK_SECONDS if deadline is None else min(_LOOK_SECONDS, deadline.left)
        with as_raised():
            ready, _ = ray.wait(list(references), num_returns=1, timeout=step)
        if _daemons is not None:
            _daemons.require_alive()
        if ready or (deadline is not None and not deadline.left):
            return list(ready)


@contextlib.contextmanager
def as_raised() -> Iterator[None]:
    """Let through what a signal handler raises inside the block, which Ray's C code may wrap into a SystemError."""
    try:
        yield
    except SystemError as error:
        if error.__cause__ is None:
            raise
        raise error.__cause__ from None
