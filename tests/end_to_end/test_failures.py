"""Runs that fail in the middle: one sentence, the traceback in a file, what was durable still there, no process left.

Each run trains for one rollout, saves, and meets its trouble at the second. What goes wrong there is real: the user's
own function does it from inside the run, so that nothing depends on timing. It leaves a process behind as well.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
import pytest

from drivetrain_infra.ray_runtime import ray_temp_dir
from drivetrain_infra.run_folder import RunFolder
from drivetrain_launcher.export import export_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SAMPLES = 16
"""Of a rollout; so many rewards are computed before those of the second."""

SECRET = "5ecret" + "0123456789abcdef" * 2

TROUBLES = """
import re
import shutil
import subprocess

import psutil

calls = 0


def second_rollout():
    global calls
    calls += 1
    if calls != SAMPLES + 4:
        return False
    subprocess.Popen(["sleep", "600"])
    return True


def raises(sample):
    if second_rollout():
        sandbox = {}
        return sandbox["verdict"]
    return float(calls % 2)


def hangs(sample):
    if second_rollout():
        re.match(r"(a+)+$", "a" * 40 + "b")  # for years, and no other thread runs meanwhile
    return float(calls % 2)


def removes_the_run_folder(sample):
    if second_rollout():
        shutil.rmtree("RUN")
    return float(calls % 2)


def limits_the_workers_files(sample):
    if second_rollout():
        import resource

        for one in psutil.Process().children(recursive=True):
            if "TrainWorker" in " ".join(one.cmdline()):
                resource.prlimit(one.pid, resource.RLIMIT_FSIZE, (65536, 65536))
    return float(calls % 2)
"""


class Finished(Protocol):
    code: int
    output: str


Command = Callable[..., Finished]


@dataclass(frozen=True)
class Failed:
    """A run that failed.

    Attributes:
        errors: what it printed after `drivetrain: error: `.
        log: text of the file with its traceback.
        last: its last line.
    """

    folder: Path
    errors: list[str]
    log: str
    log_path: Path
    last: str

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.folder / "RUN")


@pytest.fixture
def fail(
    drivetrain: Command, train_words: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Failed]:
    """Run `drivetrain train` with a reward of `TROUBLES`, or further flags, until it fails."""
    monkeypatch.setenv("HF_TOKEN", SECRET)

    def run(*more: str, command: Command = drivetrain) -> Failed:
        (tmp_path / "troubles.py").write_text(TROUBLES.replace("SAMPLES", str(SAMPLES)))
        words = train_words("--save", "RUN", "--save-interval", "1", "--num-rollout", "3", *more)
        if "sft" in more:
            words[words.index("--n-samples-per-prompt") + 1] = "1"
        finished = command(*words, folder=tmp_path)
        assert finished.code == 1, finished.output
        assert SECRET not in finished.output
        require_nothing_left(tmp_path / "RUN")
        prefix = "drivetrain: error: "
        errors = [line.removeprefix(prefix) for line in finished.output.splitlines() if line.startswith(prefix)]
        assert "Traceback" not in finished.output
        assert len(errors) == 2, finished.output
        log = Path(errors[1].removeprefix("the full traceback is in "))
        files = [path for path in [*tmp_path.rglob("*"), log] if path.is_file()]
        assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
        return Failed(
            folder=tmp_path,
            errors=errors,
            log=log.read_text() if log.exists() else "",
            log_path=log,
            last=finished.output.splitlines()[-1],
        )

    return run


def require_nothing_left(save: Path) -> None:
    """Assert that no process of the run is left: each has the run's own RAY_TMPDIR in its environment."""
    mark = f"{ray_temp_dir(save)}"

    def left() -> list[str]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("RAY_TMPDIR") == mark:
                    found.append(f"{process.pid} {process.name()}")
            except psutil.Error:  # somebody else's, or gone meanwhile
                continue
        return found

    deadline = time.monotonic() + 30
    while left() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left() == []
    assert not Path(mark).exists()


def require_first_checkpoint_only(run: RunFolder) -> None:
    names = sorted(path.name for path in run.root.iterdir())
    assert (run.root / "latest").read_text().strip() == "iter_0000001"
    assert [name for name in names if name.startswith((".", "iter_"))] == ["iter_0000001"]


def test_a_reward_that_raises(fail: Callable[..., Failed]) -> None:
    failed = fail("--reward", "troubles:raises")
    assert re.fullmatch(r"--reward troubles:raises on sample 3 \(.*\) failed: KeyError: 'verdict'", failed.errors[0]), (
        failed.errors
    )
    assert failed.log_path.parent == failed.run.root
    assert 'return sandbox["verdict"]' in failed.log
    require_first_checkpoint_only(failed.run)
    assert failed.last == (
        f"drivetrain: the newest checkpoint is {failed.run.root}/iter_0000001; to go on from it, run the same command "
        "again"
    )
    export_run(failed.run.root, failed.folder / "HF", None)


def test_a_reward_that_hangs(fail: Callable[..., Failed]) -> None:
    failed = fail("--reward", "troubles:hangs", "--rollout-timeout", "10")
    assert re.fullmatch(
        r"--reward troubles:hangs did not return for sample 3 \(.*train.jsonl:\d+\) within --rollout-timeout 10 s of "
        r"the rollout's start; repair it, or raise the timeout",
        failed.errors[0],
    ), failed.errors
    assert failed.log_path.parent == failed.run.root
    assert re.search(r'troubles\.py", line \d+ in hangs', failed.log)
    require_first_checkpoint_only(failed.run)
    assert f"the newest checkpoint is {failed.run.root}/iter_0000001" in failed.last


@pytest.mark.exhaustive
def test_a_save_folder_that_is_removed(fail: Callable[..., Failed]) -> None:
    failed = fail("--reward", "troubles:removes_the_run_folder")
    root = failed.run.root
    assert failed.errors[0] == (
        f"{root}/metrics.jsonl: metrics have no place to go, because {root} was removed or replaced while the run went "
        "on; start again with a --save that nothing removes"
    )
    assert not root.exists()
    assert "Traceback" in failed.log
    assert "newest checkpoint" not in failed.last
    shutil.rmtree(failed.log_path.parent)


def on_a_small_disk(*words: str, folder: Path) -> Finished:
    """Run the command with a file system at RUN that holds one checkpoint (1.3 MiB) but not two; copy what is on it."""
    command = shlex.join([sys.executable, "-m", "drivetrain_launcher.cli", *words])
    script = textwrap.dedent(
        f"""
        mkdir RUN DISK && mount -t tmpfs -o size=2m disk RUN || exit 99
        {command}
        code=$?
        cp -a RUN/. DISK/
        exit $code
        """
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DRIVETRAIN_", "RAY_"))}
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", script],
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1", "COLUMNS": "160"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
    )
    finished: Any = type("Finished", (), {"code": done.returncode, "output": done.stdout})
    return finished  # type: ignore[no-any-return]


def may_mount() -> bool:
    """Say whether this user may mount a tmpfs in a namespace of their own; some systems forbid it."""
    try:
        words = ["unshare", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
        return subprocess.run(words, capture_output=True, timeout=30, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.exhaustive
def test_a_disk_that_is_full_while_saving(fail: Callable[..., Failed]) -> None:
    if may_mount():
        failed = fail("--algorithm", "sft", command=on_a_small_disk)
        reason = "No space left on device|PyTorch could not write a file to its end"
        (failed.run.root).rmdir()  # the mount point
        (failed.folder / "DISK").rename(failed.run.root)
    else:
        failed = fail("--reward", "troubles:limits_the_workers_files")
        reason = "File too large|PyTorch could not write a file to its end"
    assert re.fullmatch(
        rf"--save {failed.run.root}: checkpoint iter_0000002 could not be written \(({reason})\); make room there, or "
        "choose another --save",
        failed.errors[0],
    ), failed.errors
    require_first_checkpoint_only(failed.run)
    assert f"the newest checkpoint is {failed.run.root}/iter_0000001" in failed.last
    export_run(failed.run.root, failed.folder / "HF", None)


ENGINE_SPEC = """
from drivetrain_infra.engines.base import EngineSpec
from drivetrain_infra.engines.transformers_spec import TransformersEngineConfig

SPEC = EngineSpec(
    name="careless", api_version=1, target="careless_engine:Careless", config_class=TransformersEngineConfig
)
"""

ENGINE = """
from dataclasses import replace

from drivetrain_infra.engines.transformers_engine import TransformersEngine


class Careless(TransformersEngine):
    def generate(self, requests):
        generations = super().generate(requests)
        if self.weight_version == 2:
            generations[5] = replace(generations[5], log_probs=generations[5].log_probs[:-1])
        return generations
"""


@pytest.mark.exhaustive
def test_an_engine_of_another_wheel_that_returns_wrong_shapes(
    fail: Callable[..., Failed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "careless-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: careless\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[drivetrain.rollout_engines]\ncareless = careless_spec:SPEC\n")
    (tmp_path / "careless_spec.py").write_text(ENGINE_SPEC)
    (tmp_path / "careless_engine.py").write_text(ENGINE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    failed = fail("--reward", "math", "--rollout-engine", "careless")
    assert re.fullmatch(
        r"engine-0 returned (\d) tokens and \d log-probs, for sample 5 \(.*train.jsonl:\d+\); repair it, or use "
        "another --rollout-engine",
        failed.errors[0],
    ), failed.errors
    require_first_checkpoint_only(failed.run)
