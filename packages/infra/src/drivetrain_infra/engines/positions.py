"""How many tokens a model takes, by its configuration: the one rule that checks, limits and engines share.

Knows configurations only: no weights, no torch.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

_ORIGINAL = "original_max_position_embeddings"


def usable_positions(config: Any) -> int | None:
    """Return the most tokens of a sequence that a model has positions for, None where its configuration sets no limit.

    Scaled rotary embeddings reach further than `max_position_embeddings`, which some models leave at what they were
    first trained on (YaRN, https://arxiv.org/abs/2309.00071): original length times factor counts where it is larger.

    Args:
        config: of transformers, or the table of a `config.json`.
    """
    if not isinstance(config, Mapping):
        text = config.get_text_config()
        names = ("max_position_embeddings", _ORIGINAL, "rope_parameters", "rope_scaling")
        config = {name: getattr(text, name, None) for name in names}
    limit = config.get("max_position_embeddings")
    if not _is_count(limit):
        return None
    lengths = [limit]
    for rope in _ropes(config):
        factor, given = rope.get("factor"), (rope.get(_ORIGINAL), config.get(_ORIGINAL))
        if isinstance(factor, int | float) and math.isfinite(factor):
            lengths.append(int(factor * next(filter(_is_count, given), limit)))
    return max(lengths)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield what says how positions are scaled: one table, or one for each kind of layer."""
    for table in (config.get("rope_parameters"), config.get("rope_scaling")):
        if isinstance(table, Mapping):
            yield table
            yield from (one for one in table.values() if isinstance(one, Mapping))
