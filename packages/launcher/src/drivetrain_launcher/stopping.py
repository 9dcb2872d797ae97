"""When a run stops before its end: a signal to the driver or to a train worker, or no time left.

The first signal is a wish: what may be abandoned is, the rest is finished, and the loop saves. A second one ends the
command at once. Knows nothing of what is trained.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""A first one of these asks a run to save and to end."""

_HANGUP = signal.SIGHUP
"""A closed terminal: nobody is left to be told anything, so that it ends a run at once."""

_LOOK_SECONDS = 1.0
"""How often the train workers are asked for signals while they have nothing to do."""


class Terminated(BaseException):
    """A signal came. Passes through everything that handles errors, so that what was started is ended on the way."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class StopRequested(BaseException):
    """The run is to stop here. Passes through everything that handles errors.

    Attributes:
        reason: in words, for the log and for `resume_state.json`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Stopping:
    """Turns signals into a stop; one a command, from its main thread.

    Attributes:
        reason: why the run is to stop, None as long as nobody asked.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._is_graceful = False
        self._may_abandon = False
        self._came_from_outside = False
        self._told: str | None = None

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Handle signals inside the block.

        One that whoever started this process had ignored, as `nohup` does, stays ignored.
        """
        before = {
            one: handler for one in (*SIGNALS, _HANGUP) if (handler := signal.getsignal(one)) is not signal.SIG_IGN
        }

        def handle(number: int, frame: object) -> None:
            told, self._told = self._told, None
            if told is not None and number == signal.SIGUSR1:
                self.ask(told)
                return
            if self._is_graceful and not self._came_from_outside and number in SIGNALS:
                self._came_from_outside = True  # a job's signal reaches driver and workers, in any order: that is one
                self.ask(signal.Signals(number).name)
                return
            for one in before:  # a third would only interrupt the cleaning up
                signal.signal(one, signal.SIG_IGN)
            raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)

        for one in before:
            signal.signal(one, handle)
        try:
            yield
        finally:
            for one, handler in before.items():
                if signal.getsignal(one) is handle:
                    signal.signal(one, handler)

    @contextmanager
    def graceful(self) -> Iterator[None]:
        """Take the first signal as a wish inside the block; outside of it nothing is started that could be saved."""
        self._is_graceful = True
        try:
            yield
        finally:
            self._is_graceful = False

    def ask(self, reason: str) -> None:
        """Ask for a stop; of several reasons the first counts. From the main thread only.

        Raises:
            StopRequested: what is done now may be abandoned.
        """
        if self.reason is not None:
            return
        self.reason = reason
        _say(f"{reason}: saving and stopping; a second signal ends the run at once")
        if self._may_abandon:
            self._may_abandon = False
            raise StopRequested(reason)

    def check(self) -> None:
        """Stop here if somebody asked for it.

        Raises:
            StopRequested: somebody did.
        """
        if self.reason is not None:
            raise StopRequested(self.reason)

    @contextmanager
    def abandoning(self) -> Iterator[None]:
        """Run a block that may be left at any moment without losing anything that is not made again.

        Raises:
            StopRequested: somebody asked for a stop, before or meanwhile. So does whatever fails after that: a signal
                that reaches every process of a job ends engines too.
        """
        self.check()
        self._may_abandon = True
        try:
            yield
        except Exception as error:
            self._may_abandon = False
            if self.reason is not None:
                raise StopRequested(self.reason) from error
            raise
        finally:
            self._may_abandon = False
        self.check()

    @contextmanager
    def watching(self, signals: Callable[[], str | None]) -> Iterator[None]:
        """Ask `signals` about once a second inside the block, in a thread; what it returns becomes a stop.

        Args:
            signals: returns who got a signal and which, or None.
        """
        left = threading.Event()

        def watch() -> None:
            while not left.wait(_LOOK_SECONDS):
                if (reason := signals()) and not left.is_set() and self.reason is None:
                    self._told = reason
                    os.kill(os.getpid(), signal.SIGUSR1)  # gets the main thread out of what it waits for
                    return

        thread = threading.Thread(target=watch, name="signals of workers", daemon=True)
        thread.start()
        try:
            yield
        finally:
            left.set()
            thread.join()


def _say(text: str) -> None:
    # not `print`: a handler may have interrupted one
    with suppress(OSError, ValueError):
        os.write(sys.stderr.fileno(), f"drivetrain: {text}\n".encode())
