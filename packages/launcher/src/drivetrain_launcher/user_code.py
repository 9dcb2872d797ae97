"""Running a user's code under a deadline. Knows nothing of what the code does."""

import sys
import threading
import traceback
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def call_within(do: Callable[[], T], seconds: float, *, name: str) -> T:
    """Call `do` in a thread of its own and return its result; what it raises is raised here.

    The thread is a daemon: code that never returns can neither be ended nor waited for.

    Args:
        do: what to call.
        seconds: deadline.
        name: of the thread.

    Raises:
        TimeoutError: the deadline passed; a note says where the code was.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(do())
        except BaseException as error:  # raised again by the caller
            errors.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join(max(0.0, seconds))
    if thread.is_alive():
        late = TimeoutError(f"{name} did not end within {seconds:g} s")
        frame = sys._current_frames().get(thread.ident or 0)
        late.add_note("it was here:\n" + "".join(traceback.format_stack(frame)))
        raise late
    if errors:
        raise errors[0]
    return results[0]
