"""Log-probabilities and entropy of labels from hidden states and head weight, never holding all logits.

Logits exist for `chunk_size` tokens at a time, forward and backward; the backward recomputes them. Memory beyond the
gradients is O(chunk_size x vocabulary).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


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
        weight: [V, H].
        bias: [V] or None.
        scale: factor on the logits.
        softcap: bound of the logits, or None.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None


def label_log_probs(
    hidden: Tensor,
    head: Head,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    with_entropy: bool = False,
) -> LabelLogProbs:
    """Compute log softmax(logits / temperature)[label] and, on request, the entropy; both differentiable.

    Args:
        hidden: [T, H], in the head weight's dtype.
        head: the head.
        labels: int64 [T].
        temperature: divides the logits.
        chunk_size: tokens whose logits exist at one time.
        with_entropy: also compute the entropy.
    """
    if hidden.device.type == "cpu" and hidden.dtype.itemsize == 2:
        # few CPUs multiply 16-bit matrices in hardware; without that it takes tens of times longer than fp32
        hidden = hidden.float()
        head = replace(head, weight=head.weight.float(), bias=None if head.bias is None else head.bias.float())
    log_probs, entropy = _ChunkedLogProbs.apply(
        hidden, head.weight, head.bias, labels, head.scale, head.softcap, temperature, chunk_size, with_entropy
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
    ) -> tuple[Tensor, Tensor]:
        dtype = _accumulation_dtype(hidden.dtype)
        log_probs = hidden.new_empty(len(labels), dtype=dtype)
        entropy = hidden.new_zeros(len(labels), dtype=dtype)
        for start in range(0, len(labels), chunk_size):
            part = slice(start, start + chunk_size)
            logits, _ = _scaled_logits(hidden[part], weight, bias, scale, softcap, temperature)
            log_z = torch.logsumexp(logits, dim=-1)
            log_probs[part] = logits.gather(1, labels[part, None]).squeeze(1) - log_z
            if with_entropy:
                entropy[part] = torch.special.entr(torch.softmax(logits, dim=-1)).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, labels, entropy)
        ctx.settings = (scale, softcap, temperature, chunk_size)
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_probs: Tensor | None, grad_entropy: Tensor | None):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN205
        hidden, weight, bias, labels, entropy = ctx.saved_tensors
        scale, softcap, temperature, chunk_size = ctx.settings
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        dtype = _accumulation_dtype(hidden.dtype)
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=dtype) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=dtype) if bias is not None and need_bias else None
        for start in range(0, len(labels), chunk_size):
            part = slice(start, start + chunk_size)
            logits, slope = _scaled_logits(hidden[part], weight, bias, scale, softcap, temperature)
            log_probabilities = torch.log_softmax(logits, dim=-1)
            probabilities = log_probabilities.exp()
            grad_logits = torch.zeros_like(probabilities)
            if grad_log_probs is not None:
                weighted = grad_log_probs[part, None]
                grad_logits -= probabilities * weighted
                grad_logits.scatter_add_(1, labels[part, None], weighted)
            if grad_entropy is not None:
                # dH/dz_j = -p_j (log p_j + H); p log p is 0 where p is 0, also when log p is -inf
                surprise = torch.nan_to_num(log_probabilities, neginf=0.0) + entropy[part, None]
                grad_logits -= grad_entropy[part, None] * probabilities * surprise
            grad_logits *= scale / temperature
            if slope is not None:
                grad_logits *= slope
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            narrow = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = narrow @ weight
            if grad_weight is not None:
                grad_weight += narrow.t() @ hidden[part]
        return (
            grad_hidden,
            grad_weight.to(weight.dtype) if grad_weight is not None else None,
            grad_bias.to(bias.dtype) if grad_bias is not None else None,
            *([None] * 6),
        )
