"""Rotary frequencies by Hugging Face's own rules (linear, llama3, yarn), and their angles at given positions.

Knows no model and no rank.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotary position embedding of one model.

    Attributes:
        inverse_frequencies: float32 [D / 2].
        scaling: factor on cosine and sine (yarn); 1 otherwise.
    """

    inverse_frequencies: Tensor
    scaling: float

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine, float32 [T, 1, D], at int64 positions [T]."""
        frequencies = self.inverse_frequencies.to(positions.device)
        half = positions.float()[:, None] * frequencies[None]
        whole = torch.cat((half, half), dim=-1)[:, None]
        return whole.cos() * self.scaling, whole.sin() * self.scaling


def read_rotary(folder: Path) -> Rotary:
    """Compute the frequencies that the configuration of a model folder asks for."""
    config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True)
    parameters: dict[str, Any] = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind != "default":
        frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        return Rotary(inverse_frequencies=frequencies.float(), scaling=float(scaling))
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    return Rotary(inverse_frequencies=1.0 / (parameters["rope_theta"] ** exponents), scaling=1.0)
