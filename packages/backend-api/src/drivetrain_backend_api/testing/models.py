"""Tiny Hugging Face model folders, made on the spot: dense architectures, tied and not, and mixtures of experts."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

VOCABULARY = 67
"""Odd, so that a vocabulary cut over ranks needs padding."""

PADDING = 5
"""The padding token of the models that have one, a token like others in rollouts."""

ARCHITECTURES = ("qwen3", "llama", "qwen2", "qwen3_moe")
"""Each is a model's name; with "-tied" behind it, embedding and head are one weight.

"qwen3_moe" is a mixture of experts in every block, where the weights of a token's two experts sum to 1;
"qwen3_moe-mixed" has one dense block, and the softmax's own weights.
"""


def tiny_config(model: str) -> PretrainedConfig:
    """Configure a model by its name: four blocks, for pipelines of four stages; four groups of two attention heads."""
    kind, _, variant = model.partition("-")
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
        "tie_word_embeddings": variant == "tied",
        # read it must be, and its embedding kept: transformers gives it no gradient there
        "pad_token_id": PADDING if kind == "llama" else None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if kind == "qwen3_moe":
        mixed = variant == "mixed"
        sizes |= {"mlp_only_layers": [1] if mixed else [], "norm_topk_prob": not mixed}
        sizes |= {"head_dim": 6, "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2}
        return Qwen3MoeConfig(**sizes)
    if kind == "qwen3":
        return Qwen3Config(head_dim=6, **sizes)  # of its norms' six values the last of four ranks holds none
    return LlamaConfig(**sizes) if kind == "llama" else Qwen2Config(**sizes)


def make_model(folder: Path, model: str, *, seed: int = 0, dtype: str = "float32") -> Path:
    """Save a random model whose weights are large enough for its log-probs to be far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    module = AutoModelForCausalLM.from_config(tiny_config(model))  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            centre = 1.0 if "norm" in name else 0.0
            parameter.copy_(centre + 0.12 * torch.randn(parameter.shape, generator=generator))
    module.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder
