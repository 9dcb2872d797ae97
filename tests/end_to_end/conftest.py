"""Running the command as a user does: a process of its own, a deadline, and nothing left behind."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from drivetrain_launcher.recipes import arithmetic


@dataclass(frozen=True)
class Finished:
    """A command that ended."""

    code: int
    output: str


Command = Callable[..., Finished]
"""drivetrain(*words, folder=..., seconds=..., joins_ray=...)."""


def run_drivetrain(*words: str, folder: Path, seconds: float = 400, joins_ray: bool = False) -> Finished:
    """Run `drivetrain` in a folder; it is killed, and the test fails, at the deadline.

    With `joins_ray` it inherits the variables that let it join a Ray cluster of the test.
    """
    strange = ("DRIVETRAIN_",) if joins_ray else ("DRIVETRAIN_", "RAY_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(strange)}
    environment |= {"OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    process = subprocess.run(
        [sys.executable, "-m", "drivetrain_launcher.cli", *words],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
    return Finished(code=process.returncode, output=process.stdout)


@pytest.fixture(scope="session")
def drivetrain() -> Command:
    """The command."""
    return run_drivetrain


@pytest.fixture(scope="session")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model folder and prompt files of sums."""
    folder = tmp_path_factory.mktemp("sums")
    arithmetic.make(folder, seed=7)
    return folder


@pytest.fixture(scope="session")
def train_words(sums: Path) -> Callable[..., list[str]]:
    """Flags of a small run on the sums; further ones are appended."""

    def words(*more: str) -> list[str]:
        return [
            *("train", "--train-backend", "fsdp", "--fp32", "--hf-checkpoint", str(sums / "model")),
            *("--prompt-data", str(sums / "train.jsonl"), "--input-key", "question", "--label-key", "answer"),
            *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "5"),
            *more,
        ]

    return words
