"""A run that is stopped and gone on with, by the same command, is the run that was never stopped: bit for bit.

What happens to a run happens at a moment that its own user code chooses, so that nothing depends on how fast this
machine is.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1] / "infra"))

from survival import (
    AT_ONCE_SECONDS,
    NUM_ROLLOUTS,
    START_SECONDS,
    Place,
    may_mount,
    metrics_of,
    place_of,
    require_durable,
    require_nothing_left,
    require_same_checkpoint,
    require_same_rollout,
    require_same_run,
    rollout_of,
    state_of,
    tensors_of,
)
from trouble import DRIVER, WORKER, Blow
from wandb_server import WandbServer, wandb_server

from drivetrain_infra.run_folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

EXHAUSTIVE = pytest.mark.exhaustive


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A working folder of the backend that the test names."""
    return place_of(request.param, tmp_path_factory.mktemp(request.param))


both = pytest.mark.parametrize("place", ["fsdp", "megatron"], indirect=True)
fsdp = pytest.mark.parametrize("place", ["fsdp"], indirect=True)
first_fsdp = pytest.mark.parametrize("place", ["fsdp", pytest.param("megatron", marks=EXHAUSTIVE)], indirect=True)

STOPS = {
    "fsdp": [
        # in the second rollout, then in the evaluation of what it has learned
        Blow(victim=DRIVER, signal="SIGTERM", phase="make_rollout", nth=2),
        Blow(victim=DRIVER, signal="SIGINT", phase="evaluate", nth=1),
    ],
    "megatron": [
        Blow(victim=DRIVER, signal="SIGUSR1", phase="make_rollout", nth=2),
        # while rewards are computed, which are given up once the driver hears of it
        Blow(victim=WORKER, signal="SIGTERM", rank=1, phase="make_rollout", nth=2, pause=5.0),
    ],
}
"""Backend -> what stops the run after its first rollout, and what after its second."""


def stop_reason(blow: Blow) -> str:
    return blow.signal if blow.victim == DRIVER else f"{blow.signal} to train rank"


@both
def test_a_run_stopped_at_every_boundary_is_the_unbroken_one(place: Place, server: WandbServer) -> None:
    flags = ("--save-max-to-keep", "2", "--use-wandb", "--wandb-mode", "offline")
    run = RunFolder(place.folder / "STOPPED")
    for done, blow in enumerate(STOPS[place.backend], start=1):
        finished = place.train("STOPPED", *flags, blows=[blow])
        assert finished.code == 0, finished.output
        assert len(finished.hits) == 1
        assert f"iter_{done:07d} is durable; run the same command again to go on" in finished.output
        state = state_of(run)
        assert (state.exit_reason or "").startswith(stop_reason(blow))
        assert (state.next_rollout_id, state.checkpoint) == (done, f"iter_{done:07d}")
        require_durable(run, place.straight)
    finished = place.train("STOPPED", *flags)
    assert finished.code == 0, finished.output
    require_same_run(run, place.straight)
    assert run.checkpoints() == [NUM_ROLLOUTS - 1, NUM_ROLLOUTS]
    require_one_curve(run, server, starts=3)


def require_one_curve(run: RunFolder, server: WandbServer, *, starts: int) -> None:
    """Assert that the W&B files of all starts, uploaded as a user does, are each line of metrics.jsonl once."""
    folders = sorted((run.root / "wandb").glob("offline-run-*"))
    assert len(folders) == starts
    wandb = Path(sys.executable).with_name("wandb")
    done = subprocess.run(
        [str(wandb), "sync", *map(str, folders)], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, "ERROR" in done.stderr) == (0, False), done.stderr
    assert server.rows.keys() == {state_of(run).wandb_run_id}
    (found,) = server.rows.values()
    rows = [row or {} for row in found]
    assert [row["_step"] for row in rows] == list(range(len(rows)))
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [{name: value for name, value in row.items() if not name.startswith("_")} for row in rows] == lines


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    """What W&B's own program uploads to."""
    with wandb_server() as state:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("WANDB_BASE_URL", state.url)
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        yield state


