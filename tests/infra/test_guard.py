"""What a killed driver leaves behind is ended by its guard: real processes, without Ray."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from drivetrain_infra.daemons import UNWIND_SECONDS
from drivetrain_infra.guard import MARK, Guard, find_processes
from drivetrain_infra.ray_runtime import owned_temp_dir, ray_temp_dir

DEADLINE = 10.0

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]

# Starts a child, a process of another session whose parent has ended, and a fork; says who they are, then waits.
DRIVER = f"""
import os, subprocess, sys, time
from pathlib import Path
from drivetrain_infra.ray_runtime import owned_temp_dir

with owned_temp_dir(Path({{folder!r}})):
    child = subprocess.Popen({SLEEP!r})
    starter = "import subprocess; print(subprocess.Popen({SLEEP!r}, start_new_session=True, stdout=2).pid)"
    orphan = subprocess.run([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True).stdout.strip()
    fork = os.fork()
    if fork == 0:
        time.sleep(60)
        os._exit(0)
    print(os.environ[{MARK!r}], child.pid, orphan, fork, flush=True)
    sys.stdin.readline()
print("left", flush=True)
sys.stdin.readline()
os.kill(fork, 9)
child.kill()
"""


class Driver:
    """A driver in a process group of its own, and what it has started."""

    def __init__(self, folder: Path) -> None:
        self.temp_dir = ray_temp_dir(folder)
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER.format(folder=str(folder))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        mark, *words = self.process.stdout.readline().split()
        self.mark = Path(mark)
        self.child, self.orphan, self.fork = (psutil.Process(int(one)) for one in words)

    @property
    def guard(self) -> psutil.Process:
        children = psutil.Process(self.process.pid).children()
        return next(one for one in children if "drivetrain_infra.guard" in " ".join(one.cmdline()))

    def tell(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    driver = Driver(tmp_path)
    with driver.process:
        yield driver
        for one in (driver.child, driver.orphan, driver.fork):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        driver.process.kill()


def eventually(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {DEADLINE:g} s"
        time.sleep(0.05)


def ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_killed_driver_leaves_no_process_and_no_temp_dir(driver: Driver, tmp_path: Path) -> None:
    guard = driver.guard
    # as of a later run in the same folder, which was made anew
    elsewhere = {**os.environ, MARK: str(driver.mark) + "0"}
    with subprocess.Popen(SLEEP, env=elsewhere) as stranger:
        driver.kill()
        for name in ("child", "orphan", "fork"):
            eventually(lambda name=name: ended(getattr(driver, name)), f"the end of the {name}")
        eventually(lambda: ended(guard), "the end of the guard")
        assert not driver.temp_dir.exists()
        assert stranger.poll() is None, "a process of another run was killed"
        stranger.kill()


def test_a_run_that_ends_ends_its_orphans_and_spares_the_drivers_own_children(driver: Driver) -> None:
    guard = driver.guard
    driver.tell()
    assert driver.process.stdout is not None
    assert driver.process.stdout.readline() == "left\n"
    assert ended(driver.orphan)
    assert ended(guard)
    assert not driver.temp_dir.exists()
    assert not ended(driver.child)
    assert not ended(driver.fork)
    driver.tell()
    assert driver.process.wait(timeout=DEADLINE) == 0


def test_a_killed_guard_is_replaced_by_one_that_does_the_same(driver: Driver) -> None:
    first = driver.guard
    first.kill()

    def replaced() -> bool:
        with contextlib.suppress(StopIteration, psutil.NoSuchProcess):
            return driver.guard != first
        return False

    eventually(replaced, "another guard")
    driver.kill()
    eventually(lambda: not driver.temp_dir.exists(), "the end of the temp dir")
    assert not find_processes(driver.mark)
    assert ended(driver.orphan)


def test_a_run_started_right_after_a_kill_waits_for_the_guard(driver: Driver, tmp_path: Path) -> None:
    guard = driver.guard
    guard.suspend()
    driver.kill()
    threading.Timer(1.0, guard.resume).start()
    with owned_temp_dir(tmp_path) as folder:
        assert ended(driver.orphan)
        eventually(lambda: ended(guard), "the end of the guard")
        assert (folder / "lock").exists(), "the guard removed the temp dir of the next run"
    assert not folder.exists()


def test_a_guard_leaves_the_temp_dir_of_another_run_alone(driver: Driver, tmp_path: Path) -> None:
    guard = driver.guard
    shutil.rmtree(driver.temp_dir)  # as somebody does who tidies up
    with owned_temp_dir(tmp_path) as folder, subprocess.Popen(SLEEP) as later:
        driver.kill()
        eventually(lambda: ended(guard), "the end of the guard")
        for name in ("child", "orphan", "fork"):
            assert ended(getattr(driver, name)), name
        assert later.poll() is None, "a process of the next run was killed"
        assert (folder / "lock").exists(), "the guard removed the temp dir of the next run"
        later.kill()


def test_a_guard_that_cannot_start_is_missed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    python, starts = tmp_path / "python", tmp_path / "starts"
    python.write_text(f"#!/bin/sh\necho >> {starts}\nexit 3\n")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr("drivetrain_infra.guard._HOPELESS_SECONDS", 0.4)
    with (tmp_path / "lock").open("w") as lock:
        guard = Guard(tmp_path, tmp_path / "mark", lock.fileno())
        time.sleep(2)
        guard.close()
    # at 0, 0.2, 0.6 and 1.4 s
    assert 2 <= len(starts.read_text().splitlines()) <= 4
    assert [record.getMessage() for record in caplog.records] == [
        "the process that cleans up after a killed driver does not start (exit code 3); the run goes on, but if it is "
        "killed, end what it leaves behind by hand"
    ]


def test_all_children_end_together_with_theirs() -> None:
    parent = (
        "import subprocess, sys; child = subprocess.Popen(sys.argv[1:]); print(child.pid, flush=True); child.wait()"
    )
    code = (
        "import subprocess, sys, drivetrain_infra.guard as guard\n"
        "child = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, text=True, start_new_session=True)\n"
        "print(child.pid, child.stdout.readline().strip(), flush=True)\n"
        "guard.end_children()\n"
        "print(child.wait())\n"
    )
    words = [sys.executable, "-c", code, sys.executable, "-c", parent, *SLEEP]
    shown = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True).stdout.split()
    assert shown[-1] == str(-signal.SIGKILL)
    for pid in shown[:2]:
        assert not psutil.pid_exists(int(pid)) or ended(psutil.Process(int(pid)))


# Its one daemon is a real process of that name; the driver then waits for something that never comes.
WATCHED = """
import subprocess, sys, time
from drivetrain_backend_api import DrivetrainError
from drivetrain_infra import daemons

daemons.UNWIND_SECONDS = 0.5
with daemons.watched_daemons(lambda sentence: print("stuck:", sentence)) as watched:
    raylet = subprocess.Popen([sys.argv[1], "60"])
    time.sleep(1)
    assert watched.problem() is None
    if sys.argv[2] == "expected":
        watched.expect_end()
    raylet.kill()
    raylet.wait()
    try:
        if sys.argv[2] == "known":
            watched.require_alive()
        time.sleep(3)
    except DrivetrainError:
        time.sleep(3)
        print("cleaned up")
"""


@pytest.mark.parametrize("end", ["sudden", "expected", "known"])
def test_a_driver_stuck_after_its_raylet_died_says_so_and_exits(tmp_path: Path, end: str) -> None:
    assert UNWIND_SECONDS <= 15, "with what comes before and after, a run must have ended after 30 s"
    raylet = tmp_path / "raylet"
    shutil.copy(shutil.which("sleep") or "", raylet)
    finished = subprocess.run(
        [sys.executable, "-u", "-c", WATCHED, raylet, end], capture_output=True, text=True, timeout=60, check=False
    )
    assert finished.stderr == ""
    if end == "sudden":
        assert finished.returncode == 1
        assert finished.stdout.startswith("stuck: Ray's raylet (process ")
        assert len(finished.stdout.splitlines()) == 1
    else:
        assert (finished.returncode, finished.stdout) == (0, "cleaned up\n" if end == "known" else "")
