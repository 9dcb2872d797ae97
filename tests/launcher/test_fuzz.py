"""No input of the edge ends in a traceback, a hang or a started Ray: 2,000 drawn cases, the same ones each time."""

import faulthandler
import os
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from fuzz_cases import CANARY, Case, command_lines, config_files, damaged_folders, prompt_files, shown
from hypothesis import HealthCheck, given, settings
from scratch import Ended, run_in

from drivetrain_launcher import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SECONDS = 20.0
"""Far above what a case takes (0.1 s): beyond it is a hang."""

PREFIX = "drivetrain: error: "

NOISE = ("[transformers] ", "SystemError: deallocated bytearray object has exported buffers")
"""In lines that are not ours: warnings, and what CPython prints of a pickle that promises more bytes than there are."""

CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] + message['content'] }}{% endfor %}"


class Hang(BaseException):
    """A case did not end."""


class Fuzz:
    """Runs cases in fresh copies of a good scratch folder and holds each to what must always be true."""

    def __init__(self, good: Path, work: Path) -> None:
        self._good = good
        self._folder = work / "case"
        self.reached_checks = False
        self.started_ray = False
        self.outcomes: Counter[str] = Counter()
        """How cases ended: "done", or "refused" or "failed", by the command line alone or by what it led to."""

    def run(self, case: Case) -> Ended:
        """Run a case; raises AssertionError with the case where something is not as it must be."""
        shutil.copytree(self._good, self._folder, symlinks=True)
        try:
            case.arrange(self._folder)
            before, children = _listing(self._folder), _children()
            self.reached_checks = case.words[:1] != ["train"]
            with _deadline(case):
                ended = run_in(self._folder, case.words, case.environ)
            wrong = _wrong(ended, case, before, _listing(self._folder))
            wrong += ["a started Ray"] * self.started_ray
            wrong += ["a child process"] * bool(_children() - children)
        finally:
            shutil.rmtree(self._folder)
        assert not wrong, "\n".join(
            [*wrong, f"exit code {ended.code}", ended.out[-500:], ended.err[-2000:], shown(case)]
        )
        self.outcomes[self._outcome(ended)] += 1
        return ended

    def _outcome(self, ended: Ended) -> str:
        how = {0: "done", 1: "failed", 2: "refused"}[ended.code]
        return how if how == "done" or self.reached_checks else f"{how} by the command line"

    def share(self, *outcomes: str) -> float:
        """Return the share of cases that ended so; all shares are printed, which `pytest -rP` shows."""
        print(dict(self.outcomes))
        return sum(self.outcomes[one] for one in outcomes) / self.outcomes.total()


def _wrong(ended: Ended, case: Case, before: set[str], after: set[str]) -> list[str]:
    """Say what is not as it must be after any case."""
    wrong = []
    errors = ended.err.splitlines()
    own = [line for line in errors if not any(noise in line for noise in NOISE)]
    if ended.code not in (0, 1, 2):
        wrong.append("another exit code than 0, 1 or 2")
    if ended.code == 1 and case.words[0] != "export":
        wrong.append("exit code 1, though nothing was started")
    if ended.code and not own:
        wrong.append("refused without a word")
    if ended.code and any(not line.startswith(PREFIX) or not line.removeprefix(PREFIX).strip() for line in own):
        wrong.append(f"a line that does not begin with {PREFIX!r}, or says nothing")
    if "Traceback" in ended.out + ended.err or any(line.startswith(f"{PREFIX}unexpected ") for line in errors):
        wrong.append("an unexpected error, or a traceback")
    if CANARY in after:
        wrong.append("code in a file has run")
    allowed = {one for one in after if ended.code == 0 and case.words[0] == "export" and one not in before}
    if (after ^ before) - allowed:
        wrong.append(f"files changed: {sorted(after ^ before)[:5]}")
    return wrong


def _children() -> set[int]:
    return {one.pid for one in psutil.Process().children()}


def _listing(folder: Path) -> set[str]:
    return {
        os.path.relpath(os.path.join(root, name), folder)
        for root, folders, files in os.walk(folder)
        for name in folders + files
    }


@contextmanager
def _deadline(case: Case) -> Iterator[None]:
    """Raise `Hang` in the main thread when the time is over; end the process where no signal gets through."""
    hang = Hang(f"not ended within {SECONDS:g} s: {shown(case)}")
    late: list[Hang] = []

    def interrupt(number: int, frame: Any) -> None:
        late.append(hang)
        raise hang

    def give_up() -> None:
        print(hang, file=sys.__stderr__, flush=True)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)

    # SIGALRM is pytest-timeout's
    handler = signal.signal(signal.SIGUSR2, interrupt)
    timer = threading.Timer(SECONDS, give_up)
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(2 * SECONDS, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        timer.cancel()
        signal.signal(signal.SIGUSR2, handler)
    if late:  # a library may have swallowed it
        raise hang


@pytest.fixture(scope="module")
def scratch(good_scratch: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The good scratch folder and, beside its model, one with a chat template."""
    folder = tmp_path_factory.mktemp("fuzz") / "good"
    shutil.copytree(good_scratch, folder)
    shutil.copytree(folder / "model", folder / "chat")
    (folder / "chat" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


@pytest.fixture
def fuzz(scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_tempdir: Path) -> Fuzz:
    """A fuzz that notes which cases get past the command line, and in which no Ray can start."""
    import ray

    fuzz = Fuzz(scratch, tmp_path)
    run_train = run.run_train

    def noted(request: Any, stopping: Any) -> int:
        fuzz.reached_checks = True
        return run_train(request, stopping)

    def started(*args: Any, **kwargs: Any) -> None:
        fuzz.started_ray = True
        raise AssertionError("Ray was to be started")

    monkeypatch.setattr(run, "run_train", noted)
    monkeypatch.setattr(ray, "init", started)
    return fuzz


def cases(count: int) -> Any:
    """Settings of one fuzz: always the same cases, so that it fails on the commit that broke something."""
    return settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def test_command_lines_and_variables(fuzz: Fuzz) -> None:
    @cases(160)
    @given(command_lines())
    def always(case: Case) -> None:
        fuzz.run(case)

    always()
    assert fuzz.share("done", "refused") > 0.25, fuzz.outcomes


def test_configuration_files(fuzz: Fuzz) -> None:
    @cases(200)
    @given(config_files())
    def always(case: Case) -> None:
        fuzz.run(case)

    always()
    assert fuzz.share("done", "refused") > 0.25, fuzz.outcomes


def test_prompt_files(fuzz: Fuzz) -> None:
    @cases(150)
    @given(prompt_files())
    def always(case: Case) -> None:
        fuzz.run(case)

    always()
    assert fuzz.share("refused by the command line") < 0.1, fuzz.outcomes
    assert fuzz.share("done") > 0.1, fuzz.outcomes


def test_damaged_folders(fuzz: Fuzz) -> None:
    @cases(150)
    @given(damaged_folders())
    def always(case: Case) -> None:
        fuzz.run(case)

    always()
    assert fuzz.share("refused by the command line") < 0.2, fuzz.outcomes
    assert fuzz.share("done") > 0.1, fuzz.outcomes
