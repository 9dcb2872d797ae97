"""Shipped recipes: what they make, and that ordinary flags of the main stage do not trip the warm-up."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from rich.console import Console

from drivetrain_backend_api import ConfigError, DiscoveryError, DrivetrainError
from drivetrain_infra.run_folder import RunFolder
from drivetrain_launcher.cli import main
from drivetrain_launcher.config import DrivetrainConfig, LoopConfig
from drivetrain_launcher.recipes import arithmetic
from drivetrain_launcher.run import prepare, prepare_stage, too_late_to_refuse
from drivetrain_launcher.sources import Stage, build_config, read_request

GENERATE = "async def alone(prompt, engine, tokenizer):\n    ...\n"


@pytest.mark.parametrize(
    "words",
    [
        ["--rollout-temperature", "0.8"],
        ["--custom-generate", "my_generate:alone"],
        ["--num-rollout", "none", "--num-epoch", "2"],
        ["--global-batch-size", "512"],
        ["--actor-num-gpus-per-node", "2", "--no-fp32", "--bf16"],
    ],
)
def test_the_quickstart_takes_flags_of_its_main_stage(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_generate.py").write_text(GENERATE)
    monkeypatch.chdir(tmp_path)
    request = read_request(["--recipe", "quickstart", *words], {})
    folder = RunFolder(request.save.absolute())
    warmup, main = prepare(request, folder, Console(quiet=True), made=folder.root / "made")
    assert (warmup.config.algorithm.name, main.config.algorithm.name) == ("sft", "grpo")
    assert Path(warmup.config.train.hf_checkpoint).name == "model"
    assert Path(main.config.train.hf_checkpoint).name == "warmup_model"


@pytest.mark.parametrize("recipe", [True, False])
def test_a_dry_run_checks_everything_and_leaves_nothing(
    recipe: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    short_tempdir: Path,
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    words = ["--recipe", "quickstart"]
    if not recipe:
        arithmetic.make(tmp_path, seed=7)
        words = ["--train-backend", "fsdp", "--hf-checkpoint", str(tmp_path / "model"), "--save", "runs/sums"]
        words += ["--prompt-data", str(tmp_path / "train.jsonl"), "--input-key", "question", "--label-key", "answer"]
        words += ["--num-rollout", "1", "--n-samples-per-prompt", "2", "--rollout-max-response-len", "5"]
    monkeypatch.chdir(folder)
    assert main(["train", *words, "--dry-run"]) == 0, capsys.readouterr()
    assert "everything that can be checked is right; nothing was started" in capsys.readouterr().out
    assert list(folder.iterdir()) == []
    assert [*short_tempdir.glob("drivetrain-*"), *short_tempdir.glob("dt-*")] == []
    assert not ray.is_initialized()
    assert main(["train", *words, "--dry-run", "--rollout-max-response-len", "100000"]) == 2
    assert "--rollout-max-response-len" in capsys.readouterr().err


def test_a_note_is_shown_and_refuses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--recipe", "quickstart", "--dry-run", "--num-rollout", "1000000000", "--save-interval", "1"]
    assert main(["train", *words]) == 0, capsys.readouterr()
    (note,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert note.startswith("note: --save-interval 1: the 1000000000 checkpoints of this run take about ")


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_recipe_is_not_made_where_nothing_can_be_written(dry_run: bool, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--recipe", "quickstart", "--save", "/proc/new", *["--dry-run"] * dry_run]
    assert main(["train", *words]) == 2
    assert capsys.readouterr().err.startswith("drivetrain: error: --save /proc/new: cannot write in /proc: ")


@pytest.mark.parametrize("there", [".", "runs", "runs/one", "runs/one/made"])
def test_a_refusal_leaves_a_recipes_folders_as_they_were(
    there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(there).mkdir(parents=True, exist_ok=True)
    words = ["--recipe", "quickstart", "--save", "runs/one", "--rollout-max-response-len", "100000"]
    assert main(["train", *words]) == 2
    assert "exceed the 64 positions" in capsys.readouterr().err
    left = [path for path in tmp_path.rglob("*") if path.is_dir() and "made" not in path.parent.parts]
    assert left == [
        path for path in reversed([tmp_path / there, *(tmp_path / there).parents]) if tmp_path in path.parents
    ]


def arithmetic_config(folder: Path) -> DrivetrainConfig:
    words = ["--recipe", "quickstart", "--save", str(folder / "run")]
    return build_config(read_request(words, {}), made=arithmetic.options(folder))


def test_parties_that_disagree_about_a_variable_are_found_before_anything_starts(tmp_path: Path) -> None:
    arithmetic.make(tmp_path, seed=7)
    config, folder = arithmetic_config(tmp_path), RunFolder(tmp_path / "run")
    prepare_stage(config, folder, Console(quiet=True), title="agreed")
    for name in ("backend", "engine"):
        spec = replace(getattr(config, name), worker_env=lambda options: {"OMP_NUM_THREADS": "77"})
        with pytest.raises(ConfigError, match="needs OMP_NUM_THREADS='77' and the launcher needs OMP_NUM_THREADS="):
            prepare_stage(replace(config, **{name: spec}), folder, Console(quiet=True), title="conflict")
    assert not ray.is_initialized()


def test_what_is_found_after_the_start_is_a_failure_and_no_refusal() -> None:
    for late in (ConfigError("give --lr"), DiscoveryError("no backend")):
        with pytest.raises(DrivetrainError) as caught, too_late_to_refuse():
            raise late
        assert (type(caught.value), str(caught.value), caught.value.__cause__) == (DrivetrainError, str(late), late)


def test_weights_that_have_had_all_epochs_are_refused_before_anything_starts(tmp_path: Path) -> None:
    arithmetic.make(tmp_path, seed=7)
    checkpoint = tmp_path / "old" / "iter_0000900"
    checkpoint.mkdir(parents=True)
    config = arithmetic_config(tmp_path)
    config = replace(
        config,
        backend=replace(config.backend, check_checkpoint=""),
        train=replace(config.train, load=str(checkpoint)),
        loop=LoopConfig(num_epoch=1),
    )
    with pytest.raises(ConfigError, match="was trained on 900 rollouts already, and --num-rollout"):
        prepare_stage(config, RunFolder(tmp_path / "run"), Console(quiet=True), title="over")


def test_held_out_sums_are_in_no_training_file(tmp_path: Path) -> None:
    arithmetic.make(tmp_path, seed=7)
    asked = {
        name: {json.loads(line)["question"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()}
        for name in ("warmup", "train", "held_out")
    }
    assert len(asked["held_out"]) == arithmetic.HELD_OUT
    assert not asked["held_out"] & (asked["warmup"] | asked["train"])


def test_the_same_seed_makes_the_same_model_and_sums(tmp_path: Path) -> None:
    for name in ("one", "other"):
        arithmetic.make(tmp_path / name, seed=7)
    files = [path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert (tmp_path / "one" / path).read_bytes() == (tmp_path / "other" / path).read_bytes()


def test_the_warm_up_keeps_what_the_user_chose_for_both(tmp_path: Path) -> None:
    request = read_request(["--recipe", "quickstart", "--seed", "11", "--save", str(tmp_path)], {})
    made = arithmetic.options(tmp_path)
    assert build_config(request, stage=Stage.WARMUP, made=made).train.seed == 11
