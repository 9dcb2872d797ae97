"""Custom generation: an async function of the user makes each response, calling the engine as often as it likes.

Engine calls of all samples are batched in rounds: a round starts when every unfinished sample waits for the engine, so
that a round's batch, and with it every result, depends on the prompts alone.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from drivetrain_backend_api import ConfigError, DataError, DrivetrainError
from drivetrain_backend_api.batch import SampleStatus
from drivetrain_infra.engines.base import GenerateRequest, Generation, SamplingParams
from drivetrain_launcher.data import Prompt
from drivetrain_launcher.rewards import load_function

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_TURN = 2
"""Stands before the turn in a seed, so that no turn's stream is that of a plain generation or an evaluation."""


@dataclass(frozen=True, kw_only=True)
class CustomResponse:
    """What a custom generate function returns for one sample.

    Attributes:
        token_ids: everything after the prompt, the model's tokens and those of tools and users alike.
        loss_mask: 1 for each token that the model wrote, 0 for others.
        log_probs: of each token as the engine gave them, 0 where the mask is 0.
        status: how it ended.
    """

    token_ids: Sequence[int]
    loss_mask: Sequence[int]
    log_probs: Sequence[float]
    status: SampleStatus = SampleStatus.COMPLETED


class Engine:
    """The engine as one sample's function sees it."""

    def __init__(self, rounds: "_Rounds", sample: int, sampling: SamplingParams, seed: tuple[int, ...]) -> None:
        self._rounds = rounds
        self._sample = sample
        self._seed = seed
        self._turn = 0
        self.sampling = sampling

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams | None = None) -> Generation:
        """Continue a sequence of token ids, with the run's sampling parameters unless others are given.

        Raises:
            DataError: another temperature than the run's, under which the trainer computes its log-probs.
        """
        if sampling is not None and sampling.temperature != self.sampling.temperature:
            raise DataError(
                f"a custom generate function asked for temperature {sampling.temperature:g}, but the trainer computes "
                f"log-probs at {self.sampling.temperature:g}; set --rollout-temperature instead"
            )
        request = GenerateRequest(
            prompt_ids=tuple(prompt_ids), sampling=sampling or self.sampling, seed=(*self._seed, _TURN, self._turn)
        )
        self._turn += 1
        return await self._rounds.generate(self._sample, request)


CustomGenerate = Callable[[Prompt, Engine, "PreTrainedTokenizerBase"], Awaitable[CustomResponse]]
"""`async def function(prompt, engine, tokenizer) -> CustomResponse`."""

EngineCall = Callable[[Sequence[GenerateRequest]], list[Generation]]
"""Generates for a list of requests, results in their order; blocks."""


def load_custom_generate(path: str) -> CustomGenerate:
    """Import the function that --custom-generate names.

    Raises:
        ConfigError: there is none, or it is not an `async def`.
    """
    function = load_function(path, flag="--custom-generate")
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"--custom-generate {path}: must be an `async def function(prompt, engine, tokenizer)`")
    return function


class _Rounds:
    """Collects the requests of all samples that wait, and answers them together."""

    def __init__(self, call: EngineCall, samples: int) -> None:
        self._call = call
        self._running = samples
        self._waiting: dict[int, tuple[GenerateRequest, asyncio.Future[Generation]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def generate(self, sample: int, request: GenerateRequest) -> Generation:
        if sample in self._waiting:
            raise DrivetrainError("a custom generate function may have one engine call in flight; await each in turn")
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._waiting[sample] = (request, future)
        self._start_if_complete()
        return await future

    def finished(self) -> None:
        """Note that a sample needs the engine no more."""
        self._running -= 1
        self._start_if_complete()

    def _start_if_complete(self) -> None:
        if self._waiting and len(self._waiting) == self._running:
            batch = [self._waiting[sample] for sample in sorted(self._waiting)]
            self._waiting.clear()
            task = asyncio.get_running_loop().create_task(self._answer(batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, batch: list[tuple[GenerateRequest, "asyncio.Future[Generation]"]]) -> None:
        try:
            generations = await asyncio.to_thread(self._call, [request for request, _ in batch])
        except Exception as error:  # handed to every sample that waits for it
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), generation in zip(batch, generations, strict=True):
            if not future.done():
                future.set_result(generation)


def run_custom_generate(
    function: CustomGenerate,
    prompts: Sequence[Prompt],
    *,
    name: str,
    call: EngineCall,
    tokenizer: "PreTrainedTokenizerBase",
    sampling: SamplingParams,
    seeds: Sequence[tuple[int, ...]],
    seconds: float,
) -> list[CustomResponse]:
    """Run the function for every sample, and check what it returns.

    Args:
        prompts: one a sample.
        name: of the function, for messages.
        call: generates for a batch of requests.
        seeds: one a sample.
        seconds: deadline of the whole.

    Raises:
        DataError: the function failed, or returned something malformed; names the sample.
        DrivetrainError: the deadline passed.
    """

    async def one(sample: int, rounds: _Rounds) -> CustomResponse:
        where = f"--custom-generate {name} on sample {sample} ({prompts[sample].source})"
        try:
            response = await function(prompts[sample], Engine(rounds, sample, sampling, seeds[sample]), tokenizer)
        except DrivetrainError:
            raise
        except Exception as error:  # a user's function may raise anything
            raise DataError(f"{where} failed: {type(error).__name__}: {error}") from error
        finally:
            rounds.finished()
        return _checked(response, where)

    async def everything() -> list[CustomResponse]:
        rounds = _Rounds(call, len(prompts))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(sample, rounds)) for sample in range(len(prompts))]
        return [task.result() for task in tasks]

    try:
        return asyncio.run(asyncio.wait_for(everything(), seconds))
    except TimeoutError as error:
        raise DrivetrainError(
            f"--custom-generate {name} did not finish {len(prompts)} samples within --rollout-timeout {seconds:g} s; "
            "raise it, or make the function faster"
        ) from error
    except ExceptionGroup as group_error:
        raise group_error.exceptions[0] from group_error


def _checked(response: Any, where: str) -> CustomResponse:
    if not isinstance(response, CustomResponse):
        raise DataError(f"{where} returned a {type(response).__name__}; it must return a CustomResponse")
    sizes = {len(response.token_ids), len(response.loss_mask), len(response.log_probs)}
    if len(sizes) > 1:
        raise DataError(
            f"{where} returned {len(response.token_ids)} token_ids, {len(response.loss_mask)} loss_mask and "
            f"{len(response.log_probs)} log_probs; they must be equally many"
        )
    if set(response.loss_mask) - {0, 1}:
        raise DataError(f"{where} returned a loss_mask with values other than 0 and 1")
    return replace(response, token_ids=tuple(response.token_ids))
