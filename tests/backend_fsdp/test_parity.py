"""Any number of ranks, any packing and any micro-batch split train like one plain process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import CASES
from fsdp_testing import config_of, make_rollout, one_rank, reference_train, train_here, worst_error

# fp32 sums in another order: 1e-6 relative at these sizes, and Adam passes that on to the weights.
RELATIVE = 1e-5


def check(found: dict[str, Any], model: str, *, samples: int, steps: int, **reference: Any) -> None:
    settings = {"lrs": [1e-2] * steps, "clip": 1.0, "weight_decay": 0.1, "eps": 1e-5} | reference
    expected = reference_train(model, make_rollout(samples), steps=steps, **settings)
    assert found["losses"] == pytest.approx(expected.losses, rel=RELATIVE, abs=RELATIVE)
    assert found["grad_norms"] == pytest.approx(expected.grad_norms, rel=RELATIVE)
    for position, log_probs in zip(found["positions"], found["log_probs"], strict=True):
        torch.testing.assert_close(log_probs, expected.log_probs[position], rtol=RELATIVE, atol=RELATIVE)
    assert worst_error(found["weights"], expected.weights) < RELATIVE


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("qwen3", {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40}),
        ("qwen3-tied", {"micro_batch_size": 1}),
        ("llama-tied", {"micro_batch_size": 4}),
        ("qwen2", {"micro_batch_size": 3, "gradient_checkpointing": True}),
        ("qwen2", {"micro_batch_size": 2, "optimizer_cpu_offload": True}),
        ("qwen3-tied", {"micro_batch_size": 2, "fsdp_cpu_offload": True}),
    ],
)
def test_one_rank_trains_like_a_plain_model(models: dict[str, str], kind: str, config: dict[str, Any]) -> None:
    with one_rank(config_of(models[kind], global_batch_size=4, **config)) as backend:
        found = train_here(backend, make_rollout(8))
    check(found, models[kind], samples=8, steps=2)


def test_log_probs_and_loss_are_at_the_rollout_temperature(models: dict[str, str]) -> None:
    with one_rank(config_of(models["qwen3"], rollout_temperature=0.6, micro_batch_size=8)) as backend:
        found = train_here(backend, make_rollout(8))
    check(found, models["qwen3"], samples=8, steps=1, temperature=0.6)


def test_gradients_are_clipped_to_the_given_norm_and_zero_does_not_clip(models: dict[str, str]) -> None:
    for clip in (0.05, 0.0):
        with one_rank(config_of(models["llama-tied"], grad_clip=clip, micro_batch_size=8)) as backend:
            found = train_here(backend, make_rollout(8))
        check(found, models["llama-tied"], samples=8, steps=1, clip=clip)


def check_ranks(launched: Any, models: dict[str, str], case: int) -> None:
    what = CASES[case]
    for result in launched["results"]:
        found = result["parity"][case]
        steps = what["samples"] // what["config"]["global_batch_size"]
        check(found, models[what["kind"]], samples=what["samples"], steps=steps)
    positions = [one for result in launched["results"] for one in result["parity"][case]["positions"]]
    assert sorted(positions) == list(range(what["samples"]))


@pytest.mark.parametrize("case", range(len(CASES)))
def test_two_ranks_train_like_a_plain_model(on_ranks: Callable[[int], Any], models: dict[str, str], case: int) -> None:
    check_ranks(on_ranks(2), models, case)


def test_a_rank_with_nothing_but_fillers_was_among_them(on_ranks: Callable[[int], Any]) -> None:
    idle = on_ranks(2)["results"][1]["parity"][2]
    assert (idle["positions"], idle["fillers"]) == ([], 3)


@pytest.mark.slow
@pytest.mark.parametrize("case", range(len(CASES)))
def test_four_ranks_train_like_a_plain_model(on_ranks: Callable[[int], Any], models: dict[str, str], case: int) -> None:
    check_ranks(on_ranks(4), models, case)
