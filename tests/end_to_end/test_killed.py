"""SIGKILL of a process that a run cannot go on without: no other is left 30 s later, nothing in the temp dir, and one
sentence."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DEADLINE = 30.0
"""Seconds from the kill until nothing may be left."""

START_SECONDS = 200.0


class KilledRun:
    """`drivetrain train` in its second rollout, with a temp dir of its own."""

    def __init__(self, folder: Path, temp: Path, words: list[str]) -> None:
        self.folder = folder
        self.temp = temp
        ours = ("DRIVETRAIN_", "RAY_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        environment |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(temp)}
        with (folder / "output").open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "drivetrain_launcher.cli", *words],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.driver = psutil.Process(self.process.pid)
        self.wait_for(lambda: self.rollouts > 0, START_SECONDS, "the first rollout")
        self.tree = self.driver.children(recursive=True)

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()

    @property
    def rollouts(self) -> int:
        metrics = self.folder / "RUN" / "metrics.jsonl"
        return metrics.read_text().count('"train/loss"') if metrics.exists() else 0

    def wait_for(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"the run ended before {what}:\n{self.output}"
            assert time.monotonic() < end, f"{what}: not within {seconds:g} s\n{self.output}"
            time.sleep(0.1)

    def find(self, words: str) -> psutil.Process:
        """Find the process of the run with these words in its command line."""
        found = [one for one in self.tree if words in describe(one)]
        assert len(found) == 1, f"{words!r} is in the command lines of {found}, all: {self.tree}"
        return found[0]

    def require_end(self, began: float) -> None:
        """Fail unless everything has ended `DEADLINE` after the kill."""
        while left := [one for one in [self.driver, *self.tree, *self._mentioning_temp()] if not ended(one)]:
            assert time.monotonic() < began + DEADLINE, f"still there: {left}\n{self.output}"
            if self.process.poll() is None:
                time.sleep(0.1)
        # torch keeps a cache for all processes of this user
        assert [one.name for one in self.temp.iterdir() if not one.name.startswith("torchinductor_")] == []

    def _mentioning_temp(self) -> list[psutil.Process]:
        """Processes that were started after `tree` was read."""
        return [one for one in psutil.process_iter() if str(self.temp) in describe(one)]


def describe(process: psutil.Process) -> str:
    """Its command line, and the temp dir that it has inherited."""
    try:
        return " ".join([*process.cmdline(), process.environ().get("TMPDIR", "")])
    except psutil.Error:  # it has ended, or belongs to somebody else
        return ""


def ended(process: psutil.Process) -> bool:
    try:
        # orphans stay zombies where nobody collects them
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def run(tmp_path: Path, train_words: Callable[..., list[str]]) -> Iterator[KilledRun]:
    # short, for the paths of Ray's sockets
    with tempfile.TemporaryDirectory(prefix="dk-", dir="/tmp") as temp:
        run = KilledRun(tmp_path, Path(temp), train_words("--num-rollout", "100000", "--save", "RUN"))
        yield run
        for one in [run.driver, *run.tree]:
            if not ended(one):
                one.kill()
        run.process.wait()


LOST = {
    "ray::TrainWorker": r"train rank 0 died \(process {pid}",
    "gcs_server": r"Ray's gcs_server \(process {pid}\) died",
    # its agents may be gone with it; Ray ends a driver that has lost its raylet, perhaps before that can say a word
    "raylet/raylet ": r"Ray's raylet \(process {pid}\) (and .*)?died|driver .* was ended by Ray",
    # whichever of the two is gone first; the raylet ends with either, in good order
    "ray::DashboardAgent, ray::RuntimeEnvAgent": r"Ray's .*Agent \(process \d+\) died|driver .* was ended by Ray",
}
"""Words in the command lines of processes -> what is said when they are killed."""


EVERY_RUN = ("ray::TrainWorker", "raylet/raylet ")
"""Those that are killed in CI: one of ours, one of Ray's."""


@pytest.mark.parametrize(
    "victim", [one if one in EVERY_RUN else pytest.param(one, marks=pytest.mark.exhaustive) for one in LOST]
)
def test_a_run_that_lost_a_process_says_which_and_leaves_nothing(run: KilledRun, victim: str) -> None:
    process, *others = map(run.find, victim.split(", "))
    began = time.monotonic()
    for one in (process, *others):
        one.kill()
    run.require_end(began)
    assert run.process.wait() == 1, run.output
    errors = [line for line in run.output.splitlines() if line.startswith("drivetrain: error: ")]
    assert errors, run.output
    assert re.search(LOST[victim].format(pid=process.pid), errors[0])
    assert all("the full traceback is in" in line for line in errors[1:])
    assert "Traceback" not in run.output
    assert "(raylet)" not in run.output


def test_a_run_goes_on_without_its_helpers_and_a_killed_driver_leaves_nothing(run: KilledRun) -> None:
    for helper in ("drivetrain_infra.guard", "autoscaler/_private/monitor.py", "log_monitor.py", "dashboard.py"):
        run.find(helper).kill()
    done = run.rollouts
    run.wait_for(lambda: run.rollouts >= done + 5, 60, "more rollouts")
    run.tree = run.driver.children(recursive=True)
    assert run.find("drivetrain_infra.guard")
    began = time.monotonic()
    run.driver.kill()
    assert run.process.wait() == -signal.SIGKILL
    run.require_end(began)
    assert f"drivetrain: error: the driver (process {run.driver.pid}) was killed" in run.output
