"""The quickstart recipe, whole: the held-out reward rises by a clear margin, with its fixed seed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

MARGIN = 0.15
"""Rise of the held-out reward that counts as learning; 512 answers have a standard error of 0.02."""


@pytest.mark.timeout(900)
def test_the_quickstart_learns(drivetrain: Callable[..., Any], tmp_path: Path) -> None:
    finished = drivetrain("train", "--recipe", "quickstart", folder=tmp_path, seconds=900)
    assert finished.code == 0, finished.output
    lines = (tmp_path / "runs" / "quickstart" / "metrics.jsonl").read_text().splitlines()
    rewards = [row["eval/reward"] for row in map(json.loads, lines) if "eval/reward" in row]
    assert rewards[-1] - rewards[0] >= MARGIN
