"""Running a user's code under a deadline. Knows nothing of what the code does."""

import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from drivetrain_infra.guard import LastWords
from drivetrain_infra.watchdog import watchdog
from drivetrain_launcher.last_lines import failure_lines, log_name, newest_checkpoint

T = TypeVar("T")

_GRACE_SECONDS = 5.0
"""How long after the deadline a process is ended whose code keeps Python's interpreter lock."""


def call_within(do: Callable[[Callable[[str], None]], T], seconds: float, *, name: str, save: Path | None) -> T:
    """Call `do` in a thread of its own and return its result; what it raises is raised here.

    The thread is a daemon: code that never returns can neither be ended nor waited for. Where it also keeps Python's
    interpreter lock, so that nothing else here can run, the process is ended soon after the deadline.

    Args:
        do: what to call. It is given a function that takes the sentence to be printed in that last case.
        seconds: deadline.
        name: of the thread.
        save: folder of the run, for the log of that last case; None where there is no run.

    Raises:
        TimeoutError: the deadline passed; a note says where the code was.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    log = (save or Path.cwd()) / log_name()
    newest = newest_checkpoint(save) if save else None

    with watchdog(seconds + _GRACE_SECONDS) as put_down:

        def say(sentence: str) -> None:
            put_down(LastWords(text=failure_lines(sentence, log, newest), log=str(log)))

        def run() -> None:
            try:
                results.append(do(say))
            except BaseException as error:  # raised again by the caller
                errors.append(error)

        say(f"{name} did not return, and nothing else could run meanwhile")
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        thread.join(max(0.0, seconds))
    if errors:
        raise errors[0]
    if results:
        return results[0]
    late = TimeoutError(f"{name} did not end within {seconds:g} s")
    frame = sys._current_frames().get(thread.ident or 0)
    late.add_note("it was here:\n" + "".join(traceback.format_stack(frame)))
    raise late


def describe_failure(error: BaseException) -> str:
    """Say what a user's code raised, with the fix where it is the thread that the code runs in.

    Args:
        error: what it raised.
    """
    text = f"{type(error).__name__}: {error}"
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, ValueError) and "only works in main thread" in str(chain):
            return (
                f"{text}; user code runs in a thread beside the main one, where signals cannot be used: call the "
                "library without its signal timeout (as in timeout_seconds=None), since --rollout-timeout is the "
                "deadline"
            )
        chain = chain.__cause__ or chain.__context__
    return text
