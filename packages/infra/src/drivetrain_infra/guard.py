"""End whatever a run has started, also when its driver is killed, and remove the run's temp dir.

Beside the driver runs a small process, the guard. It waits for the driver's end and cleans up after one that could not
do so itself. Knows processes, marks and one folder; knows nothing of Ray or of what the processes do.
"""

import contextlib
import json
import logging
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from drivetrain_infra.deadline import Deadline

MARK = "RAY_DRIVETRAIN_MARK"
"""Environment variable that every process of a run inherits.

Its value is a file in the run's temp dir that the driver keeps open: a child forked without exec has the file open too,
but not the variable. The name is new for each run, so that no guard ever ends what a later run in the folder started.
"""

LOCK = "lock"
"""File in the temp dir that is locked while the driver or its guard lives."""

STACKS = "stacks"
"""File in the temp dir; not empty where the driver was ended by its watchdog, which writes there."""

LAST_WORDS = "last_words"
"""File in the temp dir: the `LastWords` of a driver that is ended by its watchdog."""

END_SECONDS = 20.0
"""How long killed processes may take to disappear; one that holds GPU memory takes seconds."""

_LOOK_SECONDS = 1.0
"""How often the guard looks for the driver itself: a forked child of the driver keeps the guard's pipe open."""

_CLOSE_SECONDS = 5.0
_RESTART_SECONDS = 0.2

_LONGEST_RESTART_SECONDS = 60.0
"""How long to wait before the next guard where one after the other ends at once."""

_HOPELESS_SECONDS = 1.0
"""After a wait of this length it is said, once, that there is no guard."""

_DELETED = " (deleted)"
"""What Linux appends to the name of an open file that was removed."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LastWords:
    """What the guard prints for a driver that cannot speak any more.

    Attributes:
        text: lines for standard error; they name `log`.
        log: where the file with the stacks of all threads goes.
    """

    text: str
    log: str

    def write(self, descriptor: int) -> None:
        """Replace what an open file holds; in one call, and readable also where a longer text was there before."""
        os.pwrite(descriptor, json.dumps(asdict(self)).encode() + b"\n", 0)

    @staticmethod
    def read(path: Path) -> "LastWords | None":
        """Read them back, None where there are none."""
        try:
            line, _, _ = path.read_bytes().partition(b"\n")
            return LastWords(**json.loads(line))
        except (OSError, ValueError, TypeError):
            return None


_guarded: "tuple[Path, Guard] | None" = None
"""The temp dir that this process guards, and its guard; of several, the last one."""


def guarded_folder() -> Path | None:
    """Return the temp dir of the run that this process is the driver of, None outside of `guarded`."""
    return _guarded[0] if _guarded else None


@contextlib.contextmanager
def guarded(folder: Path, lock: int) -> Iterator[None]:
    """Mark what is started in the block as part of the run in `folder`, and end it with the block or with this process.

    At the end of the block, what is still below this process in the process tree is spared: it belongs to the caller.
    When this process dies, nothing is.

    Args:
        folder: the run's temp dir; removed at the end.
        lock: descriptor of its locked file; the lock is held until everything has ended, whoever ends it.
    """
    global _guarded
    outer = _guarded
    before = os.environ.get(MARK)
    mark = Path(os.path.realpath(folder)) / f"driver-{secrets.token_hex(8)}"
    with mark.open("w"):
        guard = Guard(folder, mark, lock)
        os.environ[MARK] = str(mark)
        _guarded = folder, guard
        try:
            yield
        finally:
            if before is None:
                os.environ.pop(MARK, None)
            else:
                os.environ[MARK] = before
            me = psutil.Process()
            end_processes(mark, spare=[me.pid, *(one.pid for one in me.children(recursive=True))])
            remove_temp_dir(folder, lock)
            guard.close()
            _guarded = outer


class Guard:
    """The process that outlives a killed driver. One that ends too early is started again."""

    def __init__(self, folder: Path, mark: Path, lock: int) -> None:
        self._folder = folder
        self._mark = mark
        self._lock = lock
        self._closing = threading.Event()
        self._is_missed = False
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
        pause = _RESTART_SECONDS
        while True:
            began = time.monotonic()
            self._process.wait()
            assert self._process.stdin is not None
            self._process.stdin.close()
            if time.monotonic() - began > _LONGEST_RESTART_SECONDS:
                pause = _RESTART_SECONDS
            if self._closing.wait(pause):
                return
            pause = min(2 * pause, _LONGEST_RESTART_SECONDS)
            problem = f"exit code {self._process.returncode}"
            try:
                self._process = self._start()
            except OSError as error:  # no process or memory to be had: the next round may have more luck
                problem = str(error)
            if pause >= _HOPELESS_SECONDS and not self._is_missed:
                self._is_missed = True
                _log.warning(
                    "the process that cleans up after a killed driver does not start (%s); the run goes on, but if it "
                    "is killed, end what it leaves behind by hand",
                    problem,
                )

    def _start(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            # -P: the current folder may hold files named as modules
            [sys.executable, "-P", "-m", __name__, *map(str, (os.getpid(), self._folder, self._mark, self._lock))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            bufsize=0,
            env={name: value for name, value in os.environ.items() if name != MARK},
            pass_fds=[self._lock],
            # Ctrl-C and kills of the driver's process group must not reach it
            start_new_session=True,
        )


def end_processes(mark: Path, *, spare: Collection[int] = (), seconds: float = END_SECONDS) -> None:
    """Kill every process that belongs to the run with this mark, and wait until they are gone.

    Args:
        mark: the value of `MARK` in the run.
        spare: ids of processes to leave alone.
        seconds: deadline of the wait.
    """
    deadline = Deadline(seconds)
    killed: set[psutil.Process] = set()
    while True:
        found = find_processes(mark, spare=spare)
        for process in found:
            with contextlib.suppress(psutil.Error):  # kills nothing if the id has passed to another process
                process.kill()
        killed = {one for one in killed.union(found) if not is_gone(one)}
        # once more after the last one: it may have started another before it ended
        if (not found and not killed) or not deadline.left:
            return
        time.sleep(0.05)


def find_processes(mark: Path, *, spare: Collection[int] = ()) -> list[psutil.Process]:
    """Find the processes that belong to the run with this mark: its driver, what that has started, and so on."""
    return [one for one in psutil.process_iter() if one.pid not in spare and _belongs(one, str(mark))]


def _belongs(process: psutil.Process, mark: str) -> bool:
    try:
        if process.uids().real != os.getuid() or is_gone(process):
            return False
        return process.environ().get(MARK) == mark or any(name == mark for name in _open_files(process))
    except (psutil.Error, OSError):  # it ended meanwhile, or may not be looked at
        return False


def _open_files(process: psutil.Process) -> Iterator[str]:
    """Yield the names of a process's open files without touching the files, which may lie on a mount that hangs."""
    if sys.platform != "linux":
        yield from (one.path for one in process.open_files())
        return
    folder = f"/proc/{process.pid}/fd"
    for descriptor in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            yield os.readlink(f"{folder}/{descriptor}").removesuffix(_DELETED)


