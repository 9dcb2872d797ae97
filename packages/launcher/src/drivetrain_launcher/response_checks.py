"""What a response must be like before anything is computed from it: token ids, log-probs, lengths, weight version.

Plain functions that say what is wrong in words that follow "returned ...". They know no engine process and no trainer.
"""

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

import numpy as np

from drivetrain_backend_api import DataError
from drivetrain_infra.engines.base import FinishReason, GenerateRequest, Generation

_ROUNDING = 1e-2
"""How far above 0 a log-prob may lie: what bf16 makes of a probability of 1."""


@dataclass(frozen=True, kw_only=True)
class ResponseLimits:
    """What the trained model and its micro-batches take; None where that is not known or not limited.

    Attributes:
        vocab_size: token ids are below it.
        max_positions: most tokens of a sample that the model has positions for.
        max_tokens: most tokens of a micro-batch, --max-tokens-per-gpu.
    """

    vocab_size: int | None = None
    max_positions: int | None = None
    max_tokens: int | None = None


def token_problem(token_ids: Any, vocab_size: int | None) -> str | None:
    """Say why token ids cannot be embedded, or None."""
    numbers = _as_array("q", token_ids)
    if numbers is not None and (
        not numbers.size or (numbers.min() >= 0 and (vocab_size is None or numbers.max() < vocab_size))
    ):
        return None
    return _token_problem(token_ids, vocab_size)


def _token_problem(token_ids: Any, vocab_size: int | None) -> str | None:
    if not isinstance(token_ids, Sequence):
        return f"token_ids of type {type(token_ids).__name__} instead of a tuple of ints"
    for kind in set(map(type, token_ids)):
        if kind is bool or not issubclass(kind, Integral):
            return f"token_ids of {kind.__name__} instead of ints"
    if not token_ids:
        return None
    lowest, highest = min(token_ids), max(token_ids)
    if lowest < 0:
        return f"token id {lowest}, which is negative"
    if vocab_size is not None and highest >= vocab_size:
        return f"token id {highest}, beyond the model's vocabulary of {vocab_size}"
    return None


def log_prob_problem(log_probs: Any) -> str | None:
    """Say why numbers cannot be log-probs of tokens that were drawn, or None."""
    numbers = _as_array("d", log_probs)
    if numbers is not None and np.isfinite(numbers).all() and numbers.max(initial=0.0) <= _ROUNDING:
        return None
    return _log_prob_problem(log_probs)


def _log_prob_problem(log_probs: Any) -> str | None:
    if not isinstance(log_probs, Sequence):
        return f"log_probs of type {type(log_probs).__name__} instead of a tuple of floats"
    for kind in set(map(type, log_probs)):
        if not issubclass(kind, Real):
            return f"log_probs of {kind.__name__} instead of floats"
    if not all(map(math.isfinite, log_probs)):
        place = next(place for place, one in enumerate(log_probs) if not math.isfinite(one))
        return f"log-prob {log_probs[place]} for token {place}, which is not finite (have the weights diverged?)"
    if log_probs and max(log_probs) > _ROUNDING:
        return f"log-prob {max(log_probs):g}, which is above 0"
    return None


def _as_array(kind: Literal["q", "d"], values: Any) -> "np.ndarray[Any, np.dtype[Any]] | None":
    """Convert a sequence of 64-bit ints ("q") or floats ("d") as fast as it goes; None where it holds anything else."""
    if not isinstance(values, Sequence):
        return None
    try:
        # unlike NumPy's own conversions, which take 1.5 for an int and "1" for a number
        return np.frombuffer(array(kind, values), dtype=kind)
    except (TypeError, ValueError, OverflowError):
        return None


def length_problem(prompt_tokens: int, response_tokens: int, limits: ResponseLimits) -> str | None:
    """Say why a sample is too long to be trained on, or None."""
    total = prompt_tokens + response_tokens
    words = f"{response_tokens} tokens, which make {total} with the prompt's {prompt_tokens}"
    if limits.max_positions is not None and total > limits.max_positions:
        return f"{words}, more than the {limits.max_positions} positions of the model; end it earlier"
    if limits.max_tokens is not None and total > limits.max_tokens:
        room = f"a micro-batch's {limits.max_tokens} (--max-tokens-per-gpu)"
        return f"{words}, more than {room}; end it earlier, or raise that"
    return None


def check_generations(
    engine: str,
    requests: Sequence[GenerateRequest],
    generations: Any,
    *,
    samples: Sequence[str],
    weight_version: int,
    vocab_size: int | None,
) -> list[Generation]:
    """Return what an engine made of its requests, once all of it is what the trainer counts on.

    Args:
        engine: its name, for messages.
        requests: what it was asked for.
        generations: whatever it returned.
        samples: what each request is for, for messages.
        weight_version: that all of it must be made with.
        vocab_size: token ids are below it, None where that is not known.

    Raises:
        DataError: names the engine, the sample and what is wrong.
    """
    fix = "repair it, or use another --rollout-engine"
    if not isinstance(generations, Sequence) or len(generations) != len(requests):
        got = len(generations) if isinstance(generations, Sequence) else type(generations).__name__
        raise DataError(
            f"{engine} returned {got} generations for {len(requests)} requests ({samples[0]} to {samples[-1]}); {fix}"
        )
    for request, generation, sample in zip(requests, generations, samples, strict=True):
        for problem in _generation_problems(generation, request, weight_version, vocab_size):
            raise DataError(f"{engine} returned {problem}, for {sample}; {fix}")
    return list(generations)


def _generation_problems(
    generation: Any, request: GenerateRequest, weight_version: int, vocab_size: int | None
) -> Iterator[str]:
    """Yield what is wrong, each only where what came before holds."""
    if not isinstance(generation, Generation):
        yield f"a {type(generation).__name__} instead of a Generation"
        return
    for problem in (token_problem(generation.token_ids, vocab_size), log_prob_problem(generation.log_probs)):
        if problem:
            yield problem
    tokens, most = len(generation.token_ids), request.sampling.max_new_tokens
    if tokens != len(generation.log_probs):
        yield f"{tokens} tokens and {len(generation.log_probs)} log-probs"
    if tokens > most:
        yield f"{tokens} tokens where at most {most} were asked for"
    if generation.finish_reason not in set(FinishReason):
        yield f"finish_reason {generation.finish_reason!r}, which is none of {', '.join(FinishReason)}"
    if generation.weight_version != weight_version:
        yield f"weight version {generation.weight_version} where {weight_version} was asked for"
