"""Custom generation: rounds batch the engine calls of all samples, and failures name the sample."""

import asyncio
import math
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from drivetrain_backend_api import ConfigError, DataError, DrivetrainError
from drivetrain_backend_api.batch import SampleStatus
from drivetrain_infra.engines.base import FinishReason, GenerateRequest, Generation, SamplingParams
from drivetrain_launcher.custom_generate import (
    CustomGenerate,
    CustomResponse,
    Engine,
    load_custom_generate,
    run_custom_generate,
)
from drivetrain_launcher.data import Prompt
from drivetrain_launcher.engine_pool import EngineCall
from drivetrain_launcher.response_checks import ResponseLimits

LIMITS = ResponseLimits(vocab_size=100, max_positions=12, max_tokens=10)


class CountingEngine:
    """A deterministic engine: continues a sequence with its length, and keeps the batches it was given."""

    def __init__(self) -> None:
        self.batches: list[list[GenerateRequest]] = []

    def __call__(
        self, requests: Sequence[GenerateRequest], *, samples: Sequence[str], weight_version: int
    ) -> list[Generation]:
        self.batches.append(list(requests))
        self.samples = samples
        return [
            Generation(
                token_ids=(len(one.prompt_ids),),
                log_probs=(-0.5,),
                finish_reason=FinishReason.STOP,
                weight_version=weight_version,
            )
            for one in requests
        ]


def run(function: CustomGenerate, engine: EngineCall, count: int = 3, seconds: float = 20) -> list[CustomResponse]:
    prompts = [
        Prompt(index=n, source=f"prompts.jsonl:{n + 1}", prompt_ids=tuple(range(n + 1)), text="") for n in range(count)
    ]
    return run_custom_generate(
        function,
        prompts,
        name="mine:function",
        call=engine,
        weight_version=1,
        limits=LIMITS,
        tokenizer=None,  # type: ignore[arg-type]  # the functions below read none
        sampling=SamplingParams(),
        seeds=[(7, 0, n) for n in range(count)],
        seconds=seconds,
    )


async def two_turns_with_a_tool(prompt: Prompt, engine: Engine, tokenizer: object) -> CustomResponse:
    first = await engine.generate(prompt.prompt_ids)
    await asyncio.sleep(0.02 * (3 - prompt.index))  # a tool, slowest for the first sample
    tool = [99]
    second = await engine.generate([*prompt.prompt_ids, *first.token_ids, *tool])
    return CustomResponse(
        token_ids=[*first.token_ids, *tool, *second.token_ids], loss_mask=[1, 0, 1], log_probs=[-0.5, 0.0, -0.5]
    )


def test_rounds_hold_all_samples_in_order_however_slow_their_tools() -> None:
    engine = CountingEngine()
    responses = run(two_turns_with_a_tool, engine)
    assert [[one.seed[2] for one in batch] for batch in engine.batches] == [[0, 1, 2], [0, 1, 2]]
    assert [list(one.token_ids) for one in responses] == [[1, 99, 3], [2, 99, 4], [3, 99, 5]]
    assert [list(one.loss_mask) for one in responses] == [[1, 0, 1]] * 3


def test_every_turn_of_every_sample_has_its_own_random_stream() -> None:
    engine = CountingEngine()
    run(two_turns_with_a_tool, engine)
    seeds = [one.seed for batch in engine.batches for one in batch]
    assert len(set(seeds)) == len(seeds) == 6


def test_samples_that_end_early_do_not_hold_the_others_up() -> None:
    async def as_many_turns_as_index(prompt: Prompt, engine: Engine, tokenizer: object) -> CustomResponse:
        tokens: list[int] = []
        for _ in range(prompt.index):
            tokens += (await engine.generate([*prompt.prompt_ids, *tokens])).token_ids
        return CustomResponse(
            token_ids=tokens,
            loss_mask=[1] * len(tokens),
            log_probs=[0.0] * len(tokens),
            status=SampleStatus.TRUNCATED,
        )

    engine = CountingEngine()
    responses = run(as_many_turns_as_index, engine, count=4)
    assert [len(one.token_ids) for one in responses] == [0, 1, 2, 3]
    assert [len(batch) for batch in engine.batches] == [3, 2, 1]
    assert engine.samples == ["sample 3 (prompts.jsonl:4)"]


