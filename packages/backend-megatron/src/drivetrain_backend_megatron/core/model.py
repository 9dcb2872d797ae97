"""The causal language model as Megatron builds it: chunks of a pipeline stage, wrapped for data parallelism."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from drivetrain_backend_megatron.architectures import ModelShape
from drivetrain_backend_megatron.attention import PackedTokens
from drivetrain_backend_megatron.config import MegatronConfig
from drivetrain_backend_megatron.core.layers import block_spec
from drivetrain_backend_megatron.name_map import global_name

Chunks = Sequence[DistributedDataParallel]
"""The model chunks of a pipeline stage, wrapped for data parallelism."""


@dataclass
class _TokensOfBatch(PackedSeqParams):  # type: ignore[misc]
    """Megatron hands this from the model's input to every attention core."""

    tokens: PackedTokens | None = None


class CausalLM(GPTModel):  # type: ignore[misc]
    """A chunk of the model that ends in hidden states: logits are made, in pieces, by whoever needs log-probs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pad_token: int | None = None
        if self.post_process:
            # called as a module, so that the hook waits which gathers updated weights
            self.output_layer.forward = lambda weight: self.output_layer.weight if weight is None else weight

    def forward(self, input_ids: Tensor, tokens: PackedTokens) -> Tensor:
        """Run this chunk.

        Args:
            input_ids: int64 [1, T] of this context-parallel rank; read where the pipeline begins.
            tokens: of the micro-batch.

        Returns: [T, 1, H]; under sequence parallelism this rank's part of T.
        """
        hidden = self._embedded(input_ids) if self.pre_process else None
        out: Tensor = self.decoder(
            hidden_states=hidden,
            attention_mask=None,
            packed_seq_params=_TokensOfBatch(qkv_format="thd", tokens=tokens),
        )
        return out

    def _embedded(self, input_ids: Tensor) -> Tensor:
        hidden: Tensor = self.embedding(input_ids=input_ids, position_ids=None)
        if self.pad_token is None:
            return hidden
        is_padding = input_ids.view(-1) == self.pad_token
        if self.config.sequence_parallel:
            is_padding = is_padding.view(parallel_state.get_tensor_model_parallel_world_size(), -1)[
                parallel_state.get_tensor_model_parallel_rank()
            ]
        # as Hugging Face models do, which keep the padding token's row: where it is zero, its norm's gradient is huge
        return torch.where(is_padding[:, None, None], hidden.detach(), hidden)

    def head_weight(self) -> Tensor:
        """This rank's rows of the head, [V padded / tp, H]."""
        shared = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        weight: Tensor = self.output_layer(shared)
        return weight


def transformer_config(shape: ModelShape, config: MegatronConfig, *, dtype: torch.dtype) -> TransformerConfig:
    """Say in Megatron's words what the model is and how it is cut."""
    chunks = config.model_chunks(shape.num_layers)
    full = config.recompute_granularity == "full"
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.head_dim,
        layernorm_epsilon=shape.rms_norm_eps,
        normalization="RMSNorm",
        qk_layernorm=shape.qk_norm,
        add_qkv_bias=shape.qkv_bias,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        context_parallel_size=config.context_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=1,
        sequence_parallel=config.sequence_parallel,
        # packed micro-batches differ in length: stages tell each other the shapes first
        variable_seq_lengths=config.pipeline_model_parallel_size > 1,
        # between two stages, both sends go to the same rank: batched, forward and backward could change places
        overlap_p2p_comm=chunks > 1,
        batch_p2p_comm=chunks == 1,
        recompute_granularity=None if config.recompute_granularity == "none" else config.recompute_granularity,
        recompute_method=(config.recompute_method or "uniform") if full else None,
        recompute_num_layers=(config.recompute_num_layers or 1) if full else None,
        transformer_impl="transformer_engine" if config.transformer_impl == "transformer_engine" else "local",
        # weights always come from a folder
        use_cpu_initialization=True,
        perform_initialization=False,
        # what these fuse needs Apex, Transformer Engine or a compiler
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        # a loss is a sum over global denominators: nothing divides it again
        calculate_per_token_loss=True,
        **_expert_settings(shape),
        **_no_cuda_graphs(),
    )


