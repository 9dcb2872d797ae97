"""The one batch type: columnar, ragged, with explicit lengths; and the packed micro-batch made from it.

A `RolloutBatch` is what an engine or a data file produced. A `MicroBatch` is what a model reads in one forward: the
same samples packed end to end (THD). No knob hides in either, and nothing is inferred from a padding id.

Shape names: N samples, T tokens, R response tokens (R <= T), S sequences of a micro-batch.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from drivetrain_backend_api.errors import DataError


class SampleStatus(IntEnum):
    """How the generation of a sample ended."""

    COMPLETED = 0
    TRUNCATED = 1
    ABORTED = 2
    FAILED = 3


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """N samples: prompt and response token ids end to end, and named columns over them.

    Attributes:
        tokens: int64 [T], prompt then response of each sample.
        total_lengths: int64 [N], tokens of each sample.
        response_lengths: int64 [N], how many of them, at the end, are response. At least one token is prompt.
        per_token: name -> [R], over the response tokens. "loss_mask" is always there (float32, 0 or 1); others are
            "rollout_log_probs", "log_probs", "ref_log_probs", "teacher_log_probs", "advantages".
        per_sample: name -> [N]. "reward", "group_id", "index", "weight_version" and "status" by convention.
    """

    tokens: Tensor
    total_lengths: Tensor
    response_lengths: Tensor
    per_token: Mapping[str, Tensor]
    per_sample: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count, responses = len(self.total_lengths), int(self.response_lengths.sum())
        problems = []
        if int(self.total_lengths.sum()) != len(self.tokens):
            problems.append(f"total_lengths sum to {int(self.total_lengths.sum())}, tokens hold {len(self.tokens)}")
        if len(self.response_lengths) != count:
            problems.append(f"{count} total_lengths and {len(self.response_lengths)} response_lengths")
        elif count and bool((self.response_lengths < 0).any() | (self.response_lengths >= self.total_lengths).any()):
            problems.append("a response is negative or leaves no prompt token")
        if "loss_mask" not in self.per_token:
            problems.append("per_token lacks 'loss_mask'")
        problems += [
            f"per_token[{name!r}] has shape {tuple(column.shape)}, needs ({responses},)"
            for name, column in self.per_token.items()
            if column.shape != (responses,)
        ]
        problems += [
            f"per_sample[{name!r}] has {len(column)} rows, needs {count}"
            for name, column in self.per_sample.items()
            if len(column) != count
        ]
        if problems:
            raise DataError("malformed rollout batch: " + "; ".join(problems))

    def __len__(self) -> int:
        return len(self.total_lengths)

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each sample, on the host."""
        return [int(one) for one in self.total_lengths.tolist()]

    @cached_property
    def token_starts(self) -> list[int]:
        """Offset of each sample in `tokens`, and the end."""
        return _starts(self.lengths)

    @cached_property
    def response_starts(self) -> list[int]:
        """Offset of each sample in a per-token column, and the end."""
        return _starts([int(one) for one in self.response_lengths.tolist()])

    def sample_tokens(self, sample: int) -> Tensor:
        """Token ids of one sample, int64 [its length]."""
        return self.tokens[self.token_starts[sample] : self.token_starts[sample + 1]]

    def sample_column(self, name: str, sample: int) -> Tensor:
        """Values of one per-token column for one sample, [its response length]."""
        return self.per_token[name][self.response_starts[sample] : self.response_starts[sample + 1]]

    def select(self, samples: Sequence[int]) -> "RolloutBatch":
        """Return the given samples, in the given order."""
        rows = torch.tensor(list(samples), dtype=torch.int64, device=self.total_lengths.device)
        return RolloutBatch(
            tokens=_join([self.sample_tokens(one) for one in samples], self.tokens),
            total_lengths=self.total_lengths[rows],
            response_lengths=self.response_lengths[rows],
            per_token={
                name: _join([self.sample_column(name, one) for one in samples], column)
                for name, column in self.per_token.items()
            },
            per_sample={name: column[rows] for name, column in self.per_sample.items()},
        )

    def with_per_token(self, name: str, values: Tensor | Sequence[Tensor]) -> "RolloutBatch":
        """Return a batch with one more per-token column, given as [R] or as one 1-D tensor a sample.

        Raises:
            DataError: it does not fit the responses; names the first sample that differs.
        """
        if isinstance(values, Tensor):
            column = values
        else:
            _check_rows(name, values, self.response_lengths.tolist())
            column = _join(list(values), self.per_token["loss_mask"].float())
        return replace(self, per_token={**self.per_token, name: column})

    def with_per_sample(self, name: str, values: Tensor) -> "RolloutBatch":
        """Return a batch with one more per-sample column [N]."""
        return replace(self, per_sample={**self.per_sample, name: values})

    def to(self, device: str | torch.device) -> "RolloutBatch":
        """Copy every column to a device."""
        return RolloutBatch(
            tokens=self.tokens.to(device),
            total_lengths=self.total_lengths.to(device),
            response_lengths=self.response_lengths.to(device),
            per_token={name: column.to(device) for name, column in self.per_token.items()},
            per_sample={name: column.to(device) for name, column in self.per_sample.items()},
        )

    def to_plain(self) -> dict[str, Any]:
        """Return tensors and plain types only, loadable by `torch.load(weights_only=True)`."""
        return {
            "tokens": self.tokens,
            "total_lengths": self.total_lengths,
            "response_lengths": self.response_lengths,
            "per_token": dict(self.per_token),
            "per_sample": dict(self.per_sample),
        }

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> "RolloutBatch":
        """Inverse of `to_plain`. Raises DataError when a field is missing or malformed."""
        try:
            return RolloutBatch(**plain)
        except TypeError as error:
            raise DataError(f"not a rollout batch: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Denominators:
    """Global sums over all ranks for one optimizer step; the losses of all its micro-batches divide by them.

    Attributes:
        tokens: response tokens whose loss mask is on; at least 1.
        sequences: samples with at least one such token; at least 1.
    """

    tokens: float
    sequences: float


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """S samples packed end to end, with every per-token quantity at the position that predicts its token.

    Response token r of a sample whose prompt has p tokens stands at position p + r and is predicted at p + r - 1, so
    its label, mask, log-prob and advantage stand at p + r - 1. Positions that predict no response token carry 0.

    Under context parallelism the fields over T hold this rank's tokens only, and `token_index` says which.

    Attributes:
        input_ids: int64 [T].
        position_ids: int64 [T], from 0 in each sequence.
        labels: int64 [T], the next token.
        loss_mask: float32 [T].
        sequence_ids: int64 [T], which of the S sequences a token belongs to.
        token_index: int64 [T], place of each token in the whole packed batch.
        cu_seqlens: int32 [S + 1], sequence boundaries of the whole packed batch.
        max_seqlen: tokens of the longest sequence.
        per_token: name -> [T], the batch's other per-token columns.
        per_sample: name -> [S].
        samples: which samples of the rank's batch these are; empty for a filler.
        response_lengths: response tokens of each sample in `samples`.
        denominators: set while training, None in forward-only passes.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    sequence_ids: Tensor
    token_index: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    per_token: Mapping[str, Tensor]
    per_sample: Mapping[str, Tensor]
    samples: tuple[int, ...]
    response_lengths: tuple[int, ...]
    denominators: Denominators | None = None

    @property
    def num_sequences(self) -> int:
        """S: sequences in the packed batch; 1 for a filler."""
        return len(self.cu_seqlens) - 1

    @property
    def is_filler(self) -> bool:
        """True when it holds no sample and exists to keep micro-batch counts equal over ranks."""
        return not self.samples

    def require_denominators(self) -> Denominators:
        """Return the denominators of a training micro-batch."""
        if self.denominators is None:
            raise DataError("this micro-batch carries no denominators; losses exist only inside train()")
        return self.denominators


def concat(batches: Sequence[RolloutBatch]) -> RolloutBatch:
    """Join batches that have the same columns, in order."""
    first = batches[0]
    names = {(frozenset(one.per_token), frozenset(one.per_sample)) for one in batches}
    if len(names) > 1:
        raise DataError("batches with different columns cannot be joined")
    return RolloutBatch(
        tokens=torch.cat([one.tokens for one in batches]),
        total_lengths=torch.cat([one.total_lengths for one in batches]),
        response_lengths=torch.cat([one.response_lengths for one in batches]),
        per_token={name: torch.cat([one.per_token[name] for one in batches]) for name in first.per_token},
        per_sample={name: torch.cat([one.per_sample[name] for one in batches]) for name in first.per_sample},
    )


def from_samples(
    prompts: Iterable[Sequence[int]],
    responses: Iterable[Sequence[int]],
    *,
    per_token: Mapping[str, Sequence[Sequence[float]]] | None = None,
    per_sample: Mapping[str, Sequence[float]] | None = None,
) -> RolloutBatch:
    """Build a batch from Python lists; without a "loss_mask" every response token counts.

    Raises:
        DataError: a per-token row is not as long as its response; names the sample.
    """
    prompts, responses = list(prompts), list(responses)
    columns = dict(per_token or {})
    columns.setdefault("loss_mask", [[1.0] * len(one) for one in responses])
    for name, rows in columns.items():
        _check_rows(name, rows, [len(one) for one in responses])
    tokens = [token for prompt, response in zip(prompts, responses, strict=True) for token in (*prompt, *response)]
    return RolloutBatch(
        tokens=torch.tensor(tokens, dtype=torch.int64),
        total_lengths=torch.tensor([len(p) + len(r) for p, r in zip(prompts, responses)], dtype=torch.int64),
        response_lengths=torch.tensor([len(r) for r in responses], dtype=torch.int64),
        per_token={
            name: torch.tensor([value for row in rows for value in row], dtype=torch.float32)
            for name, rows in columns.items()
        },
        per_sample={name: torch.tensor(rows) for name, rows in (per_sample or {}).items()},
    )


def _check_rows(name: str, rows: Sequence[Sequence[float] | Tensor], response_lengths: Sequence[int]) -> None:
    """Refuse rows of wrong lengths, whose sum alone may well be right."""
    if len(rows) != len(response_lengths):
        raise DataError(f"per_token[{name!r}] has {len(rows)} rows, needs {len(response_lengths)}")
    for sample, (row, length) in enumerate(zip(rows, response_lengths)):
        if len(row) != length:
            raise DataError(
                f"per_token[{name!r}] of sample {sample} has {len(row)} values, its response {length} tokens"
            )


def _starts(lengths: Sequence[int]) -> list[int]:
    starts = [0]
    for one in lengths:
        starts.append(starts[-1] + one)
    return starts


def _join(parts: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat(parts) if parts else like.new_empty(0)