def test_a_failure_names_function_and_sample() -> None:
    async def fails_on_one(prompt: Prompt, engine: Engine, tokenizer: object) -> CustomResponse:
        await engine.generate(prompt.prompt_ids)
        if prompt.index == 1:
            raise KeyError("weather")
        await engine.generate(prompt.prompt_ids)
        return CustomResponse(token_ids=[], loss_mask=[], log_probs=[])

    with pytest.raises(DataError, match=r"mine:function on sample 1 \(prompts.jsonl:2\) failed: KeyError: 'weather'"):
        run(fails_on_one, CountingEngine())


def respond(*token_ids: Any, mask: int = 1, log_prob: float = -0.5) -> CustomResponse:
    count = len(token_ids)
    return CustomResponse(token_ids=token_ids, loss_mask=[mask] * count, log_probs=[log_prob] * count)


@pytest.mark.parametrize(
    ("response", "complaint"),
    [
        (CustomResponse(token_ids=[1, 2], loss_mask=[1], log_probs=[0.0]), "must be equally many"),
        (respond(1, mask=2), "a loss_mask with values other than 0 and 1"),
        (None, "a NoneType; it must return a CustomResponse"),
        (CustomResponse(token_ids=None, loss_mask=[], log_probs=[]), "token_ids of type NoneType"),  # type: ignore[arg-type]
        (CustomResponse(token_ids=[], loss_mask=[], log_probs=[], status="done"), "status 'done'; it must be a Sampl"),  # type: ignore[arg-type]
        (respond(1, 100), "token id 100, beyond the model's vocabulary of 100"),
        (respond(1, -1), "token id -1, which is negative"),
        (respond("a"), "token_ids of str instead of ints"),
        (respond(1, log_prob=math.nan), "log-prob nan for token 0, which is not finite"),
        (respond(1, log_prob=1.0), "log-prob 1, which is above 0"),
        (
            respond(*range(10)),
            "10 tokens, which make 11 with the prompt's 1, more than a micro-batch's 10 (--max-tokens-per-gpu)",
        ),
        (respond(*range(12)), "12 tokens, which make 13 with the prompt's 1, more than the 12 positions"),
    ],
)
def test_malformed_responses_are_refused_by_sample(response: CustomResponse, complaint: str) -> None:
    async def malformed(prompt: Prompt, engine: Engine, tokenizer: object) -> CustomResponse:
        return response

    where = "--custom-generate mine:function on sample 0 (prompts.jsonl:1) returned "
    with pytest.raises(DataError, match=re.escape(where) + ".*" + re.escape(complaint)):
        run(malformed, CountingEngine())


def test_where_the_mask_is_off_any_log_prob_is_taken() -> None:
    async def tool_only(prompt: Prompt, engine: Engine, tokenizer: object) -> CustomResponse:
        return respond(5, mask=0, log_prob=math.nan)

    assert [one.log_probs for one in run(tool_only, CountingEngine())] == [(0.0,)] * 3


@pytest.mark.parametrize(
    ("tokens", "complaint"), [([], "no token_ids at all"), ([1, 100], "token id 100, beyond"), (["a"], "token_ids of")]
)
def test_what_the_engine_cannot_continue_never_reaches_it(tokens: list[int], complaint: str) -> None:
    async def asks(prompt: Prompt, engine: Engine, tokenizer: object) -> CustomResponse:
        await engine.generate(tokens)
        raise AssertionError

    engine = CountingEngine()
    with pytest.raises(DataError, match=rf"on sample 0 \(prompts.jsonl:1\) asked the engine to continue {complaint}"):
        run(asks, engine)
    assert engine.batches == []


