"""Where a start of the command begins: as a new run, from another run, or where the run in `--save` stopped.

Each start is prepared as the command prepares it, on a run whose checkpoints a real backend has written.
"""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from scratch import GOOD, LAYOUT, inside, one_rank, prepared, save_run, state_at_start

from drivetrain_backend_api import BackendSpec, ConfigError, DataError
from drivetrain_backend_api.manifest import MANIFEST
from drivetrain_infra.checkpoint_writer import complete_manifest
from drivetrain_infra.run_folder import RunFolder
from drivetrain_infra.run_state import RUN_STATE, RunState
from drivetrain_launcher.arguments import Surface, load_surface
from drivetrain_launcher.config import DrivetrainConfig
from drivetrain_launcher.resuming import Begin, begin_at, facts, find_point, free_keys
from drivetrain_launcher.run import PreparedStage, open_folder, prepare, run_train
from drivetrain_launcher.sources import config_values, read_request
from drivetrain_launcher.stopping import Stopping

READ = int(GOOD["--rollout-batch-size"])
"""Prompts that a rollout reads."""


@pytest.fixture(scope="module")
def runs(good_scratch: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scratch folder with two checkpoints of run/, after 1 and after 2 rollouts; copy it, never change it."""
    folder = tmp_path_factory.mktemp("runs") / "here"
    shutil.copytree(good_scratch, folder, ignore=shutil.ignore_patterns("run"))
    with inside(folder, {}):
        stage = prepared("run", "--num-rollout", "4")
        with one_rank(stage.config.train) as backend:
            backend.setup()
            save_run(stage, backend, [1, 2])
    return folder


@pytest.fixture
def here(runs: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of it as the current folder."""
    shutil.copytree(runs, tmp_path / "here")
    with inside(tmp_path / "here", {}):
        yield tmp_path / "here"


def start(save: str = "run", *more: str) -> PreparedStage:
    return prepared(save, "--num-rollout", "4", *more)


def begin(save: str = "run", *more: str) -> Begin:
    return start(save, *more).begin


def refusal(save: str = "run", *more: str) -> list[str]:
    with pytest.raises((ConfigError, DataError)) as caught:
        start(save, *more)
    return str(caught.value).splitlines()


def change(state: Path, **changes: object) -> None:
    """Change a state as another start of the command would have written it."""
    replace(RunState.read(state), **changes).write(state)  # type: ignore[arg-type]
    if state.name == RUN_STATE:
        (state.parent / MANIFEST).unlink()
        complete_manifest(state.parent)


def forget_checkpoints(run: Path) -> None:
    """Leave a run as a kill before its first checkpoint does."""
    for one in [*run.glob("iter_*"), run / "latest"]:
        shutil.rmtree(one) if one.is_dir() else one.unlink()
    change(run / "resume_state.json", next_rollout_id=0, checkpoint=None, prompts_read=0, last_save=None)


def damage(checkpoint: Path) -> None:
    os.truncate(checkpoint / "dcp" / "__0_0.distcp", 100)


# -- a new run ---------------------------------------------------------------------------------------------------------


def test_a_new_folder_begins_at_rollout_0_with_the_models_weights(here: Path) -> None:
    assert begin("new") == Begin(load=None, finetune=False, start=0, state=None, in_place=False, metrics_bytes=0)


def test_another_runs_checkpoint_begins_a_branch(here: Path) -> None:
    change(here / "run" / "iter_0000002" / RUN_STATE, wandb_run_id="w", wall_seconds=9.0, lost_steps=3, lost_since=1)
    stage = start("new", "--load", "run")
    found = stage.begin
    assert found.load is not None
    assert found.load.resolve() == here / "run" / "iter_0000002"
    assert (found.start, found.in_place, found.finetune, found.metrics_bytes) == (2, False, False, 0)
    assert found.checkpoint is None  # nothing of this run is saved yet
    assert found.notes == ()
    state = state_at_start(stage)
    # it goes on with the data and with the count of lost steps, and has a clock and a curve of its own
    assert (state.next_rollout_id, state.prompts_read, state.lost_steps, state.lost_since) == (2, 2 * READ, 3, 1)
    assert (state.checkpoint, state.wandb_run_id, state.wall_seconds) == (None, None, 0.0)
    assert state.metrics_bytes == 0


def test_a_branch_says_what_differs_from_the_run_it_comes_from(here: Path) -> None:
    (note,) = begin("new", "--load", "run", "--lr", "0.5", "--seed", "3", "--save-interval", "1").notes
    assert note.endswith("run/iter_0000002 in: lr, seed")


def test_a_branch_comes_from_the_checkpoint_that_is_asked_for(here: Path) -> None:
    for words in (["--load", "run", "--ckpt-step", "1"], ["--load", "run/iter_0000001"]):
        found = begin("new", *words)
        assert (found.start, found.load and found.load.name) == (1, "iter_0000001")
    assert refusal("new", "--load", "run", "--ckpt-step", "3")[0].endswith(
        "run holds no checkpoint 3 (--ckpt-step); it holds 1, 2"
    )


def test_finetune_takes_weights_alone_and_begins_at_rollout_0(here: Path) -> None:
    stage = start("new", "--load", "run", "--finetune", "--lr", "0.5")
    found = stage.begin
    assert (found.start, found.finetune, found.state, found.in_place) == (0, True, None, False)
    assert found.load is not None
    assert found.load.name == "iter_0000002"
    assert (stage.train.finetune, stage.train.load) == (True, str(found.load))
    assert state_at_start(stage).prompts_read == 0
    # so that a run which had all its rollouts can be taken for a shorter one
    assert prepared("new", "--num-rollout", "1", "--load", "run", "--finetune").begin.start == 0
    assert refusal_of_shorter("new", "--load", "run") != []


def refusal_of_shorter(save: str, *more: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        prepared(save, "--num-rollout", "1", *more)
    return [one for one in str(caught.value).splitlines() if "was trained on" in one]


def test_finetune_needs_something_to_take_weights_from(here: Path) -> None:
    assert refusal("new", "--finetune") == ["--finetune acts only with --load; give both or neither"]


def test_a_step_of_a_run_that_is_not_there_is_refused(here: Path) -> None:
    # a mistyped --save must not train from the beginning
    assert len(found := refusal("rnu", "--ckpt-step", "2")) == 1
    assert "--ckpt-step 2" in found[0]
    assert "rnu" in found[0]


def test_an_unknown_change_is_refused_though_there_is_nothing_to_accept(here: Path) -> None:
    assert refusal("new", "--accept-change", "lrr") == ["--accept-change lrr: no such option; did you mean lr?"]
    assert begin("new", "--accept-change", "lr").start == 0


# -- in place ----------------------------------------------------------------------------------------------------------


def test_the_same_command_goes_on_where_the_run_stopped(here: Path) -> None:
    change(here / "run" / "resume_state.json", wall_seconds=9.0, wandb_run_id="w", exit_reason="SIGTERM")
    stage = start()
    found = stage.begin
    assert found.load == found.checkpoint == here / "run" / "iter_0000002"
    assert (found.start, found.in_place, found.finetune) == (2, True, False)
    assert found.notes == (f"going on from {here / 'run' / 'iter_0000002'}, after 2 rollouts",)
    state = state_at_start(stage)
    assert (state.next_rollout_id, state.checkpoint, state.weight_version) == (2, "iter_0000002", 3)
    assert (state.prompts_read, state.wall_seconds, state.wandb_run_id) == (2 * READ, 9.0, "w")
    # how the last start ended is no news once this one has begun
    assert state.exit_reason is None
    assert (stage.train.load, stage.train.finetune) == (str(found.load), False)


def test_the_metrics_behind_the_checkpoint_are_made_again(here: Path) -> None:
    run = RunFolder(here / "run")
    size = run.metrics.stat().st_size
    with run.metrics.open("a") as file:
        file.write('{"rollout_id": 2}\n{"rollo')
    assert begin().metrics_bytes == size
    assert begin("run", "--ckpt-step", "1").metrics_bytes == size // 2


def test_what_was_logged_after_the_last_checkpoint_of_a_run_that_ended_well_stays(here: Path) -> None:
    # as an evaluation that follows the last save
    run = RunFolder(here / "run")
    with run.metrics.open("a") as file:
        file.write('{"rollout_id": 2, "eval/reward": 0.5}\n')
    size = run.metrics.stat().st_size
    change(run.state, metrics_bytes=size, exit_reason="SIGTERM")
    assert begin().metrics_bytes == size
    assert begin("run", "--ckpt-step", "1").metrics_bytes < size
    run.state.unlink()
    assert begin().metrics_bytes < size


def test_load_may_name_the_run_itself(here: Path) -> None:
    plain = begin()
    for path in ("run", str(here / "run"), "./run/"):
        assert begin("run", "--load", path) == plain
    assert begin("run", "--load", "run", "--ckpt-step", "1").start == 1
    # and be left out again, when the run has saved under it
    change(
        here / "run" / "iter_0000002" / RUN_STATE,
        options={**RunState.read(here / "run" / "resume_state.json").options, "load": str(here / "run")},
    )
    assert begin().start == 2


def test_a_branch_goes_on_in_its_own_folder_under_the_same_command(here: Path) -> None:
    words = ("--load", "run", "--ckpt-step", "1")
    stage = start("branch", *words)
    with one_rank(stage.train) as backend:
        backend.setup()
        save_run(stage, backend, [2])
    found = begin("branch", *words)
    # --ckpt-step chose among the checkpoints of run/
    assert found.checkpoint == here / "branch" / "iter_0000002"
    assert (found.start, found.in_place) == (2, True)
    assert begin("branch").start == 2  # which takes nothing from there any more
    assert refusal("branch", "--load", "run/iter_0000001") == [
        f"--load: {here / 'run'} in the run that is there, {here / 'run' / 'iter_0000001'} now; the run began from "
        "another --load, and goes on from its own checkpoint",
        "To go on all the same: --accept-change load",
    ]


def test_the_step_that_is_asked_for_is_taken_and_latest_follows(here: Path) -> None:
    stage = start("run", "--ckpt-step", "1")
    found = stage.begin
    assert (found.start, found.checkpoint) == (1, here / "run" / "iter_0000001")
    assert found.notes[0] == "going on from iter_0000001, as --ckpt-step says"
    assert state_at_start(stage).prompts_read == READ
    open_folder(stage)
    assert RunFolder(here / "run").latest() == here / "run" / "iter_0000001"
    assert refusal("run", "--ckpt-step", "3") == [
        f"--ckpt-step 3: {here / 'run'} has no checkpoint iter_0000003; choose one of 1, 2"
    ]


def test_a_damaged_newest_checkpoint_is_refused_and_the_fallback_takes_the_one_before(here: Path) -> None:
    damage(here / "run" / "iter_0000002")
    first, last = refusal()
    assert first.startswith(f"--save {here / 'run' / 'iter_0000002' / 'dcp' / '__0_0.distcp'} ")
    assert last == "The newest good checkpoint of the run is iter_0000001; add --load-fallback to go on from it"
    found = begin("run", "--load-fallback")
    assert (found.start, found.checkpoint) == (1, here / "run" / "iter_0000001")
    assert "as --load-fallback says" in " ".join(found.notes)


def test_every_byte_is_compared_where_that_is_asked_for(here: Path) -> None:
    tensors = here / "run" / "iter_0000002" / "dcp" / "__0_0.distcp"
    content = bytearray(tensors.read_bytes())
    content[len(content) // 2] ^= 1
    tensors.write_bytes(content)
    assert tensors.stat().st_size > 1 << 20  # a small one is always compared
    assert begin().start == 2
    assert "its checksum is not the one in manifest.json" in refusal("run", "--verify-checkpoint")[0]


def test_a_checkpoint_without_its_optimizer_can_only_start_another_run(here: Path) -> None:
    stage = start("bare", "--no-save-optim")
    with one_rank(stage.train) as backend:
        backend.setup()
        save_run(stage, backend, [1])
    for words in (["bare"], ["new", "--load", "bare"]):
        (found, *_) = refusal(*words)
        assert "was saved with --no-save-optim, so that no run can be resumed from it" in found
        assert "--finetune" in found
    assert begin("new", "--load", "bare", "--finetune").start == 0
    # a run that has all its rollouts needs no optimizer to say so
    assert prepared("bare", "--num-rollout", "1", "--no-save-optim").plan.start == 1


# -- in place, before the first checkpoint -----------------------------------------------------------------------------


def test_a_run_that_was_interrupted_before_its_first_checkpoint_begins_anew_in_its_folder(here: Path) -> None:
    forget_checkpoints(here / "run")
    change(here / "run" / "resume_state.json", wandb_run_id="w", wall_seconds=9.0)
    stage = start()
    found = stage.begin
    assert (found.start, found.in_place, found.load, found.checkpoint, found.metrics_bytes) == (0, True, None, None, 0)
    assert "before its first checkpoint" in found.notes[0]
    open_folder(stage)  # is not refused as used
    assert refusal("run", "--lr", "0.5")[-1] == "To go on all the same: --accept-change lr"
    assert begin("run", "--load", "run").start == 0


def test_a_branch_that_was_interrupted_before_its_first_checkpoint_begins_at_its_load_again(here: Path) -> None:
    stage = start("branch", "--load", "run")
    open_folder(stage)
    state_at_start(stage).write(stage.folder.state)
    found = begin("branch", "--load", "run")
    assert (found.start, found.in_place, found.checkpoint) == (2, True, None)
    assert found.load is not None
    assert found.load.resolve() == here / "run" / "iter_0000002"
    assert found.state is not None
    assert found.state.prompts_read == 2 * READ
    # what it begins with is looked at as closely as the first time
    damage(here / "run" / "iter_0000002")
    assert any("__0_0.distcp" in one for one in refusal("branch", "--load", "run"))


def test_a_run_that_had_no_rollout_of_its_own_is_not_over(here: Path) -> None:
    stage = prepared("branch", "--num-rollout", "3", "--load", "run")
    open_folder(stage)
    state_at_start(stage).write(stage.folder.state)
    with pytest.raises(ConfigError, match="was trained on 2 rollouts already"):
        prepared("branch", "--num-rollout", "2", "--load", "run")


# -- the end -----------------------------------------------------------------------------------------------------------


def test_a_run_with_all_its_rollouts_has_nothing_left_and_a_shorter_one_is_refused(here: Path) -> None:
    stage = prepared("run", "--num-rollout", "2")
    assert (stage.plan.start, stage.plan.stop) == (2, 2)
    assert refusal_of_shorter("run") == [
        f"{here / 'run' / 'iter_0000002'} was trained on 2 rollouts already, and --num-rollout (or --num-epoch) ends "
        "the run at 1; raise it above 2"
    ]


def test_the_evaluation_that_a_kill_prevented_is_made_first(here: Path) -> None:
    shutil.copy("train.jsonl", "held_out.jsonl")
    words = ("--eval-prompt-data", "held_out.jsonl", "--eval-interval", "2", "--accept-change", "data")
    assert start("run", *words).plan.evaluate_start
    assert not start("run", *words, "--ckpt-step", "1").plan.evaluate_start  # none is due there
    run = RunFolder(here / "run")
    with run.metrics.open("a") as file:
        file.write('{"rollout_id": 2, "eval/reward": 0.5}\n')
    assert start("run", *words).plan.evaluate_start  # it is behind what the checkpoint keeps
    change(run.state, metrics_bytes=run.metrics.stat().st_size, exit_reason="SIGTERM")
    assert not start("run", *words).plan.evaluate_start
    # evaluated in a new run, unless told otherwise
    assert start("new", *words).plan.evaluate_start
    assert not start("new", *words, "--skip-eval-before-train").plan.evaluate_start


# -- the same run? -----------------------------------------------------------------------------------------------------


def test_changed_options_are_refused_by_name_and_accepted_by_name(here: Path) -> None:
    words = ("--lr", "0.5", "--eps-clip", "0.3")
    assert refusal("run", *words) == [
        "--eps-clip: 0.2 in the run that is there, 0.3 now; the rest of the run would be another one",
        "--lr: 1e-06 in the run that is there, 0.5 now; the rest of the run would be another one",
        "To go on all the same: --accept-change eps-clip lr",
    ]
    assert refusal("run", *words, "--accept-change", "lr")[-1] == ("To go on all the same: --accept-change lr eps-clip")
    for accepted in (["lr", "eps-clip"], ["lr", "eps_clip"], ["all"]):
        found = begin("run", *words, "--accept-change", *accepted)
        assert [note.split(":")[1].strip() for note in found.notes[:2]] == ["--eps-clip", "--lr"]
    assert refusal("run", "--accept-change", "lrr")[0] == "--accept-change lrr: no such option; did you mean lr?"


def test_the_layout_is_compared_by_the_options_that_make_it(here: Path) -> None:
    assert refusal("run", "--actor-num-gpus-per-node", "2") == [
        "--actor-num-gpus-per-node: 1 in the run that is there, 2 now; the rest of the run would be another one",
        "To go on all the same: --accept-change actor-num-gpus-per-node",
    ]
    assert LAYOUT["world_size"] == 1


def test_options_that_no_number_depends_on_may_change(here: Path) -> None:
    same = begin()
    for words in (
        ["--save-interval", "1", "--save-max-to-keep", "2", "--async-save", "--no-save-optim"],
        ["--rollout-timeout", "7", "--start-timeout", "7", "--max-restarts", "3"],
        ["--wall-time-limit", "2h", "--wall-time-reserve", "1m"],
        ["--update-weight-transport", "disk", "--update-weight-pause", "abort"],
        ["--save-debug-rollout-data", "copies", "--use-wandb", "--wandb-mode", "offline"],
    ):
        assert begin("run", *words) == same
    assert prepared("run", "--num-rollout", "9").begin == same


def test_a_learning_rate_that_decays_over_the_run_holds_its_length(here: Path) -> None:
    words = ("--lr-decay-style", "linear", "--accept-change", "lr-decay-style", "lr-decay-iters")
    stage = start("decaying", *words)
    with one_rank(stage.train) as backend:
        backend.setup()
        save_run(stage, backend, [1])
    with pytest.raises(ConfigError, match="--lr-decay-iters: 4 in the run that is there, 9 now"):
        prepared("decaying", "--num-rollout", "9", "--lr-decay-style", "linear")


def test_data_and_models_may_move_and_not_change(here: Path) -> None:
    same = begin()
    (here / "train.jsonl").rename("moved.jsonl")
    (here / "model").rename("moved")
    words = ["--prompt-data", "moved.jsonl", "--hf-checkpoint", "moved"]
    assert begin("run", *words) == same
    with Path("moved.jsonl").open("a") as file:
        file.write('{"question": "1+1=", "answer": "2"}\n')
    first, last = refusal("run", *words)
    assert first.startswith("data: SHA-256 ")
    assert last == "To go on all the same: --accept-change data"
    assert begin("run", *words, "--accept-change", "data").start == 2
    config = json.loads(Path("moved/config.json").read_text())
    Path("moved/config.json").write_text(json.dumps({**config, "initializer_range": 0.5}))
    assert refusal("run", *words, "--accept-change", "data")[-1] == "To go on all the same: --accept-change data model"


def test_held_out_prompts_and_references_are_part_of_what_is_compared(here: Path) -> None:
    shutil.copy("train.jsonl", "held_out.jsonl")
    shutil.copytree("model", "reference")
    assert refusal("run", "--eval-prompt-data", "held_out.jsonl")[-1] == ("To go on all the same: --accept-change data")
    found = refusal("run", "--ref-load", "reference", "--use-kl-loss")
    assert found[-1] == "To go on all the same: --accept-change use-kl-loss model"


def test_other_releases_are_refused_by_name(here: Path) -> None:
    state = here / "run" / "iter_0000002" / RUN_STATE
    was = RunState.read(state)
    change(state, versions={**was.versions, "torch": "1.0"})
    (first, last) = refusal()
    assert first.startswith(f"versions: torch 1.0 in the run that is there, torch {was.versions['torch']} now; ")
    assert last == "To go on all the same: --accept-change versions"
    assert begin("run", "--accept-change", "versions").start == 2


def test_another_backend_can_never_go_on(here: Path) -> None:
    (found,) = refusal("run", "--train-backend", "megatron", "--accept-change", "all")
    assert found.startswith(
        "--train-backend: fsdp in the run that is there, megatron now; neither can read the other's"
    )
    assert "drivetrain export" in found


# -- options -----------------------------------------------------------------------------------------------------------

FREE = {
    "train": {
        *("hf-checkpoint", "ref-load", "opd-teacher-load"),  # compared by what they hold
        *("verify-checkpoint", "async-save", "no-save-optim", "distributed-timeout-minutes"),
    },
    "data": {"prompt-data"},  # compared by what it holds
    "rollout": {"rollout-timeout", "save-debug-rollout-data"},
    "evaluation": {"eval-interval", "eval-prompt-data"},
    "loop": {"num-rollout", "num-epoch"},
    "placement": {"ray-address", "placement-timeout", "start-timeout"},
    "weight_sync": {
        *("update-weight-transport", "update-weight-buffer-size", "update-weight-pause", "update-weight-timeout"),
        "update-weight-disk-dir",
    },
    "run_folder": {
        *("save", "save-interval", "save-max-to-keep", "ckpt-step", "load-fallback", "accept-change"),
    },
    "survival": {"wall-time-limit", "wall-time-reserve", "max-restarts", "train-timeout", "max-engine-restarts"},
    "tracking": {"use-wandb", "wandb-project", "wandb-group", "wandb-mode", "wandb-resume-id"},
}
"""Group -> the options that may change on a resume, for both official backends; what is not here is compared."""


def free_of(surface: Surface) -> dict[str, set[str]]:
    found = {
        field: {one.name.replace("_", "-") for one in surface.group_options(field) if one.free}
        for field in surface.groups
    }
    return {field: names for field, names in found.items() if names}


@pytest.mark.parametrize("algorithm", ["grpo", "opd", "sft"])
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_an_option_becomes_free_only_on_purpose(backend: str, algorithm: str) -> None:
    assert free_of(load_surface(backend, "transformers", algorithm)) == FREE


def test_every_option_is_free_or_compared(here: Path) -> None:
    config = start().config
    surface = Surface(backend=config.backend, engine=config.engine, algorithm=config.algorithm)
    names = {one.name.replace("_", "-") for field in surface.groups for one in surface.group_options(field)}
    values = config_values(config)
    assert names <= values.keys()
    assert values.keys() - names == {"train-backend", "rollout-engine", "algorithm"}  # compared too
    compared = values.keys() - free_keys(config)
    assert free_keys(config) == set().union(*FREE.values())
    state = RunState.read(here / "run" / "iter_0000002" / RUN_STATE)
    # another backend and another --load have sentences of their own
    for name in sorted(compared - {"train-backend", "load"}):
        change(here / "run" / "iter_0000002" / RUN_STATE, options={**state.options, name: "something else"})
        (first, last) = refusal_of(config)
        assert first.startswith(f"--{name}: something else in the run that is there"), name
        assert last == f"To go on all the same: --accept-change {name}"


def refusal_of(config: DrivetrainConfig) -> list[str]:
    folder = RunFolder(Path(config.run_folder.save))
    point = find_point(config, folder)
    with pytest.raises(ConfigError) as caught:
        begin_at(config, folder, point)
    return str(caught.value).splitlines()


def test_rollouts_are_used_again_by_starts_that_would_make_the_same(here: Path) -> None:
    def word(save: str, *more: str) -> str:
        return state_at_start(start(save, *more)).lineage

    same = word("new")
    assert word("new", "--save-interval", "1", "--rollout-timeout", "7") == same
    others = [
        word("new", "--lr", "0.5"),
        word("new", "--seed", "3"),
        word("new", "--rollout-top-p", "0.5"),
        word("new", "--n-samples-per-prompt", "2"),
        word("new", "--load", "run"),
        word("new", "--load", "run", "--ckpt-step", "1"),
        word("new", "--load", "run", "--finetune"),
        # from where the change was accepted
        word("run", "--lr", "0.5", "--accept-change", "lr"),
        word("run", "--ckpt-step", "1", "--lr", "0.5", "--accept-change", "lr"),
    ]
    # a run that goes on keeps what it had
    assert word("run") == word("run", "--ckpt-step", "1") == word("run", "--load", "run") == same
    with Path("train.jsonl").open("a") as file:
        file.write('{"question": "1+1=", "answer": "2"}\n')
    others.append(word("new"))
    assert len({same, *others}) == 1 + len(others)


# -- stages ------------------------------------------------------------------------------------------------------------


def quickstart(folder: Path, *more: str) -> list[PreparedStage]:
    words = ["--train-backend", "fsdp", "--recipe", "quickstart", "--save", str(folder)]
    request = read_request([*words, *more], {})
    return prepare(request, RunFolder(folder), Console(quiet=True), made=folder / "made")


def test_a_quickstart_goes_on_in_the_stage_that_was_interrupted(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    warm_up, main = quickstart(folder)
    assert (warm_up.title, main.title) == ("warm-up", "grpo")
    assert [one.begin.in_place for one in (warm_up, main)] == [False, False]
    # killed before its first checkpoint
    open_folder(warm_up)
    facts(warm_up.config).write(warm_up.folder.state)
    warm_up, main = quickstart(folder)
    assert [one.begin.in_place for one in (warm_up, main)] == [True, False]
    assert (warm_up.begin.start, warm_up.begin.load) == (0, None)
    # its checkpoint
    with one_rank(warm_up.train) as backend:
        backend.setup()
        save_run(warm_up, backend, [1])
    warm_up, main = quickstart(folder)
    assert [one.begin.in_place for one in (warm_up, main)] == [True, False]
    assert (warm_up.begin.start, main.begin.start) == (1, 0)
    # its model
    shutil.copytree(folder / "made" / "model", folder / "warmup_model")
    (main,) = quickstart(folder)
    assert (main.title, main.begin.in_place) == ("grpo", False)
    assert main.config.train.hf_checkpoint == str(folder / "warmup_model")
    open_folder(main)
    facts(main.config).write(main.folder.state)
    (main,) = quickstart(folder)
    assert main.begin.in_place


class StartedError(Exception):
    """Ray was to be started."""


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object, **__: object) -> None:
        raise StartedError

    monkeypatch.setattr("drivetrain_launcher.factory.start_cluster", started)


@pytest.mark.usefixtures("no_cluster")
def test_a_warm_up_that_ended_and_was_not_exported_is_not_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    warm_up, _ = quickstart(folder)
    with one_rank(warm_up.train) as backend:
        backend.setup()
        save_run(warm_up, backend, [warm_up.stop])
    words = ["--train-backend", "fsdp", "--recipe", "quickstart", "--save", str(folder)]
    with pytest.raises(StartedError):
        run_train(read_request(words, {}), Stopping())
    assert "nothing is left to do" not in capsys.readouterr().out


@pytest.mark.usefixtures("no_cluster")
def test_a_run_with_nothing_left_says_so_and_starts_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [one for flag, value in {**GOOD, "--save": "run"}.items() for one in (flag, value)]
    assert run_train(read_request(words, {}), Stopping()) == 0
    assert f"nothing is left to do: {here / 'run'} has all its 2 rollouts" in capsys.readouterr().out
    with pytest.raises(StartedError):
        run_train(read_request([*words[:-2], "--save", "new"], {}), Stopping())


def test_a_warm_up_whose_settings_were_changed_is_not_gone_on_with(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    warm_up, _ = quickstart(folder)
    open_folder(warm_up)
    facts(warm_up.config).write(warm_up.folder.state)
    with pytest.raises(ConfigError, match="--seed: 7 in the run that is there, 8 now"):
        quickstart(folder, "--seed", "8")


def test_a_backend_that_checks_no_checkpoints_is_gone_on_with(here: Path) -> None:
    config = start().config
    backend: BackendSpec = replace(config.backend, check_checkpoint="")
    point = find_point(replace(config, backend=backend), RunFolder(here / "run"))
    assert point is not None
    assert point.checkpoint == here / "run" / "iter_0000002"
