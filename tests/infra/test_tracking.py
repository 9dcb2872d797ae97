"""Trackers write what they are given, where others can read it."""

import json
from pathlib import Path

import pytest

from drivetrain_infra.config import TrackingConfig
from drivetrain_infra.tracking.base import Trackers
from drivetrain_infra.tracking.jsonl import JsonlTracker, read_metrics
from drivetrain_infra.tracking.wandb import WandbTracker


def test_each_line_is_strict_json_with_a_rollout_id(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(0, {"train/loss": 0.1})
    tracker.log(1, {"train/loss": float("nan"), "train/grad_norm": float("inf")})
    lines = path.read_text().splitlines()  # before close: each line is flushed
    tracker.close()

    def refuse(word: str) -> None:
        raise ValueError(word)

    assert [json.loads(line, parse_constant=refuse) for line in lines] == read_metrics(path)
    assert read_metrics(path) == [
        {"rollout_id": 0, "train/loss": 0.1},
        {"rollout_id": 1, "train/loss": None, "train/grad_norm": None},
    ]


def test_several_trackers_get_the_same(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b")]
    trackers = Trackers([JsonlTracker(path) for path in paths])
    trackers.log(3, {"x": 1.0})
    trackers.close()
    assert read_metrics(paths[0]) == read_metrics(paths[1]) == [{"rollout_id": 3, "x": 1.0}]


@pytest.mark.slow
def test_wandb_works_offline(tmp_path: Path) -> None:
    config = TrackingConfig(use_wandb=True, wandb_mode="offline")
    tracker = WandbTracker(config, tmp_path, {"lr": 0.5})
    tracker.log(0, {"train/loss": 0.1})
    tracker.close()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
