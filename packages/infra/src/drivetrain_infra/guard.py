"""End whatever a run has started, also when its driver is killed, and remove the run's temp dir.

Beside the driver runs a small process, the guard. It waits for the driver's end and cleans up after one that could not
do so itself. Knows processes, marks and one folder; knows nothing of Ray or of what the processes do.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import psutil

from drivetrain_infra.deadline import Deadline

MARK = "RAY_DRIVETRAIN_TEMP_DIR"
"""Environment variable that every process of a run inherits; its value is the run's temp dir."""

LOCK = "lock"
"""File in the temp dir that is locked while the driver or its guard lives."""

_FORK_MARK = "driver"
"""File in the temp dir that the driver keeps open: a child forked without exec has it open too, but not the mark."""

END_SECONDS = 20.0
"""How long killed processes may take to disappear; one that holds GPU memory takes seconds."""

_LOOK_SECONDS = 1.0
"""How often the guard looks for the driver itself: a forked child of the driver keeps the guard's pipe open."""

_CLOSE_SECONDS = 5.0
_RESTART_SECONDS = 0.2


@contextlib.contextmanager
def guarded(folder: Path, lock: int) -> Iterator[None]:
    """Mark what is started in the block as part of the run in `folder`, and end it with the block or with this process.

    At the end of the block, what is still below this process in the process tree is spared: it belongs to the caller.
    When this process dies, nothing is.

    Args:
        folder: the run's temp dir; removed at the end.
        lock: descriptor of its locked file; the lock is held until everything has ended, whoever ends it.
    """
    before = os.environ.get(MARK)
    with (folder / _FORK_MARK).open("w"):
        guard = Guard(folder, lock)
        os.environ[MARK] = str(folder)
        try:
            yield
        finally:
            if before is None:
                os.environ.pop(MARK, None)
            else:
                os.environ[MARK] = before
            me = psutil.Process()
            end_processes(folder, spare=[me.pid, *(one.pid for one in me.children(recursive=True))])
            remove_temp_dir(folder)
            guard.close()


class Guard:
    """The process that outlives a killed driver. One that ends too early is started again."""

    def __init__(self, folder: Path, lock: int) -> None:
        self._folder = folder
        self._lock = lock
        self._closing = threading.Event()
        self._process = self._start()
        self._keeper = threading.Thread(target=self._keep, name="guard", daemon=True)
        self._keeper.start()

    @property
    def pid(self) -> int:
        """Process id of the guard that runs now."""
        return self._process.pid

    def close(self) -> None:
        """Tell the guard that nothing is left to do, and wait for its end."""
        self._closing.set()
        deadline = Deadline(_CLOSE_SECONDS)
        while self._keeper.is_alive() and deadline.left:
            with contextlib.suppress(OSError, ValueError):  # it has ended already
                assert self._process.stdin is not None
                self._process.stdin.write(b".")
            self._keeper.join(_RESTART_SECONDS)
        self._process.kill()
        self._keeper.join()

    def _keep(self) -> None:
        while True:
            self._process.wait()
            assert self._process.stdin is not None
            self._process.stdin.close()
            if self._closing.wait(_RESTART_SECONDS):
                return
            with contextlib.suppress(OSError):  # no process or memory to be had: the next round may have more luck
                self._process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            # -P: the current folder may hold files named as modules
            [sys.executable, "-P", "-m", __name__, str(os.getpid()), str(self._folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            bufsize=0,
            env={name: value for name, value in os.environ.items() if name != MARK},
            pass_fds=[self._lock],
            # Ctrl-C and kills of the driver's process group must not reach it
            start_new_session=True,
        )


def end_processes(folder: Path, *, spare: Collection[int] = (), seconds: float = END_SECONDS) -> None:
    """Kill every process that belongs to the run in `folder`, and wait until they are gone.

    Args:
        folder: the run's temp dir.
        spare: ids of processes to leave alone.
        seconds: deadline of the wait.
    """
    deadline = Deadline(seconds)
    killed: set[psutil.Process] = set()
    while True:
        found = find_processes(folder, spare=spare)
        for process in found:
            with contextlib.suppress(psutil.Error):  # kills nothing if the id has passed to another process
                process.kill()
        killed = {one for one in killed.union(found) if not is_gone(one)}
        # once more after the last one: it may have started another before it ended
        if (not found and not killed) or not deadline.left:
            return
        time.sleep(0.05)


def find_processes(folder: Path, *, spare: Collection[int] = ()) -> list[psutil.Process]:
    """Find the processes that belong to the run in `folder`: its driver, what that has started, and so on."""
    return [one for one in psutil.process_iter() if one.pid not in spare and _belongs(one, folder)]


def _belongs(process: psutil.Process, folder: Path) -> bool:
    try:
        if process.uids().real != os.getuid() or is_gone(process):
            return False
        if process.environ().get(MARK) == str(folder):
            return True
        fork_mark = os.path.realpath(folder / _FORK_MARK)
        return any(one.path == fork_mark for one in process.open_files())
    except (psutil.Error, OSError):  # it ended meanwhile, or may not be looked at
        return False


def is_gone(process: psutil.Process) -> bool:
    """Whether a process has ended, collected by its parent or not."""
    try:
        # where nobody collects orphans, as in many containers, a killed process stays a zombie
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def remove_temp_dir(folder: Path) -> None:
    """Remove a run's temp dir, its lock last: whoever locks it next then finds nothing that is about to go."""
    with contextlib.suppress(OSError):
        for entry in [one for one in folder.iterdir() if one.name != LOCK]:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
        (folder / LOCK).unlink(missing_ok=True)
        folder.rmdir()


def main(driver: int, folder: Path) -> None:
    """Wait for the driver's end, as its child. Unless it says goodbye, clean up after it."""
    # whoever ends all processes of a machine or a job sends these first
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    while os.getppid() == driver:
        readable, _, _ = select.select([sys.stdin], [], [], _LOOK_SECONDS)
        if readable and os.read(sys.stdin.fileno(), 1):
            return
        if readable:  # the driver's end has begun
            time.sleep(0.05)
    end_processes(folder, spare=[os.getpid()])
    remove_temp_dir(folder)
    with contextlib.suppress(OSError):  # the driver's standard error, where somebody may still be reading
        print(
            f"drivetrain: error: the driver (process {driver}) was killed, or was ended by Ray because one of Ray's "
            "processes had died, and all that it had started has been ended; unless somebody did that, look whether "
            "the machine ran out of memory; then start the run again, with --load if it has a checkpoint",
            file=sys.stderr,
            flush=True,
        )


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
