"""Packed attention against softmax written out, sequence by sequence."""

import math

import pytest
import torch
from torch import Tensor

from drivetrain_backend_api.attention import Kernel, choose_kernel, packed_causal_attention, packed_sequences
from drivetrain_backend_api.errors import ConfigError

SIZE = 8


def written_out(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float) -> Tensor:
    """Attend causally in each sequence; every key head serves neighbouring query heads."""
    served = query.shape[1] // key.shape[1]
    outs = []
    for q, k, v in zip(*(torch.split(one, lengths) for one in (query, key, value)), strict=True):
        k, v = k.repeat_interleave(served, 1), v.repeat_interleave(served, 1)
        scores = scale * torch.einsum("qhd,khd->hqk", q, k)
        future = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        outs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -math.inf).softmax(-1), v))
    return torch.cat(outs)


@pytest.mark.parametrize("lengths", [[9], [1, 1, 1], [5, 11, 1, 8, 10]], ids=str)
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_each_sequence_attends_to_its_own_past(
    lengths: list[int], heads: int, key_heads: int, scale: float | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = sum(lengths)
    leaves = [
        torch.randn(tokens, many, SIZE, generator=generator, dtype=torch.float64).requires_grad_()
        for many in (heads, key_heads, key_heads)
    ]
    boundaries = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    packed = packed_sequences(boundaries, max(lengths), Kernel.PER_SEQUENCE)
    found = packed_causal_attention(*leaves, packed, scale=scale)
    expected = written_out(*leaves, lengths, SIZE**-0.5 if scale is None else scale)
    assert found.shape == (tokens, heads, SIZE)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)  # sums of a few dozen numbers in another order
    weights = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    for one, other in zip(
        torch.autograd.grad((found * weights).sum(), leaves),
        torch.autograd.grad((expected * weights).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "kernel"),
    [
        ("cuda", torch.bfloat16, 128, Kernel.VARLEN),
        ("cuda", torch.float32, 128, Kernel.PER_SEQUENCE),
        ("cuda", torch.bfloat16, 100, Kernel.PER_SEQUENCE),
        ("cpu", torch.bfloat16, 128, Kernel.PER_SEQUENCE),
    ],
)
def test_the_fused_kernel_is_chosen_where_it_can_run(
    device: str, dtype: torch.dtype, head_dim: int, kernel: Kernel
) -> None:
    assert choose_kernel("auto", device=torch.device(device), dtype=dtype, head_dim=head_dim) is kernel


def test_the_fused_kernel_is_refused_where_it_cannot_run() -> None:
    with pytest.raises(ConfigError, match=r"--attention-backend varlen needs a CUDA device.*not cpu"):
        choose_kernel("varlen", device=torch.device("cpu"), dtype=torch.bfloat16, head_dim=128)
