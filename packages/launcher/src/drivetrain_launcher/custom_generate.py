"""Custom generation: an async function of the user makes each response, calling the engine as often as it likes.

Engine calls of all samples are batched in rounds: a round starts when every unfinished sample waits for the engine, so
that a round's batch, and with it every result, depends on the prompts alone.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain_backend_api import ConfigError, DataError, DrivetrainError
from drivetrain_backend_api.batch import SampleStatus
from drivetrain_infra.engines.base import GenerateRequest, Generation, SamplingParams
from drivetrain_launcher.data import Prompt
from drivetrain_launcher.engine_pool import EngineCall
from drivetrain_launcher.response_checks import ResponseLimits, length_problem, log_prob_problem, token_problem
from drivetrain_launcher.rewards import load_function
from drivetrain_launcher.user_code import call_within, describe_failure

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_TURN = 2
"""Stands before the turn in a seed, so that no turn's stream is that of a plain generation or an evaluation."""

_CANCEL_SECONDS = 1.0
"""What unfinished samples have to end in after the deadline; code that blocks the event loop never does."""


@dataclass(frozen=True, kw_only=True)
class CustomResponse:
    """What a custom generate function returns for one sample.

    Attributes:
        token_ids: everything after the prompt, the model's tokens and those of tools and users alike.
        loss_mask: 1 for each token that the model wrote, 0 for others.
        log_probs: of each token as the engine gave them; anything where the mask is 0.
        status: how it ended.
    """

    token_ids: Sequence[int]
    loss_mask: Sequence[int]
    log_probs: Sequence[float]
    status: SampleStatus = SampleStatus.COMPLETED