# -- wall time ---------------------------------------------------------------------------------------------------------


@first_fsdp
def test_a_run_stops_before_its_wall_time_and_goes_on(place: Place) -> None:
    straight = place.straight
    reserve = 10 + 1.5 * place.straight_seconds  # more than a start takes until its second rollout
    # which is held up for so long that there is no time for a third one
    held = Blow(victim=DRIVER, signal="SIGCONT", phase="make_rollout", nth=2, until=reserve)
    variables = {"WALL_TIME_LIMIT": f"{2 * reserve:.0f}", "WALL_TIME_RESERVE": f"{reserve:.0f}s"}
    finished = place.train("SHORT", blows=[held], environment=variables)
    assert finished.code == 0, finished.output
    assert finished.seconds < 2 * reserve
    run = RunFolder(place.folder / "SHORT")
    state = state_of(run)
    assert (state.exit_reason or "").startswith("wall time limit"), state
    assert state.next_rollout_id == 2
    require_same_checkpoint(run.checkpoint(2), straight.checkpoint(2))
    # twice the reserve was never left, so there was no evaluation; the one that follows the stop is made up for
    assert metrics_of(run) == [row for row in metrics_of(straight) if "eval/reward" not in row][:2]
    finished = place.train("SHORT", "--wall-time-limit", "7d", environment={"WALL_TIME_LIMIT": "1s"})
    assert finished.code == 0, finished.output
    expected = [row for row in metrics_of(straight) if "eval/reward" not in row or row["rollout_id"] >= 2]
    assert metrics_of(run) == expected
    require_same_checkpoint(run.checkpoint(NUM_ROLLOUTS), straight.checkpoint(NUM_ROLLOUTS))
    assert state_of(run).exit_reason == "completed"


# -- disks that are full -----------------------------------------------------------------------------------------------

FULL = """
mkdir RUN FULL DONE && mount -t tmpfs -o size={size} disk RUN || exit 99
{command} > first.txt 2>&1
echo $? > first.code
cp -a RUN/. FULL/
mount -o remount,size=64m RUN || exit 98
{command} > second.txt 2>&1
echo $? > second.code
cp -a RUN/. DONE/
"""
"""One command twice, on a disk that holds one checkpoint but not two, and then on one with room."""


