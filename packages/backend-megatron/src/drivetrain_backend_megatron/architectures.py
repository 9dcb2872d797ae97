"""The supported architectures as one table, and the shape of a model as its `config.json` gives it.

A new architecture is an entry of `ARCHITECTURES`: what its configuration means, and which Hugging Face tensors make up
which Megatron parameter. Plain data, and so never imports torch, transformers or Megatron.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from drivetrain_backend_api.errors import DataError, UnsupportedModelError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose frequencies do not depend on the length of a sequence."""

_SCALED_ROPE = ("llama3", "yarn")
_DEFAULT_THETA = 10_000.0


# -- names -------------------------------------------------------------------------------------------------------------


class Layout(StrEnum):
    """How the Hugging Face tensors of one Megatron parameter lie in it.

    PLAIN: one tensor as it is. GATE_UP: gate's rows of a rank, then up's. QKV: for each query group of a rank, the rows
    of its query heads, of its key head, of its value head.
    """

    PLAIN = "plain"
    GATE_UP = "gate_up"
    QKV = "qkv"


class Block(StrEnum):
    """Which transformer blocks have a parameter."""

    ALL = "all"
    DENSE = "dense"
    SPARSE = "sparse"


@dataclass(frozen=True, kw_only=True)
class Part:
    """One Hugging Face tensor of a Megatron parameter.

    Attributes:
        name: with "{layer}" and "{expert}" for their indices.
        sizes: its dimensions, each a key of `ModelShape.sizes`.
    """

    name: str
    sizes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How one Megatron parameter, or the same one of every block and expert, is made of Hugging Face tensors.

    Attributes:
        parts: in the order of the layout.
        tp_dim: the dimension that Megatron's parallel layers cut, None for a parameter that they do not cut.
        vocab: its rows are the vocabulary's, padded to `padded_vocab_size`.
        expert: it belongs to one expert: whole on its rank, since experts are spread and not cut.
        block: which transformer blocks have it.
        needs: the attribute of `ModelShape` that must be true for the model to have it; "" for none.
    """

    parts: tuple[Part, ...]
    layout: Layout = Layout.PLAIN
    tp_dim: int | None = None
    vocab: bool = False
    expert: bool = False
    block: Block = Block.ALL
    needs: str = ""

    @property
    def split_dim(self) -> int | None:
        """The dimension that is spread over the tensor-parallel ranks, None where each of them holds the whole."""
        return None if self.expert else self.tp_dim


Rules = Mapping[str, Rule]
"""Megatron parameter name, with "{layer}" and "{expert}" for their global indices -> its rule."""


def _rule(*parts: tuple[str, str], **settings: Any) -> Rule:
    """Make a rule of (Hugging Face name, dimensions separated by spaces)."""
    return Rule(parts=tuple(Part(name=name, sizes=tuple(sizes.split())) for name, sizes in parts), **settings)


_HF = "model.layers.{layer}."
_MEGATRON = "decoder.layers.{layer}."
_ATTENTION = _HF + "self_attn."
_EXPERT = _HF + "mlp.experts.{expert}."

EMBEDDING_RULES: Rules = {
    "embedding.word_embeddings.weight": _rule(("model.embed_tokens.weight", "vocab hidden"), tp_dim=0, vocab=True),
}

HEAD_RULES: Rules = {
    "decoder.final_layernorm.weight": _rule(("model.norm.weight", "hidden")),
    "output_layer.weight": _rule(("lm_head.weight", "vocab hidden"), tp_dim=0, vocab=True, needs="untied"),
}

_ATTENTION_RULES: Rules = {
    _MEGATRON + "input_layernorm.weight": _rule((_HF + "input_layernorm.weight", "hidden")),
    _MEGATRON + "self_attention.linear_qkv.weight": _rule(
        (_ATTENTION + "q_proj.weight", "query hidden"),
        (_ATTENTION + "k_proj.weight", "key hidden"),
        (_ATTENTION + "v_proj.weight", "key hidden"),
        layout=Layout.QKV,
        tp_dim=0,
    ),
    _MEGATRON + "self_attention.linear_qkv.bias": _rule(
        (_ATTENTION + "q_proj.bias", "query"),
        (_ATTENTION + "k_proj.bias", "key"),
        (_ATTENTION + "v_proj.bias", "key"),
        layout=Layout.QKV,
        tp_dim=0,
        needs="qkv_bias",
    ),
    _MEGATRON + "self_attention.q_layernorm.weight": _rule((_ATTENTION + "q_norm.weight", "head"), needs="qk_norm"),
    _MEGATRON + "self_attention.k_layernorm.weight": _rule((_ATTENTION + "k_norm.weight", "head"), needs="qk_norm"),
    _MEGATRON + "self_attention.linear_proj.weight": _rule((_ATTENTION + "o_proj.weight", "hidden query"), tp_dim=1),
    _MEGATRON + "self_attention.linear_proj.bias": _rule((_ATTENTION + "o_proj.bias", "hidden"), needs="output_bias"),
    _MEGATRON + "pre_mlp_layernorm.weight": _rule((_HF + "post_attention_layernorm.weight", "hidden")),
}

_MLP_RULES: Rules = {
    _MEGATRON + "mlp.linear_fc1.weight": _rule(
        (_HF + "mlp.gate_proj.weight", "ffn hidden"),
        (_HF + "mlp.up_proj.weight", "ffn hidden"),
        layout=Layout.GATE_UP,
        tp_dim=0,
        block=Block.DENSE,
    ),
    _MEGATRON + "mlp.linear_fc2.weight": _rule(
        (_HF + "mlp.down_proj.weight", "hidden ffn"), tp_dim=1, block=Block.DENSE
    ),
}

_MOE_RULES: Rules = {
    _MEGATRON + "mlp.router.weight": _rule((_HF + "mlp.gate.weight", "experts hidden"), block=Block.SPARSE),
    _MEGATRON + "mlp.experts.local_experts.{expert}.linear_fc1.weight": _rule(
        (_EXPERT + "gate_proj.weight", "expert_ffn hidden"),
        (_EXPERT + "up_proj.weight", "expert_ffn hidden"),
        layout=Layout.GATE_UP,
        tp_dim=0,
        expert=True,
        block=Block.SPARSE,
    ),
    _MEGATRON + "mlp.experts.local_experts.{expert}.linear_fc2.weight": _rule(
        (_EXPERT + "down_proj.weight", "hidden expert_ffn"), tp_dim=1, expert=True, block=Block.SPARSE
    ),
}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What one `model_type` means.

    Attributes:
        layer_rules: the parameters of a transformer block.
        qk_norm: queries and keys are normalised, each head by itself.
        qkv_bias: the query, key and value projections always have biases. Where they do not, `attention_bias` of the
            configuration gives them, and the output projection, biases.
        head_dim: where the configuration gives none; None for hidden size / heads.
        moe: some or all blocks are mixtures of experts.
        embedding_rules: the parameters of the first pipeline stage.
        head_rules: the parameters behind the last block.
    """

    layer_rules: Rules
    qk_norm: bool = False
    qkv_bias: bool = False
    head_dim: int | None = None
    moe: bool = False
    embedding_rules: Rules = field(default_factory=lambda: EMBEDDING_RULES)
    head_rules: Rules = field(default_factory=lambda: HEAD_RULES)


