"""Under which keys, and in which shapes, Megatron's torch_dist checkpoints keep the parameters of a model.

Pure functions of names and shapes: no process group, no model, no file; never imports Megatron.

A dense model's parameters lie in one tensor for all layers, with the layer as its first dimension. In a mixture of
experts each layer has keys of its own, and its experts lie in one tensor: a tensor of a checkpoint has no gaps where
some layers are dense, and PyTorch compares all pieces of a tensor with each other when it saves. Reading takes both.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from drivetrain_backend_api.errors import DataError
from drivetrain_backend_api.sharded_checkpoint import Rectangle, rectangles
from drivetrain_backend_megatron.architectures import Layout, ModelShape
from drivetrain_backend_megatron.name_map import EMBEDDING, OUTPUT_LAYER, Place

_LAYERS = "decoder.layers."
_LOCAL_EXPERT = re.compile(r"\.local_experts\.\d+\.")
_FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""A norm has the name of the linear layer behind it, into which TransformerEngine fuses it."""


@dataclass(frozen=True, kw_only=True)
class StoredParameter:
    """Where a checkpoint keeps one parameter of the whole model.

    Attributes:
        key: name of the stored tensor.
        shape: of the stored tensor.
        index: of the parameter along the leading dimensions, for its layer and its expert.
    """

    key: str
    shape: tuple[int, ...]
    index: tuple[int, ...]


def whole_shape(place: Place) -> tuple[int, ...]:
    """Return the shape of a parameter of the whole model, without padding."""
    sizes = [size for _, size in place.hf]
    return (sum(one[0] for one in sizes), *sizes[0][1:])


def write_place(place: Place, shape: ModelShape) -> StoredParameter:
    """Return where a parameter is written."""
    return next(_candidates(place, shape))


def find_stored(
    place: Place, shape: ModelShape, stored: Mapping[str, tuple[int, ...]], *, prefix: str = ""
) -> StoredParameter:
    """Return where a checkpoint has a parameter, in whichever spelling.

    Args:
        stored: shape of each tensor of the checkpoint. Vocabularies may be padded there.
        prefix: of the key, for what an optimizer keeps of the parameter.

    Raises:
        DataError: it has none, or one of another shape.
    """
    candidates = [replace(one, key=prefix + one.key) for one in _candidates(place, shape)]
    found = next((one for one in candidates if one.key in stored), None)
    if found is None:
        raise DataError(f"tensor {candidates[0].key!r} has shape none there and {candidates[0].shape} in the model")
    there = stored[found.key]
    padded = place.rule.vocab and there[1:] == found.shape[1:] and there[0] >= found.shape[0]
    if there != found.shape and not padded:
        raise DataError(f"tensor {found.key!r} has shape {there} there and {found.shape} in the model")
    return replace(found, shape=there)


def _candidates(place: Place, shape: ModelShape) -> Iterator[StoredParameter]:
    """Yield where a parameter can be, first where it is written."""
    whole = whole_shape(place)
    if place.layer is None:
        tied = place.name == OUTPUT_LAYER and shape.tied
        yield StoredParameter(key=EMBEDDING if tied else place.name, shape=whole, index=())
        return
    own = place.name.removeprefix(f"{_LAYERS}{place.layer}.")
    expert: tuple[int, ...] = ()
    if place.expert is not None and shape.experts is not None:
        own = _LOCAL_EXPERT.sub(".experts.", own)
        whole, expert = (shape.experts.num_experts, *whole), (place.expert,)
    for stacked in (False, True) if shape.sparse_layers else (True, False):
        for name in _spellings(own, sparse=place.layer in shape.sparse_layers):
            if stacked:
                yield StoredParameter(
                    key=f"{_LAYERS}{name}", shape=(shape.num_layers, *whole), index=(place.layer, *expert)
                )
            else:
                yield StoredParameter(key=f"{_LAYERS}{place.layer}.{name}", shape=whole, index=expert)


def _spellings(name: str, *, sparse: bool) -> Sequence[str]:
    fused = _FUSED_NORMS.get(name)
    if fused is None:
        return (name,)
    # no linear layer follows the norm before experts
    return (name, fused) if sparse and fused.startswith("mlp.") else (fused, name)


def slice_rectangles(
    place: Place, start: int, count: int, *, shape: ModelShape, tp_size: int, tp_rank: int, padded_vocab: int
) -> list[Rectangle]:
    """Cut a range of a tensor-parallel rank's flattened parameter into rectangles of the whole parameter.

    Args:
        start: first element of the range.
        count: its elements.

    Returns: in the order of the range, without gaps; padded rows of a vocabulary, at its end, are left out.
    """
    whole, dim = whole_shape(place), place.rule.split_dim
    if dim is None:
        return rectangles(start, count, whole)
    across = padded_vocab if place.rule.vocab else whole[dim]
    local = (*whole[:dim], across // tp_size, *whole[dim + 1 :])
    if place.rule.layout is Layout.GATE_UP:
        return _halves(start, count, local, tp_size=tp_size, tp_rank=tp_rank)
    if place.rule.vocab:
        rows = min(max(shape.vocab_size - tp_rank * local[0], 0), local[0])
        count = min(count, rows * math.prod(local[1:]) - start)
    return [_moved(one, dim, tp_rank * local[dim]) for one in rectangles(start, count, local)]


def _halves(start: int, count: int, local: tuple[int, ...], *, tp_size: int, tp_rank: int) -> list[Rectangle]:
    """A rank's rows of the gate, then its rows of the up projection: two places in the whole."""
    rows = local[0] // 2
    half, found = rows * math.prod(local[1:]), []
    for number in (0, 1):
        first, last = max(start, number * half), min(start + count, (number + 1) * half)
        for one in rectangles(first - number * half, last - first, (rows, *local[1:])):
            inside = replace(one, start=one.start + first - start)
            found.append(_moved(inside, 0, (number * tp_size + tp_rank) * rows))
    return found


def _moved(one: Rectangle, dim: int, distance: int) -> Rectangle:
    offsets = list(one.offsets)
    offsets[dim] += distance
    return replace(one, offsets=tuple(offsets))
