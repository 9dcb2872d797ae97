"""Log-probabilities and entropy of labels from hidden states and head weight, never holding all logits.

Logits exist for `chunk_size` tokens at a time, forward and backward; the backward recomputes them. Memory beyond the
gradients is O(chunk_size x vocabulary), or that of this rank's share where the vocabulary is cut over ranks. Knows
nothing of which parallelism cuts it.
"""

import math
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from drivetrain_backend_api.errors import DrivetrainError


@dataclass(frozen=True, kw_only=True)
class LabelLogProbs:
    """Result over the T tokens of a micro-batch.

    Attributes:
        log_probs: float32 [T] (float64 for float64 inputs), log of the label's probability.
        entropy: same, entropy of the whole distribution in nats; None unless asked for.
    """

    log_probs: Tensor
    entropy: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Head:
    """How a language-model head turns hidden states into logits.

    logits = softcap(scale x (hidden @ weight.T + bias)), where softcap(z) = cap x tanh(z / cap).

    Attributes:
        weight: [V, H]; this rank's rows of it where a `VocabShard` goes with it.
        bias: [V] or None; as weight.
        scale: factor on the logits.
        softcap: bound of the logits, or None.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True, kw_only=True)
class VocabShard:
    """Which rows of the whole head this rank's head holds: rank r's are as many as any other's, from r x rows on.

    Attributes:
        group: the ranks over which the vocabulary is cut; may be None where `size` is 1.
        rank: in the group.
        size: of the group.
        vocab_size: tokens of the vocabulary. Rows at or past it are padding: probability and gradient are exactly zero.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int
    vocab_size: int

    def __post_init__(self) -> None:
        """Refuse a cut without a group, whose collectives would run over the whole world."""
        if self.size > 1 and self.group is None:
            raise DrivetrainError(f"a vocabulary that is cut over {self.size} ranks needs their process group")