_DENSE_LAYER: Rules = {**_ATTENTION_RULES, **_MLP_RULES}

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(layer_rules=_DENSE_LAYER),
    "qwen2": Architecture(layer_rules=_DENSE_LAYER, qkv_bias=True),
    "qwen3": Architecture(layer_rules=_DENSE_LAYER, qk_norm=True, head_dim=128),
    "qwen3_moe": Architecture(layer_rules={**_DENSE_LAYER, **_MOE_RULES}, qk_norm=True, moe=True),
}
"""`model_type` of `config.json` -> what it means."""


# -- shapes ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """The mixture-of-experts blocks of a model.

    Attributes:
        num_experts: in each sparse block.
        top_k: experts a token goes through.
        moe_ffn_hidden_size: width of one expert.
        norm_topk_prob: the weights of a token's experts are scaled to a sum of 1.
        sparse_layers: the blocks that are mixtures; the others have one MLP.
    """

    num_experts: int
    top_k: int
    moe_ffn_hidden_size: int
    norm_topk_prob: bool
    sparse_layers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What a model computes and how large its parts are: all that its `config.json` says about them.

    Attributes:
        num_query_groups: key and value heads.
        tied: the output layer's weight is the embedding's.
        qk_norm: queries and keys are normalised, each head by itself.
        qkv_bias: the query, key and value projections have biases.
        output_bias: attention's output projection has a bias.
        rope: rotary embedding as transformers' `rope_parameters`, with "rope_type" and "rope_theta".
        experts: None for a dense model.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    tied: bool
    qk_norm: bool
    qkv_bias: bool
    output_bias: bool
    rope: Mapping[str, Any]
    experts: ExpertShape | None = None

    @property
    def architecture(self) -> Architecture:
        """The entry of the table."""
        return ARCHITECTURES[self.model_type]

    @property
    def untied(self) -> bool:
        """True where the output layer has a weight of its own."""
        return not self.tied

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Indices of the mixture-of-experts blocks."""
        return self.experts.sparse_layers if self.experts else ()

    @property
    def sizes(self) -> dict[str, int]:
        """Name of a dimension, as in `Part.sizes` -> how large it is."""
        found = {
            "vocab": self.vocab_size,
            "hidden": self.hidden_size,
            "ffn": self.ffn_hidden_size,
            "query": self.num_attention_heads * self.head_dim,
            "key": self.num_query_groups * self.head_dim,
            "head": self.head_dim,
        }
        if self.experts:
            found |= {"experts": self.experts.num_experts, "expert_ffn": self.experts.moe_ffn_hidden_size}
        return found


