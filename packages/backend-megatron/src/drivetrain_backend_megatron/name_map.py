"""Between Megatron's parameters and Hugging Face's tensors, in both directions, by the rules of `architectures`.

Pure functions of names and tensors: no process group, no model, no file; never imports Megatron. Layers and experts are
counted over the whole model ("global"), whatever the stage, chunk or rank that holds them.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from drivetrain_backend_api.errors import UnsupportedModelError
from drivetrain_backend_megatron.architectures import Block, Layout, ModelShape, Rule, Rules

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"

_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")

# TransformerEngine keeps a norm in the linear layer behind it, and grouped experts in one module.
_OTHER_SPELLINGS = (
    (re.compile(r"\.self_attention\.linear_qkv\.layer_norm_weight$"), ".input_layernorm.weight"),
    (re.compile(r"\.mlp\.linear_fc1\.layer_norm_weight$"), ".pre_mlp_layernorm.weight"),
    (re.compile(r"\.experts\.(linear_fc[12])\.weight(\d+)$"), r".experts.local_experts.\2.\1.weight"),
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """One Megatron parameter of the whole model and the Hugging Face tensors that it is made of.

    Attributes:
        name: Megatron's, with global layer and expert indices.
        hf: name and shape of each tensor, in the order of the rule's parts.
        layer: None for the embedding, the final norm and the output layer.
        expert: None for what no expert owns.
    """

    name: str
    rule: Rule
    hf: tuple[tuple[str, tuple[int, ...]], ...]
    layer: int | None = None
    expert: int | None = None


# -- names -------------------------------------------------------------------------------------------------------------


def places(shape: ModelShape) -> Iterator[Place]:
    """Yield every parameter of a model once: the embedding, the blocks in order, the final norm, the output layer.

    Each Hugging Face tensor is in exactly one place; a tied output layer is in none.
    """
    architecture = shape.architecture
    yield from _places(architecture.embedding_rules, shape, None)
    for layer in range(shape.num_layers):
        yield from _places(architecture.layer_rules, shape, layer)
    yield from _places(architecture.head_rules, shape, None)


def _places(rules: Rules, shape: ModelShape, layer: int | None) -> Iterator[Place]:
    per_expert = []
    for pattern, rule in rules.items():
        if not _has(shape, rule, layer):
            continue
        if rule.expert:
            per_expert.append((pattern, rule))
        else:
            yield _place(pattern, rule, shape, layer, None)
    if per_expert and shape.experts:
        for expert in range(shape.experts.num_experts):
            for pattern, rule in per_expert:
                yield _place(pattern, rule, shape, layer, expert)


def _has(shape: ModelShape, rule: Rule, layer: int | None) -> bool:
    block = Block.SPARSE if layer in shape.sparse_layers else Block.DENSE
    return rule.block in (Block.ALL, block) and (not rule.needs or getattr(shape, rule.needs))


def _place(pattern: str, rule: Rule, shape: ModelShape, layer: int | None, expert: int | None) -> Place:
    sizes = shape.sizes
    return Place(
        name=pattern.format(layer=layer, expert=expert),
        rule=rule,
        hf=tuple(
            (part.name.format(layer=layer, expert=expert), tuple(sizes[one] for one in part.sizes))
            for part in rule.parts
        ),
        layer=layer,
        expert=expert,
    )


def place_of(name: str, shape: ModelShape) -> Place:
    """Return the place of a Megatron parameter; a tied output layer's is the embedding's tensor.

    Args:
        name: with global layer and expert indices, spelled as our own layers or TransformerEngine's do.

    Raises:
        UnsupportedModelError: the model has no such parameter.
    """
    if name == OUTPUT_LAYER and shape.tied:
        return replace(place_of(EMBEDDING, shape), name=OUTPUT_LAYER)
    spelled = _canonical(name)
    layer, expert = _index(_LAYER, spelled), _index(_EXPERT, spelled)
    pattern = _EXPERT.sub("{expert}", _LAYER.sub("{layer}", spelled))
    architecture = shape.architecture
    rules = (
        architecture.layer_rules if layer is not None else {**architecture.embedding_rules, **architecture.head_rules}
    )
    rule = rules.get(pattern)
    if rule is None or not _has(shape, rule, layer) or not _exists(shape, layer, expert):
        raise UnsupportedModelError(
            f"a {shape.model_type} model has no Megatron parameter {name!r}; its name map needs an entry for it"
        )
    return _place(pattern, rule, shape, layer, expert)


def global_name(name: str, *, first_layer: int, first_expert: int = 0) -> str:
    """Turn a model chunk's own parameter name into one with global indices.

    Args:
        name: as in `named_parameters()` of the chunk's GPTModel, without wrappers.
        first_layer: global index of the chunk's first layer.
        first_expert: global index of this rank's first expert.
    """
    spelled = _LAYER.sub(lambda found: str(int(found[0]) + first_layer), _canonical(name))
    return _EXPERT.sub(lambda found: str(int(found[0]) + first_expert), spelled)


def _canonical(name: str) -> str:
    for spelling, ours in _OTHER_SPELLINGS:
        name = spelling.sub(ours, name)
    return name


def _index(pattern: re.Pattern[str], name: str) -> int | None:
    found = pattern.search(name)
    return int(found[0]) if found else None


def _exists(shape: ModelShape, layer: int | None, expert: int | None) -> bool:
    experts = shape.experts.num_experts if shape.experts else 0
    return (layer is None or layer < shape.num_layers) and (expert is None or expert < experts)


# -- who holds what ----------------------------------------------------------------------------------------------------


def stage_of(place: Place, shape: ModelShape, *, pp_size: int, chunks: int = 1) -> int:
    """Return the pipeline stage that owns a parameter.

    Args:
        place: of the parameter.
        shape: of the model.
        pp_size: pipeline stages.
        chunks: model chunks a stage, 1 for a plain pipeline. An interleaved one passes the first chunk of all stages,
            then the second of all stages, and so on.
    """
    if place.layer is None:
        return 0 if place.name == EMBEDDING else pp_size - 1
    return place.layer // (shape.num_layers // (pp_size * chunks)) % pp_size


def expert_rank(place: Place, shape: ModelShape, *, ep_size: int) -> int | None:
    """Return the expert-parallel rank that holds a parameter, None where all of them do."""
    if place.expert is None or shape.experts is None:
        return None
    return place.expert // (shape.experts.num_experts // ep_size)


# -- tensors -----------------------------------------------------------------------------------------------------------


def padded_vocab_size(vocab_size: int, *, tp_size: int, divisible_by: int = 1) -> int:
    """Return the rows of Megatron's embedding and output layer over all tensor-parallel ranks."""
    unit = tp_size * divisible_by
    return -(-vocab_size // unit) * unit


def local_slice(rule: Rule, size: int, *, tp_size: int, tp_rank: int, padded_vocab: int) -> slice:
    """Return which part of a Hugging Face tensor, along the rule's `split_dim`, a rank holds.

    Args:
        size: the tensor's extent along that dimension.
        padded_vocab: see `padded_vocab_size`; a rank may hold rows beyond the tensor's end, or only such.
    """
    width = (padded_vocab if rule.vocab else size) // tp_size
    return slice(min(tp_rank * width, size), min((tp_rank + 1) * width, size))


def fuse(pieces: Sequence[Tensor], rule: Rule, shape: ModelShape, *, tp_size: int, padded_vocab: int) -> Tensor:
    """Make a rank's parameter of what it holds of each Hugging Face tensor; padded vocabulary rows are zero."""
    if rule.layout is Layout.GATE_UP:
        return torch.cat(list(pieces))
    if rule.layout is Layout.QKV:
        groups = shape.num_query_groups // tp_size
        return torch.cat([one.reshape(groups, -1, *one.shape[1:]) for one in pieces], dim=1).flatten(0, 1)
    (piece,) = pieces
    rows = padded_vocab // tp_size
    if not rule.vocab or len(piece) == rows:
        return piece
    return torch.cat([piece, piece.new_zeros(rows - len(piece), *piece.shape[1:])])


def to_local(
    parts: Sequence[Tensor], rule: Rule, shape: ModelShape, *, tp_size: int, tp_rank: int, padded_vocab: int
) -> Tensor:
    """Make a rank's parameter of whole Hugging Face tensors; padded vocabulary rows are zero.

    Args:
        parts: whole tensors, in the order of the rule's parts.
        padded_vocab: see `padded_vocab_size`.
    """
    dim = rule.split_dim
    if dim is not None:
        cuts = [
            local_slice(rule, one.shape[dim], tp_size=tp_size, tp_rank=tp_rank, padded_vocab=padded_vocab)
            for one in parts
        ]
        parts = [one.narrow(dim, cut.start, cut.stop - cut.start) for one, cut in zip(parts, cuts)]
    return fuse(parts, rule, shape, tp_size=1 if dim is None else tp_size, padded_vocab=padded_vocab)


def to_hf(shards: Sequence[Tensor], rule: Rule, shape: ModelShape) -> list[Tensor]:
    """Make whole Hugging Face tensors, in the order of the rule's parts, of a parameter; vocabulary padding is cut off.

    Args:
        shards: the parameter of every tensor-parallel rank in order, or of any one where `split_dim` is None.
    """
    shards = shards[:1] if rule.split_dim is None else shards
    if rule.layout is Layout.GATE_UP:
        halves = [one.chunk(2) for one in shards]
        return [torch.cat([one[half] for one in halves]) for half in (0, 1)]
    whole = shards[0] if len(shards) == 1 else torch.cat(list(shards), dim=rule.split_dim or 0)
    if rule.layout is Layout.QKV:
        heads = shape.num_attention_heads // shape.num_query_groups
        rows = [heads * shape.head_dim, shape.head_dim, shape.head_dim]
        grouped = whole.reshape(shape.num_query_groups, -1, *whole.shape[1:])
        return [one.flatten(0, 1) for one in torch.split(grouped, rows, dim=1)]
    return [whole[: shape.vocab_size] if rule.vocab else whole]