def _no_cuda_graphs() -> dict[str, Any]:
    """Leave out the default, which Megatron remarks on: there is no CUDA graph to have parts."""
    names = {one.name for one in fields(TransformerConfig)}
    # renamed; the older name goes away with megatron-core 0.17
    return {"cuda_graph_modules" if "cuda_graph_modules" in names else "cuda_graph_scope": []}


def _expert_settings(shape: ModelShape) -> dict[str, Any]:
    # the only dispatcher that takes micro-batches of varying length; dense models are asked for it too
    settings: dict[str, Any] = {"moe_token_dispatcher_type": "alltoall"}
    if shape.experts is None:
        return settings
    return settings | {
        "num_moe_experts": shape.experts.num_experts,
        "moe_router_topk": shape.experts.top_k,
        "moe_ffn_hidden_size": shape.experts.moe_ffn_hidden_size,
        # a softmax over the chosen ones alone is a softmax over all, renormalised
        "moe_router_pre_softmax": not shape.experts.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": False,
    }


def build_chunks(
    shape: ModelShape,
    config: MegatronConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    padded_vocab: int,
    pad_token: int | None = None,
) -> list[CausalLM]:
    """Build this rank's part of the model, with weights that mean nothing yet.

    Args:
        pad_token: whose embedding gets no gradient where it is read, as in Hugging Face's models; None for none.
    """
    settings = transformer_config(shape, config, dtype=dtype)
    count = config.model_chunks(shape.num_layers)
    chunks = []
    for index in range(count):
        chunk = index if count > 1 else None
        chunks.append(
            CausalLM(
                config=settings,
                transformer_layer_spec=block_spec(settings, shape, chunk),
                vocab_size=padded_vocab,
                max_sequence_length=shape.max_position_embeddings,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
                share_embeddings_and_output_weights=shape.tied,
                # positions are rotated in the attention core
                position_embedding_type="none",
                vp_stage=chunk,
            ).to(device)
        )
        chunks[-1].pad_token = pad_token
    return chunks


def wrap(chunks: Sequence[CausalLM], config: MegatronConfig) -> list[DistributedDataParallel]:
    """Give the chunks flat weight and fp32 gradient buffers that data-parallel ranks reduce and gather."""
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=config.overlap_grad_reduce,
        overlap_param_gather=config.overlap_param_gather,
    )
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if ".experts." in name:
                # tensor-parallel ranks hold replicas of whole experts; Megatron marks that only where ep is over 1
                setattr(parameter, "allreduce", False)  # noqa: B010 - unknown to types
    return [
        DistributedDataParallel(chunk.config, settings, chunk, disable_bucketing=place > 0)
        for place, chunk in enumerate(chunks)
    ]


def named_parameters(chunks: Sequence[CausalLM]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield this rank's parameters under global names: layers and experts are numbered as in the whole model."""
    rank, ranks = (
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_world_size(),
    )
    for chunk in chunks:
        first_expert = rank * ((chunk.config.num_moe_experts or 0) // ranks)
        # a stage without layers has none to number
        first_layer = chunk.decoder.layers[0].layer_number - 1 if len(chunk.decoder.layers) else 0
        for name, parameter in chunk.named_parameters():
            yield global_name(name, first_layer=first_layer, first_expert=first_expert), parameter


def whole_tokens(hidden: Tensor, *, sequence_parallel: bool) -> Tensor:
    """Bring the last layer's output to where each tensor-parallel rank works on some of the vocabulary.

    Args:
        hidden: [T, 1, H], or this rank's part of T under sequence parallelism.
        sequence_parallel: whether it is.

    Returns: [T, H] on every rank; in the backward pass the ranks' gradients are summed.
    """
    if sequence_parallel:
        whole: Tensor = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
    else:
        whole = copy_to_tensor_model_parallel_region(hidden)
    return whole.squeeze(1)
