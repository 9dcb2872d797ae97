"""End this process when it cannot do so itself: code that keeps Python's interpreter lock stops every thread.

The deadline is kept outside of Python, where the stacks of all threads are written before the process ends with code 1;
the run's guard then says what was put down for it beforehand. Knows nothing of the code that is watched.
"""

import contextlib
import faulthandler
from collections.abc import Callable, Iterator

from drivetrain_infra.guard import LAST_WORDS, STACKS, LastWords, guarded_folder

Say = Callable[[LastWords], None]
"""Puts down what is to be said if the process is ended from now on."""


@contextlib.contextmanager
def watchdog(seconds: float) -> Iterator[Say]:
    """End this process if the block is not left within some seconds; does nothing where no guard would say why.

    There is one watchdog at a time, since there is one such timer in a process.
    """
    folder = guarded_folder()
    if folder is None:
        yield lambda words: None
        return
    with (folder / STACKS).open("wb", buffering=0) as stacks, (folder / LAST_WORDS).open("wb", buffering=0) as file:

        def say(words: LastWords) -> None:
            # a full disk, or a thread that was left behind
            with contextlib.suppress(OSError, ValueError):
                words.write(file.fileno())

        faulthandler.dump_traceback_later(max(seconds, 0.001), exit=True, file=stacks)
        try:
            yield say
        finally:
            faulthandler.cancel_dump_traceback_later()
