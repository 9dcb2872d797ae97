"""The run folder: a checkpoint is complete or absent, and `latest` never names one that is not there."""

import json
from pathlib import Path

import pytest

from drivetrain_backend_api import ConfigError, DataError
from drivetrain_infra.run_folder import RunFolder, resolve_checkpoint, write_atomically


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create({"lr": 0.5})
    return folder


def commit(run: RunFolder, rollouts: int, content: str) -> Path:
    (run.begin_checkpoint(rollouts) / "weights").write_text(content)
    return run.commit_checkpoint(rollouts)


def test_a_new_run_has_its_configuration(run: RunFolder) -> None:
    assert json.loads(run.config.read_text()) == {"lr": 0.5}


def test_a_used_folder_is_refused_and_left_alone(run: RunFolder) -> None:
    run.metrics.write_text('{"rollout_id": 0}\n')
    with pytest.raises(ConfigError, match="holds a run already"):
        run.create({"lr": 1.0})
    assert json.loads(run.config.read_text()) == {"lr": 0.5}


def test_a_folder_that_cannot_be_made_is_refused_by_flag(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--save .*cannot be written"):
        RunFolder(tmp_path / "file" / "run").create({})


def test_latest_names_the_newest_committed_checkpoint(run: RunFolder) -> None:
    commit(run, 3, "three")
    newest = commit(run, 12, "twelve")
    assert newest.name == "iter_0000012"
    assert run.latest() == newest
    assert (newest / "weights").read_text() == "twelve"


def test_an_uncommitted_checkpoint_is_not_one(run: RunFolder) -> None:
    committed = commit(run, 3, "three")
    (run.begin_checkpoint(4) / "weights").write_text("half")
    assert run.latest() == committed
    assert not run.checkpoint(4).exists()


def test_what_an_interrupted_save_left_is_not_mixed_into_the_next(run: RunFolder) -> None:
    (run.begin_checkpoint(4) / "stale").write_text("half")
    commit(run, 4, "whole")
    assert [path.name for path in run.checkpoint(4).iterdir()] == ["weights"]


def test_a_checkpoint_that_was_written_elsewhere_is_not_committed(run: RunFolder) -> None:
    run.begin_checkpoint(4)
    with pytest.raises(DataError, match="all nodes share"):
        run.commit_checkpoint(4)
    assert not run.checkpoint(4).exists()


def test_no_checkpoint_is_said_plainly(run: RunFolder) -> None:
    with pytest.raises(DataError, match="holds no checkpoint"):
        run.latest()


@pytest.mark.parametrize("name", ["iter_0000099", "../elsewhere", ""])
def test_a_latest_that_names_nothing_is_refused(run: RunFolder, name: str) -> None:
    commit(run, 3, "three")
    write_atomically(run.root / "latest", name)
    with pytest.raises(DataError, match="which is no checkpoint"):
        run.latest()


def test_load_takes_a_run_or_a_checkpoint(run: RunFolder, tmp_path: Path) -> None:
    first = commit(run, 3, "three")
    newest = commit(run, 4, "four")
    assert resolve_checkpoint(run.root) == newest
    assert resolve_checkpoint(first) == first
    with pytest.raises(DataError, match="no such folder"):
        resolve_checkpoint(tmp_path / "nowhere")
