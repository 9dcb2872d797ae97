"""Drawing tokens from logits: temperature, top-k, top-p, and one random stream for each sequence.

The tokens of a row depend on that row's logits, parameters and uniform number alone, never on its neighbours.
Probabilities are summed as integers, which is exact in any order, so the draw itself adds no nondeterminism on a GPU.
Knows no model.

Shape names: B sequences, V tokens of the vocabulary.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drivetrain_infra.engines.base import SamplingParams

_UNIT = 2.0**52
"""Probability 1 as an integer: a whole row's sum, rounding included, stays exact in float64 and far below int64."""


def uniforms(seed: Sequence[int], count: int) -> npt.NDArray[np.float64]:
    """Return the first `count` numbers in [0, 1) of the random stream that `seed` names, float64 [count].

    Streams of different seeds are independent, also where one seed is the beginning of another or differs in trailing
    zeros. A longer `count` extends the same stream.
    """
    text = ",".join(str(int(one)) for one in seed)
    key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")
    raw = np.random.Philox(key=key).random_raw(count)
    return np.asarray((raw >> np.uint64(11)) * 2.0**-53, dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class SamplingColumns:
    """The sampling parameters of B sequences as columns on the logits' device.

    Attributes:
        temperature: float32 [B, 1], 1 where greedy.
        greedy: bool [B].
        top_k: int64 [B, 1], V or more where off.
        top_p: float64 [B, 1].
        restricted: int64 [up to B], the rows that top-k or top-p acts on.
        all_greedy: no row draws at random.
    """

    temperature: Tensor
    greedy: Tensor
    top_k: Tensor
    top_p: Tensor
    restricted: Tensor
    all_greedy: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> Self:
        """Lay out the parameters of B sequences."""
        off = torch.iinfo(torch.int64).max
        acting = [row for row, one in enumerate(params) if one.temperature > 0 and (one.top_k > 0 or one.top_p < 1)]
        return cls(
            temperature=torch.tensor([[one.temperature or 1.0] for one in params], dtype=torch.float32, device=device),
            greedy=torch.tensor([one.temperature == 0 for one in params], device=device),
            top_k=torch.tensor([[one.top_k or off] for one in params], device=device),
            top_p=torch.tensor([[one.top_p] for one in params], dtype=torch.float64, device=device),
            restricted=torch.tensor(acting, dtype=torch.int64, device=device),
            all_greedy=all(one.temperature == 0 for one in params),
        )


def sample(logits: Tensor, columns: SamplingColumns, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token for each row.

    Top-k keeps exactly the k most likely tokens (of equal ones, the smallest ids); top-p then keeps the smallest set of
    the most likely ones that has at least that share of what top-k left.

    Args:
        logits: float32 [B, V].
        columns: of the same rows.
        uniform: float64 [B] in [0, 1).

    Returns:
        The tokens, int64 [B], and their log-probs, float32 [B], under softmax(logits / temperature) over the whole
        vocabulary. The log-prob is not finite where the logits are not, and the token then means nothing.
    """
    log_probs = torch.log_softmax(logits / columns.temperature, dim=-1)
    tokens = logits.argmax(dim=-1)
    if not columns.all_greedy:
        weights = log_probs.exp().double().mul_(_UNIT).long()
        if len(columns.restricted):
            rows = columns.restricted
            weights[rows] = _restrict(weights[rows], columns.top_k[rows], columns.top_p[rows])
        tokens = torch.where(columns.greedy, tokens, _invert(weights, uniform))
    return tokens, log_probs.gather(1, tokens[:, None]).squeeze(1)


def _restrict(weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Zero the weights, int64 [B, V], of tokens that top-k or top-p leaves out."""
    ranked, order = weights.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(weights.shape[-1], device=weights.device)
    ranked = ranked.masked_fill(ranks >= top_k, 0)
    sums = ranked.cumsum(dim=-1)
    kept = (sums - ranked).double() < top_p * sums[:, -1:].double()
    return torch.zeros_like(weights).scatter_(1, order, ranked.masked_fill_(~kept, 0))


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return, for each row of integer weights [B, V], the token at that fraction of their running sum."""
    sums = weights.cumsum(dim=-1)
    # uniform <= 1 - 2^-53, so the product rounds to less than the total, and a token of weight 0 is never the answer
    target = (uniform * sums[:, -1].double()).long()
    tokens = torch.searchsorted(sums, target[:, None], right=True).squeeze(1)
    # only rows of non-finite logits can leave the vocabulary; their caller refuses them
    return tokens.clamp_(max=weights.shape[-1] - 1)
