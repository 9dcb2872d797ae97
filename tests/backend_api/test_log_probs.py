"""Chunked label log-probs and entropy against torch's log_softmax over full logits, gradients included."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain_backend_api.log_probs import Head, LabelLogProbs, label_log_probs

TOKENS, HIDDEN, VOCABULARY = 13, 6, 17

# Sums of a few dozen numbers in another order.
TOLERANCE = {torch.float64: {"rtol": 1e-11, "atol": 1e-12}, torch.float32: {"rtol": 2e-5, "atol": 2e-6}}


def inputs(dtype: torch.dtype, *, bias: bool = True) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    shift = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    return hidden, weight, shift if bias else None, labels


def by_full_logits(hidden: Tensor, head: Head, labels: Tensor, temperature: float) -> LabelLogProbs:
    logits = hidden @ head.weight.t()
    if head.bias is not None:
        logits = logits + head.bias
    logits = logits * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    everything = torch.log_softmax(logits / temperature, -1)
    return LabelLogProbs(
        log_probs=everything.gather(1, labels[:, None]).squeeze(1), entropy=-(everything.exp() * everything).sum(-1)
    )


def values_and_gradients(result: LabelLogProbs, leaves: list[Tensor], *, with_entropy: bool) -> list[Tensor]:
    weights = torch.linspace(-1, 2, TOKENS, dtype=result.log_probs.dtype)
    objective = (result.log_probs * weights).sum()
    found = [result.log_probs]
    if with_entropy:
        assert result.entropy is not None
        objective = objective + (result.entropy * weights.flip(0)).sum()
        found.append(result.entropy)
    return [*found, *torch.autograd.grad(objective, leaves)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize(
    ("bias", "scale", "softcap", "temperature"),
    [*product([True, False], [1.0], [None], [1.0]), (True, 0.25, None, 0.7), (True, 2.0, 3.0, 1.5)],
)
@pytest.mark.parametrize("chunk_size", [1, 5, TOKENS, 1000])
def test_values_and_gradients_equal_those_of_full_logits(
    dtype: torch.dtype,
    with_entropy: bool,
    bias: bool,
    scale: float,
    softcap: float | None,
    temperature: float,
    chunk_size: int,
) -> None:
    hidden, weight, shift, labels = inputs(dtype, bias=bias)
    head = Head(weight=weight, bias=shift, scale=scale, softcap=softcap)
    leaves = [hidden, weight] if shift is None else [hidden, weight, shift]
    result = label_log_probs(
        hidden, head, labels, temperature=temperature, chunk_size=chunk_size, with_entropy=with_entropy
    )
    assert result.log_probs.dtype == dtype
    found = values_and_gradients(result, leaves, with_entropy=with_entropy)
    expected = values_and_gradients(
        by_full_logits(hidden, head, labels, temperature), leaves, with_entropy=with_entropy
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **TOLERANCE[dtype])


def test_gradients_are_those_of_finite_differences() -> None:
    hidden, weight, bias, labels = inputs(torch.float64)

    def function(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        head = Head(weight=weight, bias=bias, scale=0.5, softcap=4.0)
        result = label_log_probs(hidden, head, labels, temperature=0.8, chunk_size=4, with_entropy=True)
        assert result.entropy is not None
        return result.log_probs, result.entropy

    assert torch.autograd.gradcheck(function, (hidden, weight, bias))


def test_bf16_on_a_cpu_multiplies_in_fp32_and_gives_bf16_gradients() -> None:
    hidden, weight, _, labels = inputs(torch.bfloat16, bias=False)
    result = label_log_probs(hidden, Head(weight=weight), labels, chunk_size=5)
    expected = torch.log_softmax(hidden.float() @ weight.float().t(), -1).gather(1, labels[:, None]).squeeze(1)
    assert result.log_probs.dtype == torch.float32
    torch.testing.assert_close(result.log_probs, expected, **TOLERANCE[torch.float32])
    gradients = torch.autograd.grad(result.log_probs.sum(), [hidden, weight])
    references = torch.autograd.grad(expected.sum(), [hidden, weight])
    for one, other in zip(gradients, references, strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)  # bf16 keeps 8 bits


@pytest.mark.parametrize("which", ["hidden", "weight", "bias"])
def test_a_frozen_part_gets_no_gradient_and_the_others_theirs(which: str) -> None:
    hidden, weight, bias, labels = inputs(torch.float64)
    parts = {"hidden": hidden, "weight": weight, "bias": bias}
    frozen = {name: part if name != which else part.detach() for name, part in parts.items() if part is not None}
    result = label_log_probs(frozen["hidden"], Head(weight=frozen["weight"], bias=frozen["bias"]), labels)
    result.log_probs.sum().backward()
    for name, part in frozen.items():
        assert (part.grad is None) == (name == which)


def test_the_entropy_alone_can_be_optimised() -> None:
    hidden, weight, _, labels = inputs(torch.float64, bias=False)
    result = label_log_probs(hidden, Head(weight=weight), labels, with_entropy=True)
    expected = by_full_logits(hidden, Head(weight=weight), labels, 1.0)
    assert result.entropy is not None
    assert expected.entropy is not None
    torch.testing.assert_close(
        torch.autograd.grad(result.entropy.sum(), hidden), torch.autograd.grad(expected.entropy.sum(), hidden)
    )


def test_tokens_ruled_out_by_an_infinite_bias_leave_everything_finite() -> None:
    hidden, weight, _, _ = inputs(torch.float64, bias=False)
    bias = torch.zeros(VOCABULARY, dtype=torch.float64)
    bias[4:] = -math.inf
    labels = torch.arange(TOKENS) % 4
    result = label_log_probs(hidden, Head(weight=weight, bias=bias), labels, with_entropy=True)
    assert result.entropy is not None
    kept = by_full_logits(hidden, Head(weight=weight[:4]), labels, 1.0)
    assert kept.entropy is not None
    torch.testing.assert_close(result.log_probs, kept.log_probs)
    torch.testing.assert_close(result.entropy, kept.entropy)
    found = torch.autograd.grad((result.log_probs + result.entropy).sum(), hidden)
    torch.testing.assert_close(found, torch.autograd.grad((kept.log_probs + kept.entropy).sum(), hidden))


def test_a_second_derivative_is_refused_instead_of_wrong() -> None:
    hidden, weight, _, labels = inputs(torch.float64, bias=False)
    result = label_log_probs(hidden, Head(weight=weight), labels)
    (gradient,) = torch.autograd.grad(result.log_probs.square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


class LargestTensor(TorchDispatchMode):
    """Sees every operator that runs, also in backward, and remembers the largest tensor that one returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for one in torch.utils._pytree.tree_leaves(result):
            if isinstance(one, Tensor):
                self.numel = max(self.numel, one.numel())
        return result


