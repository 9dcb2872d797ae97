"""Sampling against explicit distributions and the filters of transformers."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import TopKLogitsWarper, TopPLogitsWarper

from drivetrain_infra.engines.base import SamplingParams
from drivetrain_infra.engines.sampling import SamplingColumns, sample, uniforms

CPU = torch.device("cpu")
LAST = 1 - 2.0**-53  # the largest number a stream can give


def draw(logits: Tensor, params: list[SamplingParams], uniform: list[float] | Tensor) -> tuple[Tensor, Tensor]:
    column = torch.as_tensor(uniform, dtype=torch.float64)
    return sample(logits, SamplingColumns.of(params, CPU), column)


def sweep(logits: Tensor, params: SamplingParams, points: int) -> Tensor:
    """Share of each token over evenly spaced uniform numbers, float64 [V]."""
    uniform = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    tokens, _ = draw(logits.expand(points, -1), [params] * points, uniform)
    return torch.bincount(tokens, minlength=logits.shape[-1]).double() / points


def test_a_stream_depends_on_its_whole_seed_and_on_nothing_else() -> None:
    seeds = [(1,), (1, 0), (1, 0, 0), (0, 1), (12, 3), (1, 23), (2**32,), (0, 1, 0), (-1,), ()]
    streams = {tuple(uniforms(seed, 4)) for seed in seeds}
    assert len(streams) == len(seeds)
    np.testing.assert_array_equal(uniforms((7, 8), 50)[:20], uniforms([7, 8], 20))


def test_streams_are_uniform_along_and_across() -> None:
    table = np.stack([uniforms((0, 0, sample_index), 64) for sample_index in range(256)])
    assert table.min() >= 0
    assert table.max() < 1
    # 16384 numbers: the mean's standard error is 0.0023, a column's or row's at most 0.036
    assert abs(table.mean() - 0.5) < 0.01
    assert np.abs(table.mean(axis=0) - 0.5).max() < 0.1
    assert np.abs(table.mean(axis=1) - 0.5).max() < 0.2
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.05


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_invert_the_cumulative_distribution(temperature: float) -> None:
    logits = torch.randn(400, 50, generator=torch.Generator().manual_seed(0)) * 3
    uniform = torch.rand(400, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    tokens, log_probs = draw(logits, [SamplingParams(temperature=temperature)] * 400, uniform)
    exact = torch.softmax(logits.double() / temperature, dim=-1)
    upper = exact.cumsum(dim=-1).gather(1, tokens[:, None]).squeeze(1)
    probability = exact.gather(1, tokens[:, None]).squeeze(1)
    # float32 softmax: relative rounding of some 1e-7 a token
    assert bool((uniform <= upper + 1e-6).all())
    assert bool((uniform >= upper - probability - 1e-6).all())
    torch.testing.assert_close(log_probs.double(), probability.log(), atol=5e-6, rtol=0)


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 0.9), (0, 0.35), (0, 0.01), (5, 1.0), (1, 1.0), (40, 1.0), (6, 0.7), (3, 0.99)]
)
def test_top_k_and_top_p_give_the_distribution_that_transformers_filters(top_k: int, top_p: float) -> None:
    logits = torch.randn(1, 24, generator=torch.Generator().manual_seed(2)) * 2
    filtered = logits / 0.8
    ids = torch.zeros(1, 1, dtype=torch.int64)
    if top_k:
        filtered = TopKLogitsWarper(top_k)(ids, filtered)
    if top_p < 1:
        filtered = TopPLogitsWarper(top_p)(ids, filtered)
    expected = torch.softmax(filtered.double(), dim=-1)[0]
    points = 20_000
    share = sweep(logits, SamplingParams(temperature=0.8, top_k=top_k, top_p=top_p), points)
    # an interval of the unit line holds its length in grid points, to within one at each end
    torch.testing.assert_close(share, expected, atol=2 / points, rtol=0)
    assert bool((share[expected == 0] == 0).all())


def test_log_probs_ignore_top_k_and_top_p() -> None:
    logits = torch.randn(8, 30, generator=torch.Generator().manual_seed(3))
    tokens, log_probs = draw(logits, [SamplingParams(temperature=0.6, top_k=3, top_p=0.5)] * 8, [0.3] * 8)
    whole = torch.log_softmax(logits / 0.6, dim=-1).gather(1, tokens[:, None]).squeeze(1)
    torch.testing.assert_close(log_probs, whole, atol=1e-6, rtol=0)


def test_among_equal_tokens_top_k_keeps_exactly_k() -> None:
    share = sweep(torch.tensor([[0.0, 1.0, 1.0, 1.0, 1.0]]), SamplingParams(top_k=2), 1000)
    assert share.nonzero().squeeze(1).tolist() == [1, 2]


@pytest.mark.parametrize("uniform", [0.0, LAST])
def test_an_impossible_token_is_never_drawn(uniform: float) -> None:
    logits = torch.tensor([[-torch.inf, -torch.inf, 0.3, -torch.inf, 0.1, -torch.inf]])
    for params in (SamplingParams(), SamplingParams(top_p=0.999), SamplingParams(top_k=2)):
        tokens, log_probs = draw(logits, [params], [uniform])
        assert tokens.item() == (2 if uniform == 0.0 else 4)
        assert bool(log_probs.isfinite().all())


def test_a_large_vocabulary_is_drawn_from_evenly() -> None:
    size = 200_000
    uniform = torch.linspace(0, LAST, 33, dtype=torch.float64)
    tokens, _ = draw(torch.zeros(33, size), [SamplingParams()] * 33, uniform)
    # each float32 probability of 5e-6 is rounded by at most 6e-8 of itself, and all alike
    assert (tokens - (uniform * size).long()).abs().max() <= 1


def test_greedy_takes_the_likeliest_token_with_its_log_prob_at_temperature_one() -> None:
    logits = torch.randn(6, 20, generator=torch.Generator().manual_seed(4))
    tokens, log_probs = draw(logits, [SamplingParams(temperature=0.0)] * 6, [0.9] * 6)
    assert tokens.tolist() == logits.argmax(dim=-1).tolist()
    torch.testing.assert_close(log_probs, torch.log_softmax(logits, dim=-1).max(dim=-1).values, atol=1e-6, rtol=0)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    base = SamplingParams()
    changes: list[dict[str, float]] = [{}, {"temperature": 0.0}, {"top_p": 0.6}, {"top_k": 4}, {"temperature": 0.4}]
    params = [dataclasses.replace(base, **change) for change in changes for _ in range(8)]  # type: ignore[arg-type]
    logits = torch.randn(len(params), 40, generator=torch.Generator().manual_seed(5))
    uniform = torch.rand(len(params), dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    tokens, log_probs = draw(logits, params, uniform)
    for row, one in enumerate(params):
        alone, alone_log_probs = draw(logits[row : row + 1], [one], uniform[row : row + 1])
        assert alone.item() == tokens[row].item()
        assert alone_log_probs.item() == log_probs[row].item()


def test_logits_that_are_not_finite_show_in_the_log_probs() -> None:
    logits = torch.zeros(3, 5)
    logits[1, 2], logits[2, 0] = torch.nan, torch.inf
    tokens, log_probs = draw(logits, [SamplingParams()] * 3, [0.5] * 3)
    assert log_probs.isfinite().tolist() == [True, False, False]
    assert bool(((tokens >= 0) & (tokens < 5)).all())
