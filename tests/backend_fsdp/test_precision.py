"""The loss scale of fp16, masters under bf16, and the schedule."""

from pathlib import Path

import pytest
import torch
from fsdp_testing import assert_same, config_of, exported, one_rank, rollout_of, train
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from drivetrain_backend_api.errors import ConfigError
from drivetrain_backend_api.schedule import learning_rate
from drivetrain_backend_api.testing.models import make_model
from drivetrain_backend_fsdp.backend import FsdpBackend


def take_step(backend: FsdpBackend) -> dict[str, float]:
    (metrics,) = train(backend, rollout_of())
    return metrics


def test_fp16_overflow_halves_the_loss_scale_until_a_step_is_taken(models: dict[str, Path]) -> None:
    config = config_of(models["qwen3"], fp16=True, initial_loss_scale=2.0**24, loss_scale_window=2, micro_batch_size=8)
    with one_rank(config_of(models["qwen3"], micro_batch_size=8)) as backend:
        backend.setup()
        expected = take_step(backend)["grad_norm"]
    with one_rank(config) as backend:
        backend.setup()
        before = exported(backend)
        outcomes = [take_step(backend) for _ in range(14)]
        skipped = [bool(one["skipped_steps"]) for one in outcomes]
        first_taken = skipped.index(False)
        # The loss's own gradients are far below the fp16 maximum, so the scale of 2**24 alone overflows.
        assert 0 < first_taken < 12
        # Four layers in fp16, unit 2**-11: the norm is unscaled, and so that of fp32.
        assert outcomes[first_taken]["grad_norm"] == pytest.approx(expected, rel=32 * 2**-11)
        assert any(not torch.equal(before[name], one) for name, one in exported(backend).items())


def test_the_loss_scale_grows_back_after_its_window(models: dict[str, Path]) -> None:
    config = config_of(models["qwen3"], fp16=True, initial_loss_scale=8.0, loss_scale_window=2, micro_batch_size=8)
    with one_rank(config) as backend:
        backend.setup()
        scales = []
        for _ in range(4):
            take_step(backend)
            scales.append(backend.loss_scale)
    assert scales == [8.0, 16.0, 16.0, 32.0]


def test_bf16_models_train_in_fp32_and_export_in_bf16(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama", dtype="bfloat16")
    with one_rank(config_of(model, bf16=True, lr=1e-5, micro_batch_size=8)) as backend:
        backend.setup()
        take_step(backend)
        masters = exported(backend)
        assert any(not torch.equal(one, one.bfloat16().float()) for one in masters.values())
        assert_same(exported(backend, dtype=None), {name: one.bfloat16() for name, one in masters.items()})


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_the_schedule_is_that_of_transformers(style: str) -> None:
    config = config_of("unused", lr=0.5, lr_decay_style=style, lr_warmup_iters=3, lr_decay_iters=11)
    make = {"linear": get_linear_schedule_with_warmup, "cosine": get_cosine_schedule_with_warmup}[style]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    schedule = make(optimizer, num_warmup_steps=3, num_training_steps=11)
    for step in range(11):
        assert learning_rate(step, config) == pytest.approx(schedule.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        schedule.step()


def test_the_schedule_ends_at_the_minimum_and_stays_there() -> None:
    config = config_of("unused", lr=0.5, min_lr=0.1, lr_decay_style="cosine", lr_decay_iters=4)
    assert [learning_rate(step, config) for step in (0, 2, 4, 40)] == pytest.approx([0.5, 0.3, 0.1, 0.1])


def test_a_decay_without_an_end_is_refused_before_anything_is_loaded() -> None:
    config = config_of("unused", lr_decay_style="cosine")
    with one_rank(config) as backend, pytest.raises(ConfigError, match="--lr-decay-iters"):
        backend.setup()