def end_children(seconds: float = END_SECONDS) -> None:
    """Kill everything below this process in the process tree but a guard that is still needed.

    Args:
        seconds: deadline of the wait for their end.
    """
    deadline = Deadline(seconds)
    spare = _guarded[1].pid if _guarded else None
    stopped: set[psutil.Process] = set()
    while deadline.left:
        # stopped before any is killed: none starts another meanwhile, and none is left without a parent to find it by
        below = [one for one in psutil.Process().children(recursive=True) if one.pid != spare and not is_gone(one)]
        if not (new := set(below) - stopped):
            break
        for process in new:
            with contextlib.suppress(psutil.Error):
                process.suspend()
        stopped |= new
    for process in stopped:
        with contextlib.suppress(psutil.Error):
            process.kill()
    while deadline.left and not all(map(is_gone, stopped)):
        time.sleep(0.01)


def is_gone(process: psutil.Process) -> bool:
    """Whether a process has ended, collected by its parent or not."""
    try:
        # where nobody collects orphans, as in many containers, a killed process stays a zombie
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def remove_temp_dir(folder: Path, lock: int) -> None:
    """Remove a run's temp dir, its lock last: whoever locks it next then finds nothing that is about to go.

    Args:
        folder: the temp dir; left alone where somebody removed it and another run has made its own there.
        lock: descriptor of the run's locked file.
    """
    with contextlib.suppress(OSError):
        if not os.path.samestat(os.fstat(lock), (folder / LOCK).stat()):
            return
        for entry in [one for one in folder.iterdir() if one.name != LOCK]:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
        (folder / LOCK).unlink(missing_ok=True)
        folder.rmdir()


def main(driver: int, folder: Path, mark: Path, lock: int) -> None:
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
    end_processes(mark, spare=[os.getpid()])
    text = _last_words(folder) or (
        f"drivetrain: error: the driver (process {driver}) was killed, or was ended by Ray because one of Ray's "
        "processes had died, and all that it had started has been ended; unless somebody did that, look whether "
        "the machine ran out of memory; then run the same command again"
    )
    remove_temp_dir(folder, lock)
    with contextlib.suppress(OSError):  # the driver's standard error, where somebody may still be reading
        print(text, file=sys.stderr, flush=True)


def _last_words(folder: Path) -> str | None:
    """Return what the driver wanted to be said, with its log in place; None where its watchdog did not end it."""
    words = LastWords.read(folder / LAST_WORDS)
    try:
        stacks = (folder / STACKS).read_text("utf-8", "replace")
    except OSError:
        return None
    if words is None or not stacks:
        return None
    name = Path(words.log).name
    for log in (words.log, os.path.join(tempfile.mkdtemp(prefix="drivetrain-"), name)):
        with contextlib.suppress(OSError):  # its folder is full or gone
            Path(log).write_text(stacks, "utf-8")
            return words.text.replace(words.log, log)
    return words.text


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