def test_tokens_that_only_equal_known_ones_are_replaced_by_them() -> None:
    async def asks(prompt: Prompt, engine: Engine, tokenizer: object) -> CustomResponse:
        first = await engine.generate(prompt.prompt_ids)
        again = [*map(float, prompt.prompt_ids), *first.token_ids]
        second = await engine.generate([*again, 5])  # type: ignore[list-item]
        with pytest.raises(DataError, match="asked the engine to continue token_ids of float"):
            await engine.generate([*again, 5, *second.token_ids, 6.0])  # type: ignore[list-item]
        with pytest.raises(DataError, match="asked the engine to continue token id 100, beyond"):
            await engine.generate([100])
        return respond(5)

    engine = CountingEngine()
    run(asks, engine, count=1)
    assert [one.prompt_ids for batch in engine.batches for one in batch] == [(0,), (0, 1, 5)]
    assert {type(one) for batch in engine.batches for request in batch for one in request.prompt_ids} == {int}


def test_a_signal_timeout_in_a_function_is_told_the_fix() -> None:
    async def sets_an_alarm(prompt: Prompt, engine: Engine, tokenizer: object) -> CustomResponse:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        raise AssertionError

    with pytest.raises(DataError, match=r"failed: ValueError: signal only works .*without its signal timeout .*None"):
        run(sets_an_alarm, CountingEngine())


def test_a_function_that_ends_the_process_is_a_failure_of_its_sample() -> None:
    async def leaves(prompt: Prompt, engine: Engine, tokenizer: object) -> CustomResponse:
        raise SystemExit(0)

    with pytest.raises(DataError, match=r"on sample 0 \(prompts.jsonl:1\) failed: SystemExit: 0"):
        run(leaves, CountingEngine())


async def waits(prompt: Prompt, engine: Engine, tokenizer: object) -> CustomResponse:
    if prompt.index:
        await asyncio.sleep(3600)
    return respond(1)


async def blocks(prompt: Prompt, engine: Engine, tokenizer: object) -> CustomResponse:
    if prompt.index:
        time.sleep(60)  # nothing can end it: the event loop itself stands still
    return respond(1)


async def refuses_to_be_cancelled(prompt: Prompt, engine: Engine, tokenizer: object) -> CustomResponse:
    while prompt.index:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)
    return respond(1)


@pytest.mark.parametrize("function", [waits, blocks, refuses_to_be_cancelled])
def test_a_function_that_hangs_ends_at_the_deadline(function: CustomGenerate) -> None:
    with pytest.raises(
        DrivetrainError,
        match=r"did not finish sample 1 \(prompts.jsonl:2\) and 1 others within --rollout-timeout 0\.2 s; repair it",
    ):
        run(function, CountingEngine(), seconds=0.2)


def test_an_engine_failure_reaches_the_caller() -> None:
    def broken(requests: Sequence[GenerateRequest], *, samples: Sequence[str], weight_version: int) -> list[Generation]:
        raise DrivetrainError("engine 0 died")

    with pytest.raises(DrivetrainError, match="engine 0 died"):
        run(two_turns_with_a_tool, broken)


def test_only_async_functions_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "generate_sync.py").write_text("def function(prompt, engine, tokenizer): pass\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="must be an `async def"):
        load_custom_generate("generate_sync:function")


def test_another_temperature_than_the_trainers_is_refused() -> None:
    async def hotter(prompt: Prompt, engine: Engine, tokenizer: object) -> CustomResponse:
        await engine.generate(prompt.prompt_ids, SamplingParams(temperature=2.0))
        raise AssertionError

    with pytest.raises(DataError, match="set --rollout-temperature instead"):
        run(hotter, CountingEngine())
