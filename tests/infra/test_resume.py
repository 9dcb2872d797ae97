"""A run goes on from the right checkpoint, as the run that it was."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from drivetrain_backend_api import ConfigError, DataError
from drivetrain_backend_api.manifest import manifest_findings
from drivetrain_infra.checkpoint_writer import CheckpointWriter
from drivetrain_infra.resume import Difference, ResumePoint, differences, find_resume, require_same
from drivetrain_infra.run_folder import RunFolder
from drivetrain_infra.run_state import RunState

STATE = RunState(
    next_rollout_id=0,
    checkpoint=None,
    weight_version=1,
    prompts_read=0,
    seed=7,
    metrics_bytes=0,
    backend="fsdp",
    versions={"torch": "2.11.0", "ray": "2.60.0"},
    layout={"world_size": 2, "tp": 1, "dp": 2},
    model_sha256="ab" * 32,
    data_sha256="cd" * 32,
    options={"train-backend": "fsdp", "lr": 0.5, "load": None, "finetune": False, "rollout-stop": ["a"], "save": "X"},
)


class OneFile:
    """Writes weights at once."""

    def begin_save(self, folder: Path) -> None:
        (folder / "weights").write_text(folder.name)

    def poll_save(self) -> bool:
        return True

    def finish_save(self) -> None:
        pass


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create({})
    return folder


def save(run: RunFolder, *ids: int) -> None:
    writer = CheckpointWriter(run, OneFile())
    for one in ids:
        state = replace(STATE, next_rollout_id=one, metrics_bytes=100 * one, wall_seconds=one, wandb_run_id="w")
        writer.begin(state)
        writer.finish()


def find(run: RunFolder, step: int | None = None, *, fallback: bool = False) -> ResumePoint:
    found = find_resume(run, step=step, verify=manifest_findings, fallback=fallback)
    assert found is not None
    return found


def damage(run: RunFolder, next_rollout_id: int) -> Path:
    path = run.checkpoint(next_rollout_id) / "weights"
    path.write_text("x")
    return path


# -- where from --------------------------------------------------------------------------------------------------------


def test_a_new_folder_holds_no_run(run: RunFolder, tmp_path: Path) -> None:
    assert find_resume(run, verify=manifest_findings) is None
    assert find_resume(RunFolder(tmp_path / "nowhere"), verify=manifest_findings) is None
    assert find_resume(run, step=3, verify=manifest_findings) is None


def test_a_run_goes_on_from_its_newest_checkpoint(run: RunFolder) -> None:
    save(run, 2, 4)
    point = find(run)
    assert point.checkpoint == run.checkpoint(4)
    assert point.state is not None
    assert (point.state.next_rollout_id, point.state.metrics_bytes) == (4, 400)
    assert point.notes == ()


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew(run: RunFolder) -> None:
    STATE.write(run.state)
    run.metrics.write_text('{"rollout_id": 0}\n')
    point = find(run)
    assert (point.checkpoint, point.state) == (None, STATE)
    assert "before its first checkpoint" in point.notes[0]
    run.state.unlink()
    assert find(run).state is None


def test_a_run_that_lost_all_its_checkpoints_does_not_silently_begin_anew(run: RunFolder) -> None:
    save(run, 2)
    shutil.rmtree(run.checkpoint(2))
    (run.root / "latest").unlink()
    with pytest.raises(DataError, match=r"the run has saved iter_0000002, but .* holds no checkpoint; bring it back"):
        find(run)


def test_a_complete_checkpoint_that_latest_does_not_name_yet_waits_to_be_replaced(run: RunFolder) -> None:
    save(run, 2, 4)
    run.rewind_to(run.checkpoint(2))  # as a kill between the renaming and `latest` leaves it
    assert find(run).checkpoint == run.checkpoint(2)
    assert find(run, step=4).checkpoint == run.checkpoint(4)


def test_the_first_checkpoint_is_taken_though_latest_was_never_written(run: RunFolder) -> None:
    save(run, 2)
    (run.root / "latest").unlink()
    assert find(run).checkpoint == run.checkpoint(2)


def test_the_newest_state_gives_the_clock_and_the_curve_and_the_checkpoint_all_else(run: RunFolder) -> None:
    save(run, 2, 4)
    stopped = replace(RunState.read(run.state), wall_seconds=99.0, exit_reason="SIGTERM", wandb_run_id="other")
    replace(stopped, prompts_read=12345, metrics_bytes=1).write(run.state)
    for step, rollouts in [(None, 4), (2, 2)]:
        state = find(run, step).state
        assert state is not None
        assert (state.wall_seconds, state.exit_reason, state.wandb_run_id) == (99.0, "SIGTERM", "other")
        assert (state.next_rollout_id, state.prompts_read, state.metrics_bytes) == (rollouts, 0, 100 * rollouts)


def test_a_newest_state_that_lags_says_nothing_of_how_the_run_ended(run: RunFolder) -> None:
    save(run, 2)
    replace(RunState.read(run.state), exit_reason="SIGTERM").write(run.state)
    lagging = run.state.read_text()
    save(run, 4)
    run.state.write_text(lagging)
    state = find(run).state
    assert state is not None
    assert (state.exit_reason, state.wall_seconds, state.wandb_run_id) == (None, 4, "w")


def test_a_step_is_taken_by_name_and_said(run: RunFolder) -> None:
    save(run, 2, 4)
    point = find(run, step=2)
    assert point.checkpoint == run.checkpoint(2)
    assert point.notes == ("going on from iter_0000002, as --ckpt-step says",)


def test_a_step_that_is_not_there_names_those_that_are(run: RunFolder) -> None:
    STATE.write(run.state)
    with pytest.raises(ConfigError, match=r"--ckpt-step 3: .* has no checkpoint iter_0000003; it has none yet"):
        find(run, step=3)
    save(run, 2, 4)
    with pytest.raises(ConfigError, match=r"--ckpt-step 3: .* has no checkpoint iter_0000003; choose one of 2, 4"):
        find(run, step=3)


def test_a_damaged_newest_checkpoint_is_refused_with_the_file_the_newest_good_one_and_the_flag(run: RunFolder) -> None:
    save(run, 2, 4, 6)
    damage(run, 4)
    path = damage(run, 6)
    with pytest.raises(DataError) as caught:
        find(run)
    finding, fix = str(caught.value).split("\n")
    assert finding.startswith(f"{path} is ")
    assert fix == "The newest good checkpoint of the run is iter_0000002; add --load-fallback to go on from it"

    point = find(run, fallback=True)
    assert point.checkpoint == run.checkpoint(2)
    assert point.notes == (finding, "going on from iter_0000002, as --load-fallback says")


def test_a_fallback_never_takes_a_checkpoint_of_an_abandoned_branch(run: RunFolder) -> None:
    save(run, 2, 4, 6)
    run.rewind_to(run.checkpoint(4))
    damage(run, 4)
    assert find(run, fallback=True).checkpoint == run.checkpoint(2)


def test_a_fallback_is_not_used_where_nothing_is_damaged(run: RunFolder) -> None:
    save(run, 2, 4)
    assert find(run, fallback=True) == find(run)


def test_where_nothing_is_whole_no_flag_is_offered(run: RunFolder) -> None:
    save(run, 2)
    damage(run, 2)
    for fallback in (False, True):
        with pytest.raises(DataError, match="No other checkpoint of the run is whole; begin a new run with another"):
            find(run, fallback=fallback)


def test_a_damaged_step_is_refused_with_the_step_to_take(run: RunFolder) -> None:
    save(run, 2, 4)
    damage(run, 2)
    with pytest.raises(DataError, match="newest good checkpoint of the run is iter_0000004; add --ckpt-step 4 to"):
        find(run, step=2, fallback=True)


def test_a_latest_that_names_nothing_is_as_good_as_damage(run: RunFolder) -> None:
    save(run, 2, 4)
    shutil.rmtree(run.checkpoint(4))
    with pytest.raises(
        DataError, match=r"names 'iter_0000004', which is no checkpoint .*\n.* is iter_0000002; add --l"
    ):
        find(run)
    assert find(run, fallback=True).checkpoint == run.checkpoint(2)


def test_a_checkpoint_without_a_state_can_only_start_another_run(run: RunFolder) -> None:
    with run.new_checkpoint(2) as folder:
        (folder / "weights").write_text("")
    with pytest.raises(
        DataError, match=r"run_state.json: is missing, .* begin a new one with --load .*iter_0000002 --"
    ):
        find_resume(run, verify=lambda folder: [])


def test_a_renamed_checkpoint_is_not_taken_for_what_its_name_says(run: RunFolder) -> None:
    save(run, 2)
    run.checkpoint(2).rename(run.checkpoint(4))
    run.rewind_to(run.checkpoint(4))
    with pytest.raises(DataError, match="belongs to iter_0000002 with 2 rollouts, so the folder was renamed"):
        find(run)


def test_a_damaged_newest_state_says_that_it_can_go(run: RunFolder) -> None:
    save(run, 2)
    run.state.write_text("{")
    with pytest.raises(
        DataError, match=r"resume_state.json: is damaged .* remove it: the newest checkpoint has a state"
    ):
        find(run)
    run.state.unlink()
    assert find(run).checkpoint == run.checkpoint(2)


# -- the same run? -----------------------------------------------------------------------------------------------------


def now(**options: object) -> RunState:
    """What the same command makes, with some options changed: those set to `...` left out."""
    table = {**STATE.options, **{name.replace("_", "-"): value for name, value in options.items()}}
    return replace(STATE, options={name: value for name, value in table.items() if value is not ...})


def test_the_same_command_differs_in_nothing() -> None:
    saved = replace(STATE, next_rollout_id=4, metrics_bytes=5, wall_seconds=9.0, checkpoint="iter_0000004")
    assert differences(saved, STATE) == []
    assert require_same([]) == []


def test_values_are_compared_as_json_keeps_them() -> None:
    again = now(rollout_stop=("a",), lr=0.5)
    saved = replace(STATE, options=json.loads(json.dumps(STATE.options)))
    assert differences(saved, again) == []


def test_each_changed_option_is_named_with_both_values() -> None:
    found = differences(STATE, now(lr=0.25, rollout_stop=["a", "b"], save="Y"), free={"save"})
    assert [(one.name, one.was, one.now) for one in found] == [("lr", "0.5", "0.25"), ("rollout-stop", "a", "a b")]


def test_an_option_of_another_release_is_a_difference() -> None:
    found = differences(STATE, now(lr=..., new=True, other=None))
    assert [(one.name, one.was, one.now) for one in found] == [
        ("lr", "0.5", "absent"),
        ("new", "absent", "on"),
        ("other", "absent", "not set"),
    ]


def test_versions_layout_model_and_data_are_one_difference_each() -> None:
    other = replace(
        STATE,
        versions={"torch": "2.12.0", "ray": "2.60.0", "numpy": "2.0"},
        layout={"world_size": 1, "tp": 1, "dp": 1},
        model_sha256="ef" * 32,
        data_sha256="",
    )
    assert [(one.name, one.was, one.now) for one in differences(STATE, other)] == [
        ("versions", "numpy absent, torch 2.11.0", "numpy 2.0, torch 2.12.0"),
        ("layout", "dp 2, world_size 2", "dp 1, world_size 1"),
        ("model", "SHA-256 abababababab", "SHA-256 efefefefefef"),
        ("data", "SHA-256 cdcdcdcdcdcd", "absent"),
    ]


def test_a_refusal_names_all_that_differs_and_the_flag_that_accepts_it() -> None:
    found = differences(STATE, replace(now(lr=0.25, load="BASE"), versions={"torch": "2.12.0", "ray": "2.60.0"}))
    with pytest.raises(ConfigError) as caught:
        require_same(found)
    assert str(caught.value).split("\n") == [
        "--load: not set in the run that is there, BASE now; the run began from another --load, and goes on from its "
        "own checkpoint",
        "--lr: 0.5 in the run that is there, 0.25 now; the rest of the run would be another one",
        "versions: torch 2.11.0 in the run that is there, torch 2.12.0 now; other releases may round and draw "
        "differently",
        "To go on all the same: --accept-change load lr versions",
    ]


def test_what_is_accepted_is_noted_and_the_rest_refused() -> None:
    found = differences(STATE, now(lr=0.25, finetune=True))
    with pytest.raises(ConfigError) as caught:
        require_same(found, ["lr"])
    finding, fix = str(caught.value).split("\n")
    assert finding.startswith("--finetune: off in the run that is there, on now; ")
    assert fix == "To go on all the same: --accept-change lr finetune"
    for accepted in (["lr", "finetune"], ["--lr", "finetune"], ["all"]):
        notes = require_same(found, accepted)
        assert [note.split(":")[1] for note in notes] == [" --finetune", " --lr"]


def test_a_name_that_is_no_option_is_refused_and_one_that_does_not_differ_noted() -> None:
    found = differences(STATE, now(rollout_stop=[]))
    with pytest.raises(ConfigError) as caught:
        require_same(found, ["rollout_stop", "version"], options=STATE.options.keys())
    assert str(caught.value) == "--accept-change version: no such option; did you mean versions?"
    notes = require_same(found, ["rollout_stop", "lr", "model"], options=STATE.options.keys())
    assert [note.split(":")[0] for note in notes] == [
        "accepted",
        "--accept-change lr accepts nothing",
        "--accept-change model accepts nothing",
    ]


def test_another_backend_is_never_accepted() -> None:
    other = replace(now(train_backend="megatron", lr=0.25), backend="megatron", layout={"tp": 2})
    found = differences(STATE, other)
    assert [(one.name, one.was, one.now, one.acceptable) for one in found] == [
        ("train-backend", "fsdp", "megatron", False)
    ]
    for accepted in ([], ["all"], ["train-backend"]):
        with pytest.raises(ConfigError, match=r"^--train-backend: fsdp .*, megatron now; .*drivetrain export.*new run"):
            require_same(found, accepted)


def test_values_with_line_breaks_stay_in_one_line() -> None:
    (found,) = differences(STATE, now(save="a\nb"))
    assert found == Difference(name="save", was="X", now="'a\\nb'", why=found.why)