def test_the_full_logits_never_exist_forward_or_backward() -> None:
    tokens, chunk_size, vocabulary, hidden_size = 64, 8, 257, 4
    hidden = torch.randn(tokens, hidden_size, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weight = torch.randn(vocabulary, hidden_size, generator=torch.Generator().manual_seed(1)).requires_grad_()
    bias = torch.zeros(vocabulary).requires_grad_()
    labels = torch.arange(tokens)
    with LargestTensor() as full:
        by_full_logits(hidden, Head(weight=weight, bias=bias), labels, 1.0)
    assert full.numel >= tokens * vocabulary  # the watcher does see logits
    with LargestTensor() as chunked:
        result = label_log_probs(
            hidden, Head(weight=weight, bias=bias, softcap=5.0), labels, chunk_size=chunk_size, with_entropy=True
        )
        assert result.entropy is not None
        (result.log_probs + result.entropy).sum().backward()
    assert hidden.grad is not None
    assert chunked.numel <= chunk_size * vocabulary


def test_no_tokens_give_no_log_probs_and_zero_gradients() -> None:
    weight = torch.randn(5, 3).requires_grad_()
    result = label_log_probs(torch.empty(0, 3).requires_grad_(), Head(weight=weight), torch.empty(0, dtype=torch.int64))
    result.log_probs.sum().backward()
    assert result.log_probs.shape == (0,)
    assert weight.grad is not None
    assert not weight.grad.any()
