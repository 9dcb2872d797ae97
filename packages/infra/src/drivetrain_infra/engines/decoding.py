"""The sampling loop: one batch of requests from prompts to finished generations.

Knows no engine state, no batching of the request list and no weight update.

Shape names: B sequences that are still carried, N requests of the batch, S stop ids.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from drivetrain_backend_api import DrivetrainError
from drivetrain_infra.engines.base import FinishReason, GenerateRequest
from drivetrain_infra.engines.causal_lm import CachedSequences, CausalLM
from drivetrain_infra.engines.sampling import SamplingColumns, sample, uniforms

_CARRIED_SHARE = 0.75
"""Sequences that ended are dropped from the cache once fewer than this share still runs: a drop copies the cache."""

_STOP_MARGIN = 8
"""Tokens decoded beyond a stop string's own: the first ones of a cut may decode differently than in their place."""


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """A finished sequence: its new tokens, their log-probs and why it ended."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: FinishReason


@torch.inference_mode()
def decode_batch(lm: CausalLM, requests: Sequence[GenerateRequest], aborted: Callable[[], bool]) -> list[Decoded]:
    """Generate for N requests together; results in their order.

    Args:
        lm: the model; its own end-of-sequence ids are added to each request's stop ids.
        requests: at least one, each with room for at least one token.
        aborted: asked before each token; when true, what runs ends there with `FinishReason.ABORT`.

    Raises:
        DrivetrainError: the model's logits are not finite.
    """
    if aborted():
        return [Decoded(token_ids=(), log_probs=(), finish_reason=FinishReason.ABORT) for _ in requests]
    limits = [_token_limit(lm, one) for one in requests]
    steps, device = max(limits), lm.device
    limit = torch.tensor(limits, device=device)
    stop_ids = _stop_id_table([{*lm.eos_token_ids, *one.sampling.stop_token_ids} for one in requests], device)
    has_stop_strings = any(one.sampling.stop for one in requests)
    columns = SamplingColumns.of([one.sampling for one in requests], device)
    uniform = torch.from_numpy(np.stack([uniforms(one.seed, steps) for one in requests])).to(device)
    tokens = torch.zeros(len(requests), steps, dtype=torch.int64, device=device)
    log_probs = torch.zeros(len(requests), steps, device=device)
    ends: dict[int, tuple[int, FinishReason]] = {}

    sequences = CachedSequences(lm, [one.prompt_ids for one in requests], room=steps - 1)
    rows = torch.arange(len(requests), device=device)
    running = torch.ones(len(requests), dtype=torch.bool, device=device)
    for step in range(steps):
        if aborted():
            break
        drawn, drawn_log_probs = sample(sequences.logits, columns, uniform[rows, step])
        if not bool((drawn_log_probs.isfinite() | ~running).all()):
            raise DrivetrainError(
                f"the model gives logits that are not finite for token {step} of a response; its weights have "
                "diverged: lower --lr, or resume from an earlier checkpoint"
            )
        tokens[rows, step], log_probs[rows, step] = drawn, drawn_log_probs
        stopped = (drawn[:, None] == stop_ids[rows]).any(dim=1)
        if has_stop_strings:
            stopped |= _stop_strings_hit(lm, requests, tokens[:, : step + 1], rows, running)
        ended = running & (stopped | (limit[rows] == step + 1))
        if not bool(ended.any()):
            sequences.append(drawn)
            continue
        for row, by_stop in zip(rows[ended].tolist(), stopped[ended].tolist(), strict=True):
            ends[row] = (step + 1, FinishReason.STOP if by_stop else FinishReason.LENGTH)
        if len(ends) == len(requests):
            break
        running &= ~ended
        if int(running.sum()) < _CARRIED_SHARE * len(rows):
            kept = running.nonzero().squeeze(1)
            sequences.select(kept)
            rows, drawn, running = rows[kept], drawn[kept], running[kept]
            columns = SamplingColumns.of([requests[row].sampling for row in rows.tolist()], device)
        sequences.append(drawn)
    made = step
    return _collect(tokens, log_probs, [ends.get(row, (made, FinishReason.ABORT)) for row in range(len(requests))])


def _token_limit(lm: CausalLM, request: GenerateRequest) -> int:
    if lm.max_length is None:
        return request.sampling.max_new_tokens
    return min(request.sampling.max_new_tokens, lm.max_length - len(request.prompt_ids))


def _stop_id_table(stop_ids: Sequence[Iterable[int]], device: torch.device) -> Tensor:
    """Lay out each request's stop ids, int64 [N, S], with -1 where it has fewer."""
    lists = [sorted(one) for one in stop_ids]
    width = max(map(len, lists))
    return torch.tensor([one + [-1] * (width - len(one)) for one in lists], dtype=torch.int64, device=device)


def _stop_strings_hit(
    lm: CausalLM, requests: Sequence[GenerateRequest], tokens: Tensor, rows: Tensor, running: Tensor
) -> Tensor:
    """Say which carried sequences have a stop string in their text, bool [B].

    Only the tail is decoded: a token that shows adds at least one byte, so a string that the last token completes lies
    within as many tokens as it has bytes.
    """
    watched = [
        place
        for place, (row, runs) in enumerate(zip(rows.tolist(), running.tolist(), strict=True))
        if runs and requests[row].sampling.stop
    ]
    stops = [requests[row].sampling.stop for row in rows[watched].tolist()]
    width = max((len(stop.encode()) for some in stops for stop in some), default=0) + _STOP_MARGIN
    texts = lm.decode(tokens[rows[watched], -width:].tolist())
    hit = torch.zeros(len(rows), dtype=torch.bool)
    for place, some, text in zip(watched, stops, texts, strict=True):
        hit[place] = any(stop in text for stop in some)
    return hit.to(tokens.device)


def _collect(tokens: Tensor, log_probs: Tensor, ends: Sequence[tuple[int, FinishReason]]) -> list[Decoded]:
    return [
        Decoded(token_ids=tuple(ids[:length]), log_probs=tuple(values[:length]), finish_reason=reason)
        for ids, values, (length, reason) in zip(tokens.tolist(), log_probs.tolist(), ends, strict=True)
    ]
