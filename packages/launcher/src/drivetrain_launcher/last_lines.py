"""The last lines of a run that failed: where its log is, and which checkpoint to go on from.

Also for runs that cannot print them any more, which is why they can be put together beforehand. Imports nothing heavy.
"""

import os
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

from drivetrain_backend_api import DataError, DrivetrainError
from drivetrain_backend_api.errors import in_one_line

_LONGEST_SENTENCE = 1500
"""Characters of an error on the screen; a user's exception may carry pages, which are in the log."""


class DivergedError(DrivetrainError):
    """Training does not learn any more; the newest checkpoint may be one of those to throw away."""


def one_line(text: str) -> str:
    """Put a text of any length and any number of lines into one line."""
    line = in_one_line(text)
    return line if len(line) <= _LONGEST_SENTENCE else line[: _LONGEST_SENTENCE - 3] + "..."


def failure_lines(sentence: str, log: Path | None, newest: str | None) -> str:
    """Put together what a run prints that failed.

    Args:
        sentence: what went wrong.
        log: of the traceback, None where it could not be written.
        newest: what `newest_checkpoint` says.
    """
    lines = [f"error: {one_line(sentence)}", f"error: the full traceback is in {log}" if log else None, newest]
    return "\n".join(f"drivetrain: {line}" for line in lines if line)


def newest_checkpoint(save: Path) -> str | None:
    """Say which checkpoint of a run is the newest and how to go on from it; None where it has none."""
    from drivetrain_infra.run_folder import RunFolder

    try:
        newest = RunFolder(save).latest()
    except (DataError, OSError):
        return None
    return f"the newest checkpoint is {newest}; to go on from it, run the same command again"


def log_name() -> str:
    """Name the log of a failure that happens now."""
    return f"error_{time.strftime('%Y%m%d-%H%M%S')}_{os.getpid()}.log"


def write_log(text: str, folder: Path | None) -> Path:
    """Write a new log into `folder`, or into the system's temporary folder where that fails.

    A folder that does not exist is not made: whoever removed it does not expect it back.

    Raises:
        OSError: neither can be written.
    """
    name = log_name()
    if folder is not None:
        log = folder / name
        try:
            log.write_text(text, "utf-8", "backslashreplace")
            return log
        except OSError:  # a full or vanished disk may be the very error
            with suppress(OSError):
                log.unlink()
    log = Path(tempfile.mkdtemp(prefix="drivetrain-")) / name
    log.write_text(text, "utf-8", "backslashreplace")
    return log


def print_stuck(save: Path, sentence: str) -> None:
    """Print the last lines of a run whose driver is stuck and about to be ended, and log where each thread is."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = [
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    ]
    log = None
    with suppress(OSError):
        log = write_log("\n".join(stacks), save)
    print(failure_lines(sentence, log, newest_checkpoint(save)), file=sys.stderr, flush=True)
