"""Layers without Transformer Engine: norm, attention core, and the specs that put them into Megatron's own modules."""

from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor

from drivetrain_backend_megatron.architectures import ModelShape
from drivetrain_backend_megatron.attention import packed_attention


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm, rounded as Hugging Face rounds it: statistics in fp32, then cast, then scaled."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # each tensor-parallel rank normalises its own tokens only; the mark has the gradients summed
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 - unknown to types

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise the last dimension."""
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(hidden.dtype)


class CoreAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention over packed sequences; positions are rotated here, by each token's own position."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale or config.kv_channels**-0.5

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, packed_seq_params: Any, **_: Any
    ) -> Tensor:
        """Attend; [T, heads, size] each."""
        return packed_attention(query, key, value, packed_seq_params.tokens, scale=self.scale)


class BiasedRowParallelLinear(RowParallelLinear):  # type: ignore[misc]
    """An output projection with a bias, where Megatron has one setting for the biases of all layers."""

    def __init__(self, *args: Any, bias: bool, **kwargs: Any) -> None:
        super().__init__(*args, bias=True, **kwargs)


def block_spec(config: TransformerConfig, shape: ModelShape, chunk: int | None) -> TransformerBlockSubmodules:
    """Specify the layers that this pipeline stage builds, and the final norm.

    Args:
        config: Megatron's.
        shape: of the model.
        chunk: which of the stage's model chunks; None where there is one.
    """
    offset = get_transformer_layer_offset(config, vp_stage=chunk)
    count = get_num_layers_to_build(config, vp_stage=chunk)
    layers = [
        _layer_spec(config, shape, sparse=index in shape.sparse_layers) for index in range(offset, offset + count)
    ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _layer_spec(config: TransformerConfig, shape: ModelShape, *, sparse: bool) -> ModuleSpec:
    qk_norm = RMSNorm if config.qk_layernorm else IdentityOp
    column, row = _linear_layers(config)
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=column,
            core_attention=CoreAttention,
            linear_proj=BiasedRowParallelLinear if shape.output_bias else row,
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )
    moe = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts) if sparse else None
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=moe or _dense_mlp(column, row),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _linear_layers(config: TransformerConfig) -> tuple[type, type]:
    """Return the column-parallel and the row-parallel linear layer."""
    if config.transformer_impl == "local":
        return ColumnParallelLinear, RowParallelLinear
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

    return TEColumnParallelLinear, TERowParallelLinear


def _dense_mlp(column: type, row: type) -> Any:
    submodules = MLPSubmodules(linear_fc1=column, linear_fc2=row)
    # a layer takes a builder since it has this method; the spec goes away with megatron-core 0.17
    if hasattr(MLP, "as_mlp_submodule"):
        return partial(MLP.as_mlp_submodule, submodules=submodules)
    return ModuleSpec(module=MLP, submodules=submodules)