def differences(shape: ModelShape, other: ModelShape) -> list[str]:
    """Say in what two models differ so that the weights of one do not belong into the other: "num_layers 4, not 2".

    How many positions a model claims does not matter: it changes no weight and no result.
    """
    names = [one.name for one in fields(ModelShape) if one.name != "max_position_embeddings"]
    pairs = [(name, getattr(shape, name), getattr(other, name)) for name in names]
    return [f"{name} {mine}, not {theirs}" for name, mine, theirs in pairs if mine != theirs]


# -- reading -----------------------------------------------------------------------------------------------------------


def read_shape(folder: Path) -> ModelShape:
    """Read the shape of a model from the `config.json` of its folder.

    Raises:
        DataError: the file is missing, is no model configuration, or lacks something.
        UnsupportedModelError: the model has something that this backend does not compute, or would compute wrongly.
    """
    return shape_of(read_table(folder), folder / "config.json")


def read_table(folder: Path) -> dict[str, Any]:
    """Read `config.json` of a model folder as it is.

    Raises:
        DataError: it is missing, or no JSON object with a model_type.
    """
    path = folder / "config.json"
    try:
        table = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise DataError(f"{folder} has no config.json; it must be a Hugging Face model folder") from None
    except (ValueError, OSError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}; copy the model again") from error
    if not isinstance(table, dict) or not isinstance(table.get("model_type"), str):
        raise DataError(f"{path}: names no model_type, so it is no Hugging Face model configuration")
    return table


def read_pad_token(folder: Path) -> int | None:
    """Return the token whose embedding Hugging Face's model keeps as it is, None where its configuration names none."""
    table = read_table(folder)
    token, vocabulary = table.get("pad_token_id"), table.get("vocab_size")
    if not isinstance(token, int) or isinstance(token, bool) or not isinstance(vocabulary, int):
        return None
    # as torch.nn.Embedding counts
    return token % vocabulary if -vocabulary <= token < vocabulary else None


