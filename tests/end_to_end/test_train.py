"""`drivetrain train` on a CPU: real Ray, real gloo, two train ranks, a real engine, files as documented."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.timeout(900)

ROLLOUTS = 3


class Finished(Protocol):
    code: int
    output: str


Command = Callable[..., Finished]

# A reward with variance even while the model knows nothing: how many of the response's characters are odd digits.
REWARD = """
def odd_digits(sample):
    return sum(one in "13579" for one in sample.response) / 5
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "my_rewards.py").write_text(REWARD)
    return folder


@pytest.fixture(scope="module")
def finished(drivetrain: Command, folder: Path, sums: Path, train_words: Callable[..., list[str]]) -> Finished:
    words = train_words(
        *("--actor-num-gpus-per-node", "2", "--num-rollout", str(ROLLOUTS), "--save", "RUN", "--save-interval", "2"),
        *("--reward", "my_rewards:odd_digits", "--lr", "1e-3", "--global-batch-size", "8"),
        *("--eval-interval", "2", "--eval-prompt-data", str(sums / "held_out.jsonl"), "--rollout-num-gpus", "2"),
    )
    return drivetrain(*words, folder=folder)


@pytest.fixture(scope="module")
def metrics(finished: Finished, folder: Path) -> list[dict[str, Any]]:
    assert finished.code == 0, finished.output
    return [json.loads(line) for line in (folder / "RUN" / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def trained(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in metrics if "train/loss" in row]


def test_every_rollout_is_logged_once(trained: list[dict[str, Any]]) -> None:
    assert [row["rollout_id"] for row in trained] == list(range(ROLLOUTS))


def test_rollout_i_is_made_with_weight_version_i_plus_1(trained: list[dict[str, Any]]) -> None:
    assert [row["rollout/weight_version"] for row in trained] == [1, 2, 3]


def test_rewards_vary_and_gradients_flow(trained: list[dict[str, Any]]) -> None:
    assert all(row["rollout/reward_std"] > 0 for row in trained)
    assert all(row["train/grad_norm"] > 0 for row in trained)
    assert all(row["train/skipped_steps"] == 0 for row in trained)


def test_the_engine_has_the_trainers_weights_at_every_rollout(trained: list[dict[str, Any]]) -> None:
    # fp32 on both sides; what is left is the order of sums in attention and matmul.
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-4 for row in trained)


def test_evaluations_carry_the_id_of_the_rollout_they_precede(metrics: list[dict[str, Any]]) -> None:
    assert [row["rollout_id"] for row in metrics if "eval/reward" in row] == [0, 2, 3]


def test_speed_is_logged(trained: list[dict[str, Any]]) -> None:
    for row in trained:
        phases = [row[f"perf/{name}_seconds"] for name in ("rollout", "train", "sync")]
        assert row["perf/seconds"] == pytest.approx(sum(phases))
        assert row["perf/tokens_per_second"] > 0


def test_the_summary_is_shown(finished: Finished, folder: Path) -> None:
    assert "Summary" in finished.output
    assert "eval/reward, first -> last" in finished.output
    assert "drivetrain export" in finished.output


def test_checkpoints_are_where_the_readme_says(metrics: list[dict[str, Any]], folder: Path) -> None:
    run = folder / "RUN"
    assert sorted(path.name for path in run.glob("iter_*")) == ["iter_0000002", "iter_0000003"]
    assert (run / "latest").read_text().strip() == "iter_0000003"
    assert json.loads((run / "config.json").read_text())["lr"] == 1e-3


def test_the_exported_model_loads_and_moved_in_nearly_every_tensor(
    drivetrain: Command, metrics: list[dict[str, Any]], folder: Path, sums: Path
) -> None:
    exported = drivetrain("export", "RUN", "--out", "HF", folder=folder)
    assert exported.code == 0, exported.output
    before = AutoModelForCausalLM.from_pretrained(sums / "model").state_dict()
    after = AutoModelForCausalLM.from_pretrained(folder / "HF").state_dict()
    assert before.keys() == after.keys()
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(moved) >= 0.9 * len(before)
    again = drivetrain("export", "RUN", "--out", "HF", folder=folder)
    assert again.code == 2
    assert "is there already" in again.output


def test_another_run_in_the_same_folder_is_refused_and_its_files_left_alone(
    drivetrain: Command, metrics: list[dict[str, Any]], folder: Path, train_words: Callable[..., list[str]]
) -> None:
    before = (folder / "RUN" / "metrics.jsonl").read_bytes()
    again = drivetrain(*train_words("--num-rollout", "5", "--save", "RUN"), folder=folder)
    assert again.code == 2
    assert "--lr: 0.001 in the run that is there, 1e-06 now" in again.output
    assert (folder / "RUN" / "metrics.jsonl").read_bytes() == before


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    assert not [child for child in psutil.Process().children(recursive=True) if "ray" in child.name().lower()]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_run_continues_from_a_checkpoint_of_another_layout(
    drivetrain: Command, metrics: list[dict[str, Any]], folder: Path, train_words: Callable[..., list[str]]
) -> None:
    words = train_words("--num-rollout", "4", "--save", "NEXT", "--load", "RUN", "--reward", "my_rewards:odd_digits")
    finished = drivetrain(*words, folder=folder)
    assert finished.code == 0, finished.output
    rows = [json.loads(line) for line in (folder / "NEXT" / "metrics.jsonl").read_text().splitlines()]
    assert [row["rollout_id"] for row in rows] == [3]
    assert rows[0]["rollout/weight_version"] == 4


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_same_run_twice_gives_the_same_metrics(
    drivetrain: Command, folder: Path, train_words: Callable[..., list[str]]
) -> None:
    rows = []
    for name in ("ONCE", "TWICE"):
        words = train_words("--num-rollout", "2", "--save", name, "--reward", "my_rewards:odd_digits", "--lr", "1e-3")
        finished = drivetrain(*words, folder=folder)
        assert finished.code == 0, finished.output
        lines = (folder / name / "metrics.jsonl").read_text().splitlines()
        rows.append([{k: v for k, v in json.loads(line).items() if "second" not in k} for line in lines])
    assert rows[0] == rows[1]


@pytest.mark.slow
def test_the_disk_transport_and_custom_generation_train_too(
    drivetrain: Command, folder: Path, train_words: Callable[..., list[str]]
) -> None:
    (folder / "my_turns.py").write_text(
        "from drivetrain_launcher.custom_generate import CustomResponse\n"
        "async def two_turns(prompt, engine, tokenizer):\n"
        "    first = await engine.generate(prompt.prompt_ids)\n"
        "    tool = tuple(tokenizer('+1=')['input_ids'])\n"
        "    second = await engine.generate(prompt.prompt_ids + first.token_ids + tool)\n"
        "    return CustomResponse(\n"
        "        token_ids=first.token_ids + tool + second.token_ids,\n"
        "        loss_mask=[1] * len(first.token_ids) + [0] * len(tool) + [1] * len(second.token_ids),\n"
        "        log_probs=first.log_probs + (0.0,) * len(tool) + second.log_probs)\n"
    )
    words = train_words(
        *("--num-rollout", "2", "--save", "TURNS", "--reward", "my_rewards:odd_digits", "--lr", "1e-3"),
        *("--custom-generate", "my_turns:two_turns", "--update-weight-transport", "disk"),
    )
    finished = drivetrain(*words, folder=folder)
    assert finished.code == 0, finished.output
    rows = [json.loads(line) for line in (folder / "TURNS" / "metrics.jsonl").read_text().splitlines()]
    assert [row["rollout/weight_version"] for row in rows] == [1, 2]
    # tool tokens are masked, so the engine's log-probs agree on all that counts
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-4 for row in rows)
    assert all(row["train/loss_tokens"] < 16 * (row["rollout/response_length"] - 2) for row in rows)


@pytest.mark.slow
def test_a_reference_and_importance_weights_train_too(
    drivetrain: Command, folder: Path, sums: Path, train_words: Callable[..., list[str]]
) -> None:
    words = train_words(
        *("--num-rollout", "2", "--save", "KL", "--reward", "my_rewards:odd_digits", "--lr", "1e-2"),
        *("--use-kl-loss", "--kl-loss-coef", "0.1", "--ref-load", str(sums / "model"), "--use-tis"),
        *("--entropy-coef", "0.01", "--global-batch-size", "8", "--actor-num-gpus-per-node", "2"),
    )
    finished = drivetrain(*words, folder=folder)
    assert finished.code == 0, finished.output
    rows = [json.loads(line) for line in (folder / "KL" / "metrics.jsonl").read_text().splitlines()]
    # the first of the two steps is taken from the reference's own weights, every later one is not
    assert rows[1]["train/kl_loss"] > 10 * rows[0]["train/kl_loss"] > 0
    # the engine computes what the trainer does, so that nothing is corrected
    assert all(row["train/tis"] == pytest.approx(1.0, abs=1e-3) for row in rows)
