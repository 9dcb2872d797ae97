"""A run over two Ray nodes (on one machine), which it joins; and epochs instead of a number of rollouts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drivetrain_infra.ray_runtime import ray_session
from drivetrain_infra.testing import local_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_train_ranks_spread_over_the_nodes_of_a_cluster(
    drivetrain: Callable[..., Any], sums: Path, train_words: Callable[..., list[str]], tmp_path: Path
) -> None:

    def words(nodes: int, save: str) -> list[str]:
        given = train_words("--algorithm", "sft", "--num-rollout", "2", "--save", save, "--actor-num-nodes", str(nodes))
        given[given.index("--n-samples-per-prompt") + 1] = "1"
        return given

    with local_cluster(tmp_path / "cluster", cpus_per_node=(1, 1)) as address:
        finished = drivetrain(*words(2, "RUN"), "--ray-address", address, folder=tmp_path, joins_ray=True)
        too_many = drivetrain(*words(3, "OTHER"), "--ray-address", address, folder=tmp_path, joins_ray=True)
        # the cluster outlives the runs that joined it
        with ray_session(tmp_path / "mine", address=address):
            pass
    assert finished.code == 0, finished.output
    rows = [json.loads(line) for line in (tmp_path / "RUN" / "metrics.jsonl").read_text().splitlines()]
    assert [row["rollout_id"] for row in rows] == [0, 1]
    assert too_many.code != 0
    assert "--actor-num-nodes" in too_many.output
    assert "asked: train" in too_many.output


def test_epochs_are_counted_over_the_prompts(
    drivetrain: Callable[..., Any], sums: Path, train_words: Callable[..., list[str]], tmp_path: Path
) -> None:
    rows = (sums / "train.jsonl").read_text().splitlines()[:10]
    (tmp_path / "ten.jsonl").write_text("\n".join(rows))
    words = train_words("--num-epoch", "2", "--save", "RUN")
    words[words.index("--prompt-data") + 1] = "ten.jsonl"
    finished = drivetrain(*words, folder=tmp_path)
    assert finished.code == 0, finished.output
    metrics = [json.loads(line) for line in (tmp_path / "RUN" / "metrics.jsonl").read_text().splitlines()]
    assert [row["rollout_id"] for row in metrics] == list(range(5))  # 2 x 10 prompts, 4 a rollout