def shape_of(table: Mapping[str, Any], path: Path) -> ModelShape:
    """Turn a model configuration into a shape.

    Args:
        table: the content of `config.json`.
        path: the file, for messages.

    Raises:
        DataError: it lacks something, or has a value of the wrong kind.
        UnsupportedModelError: the model has something that this backend does not compute.
    """
    model_type = table["model_type"]
    if model_type not in ARCHITECTURES:
        raise _unsupported(path, f"model_type {model_type!r}")
    for finding in _unsupported_features(table):
        raise _unsupported(path, finding)
    architecture = ARCHITECTURES[model_type]
    heads = _count(table, "num_attention_heads", path)
    hidden = _count(table, "hidden_size", path)
    bias = bool(table.get("attention_bias")) and not architecture.qkv_bias
    shape = ModelShape(
        model_type=model_type,
        num_layers=_count(table, "num_hidden_layers", path),
        hidden_size=hidden,
        ffn_hidden_size=_count(table, "intermediate_size", path),
        num_attention_heads=heads,
        num_query_groups=_count(table, "num_key_value_heads", path, default=heads),
        head_dim=_count(table, "head_dim", path, default=architecture.head_dim or hidden // heads),
        vocab_size=_count(table, "vocab_size", path),
        max_position_embeddings=_count(table, "max_position_embeddings", path),
        rms_norm_eps=_number(table, "rms_norm_eps", path, default=1e-6),
        tied=bool(table.get("tie_word_embeddings")),
        qk_norm=architecture.qk_norm,
        qkv_bias=architecture.qkv_bias or bias,
        output_bias=bias,
        rope=_rope(table, path),
        experts=_experts(table, path) if architecture.moe else None,
    )
    _check_heads(shape, path)
    return shape


def _unsupported(path: Path, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{path}: {what} is not supported by --train-backend megatron, which trains "
        f"{', '.join(ARCHITECTURES)} (unquantised, full attention, SiLU, no dropout); give such a model, or "
        "--train-backend fsdp where that takes it"
    )


def _unsupported_features(table: Mapping[str, Any]) -> list[str]:
    found = []
    if table.get("quantization_config") is not None:
        found.append("quantization_config (quantised weights)")
    if (activation := table.get("hidden_act", "silu")) != "silu":
        found.append(f"hidden_act {activation!r}")
    window = table.get("use_sliding_window") and table.get("sliding_window") is not None
    if window or any(one != "full_attention" for one in table.get("layer_types") or ()):
        found.append("sliding-window attention (use_sliding_window, layer_types)")
    if dropout := table.get("attention_dropout"):
        found.append(f"attention_dropout {dropout}")
    if table.get("mlp_bias"):
        found.append("mlp_bias")
    return found


def _check_heads(shape: ModelShape, path: Path) -> None:
    heads, groups = shape.num_attention_heads, shape.num_query_groups
    if heads % groups:
        raise _unsupported(path, f"num_attention_heads {heads} that is no multiple of num_key_value_heads {groups}")
    if shape.head_dim % 2:
        raise _unsupported(path, f"an odd head_dim {shape.head_dim}, which rotary embeddings cannot pair,")


def _rope(table: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Put the old spelling (rope_theta, rope_scaling) and the new one (rope_parameters) into the new one."""
    # of both, the old one wins in transformers
    given = table.get("rope_scaling") or table.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise DataError(f"{path}: rope_parameters {given!r} is no table; copy the model again")
    if any(isinstance(one, dict) for one in given.values()):
        raise _unsupported(path, "rope_parameters for each type of layer")
    rope = {name: value for name, value in given.items() if name != "type"}
    rope.setdefault("rope_type", given.get("type", "default"))
    if rope["rope_type"] not in ROPE_TYPES:
        raise _unsupported(path, f"rope_type {rope['rope_type']!r} (of {', '.join(ROPE_TYPES)})")
    rope.setdefault("rope_theta", table.get("rope_theta", _DEFAULT_THETA))
    if rope.pop("partial_rotary_factor", table.get("partial_rotary_factor") or 1.0) != 1.0:
        raise _unsupported(path, "partial_rotary_factor other than 1")
    if rope["rope_type"] in _SCALED_ROPE:
        rope.setdefault("original_max_position_embeddings", table.get("max_position_embeddings"))
    for name in _rope_needs(rope["rope_type"]):
        _number(rope, name, path)
    return rope


def _rope_needs(rope_type: str) -> Sequence[str]:
    if rope_type == "llama3":
        return "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
    if rope_type == "yarn":
        return "rope_theta", "factor", "original_max_position_embeddings"
    return ("rope_theta", "factor") if rope_type == "linear" else ("rope_theta",)


def _experts(table: Mapping[str, Any], path: Path) -> ExpertShape | None:
    # transformers 5 writes num_local_experts where older versions wrote num_experts
    key = "num_experts" if "num_experts" in table else "num_local_experts"
    num_experts, top_k = _count(table, key, path), _count(table, "num_experts_per_tok", path)
    if top_k > num_experts:
        raise DataError(f"{path}: num_experts_per_tok {top_k} exceeds {key} {num_experts}; copy the model again")
    if top_k == 1 and table.get("norm_topk_prob"):
        raise _unsupported(path, "num_experts_per_tok 1 with norm_topk_prob")
    step = _count(table, "decoder_sparse_step", path, default=1)
    dense = table.get("mlp_only_layers") or ()
    layers = range(_count(table, "num_hidden_layers", path))
    sparse = tuple(one for one in layers if one not in dense and (one + 1) % step == 0)
    if not sparse:
        return None
    return ExpertShape(
        num_experts=num_experts,
        top_k=top_k,
        moe_ffn_hidden_size=_count(table, "moe_intermediate_size", path),
        norm_topk_prob=bool(table.get("norm_topk_prob")),
        sparse_layers=sparse,
    )


def _count(table: Mapping[str, Any], key: str, path: Path, *, default: int | None = None) -> int:
    value = table.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise DataError(f"{path}: {key} must be a whole number of 1 or more, and is {value!r}; copy the model again")
    return value


def _number(table: Mapping[str, Any], key: str, path: Path, *, default: float | None = None) -> float:
    value = table.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise DataError(f"{path}: {key} must be a number above 0, and is {value!r}; copy the model again")
    return float(value)
