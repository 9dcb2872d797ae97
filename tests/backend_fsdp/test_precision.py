"""Half precision, the loss scale, skipped steps and the schedule."""

from collections.abc import Mapping

import pytest
import torch
from fsdp_testing import (
    PolicyGradient,
    assert_same,
    config_of,
    exported,
    make_rollout,
    one_rank,
    reference_train,
    train_here,
)
from torch import Tensor
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from drivetrain_backend_api.batch import MicroBatch
from drivetrain_backend_api.errors import ConfigError
from drivetrain_backend_api.parallel import ProcessGroups
from drivetrain_backend_fsdp.backend import FsdpBackend
from drivetrain_backend_fsdp.optimizer import learning_rate


class Poisoned(PolicyGradient):
    """The policy gradient times a factor, for example nan."""

    def __init__(self, factor: float) -> None:
        super().__init__(None)
        self.factor = factor

    def compute_loss(
        self, outputs: Mapping[str, Tensor], batch: MicroBatch, groups: ProcessGroups
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = super().compute_loss(outputs, batch, groups)
        return loss * self.factor, metrics


@pytest.mark.parametrize(("precision", "unit"), [("bf16", 2**-8), ("fp16", 2**-11)])
def test_half_precision_stays_within_its_rounding_of_fp32(models: dict[str, str], precision: str, unit: float) -> None:
    # Activations and gathered weights are rounded to `unit` in each of two layers; masters and reductions are fp32.
    with one_rank(config_of(models["qwen3"], micro_batch_size=4, **{precision: True})) as backend:
        found = train_here(backend, make_rollout(8))
    expected = reference_train(
        models["qwen3"], make_rollout(8), steps=1, lrs=[1e-2], clip=1.0, weight_decay=0.1, eps=1e-5
    )
    assert found["losses"] == pytest.approx(expected.losses, rel=16 * unit)
    assert found["grad_norms"] == pytest.approx(expected.grad_norms, rel=16 * unit)
    for position, log_probs in zip(found["positions"], found["log_probs"], strict=True):
        assert log_probs.dtype == torch.float32
        torch.testing.assert_close(log_probs, expected.log_probs[position], rtol=32 * unit, atol=32 * unit)


def take_step(backend: FsdpBackend, factor: float = 1.0) -> dict[str, float]:
    shard = backend.preprocess_rollout_data(make_rollout(8))
    (metrics,) = backend.train(0, shard, Poisoned(factor))
    return metrics


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_step_with_non_finite_gradients_changes_nothing(models: dict[str, str], factor: float) -> None:
    config = config_of(models["qwen3"], lr_warmup_iters=4, micro_batch_size=4)
    with one_rank(config) as backend, one_rank(config) as untouched:
        backend.setup()
        take_step(backend)
        weights = exported(backend)
        state = {name: one.clone() for name, one in backend.optimizer.state().items()}
        skipped = take_step(backend, factor)
        assert (skipped["skipped_steps"], skipped["lr"]) == (1.0, 1e-2 / 4)
        assert_same(exported(backend), weights)
        assert_same(backend.optimizer.state(), state)
        second = take_step(backend)
        assert (second["skipped_steps"], second["lr"]) == (0.0, 1e-2 / 4)
        after = exported(backend)
        backend.close()
        untouched.setup()
        take_step(untouched)
        take_step(untouched)
        assert_same(exported(untouched), after)


def test_fp16_overflow_halves_the_loss_scale_until_a_step_is_taken(models: dict[str, str]) -> None:
    config = config_of(models["qwen3"], fp16=True, initial_loss_scale=2.0**24, loss_scale_window=2, micro_batch_size=8)
    with one_rank(config) as backend:
        backend.setup()
        before = exported(backend)
        outcomes = [take_step(backend) for _ in range(14)]
        skipped = [bool(one["skipped_steps"]) for one in outcomes]
        first_taken = skipped.index(False)
        # The loss's own gradients are far below the fp16 maximum, so the scale of 2**24 alone overflows.
        assert 0 < first_taken < 12
        expected = reference_train(
            models["qwen3"], make_rollout(8), steps=1, lrs=[1e-2], clip=1.0, weight_decay=0.1, eps=1e-5
        )
        # Two layers in fp16, unit 2**-11: the norm is unscaled.
        assert outcomes[first_taken]["grad_norm"] == pytest.approx(expected.grad_norms[0], rel=16 * 2**-11)
        assert any(not torch.equal(before[name], one) for name, one in exported(backend).items())


def test_the_loss_scale_grows_back_after_its_window(models: dict[str, str]) -> None:
    config = config_of(models["qwen3"], fp16=True, initial_loss_scale=8.0, loss_scale_window=2, micro_batch_size=8)
    with one_rank(config) as backend:
        backend.setup()
        scales = []
        for _ in range(4):
            take_step(backend)
            scales.append(backend.loss_scale)
    assert scales == [8.0, 16.0, 16.0, 32.0]


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