@pytest.mark.parametrize(
    ("place", "more"),
    [
        pytest.param("fsdp", ("--async-save",), id="fsdp-async"),
        pytest.param("fsdp", ("--no-async-save",), id="fsdp", marks=EXHAUSTIVE),
        pytest.param("megatron", ("--async-save",), id="megatron-async", marks=EXHAUSTIVE),
        pytest.param("megatron", ("--no-async-save",), id="megatron", marks=EXHAUSTIVE),
    ],
    indirect=["place"],
)
def test_a_run_whose_disk_was_full_goes_on_once_there_is_room(
    place: Place, more: Sequence[str], tmp_path: Path
) -> None:
    if not may_mount():
        pytest.skip("this user may not mount a tmpfs in a namespace of their own")
    one = sum(path.stat().st_size for path in place.straight.checkpoint(1).rglob("*") if path.is_file())
    words = [sys.executable, "-m", "drivetrain_launcher.cli", *place.words("RUN", *more)]
    for name in ("sums", "site", "trouble.py"):
        (tmp_path / name).symlink_to(place.folder / name)
    with tempfile.TemporaryDirectory(prefix="dk-", dir="/tmp") as temp:
        script = textwrap.dedent(FULL).format(size=one * 3 // 2, command=shlex.join(words))
        unshared = ["unshare", "--map-root-user", "--mount", "sh", "-c", script]
        environment = place.environment(temp)
        subprocess.run(
            unshared, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, timeout=2 * START_SECONDS, check=True
        )
        require_nothing_left(temp)
    first = (tmp_path / "first.txt").read_text()
    assert (tmp_path / "first.code").read_text() == "1\n", first
    # or what the run writes while that save goes on
    assert re.search(
        r"drivetrain: error: .*(iter_0000002|rollout_2|metrics).*No space left on device.*make room", first
    )
    full, done = (RunFolder(tmp_path / name) for name in ("FULL", "DONE"))
    assert full.checkpoints() == [1]
    require_durable(full, place.straight)
    second = (tmp_path / "second.txt").read_text()
    assert (tmp_path / "second.code").read_text() == "0\n", second
    require_same_run(done, place.straight)


# -- other layouts -----------------------------------------------------------------------------------------------------

FEWER = {
    "fsdp": (("--actor-num-gpus-per-node", "1"), ["actor-num-gpus-per-node"]),
    "megatron": (
        ("--actor-num-gpus-per-node", "1", "--tensor-model-parallel-size", "1", "--no-sequence-parallel"),
        ["actor-num-gpus-per-node", "sequence-parallel", "tensor-model-parallel-size"],
    ),
}
"""Backend -> flags of the same run on one rank, and what of them it does not take unasked."""


@first_fsdp
def test_a_run_goes_on_under_another_layout_with_the_same_weights(place: Place) -> None:
    run = place.copy("FEWER")
    damage(run.checkpoint(3))
    flags, changes = FEWER[place.backend]
    refused = place.train("FEWER", *flags, "--load-fallback")
    assert refused.code == 2, refused.output
    for name in changes:
        assert f"--{name}: " in refused.output
    assert f"To go on all the same: --accept-change {' '.join(changes)}" in refused.output
    assert run.checkpoints() == [1, 2, 3]
    # the rollout comes from what is loaded
    shutil.rmtree(run.rollouts)
    finished = place.train("FEWER", *flags, "--load-fallback", "--accept-change", *changes)
    assert finished.code == 0, finished.output
    assert "going on from iter_0000002, as --load-fallback says" in finished.output
    require_same_rollout(run, place.straight, 2)
    assert state_of(run).layout["world_size"] == 1
    # the order of sums differs from here on: they agree as fp32 does
    mine, other = (tensors_of(one.checkpoint(3)) for one in (run, place.straight))
    weights = [name for name in other if name.endswith("weight") and name in mine]
    assert len(weights) > 10
    for name in weights:
        torch.testing.assert_close(mine[name], other[name], rtol=1e-3, atol=1e-4)


def damage(checkpoint: Path) -> Path:
    """Cut the end off the largest file."""
    largest = max((one for one in checkpoint.rglob("*") if one.is_file()), key=lambda one: one.stat().st_size)
    os.truncate(largest, largest.stat().st_size - 1)
    return largest


# -- what a start does that is not the next one ------------------------------------------------------------------------


@fsdp
def test_a_run_with_nothing_left_to_do_says_so(place: Place) -> None:
    run = place.straight
    before = {path: path.stat().st_mtime_ns for path in run.root.rglob("*") if path.is_file()}
    finished = place.train("STRAIGHT")
    assert finished.code == 0, finished.output
    assert f"nothing is left to do: {run.root} has all its {NUM_ROLLOUTS} rollouts" in finished.output
    assert "starting" not in finished.output
    assert {path: path.stat().st_mtime_ns for path in run.root.rglob("*") if path.is_file()} == before


@fsdp
def test_a_start_that_would_make_another_run_is_refused(place: Place) -> None:
    refused = place.train("STRAIGHT", "--num-rollout", "2")
    assert refused.code == 2, refused.output
    assert "--num-rollout" in refused.output
    assert "raise it above 3" in refused.output
    refused = place.train("STRAIGHT", "--num-rollout", "4", "--lr", "2e-3")
    assert refused.code == 2, refused.output
    assert "--lr: 0.001 in the run that is there, 0.002 now" in refused.output
    assert "To go on all the same: --accept-change lr" in refused.output


@fsdp
def test_a_damaged_newest_checkpoint_is_named_with_the_way_on(place: Place) -> None:
    run = place.copy("DAMAGED")
    file = damage(run.checkpoint(3))
    refused = place.train("DAMAGED", "--num-rollout", "4")
    assert refused.code == 2, refused.output
    assert str(file.name) in refused.output
    assert "The newest good checkpoint of the run is iter_0000002; add --load-fallback to go on from it" in (
        refused.output
    )


@pytest.mark.exhaustive
@both
def test_a_run_goes_on_from_the_checkpoint_that_is_asked_for(place: Place) -> None:
    refused = place.train("STRAIGHT", "--ckpt-step", "7")
    assert refused.code == 2, refused.output
    assert "--ckpt-step 7: " in refused.output
    assert "choose one of 1, 2, 3" in refused.output
    run = place.copy("FROM_1")
    finished = place.train("FROM_1", "--ckpt-step", "1")
    assert finished.code == 0, finished.output
    assert "going on from iter_0000001, as --ckpt-step says" in finished.output
    require_same_run(run, place.straight)


@pytest.mark.exhaustive
@both
def test_a_run_is_initialised_with_weights_alone(place: Place) -> None:
    finished = place.train("FINETUNED", "--load", str(place.straight.root), "--finetune", "--num-rollout", "2")
    assert finished.code == 0, finished.output
    run = RunFolder(place.folder / "FINETUNED")
    rows = metrics_of(run)
    assert [row["rollout_id"] for row in rows] == [0, 0, 1, 1, 2]
    # evaluated before its first step, it is what the other run was at its end
    other = metrics_of(place.straight)[-1]
    names = [name for name in other if name.startswith("eval/") and not name.endswith("weight_version")]
    assert names
    assert {name: rows[0][name] for name in names} == {name: other[name] for name in names}
    state = json.loads((run.checkpoint(1) / "trainer_state.json").read_text())
    begun = json.loads((place.straight.checkpoint(1) / "trainer_state.json").read_text())
    assert state == begun


@pytest.mark.exhaustive
@both
def test_rollouts_that_were_made_alone_are_trained_on_alone(place: Place) -> None:
    made = place.run(without_evaluation(place.words("MADE", "--debug-rollout-only", "--num-rollout", "2")))
    assert made.code == 0, made.output
    assert "starting 0 train workers" in made.output
    rollouts = RunFolder(place.folder / "MADE").rollouts
    assert sorted(one.name for one in rollouts.iterdir()) == ["rollout_0.pt", "rollout_1.pt"]
    # the first of a training run is made with the same weights
    first = rollout_of(RunFolder(place.folder / "MADE"), 0)
    assert torch.equal(first["tokens"], rollout_of(place.straight, 0)["tokens"])
    replay = ("--debug-train-only", "--load-debug-rollout-data", str(place.straight.rollouts))
    trained = place.run(without_evaluation(place.words("REPLAYED", *replay)))
    assert trained.code == 0, trained.output
    assert "0 rollout engines" in trained.output
    run = RunFolder(place.folder / "REPLAYED")
    # of the same rollouts, the same steps
    for one in range(1, NUM_ROLLOUTS + 1):
        require_same_checkpoint(run.checkpoint(one), place.straight.checkpoint(one))


def without_evaluation(words: list[str]) -> list[str]:
    """Leave out the flags of evaluations, which need both engines and train workers."""
    places = [words.index(one) for one in ("--eval-prompt-data", "--eval-interval")]
    return [word for at, word in enumerate(words) if at - 1 not in places and at not in places]


# -- a second signal ---------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize(("signal", "code"), [("SIGINT", 130), ("SIGUSR1", 138)])
@fsdp
def test_a_second_signal_ends_a_run_at_once(place: Place, signal: str, code: int) -> None:
    run = RunFolder(place.folder / f"AT_ONCE_{signal}")
    blows = [
        Blow(victim=DRIVER, signal=signal, phase="train_on", nth=2, after=0.1),
        Blow(victim=DRIVER, signal=signal, file=r"\.partial"),
    ]
    finished = place.train(run.root.name, blows=blows)
    assert finished.code == code, finished.output
    assert len(finished.hits) == 2
    assert finished.ended - finished.hits[-1]["at"] < AT_ONCE_SECONDS
    require_durable(run, place.straight)
    finished = place.train(run.root.name)
    assert finished.code == 0, finished.output
    require_same_run(run, place.straight)
