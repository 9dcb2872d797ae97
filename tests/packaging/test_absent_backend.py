"""A machine on which an official train backend is not installed, as the launcher sees it."""

import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest

import drivetrain_backend_api
import drivetrain_infra
import drivetrain_launcher

ABSENT = "drivetrain_backend_fsdp"


@pytest.fixture
def without_fsdp(tmp_path: Path) -> dict[str, str]:
    """Environment of an interpreter that sees every installed distribution but one."""
    installed = Path(pyarrow.__file__).parents[1]
    folder = tmp_path / "site"
    folder.mkdir()
    for path in installed.iterdir():
        if not path.name.startswith(ABSENT):
            (folder / path.name).symlink_to(path)
    sources = [Path(one.__file__).parents[1] for one in (drivetrain_backend_api, drivetrain_infra, drivetrain_launcher)]
    megatron = sources[0].parents[1] / "backend-megatron" / "src"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DRIVETRAIN_")}
    return clean | {"PYTHONPATH": os.pathsep.join(map(str, [*sources, megatron, folder]))}


def test_a_flag_of_a_known_backend_that_is_not_installed_says_what_to_install(without_fsdp: dict[str, str]) -> None:
    words = ["train", "--train-backend", "megatron", "--fsdp-cpu-offload", "--no-gradient-checkpointing"]
    done = subprocess.run(
        [sys.executable, "-S", "-m", "drivetrain_launcher.cli", *words],
        env=without_fsdp,
        capture_output=True,
        text=True,
        timeout=60,
    )
    hint = "belongs to train backend 'fsdp', which is not installed; pip install drivetrain-backend-fsdp"
    assert done.returncode == 2, done.stderr
    assert f"drivetrain: error: --fsdp-cpu-offload {hint}" in done.stderr.splitlines()
    assert f"drivetrain: error: --no-gradient-checkpointing {hint}" in done.stderr.splitlines()