class Engine:
    """The engine as one sample's function sees it."""

    def __init__(
        self,
        rounds: "_Rounds",
        sample: int,
        sampling: SamplingParams,
        seed: tuple[int, ...],
        *,
        where: str,
        vocab_size: int | None,
    ) -> None:
        self._rounds = rounds
        self._sample = sample
        self._seed = seed
        self._where = where
        self._vocab_size = vocab_size
        self._turn = 0
        self._known: tuple[int, ...] = ()
        self.sampling = sampling

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams | None = None) -> Generation:
        """Continue a sequence of token ids, with the run's sampling parameters unless others are given.

        Raises:
            DataError: no tokens, or such that the model does not have; or another temperature than the run's, under
                which the trainer computes its log-probs.
        """
        if sampling is not None and sampling.temperature != self.sampling.temperature:
            raise DataError(
                f"{self._where} asked for temperature {sampling.temperature:g}, but the trainer computes "
                f"log-probs at {self.sampling.temperature:g}; set --rollout-temperature instead"
            )
        tokens = self._checked(tuple(prompt_ids))
        request = GenerateRequest(
            prompt_ids=tokens, sampling=sampling or self.sampling, seed=(*self._seed, _TURN, self._turn)
        )
        self._turn += 1
        generation = await self._rounds.generate(self._sample, request)
        self._known = tokens + generation.token_ids
        return generation

    def _checked(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Return tokens that the engine can continue; what the last call ended with is known to be such."""
        known = self._known if tokens[: len(self._known)] == self._known else ()
        more = tokens[len(known) :]
        if problem := token_problem(more, self._vocab_size) or (None if tokens else "no token_ids at all"):
            raise DataError(f"{self._where} asked the engine to continue {problem}")
        return known + more  # not what only equals it, as 1.0 equals 1


CustomGenerate = Callable[[Prompt, Engine, "PreTrainedTokenizerBase"], Awaitable[CustomResponse]]
"""`async def function(prompt, engine, tokenizer) -> CustomResponse`."""


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

    def __init__(self, call: EngineCall, samples: Sequence[str], weight_version: int) -> None:
        self._call = call
        self._samples = samples
        self._weight_version = weight_version
        self._running = len(samples)
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
            batch = {sample: self._waiting[sample] for sample in sorted(self._waiting)}
            self._waiting.clear()
            task = asyncio.get_running_loop().create_task(self._answer(batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, batch: Mapping[int, tuple[GenerateRequest, "asyncio.Future[Generation]"]]) -> None:
        try:
            generations = await asyncio.to_thread(
                self._call,
                [request for request, _ in batch.values()],
                samples=[self._samples[sample] for sample in batch],
                weight_version=self._weight_version,
            )
        except Exception as error:  # handed to every sample that waits for it
            for _, future in batch.values():
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), generation in zip(batch.values(), generations, strict=True):
            if not future.done():
                future.set_result(generation)


def run_custom_generate(
    function: CustomGenerate,
    prompts: Sequence[Prompt],
    *,
    name: str,
    call: EngineCall,
    weight_version: int,
    limits: ResponseLimits,
    tokenizer: "PreTrainedTokenizerBase",
    sampling: SamplingParams,
    seeds: Sequence[tuple[int, ...]],
    seconds: float,
    save: Path | None = None,
) -> list[CustomResponse]:
    """Run the function for every sample, and check what it returns.

    Args:
        prompts: one a sample.
        name: of the function, for messages.
        call: generates for a batch of requests.
        weight_version: that the engines must serve.
        limits: what a response must keep to.
        seeds: one a sample.
        seconds: deadline of the whole.
        save: folder of the run, for logs; None where there is no run.

    Raises:
        DataError: the function failed, or returned something malformed; names the sample.
        DrivetrainError: the deadline passed; names the first sample that is not finished.
    """
    samples = [f"sample {place} ({prompt.source})" for place, prompt in enumerate(prompts)]
    unfinished = set(range(len(prompts)))

    async def one(sample: int, rounds: _Rounds) -> CustomResponse:
        where = f"--custom-generate {name} on {samples[sample]}"
        prompt = prompts[sample]
        engine = Engine(rounds, sample, sampling, seeds[sample], where=where, vocab_size=limits.vocab_size)
        try:
            response = await function(prompt, engine, tokenizer)
        except DrivetrainError:
            raise
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            raise DataError(f"{where} failed: {describe_failure(error)}") from error
        finally:
            rounds.finished()
        response = _checked(response, where, len(prompt.prompt_ids), limits)
        unfinished.discard(sample)
        return response

    async def everything() -> list[CustomResponse]:
        rounds = _Rounds(call, samples, weight_version)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(sample, rounds)) for sample in range(len(prompts))]
        return [task.result() for task in tasks]

    def run(say: Callable[[str], None]) -> list[CustomResponse]:
        say(
            f"--custom-generate {name} did not return within --rollout-timeout {seconds:g} s, and nothing else could "
            "run meanwhile; the log shows the line; repair it"
        )
        return asyncio.run(asyncio.wait_for(everything(), seconds))

    try:
        return call_within(run, seconds + _CANCEL_SECONDS, name=f"--custom-generate {name}", save=save)
    except TimeoutError as error:
        raise DrivetrainError(_late(name, samples, unfinished, seconds)) from error
    except ExceptionGroup as group_error:
        raise group_error.exceptions[0] from group_error


def _late(name: str, samples: Sequence[str], unfinished: Set[int], seconds: float) -> str:
    others = f" and {len(unfinished) - 1} others" if len(unfinished) > 1 else ""
    return (
        f"--custom-generate {name} did not finish {samples[min(unfinished, default=-1)]}{others} within "
        f"--rollout-timeout {seconds:g} s; repair it, make it faster, or raise the timeout"
    )


def _checked(response: Any, where: str, prompt_tokens: int, limits: ResponseLimits) -> CustomResponse:
    if not isinstance(response, CustomResponse):
        raise DataError(f"{where} returned a {type(response).__name__}; it must return a CustomResponse")
    columns = {name: getattr(response, name) for name in ("token_ids", "loss_mask", "log_probs")}
    for column, values in columns.items():
        if not isinstance(values, Sequence):
            raise DataError(f"{where} returned {column} of type {type(values).__name__}; it must be a list or a tuple")
    if len(set(map(len, columns.values()))) > 1:
        sizes = ", ".join(f"{len(values)} {column}" for column, values in columns.items())
        raise DataError(f"{where} returned {sizes}; they must be equally many")
    if not set(response.loss_mask) <= {0, 1}:
        raise DataError(f"{where} returned a loss_mask with values other than 0 and 1")
    if not isinstance(response.status, SampleStatus):
        raise DataError(f"{where} returned status {response.status!r}; it must be a SampleStatus")
    written = [one for one, mask in zip(response.log_probs, response.loss_mask) if mask]
    problem = (
        token_problem(response.token_ids, limits.vocab_size)
        or log_prob_problem(written)
        or length_problem(prompt_tokens, len(response.token_ids), limits)
    )
    if problem:
        raise DataError(f"{where} returned {problem}")
    # where the mask is off anything is allowed, and nothing reads it
    log_probs = [one if mask else 0.0 for one, mask in zip(response.log_probs, response.loss_mask)]
    return replace(response, token_ids=tuple(response.token_ids), log_probs=tuple(log_probs))
