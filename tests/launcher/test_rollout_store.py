"""Rollouts on disk: what was made is used again by the same run, and by no other."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drivetrain_backend_api import DataError, DrivetrainError
from drivetrain_backend_api.batch import from_samples
from drivetrain_infra.rollout_files import rollout_file, save_rollout
from drivetrain_launcher.rollout import Rollout
from drivetrain_launcher.rollout_store import RolloutStore


def rollout(first: int = 2) -> Rollout:
    batch = from_samples(
        [[first, 3], [4]],
        [[5, 6, 7], [8]],
        per_token={"loss_mask": [[1.0, 1.0, 0.0], [1.0]], "rollout_log_probs": [[-0.5, -1.5, -2.5], [-0.25]]},
        per_sample={"reward": [1.0, 0.0], "group_id": [0, 0], "index": [0, 1]},
    )
    return Rollout(batch=batch, metrics={"reward": 0.5, "generate_seconds": 1.25})


@pytest.fixture
def store(tmp_path: Path) -> RolloutStore:
    return RolloutStore(folder=tmp_path / "rollouts", lineage="a")


def require_same(found: Rollout | None, expected: Rollout) -> None:
    assert found is not None
    assert found.metrics == expected.metrics
    mine, other = found.batch.to_plain(), expected.batch.to_plain()
    torch.testing.assert_close(mine, other, rtol=0, atol=0)


def test_a_rollout_that_was_made_comes_back_as_it_was(store: RolloutStore) -> None:
    assert store.find(3) is None
    store.save(3, rollout())
    require_same(store.find(3), rollout())
    assert store.find(4) is None
    assert [one.name for one in store.folder.iterdir()] == ["rollout_3.pt"]


def test_a_rollout_of_other_options_is_made_anew_and_replaced(store: RolloutStore) -> None:
    store.save(3, rollout())
    other = replace(store, lineage="b")
    assert other.find(3) is None
    other.save(3, rollout(first=9))
    require_same(other.find(3), rollout(first=9))
    assert store.find(3) is None


def test_a_copy_goes_where_the_user_wants_one(store: RolloutStore, tmp_path: Path) -> None:
    copying = replace(store, copy_to=tmp_path / "some" / "where")
    copying.save(3, rollout())
    mine, copied = (rollout_file(one, 3).read_bytes() for one in (store.folder, tmp_path / "some" / "where"))
    assert mine == copied
    require_same(store.find(3), rollout())


def test_rollouts_to_replay_are_taken_whoever_made_them(store: RolloutStore, tmp_path: Path) -> None:
    store.save(3, rollout())
    replaying = RolloutStore(folder=tmp_path / "new", lineage="b", replay=store.folder)
    require_same(replaying.find(3), rollout())
    with pytest.raises(DataError, match=r"rollouts/rollout_4\.pt: is missing"):
        replaying.find(4)
    # what is replayed is not looked for in the run's own folder
    own = RolloutStore(folder=tmp_path / "new", lineage="b")
    own.save(4, rollout())
    with pytest.raises(DataError, match="is missing"):
        replaying.find(4)


def test_a_damaged_rollout_is_named_and_can_go(store: RolloutStore) -> None:
    store.save(3, rollout())
    path = rollout_file(store.folder, 3)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=rf"{path}: is damaged.*remove it, and the rollout is made again"):
        store.find(3)
    path.unlink()
    assert store.find(3) is None


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"batch": rollout().batch.to_plain()},
        {"batch": {}, "metrics": {}},
        {"batch": rollout().batch.to_plain(), "metrics": {"reward": "high"}},
        {"batch": rollout().batch.to_plain(), "metrics": []},
        {"batch": {**rollout().batch.to_plain(), "tokens": None}, "metrics": {}},
    ],
    ids=["nothing", "no metrics", "an empty batch", "a metric of text", "metrics as a list", "no tokens"],
)
def test_a_file_that_holds_something_else_is_no_rollout(store: RolloutStore, content: dict[str, object]) -> None:
    path = save_rollout(store.folder, 3, content, lineage="a")
    with pytest.raises(DataError, match=rf"{path}: is no rollout \(.*\); remove it"):
        store.find(3)


def test_a_rollout_under_another_number_is_not_taken_for_it(store: RolloutStore) -> None:
    store.save(3, rollout())
    shutil.copy(rollout_file(store.folder, 3), rollout_file(store.folder, 4))
    with pytest.raises(DataError, match=r"rollout_4\.pt: .*it holds rollout 3, not 4"):
        store.find(4)


def test_a_folder_that_cannot_be_written_is_named_by_its_flag(store: RolloutStore, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DrivetrainError, match=f"--save {tmp_path / 'file'}: rollout_3.pt could not be written"):
        replace(store, folder=tmp_path / "file").save(3, rollout())
    with pytest.raises(DrivetrainError, match=f"--save-debug-rollout-data {tmp_path / 'file'}: cannot be made"):
        replace(store, copy_to=tmp_path / "file").save(3, rollout())
    with pytest.raises(DrivetrainError, match=r"--save-debug-rollout-data .*file/below: cannot be made"):
        replace(store, copy_to=tmp_path / "file" / "below").save(3, rollout())
