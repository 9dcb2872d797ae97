"""The state of a run comes back as it was written, or not at all."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from drivetrain_backend_api import DataError
from drivetrain_infra.run_state import RUN_STATE, SCHEMA, LastSave, RunState, installed_versions

STATE = RunState(
    next_rollout_id=4,
    checkpoint="iter_0000004",
    weight_version=5,
    prompts_read=32,
    seed=-1,
    metrics_bytes=1234,
    lost_steps=2,
    lost_since=3,
    wandb_run_id="run-ü",
    wall_seconds=12.5,
    exit_reason="SIGTERM",
    backend="fsdp",
    versions={"torch": "2.11.0"},
    layout={"world_size": 2, "tp": 1, "dp": 2},
    model_sha256="ab" * 32,
    data_sha256="cd" * 32,
    options={"lr": 1e-6, "rollout-stop": ["a", "b"], "load": None, "bf16": True},
    last_save=LastSave(blocked_seconds=0.1, seconds=2),
)


def written(folder: Path, name: str = "resume_state.json", **changed: Any) -> Path:
    """Write a state's table with some fields replaced, those set to `...` left out."""
    table = {**asdict(STATE), **changed}
    path = folder / name
    path.write_text(json.dumps({key: value for key, value in table.items() if value is not ...}))
    return path


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "resume_state.json"
    STATE.write(path)
    assert RunState.read(path) == STATE
    first = replace(STATE, checkpoint=None, wandb_run_id=None, exit_reason=None, last_save=None)
    first.write(path)
    assert RunState.read(path) == first
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("next_rollout_id", ..., "next_rollout_id is missing"),
        ("next_rollout_id", "4", "next_rollout_id is '4', not a whole number"),
        ("next_rollout_id", True, "next_rollout_id is True, not a whole number"),
        ("next_rollout_id", 4.0, "next_rollout_id is 4.0, not a whole number"),
        ("next_rollout_id", -1, "next_rollout_id is -1, out of range"),
        ("metrics_bytes", None, "metrics_bytes is None, not a whole number"),
        ("seed", 1.5, "seed is 1.5, not a whole number"),
        ("wall_seconds", float("nan"), "wall_seconds is nan, out of range"),
        ("backend", None, "backend is None, not a text"),
        ("checkpoint", 4, "checkpoint is 4, not a text"),
        ("versions", ["torch"], r"versions is \['torch'\], not a table"),
        ("versions", {"torch": 2.11}, "versions.torch is 2.11, not a text"),
        ("layout", {"tp": "1"}, "layout.tp is '1', not a whole number"),
        ("options", None, "options is None, not a table"),
        ("last_save", {"seconds": 1.0}, "blocked_seconds"),
        ("last_save", {"seconds": -1.0, "blocked_seconds": 0.0}, "last_save.seconds is -1.0, out of range"),
        ("last_save", [1.0], r"last_save is \[1.0\], not a table of seconds"),
        ("schema", "1", "schema is '1', not a whole number"),
        ("schema", ..., "schema is missing"),
        ("ckpt", "x", "'ckpt' is no field"),
    ],
)
def test_a_field_that_is_not_as_it_must_be_is_named(tmp_path: Path, field: str, value: Any, said: str) -> None:
    path = written(tmp_path, **{field: value})
    with pytest.raises(DataError, match=said) as caught:
        RunState.read(path)
    assert str(path) in str(caught.value)
    assert str(caught.value).endswith("remove it: the newest checkpoint has a state of its own")


def test_another_schema_is_told_from_damage(tmp_path: Path) -> None:
    path = written(tmp_path, schema=SCHEMA + 1, new_field=1)
    with pytest.raises(DataError) as caught:
        RunState.read(path)
    assert str(caught.value) == (
        f"{path}: schema is {SCHEMA + 1}, and this release reads {SCHEMA}; go on with the release of Drivetrain that "
        "wrote it"
    )


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"schema": 1}', "\udc80", "[" * 100_000])
def test_what_is_no_state_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / RUN_STATE
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=r"run_state.json: is damaged .*; use another checkpoint .*--ckpt-step"):
        RunState.read(path)


def test_a_state_that_is_missing_or_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is missing; use another checkpoint"):
        RunState.read(tmp_path / RUN_STATE)
    (tmp_path / RUN_STATE).mkdir()
    with pytest.raises(DataError, match="is no file"):
        RunState.read(tmp_path / RUN_STATE)


def test_a_state_that_cannot_be_read_back_is_not_made() -> None:
    with pytest.raises(ValueError, match="prompts_read is -1"):
        replace(STATE, prompts_read=-1)


def test_the_installed_releases_are_listed() -> None:
    found = installed_versions(also=["pytest", "no-such-distribution"])
    assert found["torch"] == version("torch")
    assert found["drivetrain-infra"] == version("drivetrain-infra")
    assert found["pytest"] == version("pytest")
    assert "no-such-distribution" not in found


def test_what_the_driver_reads_before_it_starts_anything_imports_no_torch() -> None:
    modules = ", ".join(f"drivetrain_infra.{one}" for one in ("run_folder", "run_state", "resume", "checkpoint_writer"))
    code = f"import sys, {modules}; print([one for one in ('torch', 'ray', 'numpy') if one in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout == "[]\n"