def label_log_probs(
    hidden: Tensor,
    head: Head,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    with_entropy: bool = False,
    shard: VocabShard | None = None,
) -> LabelLogProbs:
    """Compute log softmax(logits / temperature)[label] and, on request, the entropy; both differentiable.

    Over a vocabulary that is cut, this is a collective: every rank of the group passes the same hidden states, labels
    and options, and gets the same results, bit for bit. It costs two all-reduces a chunk forward and none backward.
    Every rank computes the same loss of the results. What then flows back into `hidden` is this rank's part of the
    gradient: the caller passes hidden states through an operator whose backward sums over the group.

    Args:
        hidden: [T, H], in the head weight's dtype.
        head: the head.
        labels: int64 [T].
        temperature: divides the logits.
        chunk_size: tokens whose logits exist at one time.
        with_entropy: also compute the entropy.
        shard: which rows of the vocabulary `head` holds; None for all, without padding.

    Raises:
        DrivetrainError: the shards hold fewer rows than the vocabulary has tokens.
    """
    if shard is not None and len(head.weight) * shard.size < shard.vocab_size:
        raise DrivetrainError(
            f"{shard.size} x {len(head.weight)} rows of the head cannot hold a vocabulary of {shard.vocab_size}; pad "
            "it to a multiple of the ranks before cutting it"
        )
    if hidden.device.type == "cpu" and hidden.dtype.itemsize == 2:
        # few CPUs multiply 16-bit matrices in hardware; without that it takes tens of times longer than fp32
        hidden = hidden.float()
        head = replace(head, weight=head.weight.float(), bias=None if head.bias is None else head.bias.float())
    log_probs, entropy = _ChunkedLogProbs.apply(
        hidden, head.weight, head.bias, labels, head.scale, head.softcap, temperature, chunk_size, with_entropy, shard
    )
    return LabelLogProbs(log_probs=log_probs, entropy=entropy if with_entropy else None)


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _scaled_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float, softcap: float | None, temperature: float
) -> tuple[Tensor, Tensor | None]:
    """Logits over temperature of one chunk [C, V], and d(capped)/d(uncapped) where there is a cap."""
    logits = (hidden @ weight.t()).to(_accumulation_dtype(hidden.dtype))
    if bias is not None:
        logits += bias
    if scale != 1.0:
        logits *= scale
    slope = None
    if softcap is not None:
        squashed = torch.tanh(logits / softcap)
        slope = 1 - squashed.square()
        logits = squashed * softcap
    if temperature != 1.0:
        logits /= temperature
    return logits, slope


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """The rows of this rank's head that are tokens."""

    first: int
    count: int

    def of(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return weight[: self.count], None if bias is None else bias[: self.count]

    def find(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return labels as row numbers, 0 for those that other ranks hold, and which ones are here."""
        here = (labels >= self.first) & (labels < self.first + self.count)
        return torch.where(here, labels - self.first, 0), here


def _token_rows(rows: int, shard: VocabShard | None) -> _Rows:
    if shard is None:
        return _Rows(first=0, count=rows)
    first = shard.rank * rows
    return _Rows(first=first, count=min(max(shard.vocab_size - first, 0), rows))


def _over_shards(
    logits: Tensor, labels: Tensor, rows: _Rows, shard: VocabShard, *, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return log-probs, log-normalisers and entropy, each [C], of one chunk; overwrites the logits [C, rows]."""
    # A rank of nothing but padding takes part in the collectives all the same.
    top = logits.amax(-1) if rows.count else logits.new_full((len(logits),), -math.inf)
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=shard.group)
    logits -= top[:, None]
    # A whole vocabulary raises for a label that is no token; here it would be the 0 that ranks without it add.
    unknown = (labels < 0) | (labels >= shard.vocab_size)
    wanted = torch.where(unknown, math.nan, torch.zeros_like(top))
    if rows.count:
        index, here = rows.find(labels)
        wanted = torch.where(here, logits.gather(1, index[:, None]).squeeze(1), wanted)
    weights = logits.exp_()
    parts = [wanted, weights.sum(-1)]
    if with_entropy:
        parts.append(torch.special.entr(weights).sum(-1))
    sums = torch.stack(parts)
    dist.all_reduce(sums, group=shard.group)
    log_total = sums[1].log()
    # p = w / W, so that -sum p log p = log W + (-sum w log w) / W
    return sums[0] - log_total, top + log_total, log_total + sums[2] / sums[1] if with_entropy else None


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,  # noqa: ANN001
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        scale: float,
        softcap: float | None,
        temperature: float,
        chunk_size: int,
        with_entropy: bool,
        shard: VocabShard | None,
    ) -> tuple[Tensor, Tensor]:
        dtype = _accumulation_dtype(hidden.dtype)
        rows = _token_rows(len(weight), shard)
        token_weight, token_bias = rows.of(weight, bias)
        log_probs = hidden.new_empty(len(labels), dtype=dtype)
        entropy = hidden.new_zeros(len(labels), dtype=dtype)
        # Kept where it took a collective, so that the backward needs none.
        log_normaliser = torch.empty_like(log_probs) if shard is not None and shard.size > 1 else None
        for start in range(0, len(labels), chunk_size):
            part = slice(start, start + chunk_size)
            logits, _ = _scaled_logits(hidden[part], token_weight, token_bias, scale, softcap, temperature)
            if shard is not None and log_normaliser is not None:
                log_probs[part], log_normaliser[part], whole_entropy = _over_shards(
                    logits, labels[part], rows, shard, with_entropy=with_entropy
                )
                if whole_entropy is not None:
                    entropy[part] = whole_entropy
                continue
            log_z = torch.logsumexp(logits, dim=-1)
            log_probs[part] = logits.gather(1, labels[part, None]).squeeze(1) - log_z
            if with_entropy:
                entropy[part] = torch.special.entr(torch.softmax(logits, dim=-1)).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, labels, entropy, log_normaliser)
        ctx.settings = (scale, softcap, temperature, chunk_size, rows)
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_probs: Tensor | None, grad_entropy: Tensor | None):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN205
        hidden, weight, bias, labels, entropy, log_normaliser = ctx.saved_tensors
        scale, softcap, temperature, chunk_size, rows = ctx.settings
        token_weight, token_bias = rows.of(weight, bias)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        dtype = _accumulation_dtype(hidden.dtype)
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=dtype) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=dtype) if bias is not None and need_bias else None
        for start in range(0, len(labels), chunk_size):
            part = slice(start, start + chunk_size)
            logits, slope = _scaled_logits(hidden[part], token_weight, token_bias, scale, softcap, temperature)
            if log_normaliser is None:
                log_probabilities = torch.log_softmax(logits, dim=-1)
            else:
                log_probabilities = logits.sub_(log_normaliser[part, None])
            probabilities = log_probabilities.exp()
            grad_logits = torch.zeros_like(probabilities)
            if grad_log_probs is not None:
                weighted = grad_log_probs[part, None]
                grad_logits -= probabilities * weighted
                if log_normaliser is None:
                    grad_logits.scatter_add_(1, labels[part, None], weighted)
                elif rows.count:
                    index, here = rows.find(labels[part])
                    grad_logits.scatter_add_(1, index[:, None], weighted.where(here[:, None], 0))
            if grad_entropy is not None:
                # dH/dz_j = -p_j (log p_j + H); p log p is 0 where p is 0, also when log p is -inf
                surprise = torch.nan_to_num(log_probabilities, neginf=0.0) + entropy[part, None]
                grad_logits -= grad_entropy[part, None] * probabilities * surprise
            grad_logits *= scale / temperature
            if slope is not None:
                grad_logits *= slope
            if grad_bias is not None:
                grad_bias[: rows.count] += grad_logits.sum(0)
            narrow = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = narrow @ token_weight
            if grad_weight is not None:
                grad_weight[: rows.count] += narrow.t() @ hidden[part]
        return (
            grad_hidden,
            grad_weight.to(weight.dtype) if grad_weight is not None else None,
            grad_bias.to(bias.dtype) if grad_bias is not None else None,
            *([None] * 7),
        )
