"""When the loop gives a run up: steps that are lost now and then are bad luck, a row of them is divergence."""

import math

import pytest

from drivetrain_backend_api import DrivetrainError, TrainConfig
from drivetrain_launcher.loop import Divergence

GOOD = {"skipped_steps": 0.0, "loss": 0.5}
SKIPPED = {"skipped_steps": 1.0, "loss": 0.5}
NOT_FINITE = {"skipped_steps": 0.0, "loss": math.nan}


def config(**options: object) -> TrainConfig:
    return TrainConfig(hf_checkpoint="M", **options)  # type: ignore[arg-type]


def test_lost_steps_with_good_ones_between_them_are_bad_luck() -> None:
    divergence = Divergence(config())
    for rollout_id in range(30):
        divergence.check(rollout_id, [SKIPPED] * 9 if rollout_id % 2 else [GOOD])


@pytest.mark.parametrize("lost", [SKIPPED, NOT_FINITE])
def test_a_run_whose_last_ten_steps_were_lost_ends(lost: dict[str, float]) -> None:
    divergence = Divergence(config())
    divergence.check(0, [lost, GOOD])
    for rollout_id in range(1, 10):
        divergence.check(rollout_id, [lost])
    with pytest.raises(
        DrivetrainError, match=r"the last 10 optimizer steps, from rollout 1 to rollout 10, .*lower --lr"
    ):
        divergence.check(10, [lost])


def test_fp16_may_first_bring_its_loss_scale_down() -> None:
    divergence = Divergence(config(fp16=True, initial_loss_scale=2.0**16, min_loss_scale=2.0))
    divergence.check(0, [SKIPPED] * 24)
    with pytest.raises(DrivetrainError, match="the last 25 optimizer steps"):
        divergence.check(1, [SKIPPED])


def test_an_algorithm_that_reports_no_loss_is_judged_by_its_steps() -> None:
    Divergence(config()).check(0, [{"skipped_steps": 0.0}] * 20)
