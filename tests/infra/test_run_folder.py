"""The run folder: a checkpoint is complete or absent, and `latest` never names one that is not there."""

import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from drivetrain_backend_api import ConfigError, DataError, DrivetrainError
from drivetrain_infra.run_folder import RunFolder, resolve_checkpoint, write_atomically


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create({"lr": 0.5})
    return folder


def commit(run: RunFolder, rollouts: int, content: str) -> Path:
    with run.new_checkpoint(rollouts) as folder:
        (folder / "weights").write_text(content)
    return run.checkpoint(rollouts)


def save_and_raise(run: RunFolder, cause: BaseException) -> None:
    with run.new_checkpoint(4) as folder:
        (folder / "weights").write_text("half")
        raise cause


@contextmanager
def files_no_longer_than(nbytes: int) -> Iterator[None]:
    """A real limit of the system, at which writing fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def files(run: RunFolder) -> list[str]:
    return sorted(path.name for path in run.root.iterdir())


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


def test_a_checkpoint_is_not_there_until_it_is_whole(run: RunFolder) -> None:
    committed = commit(run, 3, "three")
    with run.new_checkpoint(4) as folder:
        (folder / "weights").write_text("half")
        assert run.latest() == committed
        assert not run.checkpoint(4).exists()
    assert run.latest() == run.checkpoint(4)


def test_what_a_killed_save_left_is_not_mixed_into_the_next(run: RunFolder) -> None:
    stale = run.root / "iter_0000004.partial"
    stale.mkdir()
    (stale / "stale").write_text("half")
    commit(run, 4, "whole")
    assert [path.name for path in run.checkpoint(4).iterdir()] == ["weights"]
    assert not stale.exists()


def test_a_checkpoint_that_was_written_elsewhere_is_not_committed(run: RunFolder) -> None:
    with pytest.raises(DataError, match="all nodes share"), run.new_checkpoint(4):
        pass
    assert files(run) == ["config.json"]


@pytest.mark.parametrize("cause", [DrivetrainError("rank 1 died"), ValueError("wrong shape"), KeyboardInterrupt()])
def test_a_save_that_fails_leaves_what_was_durable_and_nothing_half_written(
    run: RunFolder, cause: BaseException
) -> None:
    committed = commit(run, 3, "three")
    before = files(run)
    with pytest.raises(type(cause)) as caught:
        save_and_raise(run, cause)
    assert caught.value is cause
    assert files(run) == before
    assert run.latest() == committed


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        (OSError(28, "No space left on device", "x"), "No space left on device"),
        # the messages of safetensors and of PyTorch's writer on a full tmpfs, as a train worker's error carries them
        (
            DrivetrainError(
                "saving x: train rank 0 failed: SafetensorError: I/O error: No space left on device (os 28)"
            ),
            "No space left on device",
        ),
        (
            DrivetrainError("rank 0: RuntimeError: [enforce fail at inline_container.cc:671] . unexpected pos 7 vs 5"),
            "PyTorch could not write a file to its end",
        ),
    ],
)
def test_a_full_disk_is_told_apart_from_other_failures(run: RunFolder, cause: Exception, reason: str) -> None:
    with pytest.raises(DrivetrainError) as caught:
        save_and_raise(run, cause)
    assert str(caught.value) == (
        f"--save {run.root}: checkpoint iter_0000004 could not be written ({reason}); make room there, or choose "
        "another --save"
    )
    assert caught.value.__cause__ is cause


def test_a_disk_that_is_full_for_the_checkpoints_files(run: RunFolder) -> None:
    commit(run, 3, "three")
    before = files(run)
    with (
        pytest.raises(DrivetrainError, match=r"iter_0000004 could not be written \(File too large\)"),
        run.new_checkpoint(4) as folder,
        files_no_longer_than(64),
    ):
        (folder / "weights").write_bytes(b"x" * 65)
    assert files(run) == before


def test_a_disk_that_is_full_for_the_pointer_leaves_the_old_one(run: RunFolder) -> None:
    committed = commit(run, 3, "three")
    with (
        files_no_longer_than(10),
        pytest.raises(DrivetrainError, match=r"File too large"),
        run.new_checkpoint(4) as folder,
    ):
        (folder / "weights").write_text("four")
    assert run.latest() == committed
    assert not list(run.root.glob(".*"))
    assert not list(run.root.glob("*.partial"))


def test_a_run_folder_that_was_removed_is_not_made_again(run: RunFolder) -> None:
    commit(run, 3, "three")
    shutil.rmtree(run.root)
    with pytest.raises(DrivetrainError, match=r"--save .*/run: the folder is gone"), run.new_checkpoint(4):
        raise AssertionError
    assert not run.root.exists()


def test_a_run_folder_that_is_removed_during_a_save_is_named(run: RunFolder) -> None:
    with (
        pytest.raises(DrivetrainError, match=r"--save .*/run: the folder is gone, so checkpoint iter_0000004"),
        run.new_checkpoint(4),
    ):
        shutil.rmtree(run.root)  # then committing finds nothing
    assert not run.root.exists()


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


# -- what a killed process leaves --------------------------------------------------------------------------------------


def test_leftovers_of_a_killed_run_are_removed_and_nothing_else(run: RunFolder) -> None:
    commit(run, 3, "three")
    run.rollouts.mkdir()
    kept = [run.rollouts / "rollout_3.pt", run.root / "notes.partial", run.root / ".latest.old", run.root / "iter_4"]
    left = [run.root / ".latest.4711", run.root / ".resume_state.json.4711", run.rollouts / ".rollout_3.pt.4711"]
    for path in [*kept, *left]:
        path.write_text("")
    left += [run.root / "iter_0000004.partial", run.root / "iter_0000002.removed", run.root / "iter_0000003.replaced"]
    for path in left[3:]:
        (path / "dcp").mkdir(parents=True)
        (path / "dcp" / "shard").write_text("")
    run.remove_leftovers()
    assert [path for path in left if path.exists()] == []
    assert [path for path in kept if not path.exists()] == []
    assert (run.latest() / "weights").read_text() == "three"


def test_a_checkpoint_that_was_being_replaced_when_the_run_was_killed_is_read_and_put_back(run: RunFolder) -> None:
    commit(run, 3, "three").rename(run.root / "iter_0000003.replaced")
    assert run.checkpoints() == [3]
    assert (run.latest() / "weights").read_text() == "three"
    run.remove_leftovers()
    assert run.latest() == run.checkpoint(3)
    assert (run.latest() / "weights").read_text() == "three"


def test_a_leftover_that_cannot_be_removed_is_named(run: RunFolder) -> None:
    (run.root / "iter_0000004.partial").write_text("a file, where a folder should be")
    with pytest.raises(DrivetrainError, match=r"--save .*iter_0000004\.partial is left of a run .* remove it by hand"):
        run.remove_leftovers()


@pytest.mark.parametrize("name", ["metrics.jsonl", "resume_state.json", "latest", "rollout_ckpts/rollout_0.pt"])
def test_a_folder_with_anything_of_a_run_in_it_is_used(run: RunFolder, name: str) -> None:
    assert not run.is_used()  # its configuration alone is no run
    (run.root / name).parent.mkdir(exist_ok=True)
    (run.root / name).write_text("x")
    assert run.is_used()
    with pytest.raises(ConfigError, match="holds a run already"):
        run.refuse_if_used()


def test_a_folder_with_a_checkpoint_that_latest_does_not_name_yet_is_used(run: RunFolder) -> None:
    commit(run, 3, "three")
    (run.root / "latest").unlink()
    assert run.is_used()
    assert run.newest() == run.checkpoint(3)


def test_a_folder_that_is_not_there_is_unused(tmp_path: Path) -> None:
    assert not RunFolder(tmp_path / "nowhere").is_used()
    assert RunFolder(tmp_path / "nowhere").checkpoints() == []
    RunFolder(tmp_path / "nowhere").remove_leftovers()


def test_a_run_that_goes_on_has_its_new_configuration(run: RunFolder) -> None:
    commit(run, 3, "three")
    run.reopen({"lr": 0.25})
    assert json.loads(run.config.read_text()) == {"lr": 0.25}
    assert run.latest() == run.checkpoint(3)


# -- retention ---------------------------------------------------------------------------------------------------------


def save_all(run: RunFolder, *ids: int) -> None:
    for one in ids:
        commit(run, one, str(one))


def save_rollouts(run: RunFolder, *ids: int) -> None:
    run.rollouts.mkdir()
    for one in ids:
        (run.rollouts / f"rollout_{one}.pt").write_text("")


def test_the_newest_checkpoints_stay(run: RunFolder) -> None:
    save_all(run, 2, 4, 6, 12)
    assert run.prune(2) == [2, 4]
    assert run.checkpoints() == [6, 12]
    assert run.prune(2) == []
    assert files(run) == ["config.json", "iter_0000006", "iter_0000012", "latest"]


def test_without_a_number_everything_stays(run: RunFolder) -> None:
    save_all(run, 2, 4)
    save_rollouts(run, 0)
    assert run.prune(None) == []
    assert run.checkpoints() == [2, 4]
    assert len(list(run.rollouts.iterdir())) == 1


def test_rollouts_go_with_the_last_checkpoint_that_needs_them(run: RunFolder) -> None:
    save_all(run, 2, 4, 6)
    save_rollouts(run, 1, 2, 3, 4, 10)
    (run.rollouts / "notes.txt").write_text("")
    run.prune(2)
    assert sorted(path.name for path in run.rollouts.iterdir()) == ["notes.txt", "rollout_10.pt", "rollout_4.pt"]


def test_a_protected_checkpoint_stays_and_is_not_counted(run: RunFolder) -> None:
    save_all(run, 2, 4, 6)
    assert run.prune(1, protect=[run.checkpoint(2)]) == [4]
    assert run.checkpoints() == [2, 6]


def test_what_latest_names_is_not_removed_when_a_run_has_gone_back(run: RunFolder) -> None:
    save_all(run, 2, 4, 6)
    run.rewind_to(run.checkpoint(4))
    assert run.latest() == run.checkpoint(4)
    assert run.prune(1) == [2]
    assert run.checkpoints() == [4, 6]
    assert commit(run, 6, "again") == run.latest()
    assert (run.latest() / "weights").read_text() == "again"
    assert run.prune(1) == [4]


def test_a_checkpoint_that_cannot_be_removed_is_an_error_that_names_it(run: RunFolder) -> None:
    save_all(run, 2, 4)
    (run.root / "iter_0000002.removed").write_text("in the way")
    with pytest.raises(DrivetrainError, match=r"iter_0000002 cannot be removed .*--save-max-to-keep 1"):
        run.prune(1)
    assert run.checkpoints() == [2, 4]


def test_what_an_earlier_retention_could_not_delete_goes_with_the_next(run: RunFolder) -> None:
    save_all(run, 2, 4)
    run.checkpoint(2).rename(run.root / "iter_0000002.removed")
    assert run.checkpoints() == [4]
    assert run.prune(1) == []
    assert files(run) == ["config.json", "iter_0000004", "latest"]


HOLD = """
import sys, time
from pathlib import Path
from drivetrain_infra.run_folder import RunFolder
with RunFolder(Path(sys.argv[1])).locked():
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_folder_is_held_by_one_process_and_free_once_that_is_gone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.refuse_if_locked()
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(folder.root)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        refusal = rf"--save {folder.root}: process {holder.pid} on .* runs in it; wait for its end"
        with pytest.raises(ConfigError, match=refusal):
            folder.refuse_if_locked()
        with pytest.raises(ConfigError, match=refusal), folder.locked():
            pass
    finally:
        holder.kill()
        holder.communicate()
    folder.refuse_if_locked()
    with folder.locked():
        assert not folder.is_used()
