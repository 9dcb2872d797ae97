"""What the tests of checkpoints save, known by the names of the tensors alone."""

import zlib

import torch
from torch import Tensor

STEPS, NEXT_ROLLOUT = 7, 5
KINDS = ("main", "exp_avg", "exp_avg_sq")


def hf_values(kind: str, name: str, size: tuple[int, ...]) -> Tensor:
    """What a whole Hugging Face tensor must hold."""
    values = torch.randn(size, generator=torch.Generator().manual_seed(zlib.crc32(f"{kind} {name}".encode())))
    return values.abs() if kind == "exp_avg_sq" else values
