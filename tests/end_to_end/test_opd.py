"""On-policy distillation as a user runs it: a student learns from a teacher alone, and its reverse KL falls."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BACKENDS = ["fsdp", pytest.param("megatron", marks=pytest.mark.exhaustive)]

ROLLOUTS = 25


class Finished(Protocol):
    code: int
    output: str


Command = Callable[..., Finished]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory, sums: Path) -> Path:
    """The student with larger embeddings of its own, so that it likes some tokens, above all the last one again."""
    folder = Path(shutil.copytree(sums / "model", tmp_path_factory.mktemp("opd") / "teacher"))
    model = AutoModelForCausalLM.from_pretrained(folder)
    embeddings: torch.Tensor = model.get_input_embeddings().weight
    with torch.no_grad():
        embeddings.add_(0.06 * torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(11)))
    model.save_pretrained(folder)
    return folder


def words(backend: str, sums: Path, teacher: Path, *more: str) -> list[str]:
    """Flags of a small distillation; further ones are appended."""
    return [
        *("train", "--algorithm", "opd", "--train-backend", backend, "--fp32", "--hf-checkpoint", str(sums / "model")),
        *("--opd-teacher-load", str(teacher), "--prompt-data", str(sums / "train.jsonl"), "--input-key", "question"),
        *("--rollout-batch-size", "64", "--rollout-max-response-len", "5", "--use-dynamic-batch-size"),
        *("--max-tokens-per-gpu", "4096", "--actor-num-gpus-per-node", "2", "--calculate-per-token-loss"),
        *("--lr", "3e-3", "--weight-decay", "0"),
        *more,
    ]


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_student_comes_close_to_its_teacher(
    backend: str, drivetrain: Command, tmp_path: Path, sums: Path, teacher: Path
) -> None:
    more = ("--reward", "none", "--n-samples-per-prompt", "4", "--num-rollout", str(ROLLOUTS), "--save", "RUN")
    finished = drivetrain(*words(backend, sums, teacher, *more), folder=tmp_path, seconds=800)
    assert finished.code == 0, finished.output
    assert "of host memory on each of 2 ranks" in finished.output
    assert "opd: teacher: 0.2 MiB of host memory on each rank" in finished.output
    assert "nothing to learn from" not in finished.output
    rows = rows_of(tmp_path / "RUN")
    divergence = [row["train/opd_reverse_kl"] for row in rows]
    assert divergence[0] > 0.5
    assert all(one < 0.1 * divergence[0] for one in divergence[-5:])
    assert all(row["train/skipped_steps"] == 0 for row in rows)
    # fp32 on both sides, so the engine's log-probs in the advantages are the trainer's
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-4 for row in rows)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_teacher_and_a_reward_teach_together_over_several_steps(
    backend: str, drivetrain: Command, tmp_path: Path, sums: Path, teacher: Path
) -> None:
    more = [
        *("--opd-reward-coef", "0.5", "--opd-kl-coef", "0.5", "--label-key", "answer", "--reward", "mine:twos"),
        *("--n-samples-per-prompt", "4", "--global-batch-size", "64", "--num-rollout", "4", "--save", "RUN"),
        *("--use-kl-loss", "--ref-load", str(sums / "model")),
    ]
    (tmp_path / "mine.py").write_text("def twos(sample):\n    return sample.response.count('2')\n")
    finished = drivetrain(*words(backend, sums, teacher, *more), folder=tmp_path)
    assert finished.code == 0, finished.output
    rows = rows_of(tmp_path / "RUN")
    # four optimizer steps a rollout: the later ones leave the policy that sampled
    assert all(row["train/ppo_kl"] > 0 for row in rows)
    assert rows[-1]["train/opd_reverse_kl"] < rows[0]["train/opd_reverse_kl"]
    assert rows[-1]["rollout/reward"] > rows[0]["rollout/reward"]
    assert rows[-1]["train/kl_loss"] > 0
