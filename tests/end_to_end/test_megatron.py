"""`drivetrain train` on the Megatron backend: layouts, resume under another, export, and agreement with FSDP."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


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
    folder = tmp_path_factory.mktemp("megatron")
    (folder / "my_rewards.py").write_text(REWARD)
    return folder


def words(sums: Path, save: str, *more: str) -> list[str]:
    """Flags of a small run over two ranks, with two optimizer steps a rollout; further ones are appended."""
    return [
        *("train", "--fp32", "--prompt-data", str(sums / "train.jsonl"), "--input-key", "question"),
        *("--label-key", "answer", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4"),
        *("--rollout-max-response-len", "5", "--reward", "my_rewards:odd_digits", "--lr", "1e-3"),
        *("--global-batch-size", "8", "--actor-num-gpus-per-node", "2", "--save", save, *more),
    ]


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(drivetrain: Command, folder: Path, sums: Path) -> list[dict[str, Any]]:
    """Metrics of a run whose matrices and tokens are cut in two, with a reference beside the policy."""
    model = str(sums / "model")
    cut = ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--use-kl-loss", "--ref-load", model)
    finished = drivetrain(*words(sums, "RUN", "--hf-checkpoint", model, *cut, "--num-rollout", "2"), folder=folder)
    assert finished.code == 0, finished.output
    # without --train-backend
    assert "starting 2 train workers (megatron)" in finished.output
    assert "sleep tier: offload" in finished.output
    return rows_of(folder / "RUN")


@pytest.fixture(scope="module")
def exported(drivetrain: Command, trained: list[dict[str, Any]], folder: Path, sums: Path) -> Path:
    """A model folder of the run, after it has gone on for a rollout as two pipeline stages."""
    cut = ("--pipeline-model-parallel-size", "2", "--load", "RUN", "--num-rollout", "3")
    finished = drivetrain(*words(sums, "NEXT", "--hf-checkpoint", str(sums / "model"), *cut), folder=folder)
    assert finished.code == 0, finished.output
    done = drivetrain("export", "NEXT", "--out", "HF", folder=folder)
    assert done.code == 0, done.output
    return folder / "HF"


def test_the_engine_has_the_weights_of_all_ranks_at_every_rollout(trained: list[dict[str, Any]]) -> None:
    assert [(row["rollout_id"], row["rollout/weight_version"]) for row in trained] == [(0, 1), (1, 2)]
    # fp32 on both sides; what is left is the order of sums in attention and matmul
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-4 for row in trained)


def test_the_reference_stays_while_the_policy_learns(trained: list[dict[str, Any]]) -> None:
    # the first of the two steps of a rollout is taken from the reference's own weights, every later one is not
    assert trained[1]["train/kl_loss"] > 2 * trained[0]["train/kl_loss"] > 0
    assert all(row["train/skipped_steps"] == 0 for row in trained)


def test_a_run_goes_on_under_another_layout(exported: Path) -> None:
    (row,) = rows_of(exported.parent / "NEXT")
    assert (row["rollout_id"], row["rollout/weight_version"]) == (2, 3)
    assert row["train/train_rollout_logprob_abs_diff"] < 1e-4


def test_the_exported_model_moved_in_every_tensor(exported: Path, sums: Path) -> None:
    before = AutoModelForCausalLM.from_pretrained(sums / "model").state_dict()
    after = AutoModelForCausalLM.from_pretrained(exported).state_dict()
    assert before.keys() == after.keys()
    assert [name for name in before if torch.equal(before[name], after[name])] == []


@pytest.mark.exhaustive
def test_both_backends_take_the_same_steps_from_the_exported_weights(
    drivetrain: Command, exported: Path, folder: Path, sums: Path
) -> None:
    runs = {
        # its weights alone: the run begins at rollout 0
        "MEGATRON": ("--hf-checkpoint", str(sums / "model"), "--load", str(exported), "--context-parallel-size", "2"),
        "FSDP": ("--hf-checkpoint", str(exported), "--train-backend", "fsdp"),
    }
    for save, more in runs.items():
        finished = drivetrain(*words(sums, save, *more, "--num-rollout", "1"), folder=folder)
        assert finished.code == 0, finished.output
    (mine,), (other,) = (rows_of(folder / save) for save in runs)
    assert mine["rollout_id"] == other["rollout_id"] == 0
    # of two steps, the second from weights that the first has moved: what differs is the order of fp32 sums
    for name in ("rollout/reward", "train/loss", "train/entropy", "train/ppo_kl", "train/grad_norm"):
        assert mine[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name
