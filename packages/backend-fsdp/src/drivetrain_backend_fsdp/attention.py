"""Packed causal attention, registered with transformers under one name.

A model that hands the function an argument it does not implement (a window, a soft cap, sinks, a mask) is refused
instead of computed wrong. Knows no model class and nothing of sharding.
"""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from drivetrain_backend_api.attention import PackedSequences, packed_causal_attention
from drivetrain_backend_api.errors import UnsupportedModelError

PACKED_ATTENTION = "drivetrain_packed"
"""Name of the attention implementation, as `attn_implementation` of transformers."""

_CARRY_NO_MATHS = frozenset(("position_ids", "cache_position"))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    packed: PackedSequences | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend causally within each packed sequence; the signature is that of transformers.

    Args:
        module: the attention layer.
        query: [1, heads, T, head size].
        key: [1, key heads, T, head size]; value alike.
        attention_mask: must be None.
        scaling: factor on the scores.
        packed: where the sequences lie.
        others: whatever else the layer passes; anything that would change the result is refused.

    Returns: [1, T, heads, head size], and None for the attention weights.

    Raises:
        UnsupportedModelError: the layer asks for something that is not implemented here.
    """
    name = type(module).__name__
    if packed is None:
        raise UnsupportedModelError(f"{name} does not hand `packed` to its attention function; it cannot be packed")
    if attention_mask is not None:
        raise UnsupportedModelError(f"{name} passes an attention mask, which packed attention does not implement")
    if not getattr(module, "is_causal", True) or others.pop("is_causal", None) is False:
        raise UnsupportedModelError(f"{name} is not causal, which packed attention does not implement")
    for argument, given in others.items():
        if argument in _CARRY_NO_MATHS or given is None or given is False:
            continue
        if argument == "dropout" and given == 0:
            continue
        shown = f"={given}" if isinstance(given, int | float | str) else ""
        raise UnsupportedModelError(f"{name} passes {argument}{shown}, which packed attention does not implement")
    q, k, v = (heads_first[0].transpose(0, 1) for heads_first in (query, key, value))
    return packed_causal_attention(q, k, v, packed, scale=scaling)[None], None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
