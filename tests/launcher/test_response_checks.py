"""What engines may return: anything else is refused by engine and sample, in one sentence that says what was wrong."""

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from drivetrain_backend_api import DataError
from drivetrain_infra.engines.base import FinishReason, GenerateRequest, Generation, SamplingParams
from drivetrain_launcher.response_checks import ResponseLimits, check_generations, length_problem

REQUESTS = [GenerateRequest(prompt_ids=(1,), sampling=SamplingParams(max_new_tokens=3), seed=(n,)) for n in range(2)]
GOOD = Generation(token_ids=(4, 5), log_probs=(-0.5, 0.0), finish_reason=FinishReason.STOP, weight_version=2)


def check(generations: Any) -> list[Generation]:
    return check_generations(
        "engine-1", REQUESTS, generations, samples=["sample 6", "sample 7"], weight_version=2, vocab_size=10
    )


@pytest.mark.parametrize(
    "good",
    [
        GOOD,
        replace(GOOD, token_ids=(), log_probs=()),
        replace(GOOD, token_ids=(0, 9, 9), log_probs=(-1e4, 1e-3, -1.0), finish_reason=FinishReason.LENGTH),
        replace(GOOD, token_ids=tuple(np.arange(2)), log_probs=tuple(np.float32([-1.0, -2.0]))),
    ],
)
def test_what_can_be_trained_on_passes(good: Generation) -> None:
    assert check((good, GOOD)) == [good, GOOD]


@pytest.mark.parametrize(
    ("generations", "complaint"),
    [
        ([GOOD], "1 generations for 2 requests (sample 6 to sample 7)"),
        ([GOOD] * 3, "3 generations for 2 requests (sample 6 to sample 7)"),
        (None, "NoneType generations for 2 requests (sample 6 to sample 7)"),
    ],
)
def test_another_number_of_generations_is_refused(generations: Any, complaint: str) -> None:
    with pytest.raises(DataError, match=re.escape(f"engine-1 returned {complaint}; repair it, or use another --rol")):
        check(generations)


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ({"token_ids": (4,)}, "a dict instead of a Generation"),
        (replace(GOOD, log_probs=(-0.5,)), "2 tokens and 1 log-probs"),
        (replace(GOOD, log_probs=(-0.5, math.nan)), "log-prob nan for token 1, which is not finite"),
        (replace(GOOD, log_probs=(-math.inf, -0.5)), "log-prob -inf for token 0, which is not finite"),
        (replace(GOOD, log_probs=(-0.5, 0.5)), "log-prob 0.5, which is above 0"),
        (replace(GOOD, log_probs=("-0.5", "0")), "log_probs of str instead of floats"),
        (replace(GOOD, log_probs=None), "log_probs of type NoneType instead of a tuple of floats"),
        (replace(GOOD, token_ids=(4, -1)), "token id -1, which is negative"),
        (replace(GOOD, token_ids=(4, 10)), "token id 10, beyond the model's vocabulary of 10"),
        (replace(GOOD, token_ids=(4, 5.0)), "token_ids of float instead of ints"),
        (replace(GOOD, token_ids=(4, 2**70)), f"token id {2**70}, beyond the model's vocabulary of 10"),
        (replace(GOOD, token_ids=(4, None)), "token_ids of NoneType instead of ints"),
        (replace(GOOD, token_ids=None), "token_ids of type NoneType instead of a tuple of ints"),
        (replace(GOOD, token_ids=(4,) * 4, log_probs=(-1.0,) * 4), "4 tokens where at most 3 were asked for"),
        (replace(GOOD, finish_reason="eos"), "finish_reason 'eos', which is none of stop, length, abort"),
        (replace(GOOD, weight_version=1), "weight version 1 where 2 was asked for"),
    ],
)
def test_a_malformed_generation_is_refused(bad: Any, complaint: str) -> None:
    with pytest.raises(DataError, match=f"engine-1 returned {re.escape(complaint)}.*, for sample 7; repair it"):
        check([GOOD, bad])


@pytest.mark.parametrize(
    ("limits", "complaint"),
    [
        (ResponseLimits(max_positions=9), "6 tokens, which make 10 with the prompt's 4, more than the 9 positions"),
        (
            ResponseLimits(max_tokens=9),
            "6 tokens, which make 10 with the prompt's 4, more than a micro-batch's 9 (--max-tokens-per-gpu)",
        ),
    ],
)
def test_a_sample_that_is_too_long_is_told_its_limit(limits: ResponseLimits, complaint: str) -> None:
    assert (length_problem(4, 6, limits) or "").startswith(complaint)
    assert length_problem(4, 5, limits) is None
    assert length_problem(4, 6, ResponseLimits()) is None
