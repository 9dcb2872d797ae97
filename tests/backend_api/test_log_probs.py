"""Chunked label log-probs and entropy against torch's log_softmax over full logits, gradients included.

Run as a script, this file is one rank of the gloo groups over which a vocabulary is cut.
"""

import math
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain_backend_api.algorithm import HiddenOutput
from drivetrain_backend_api.errors import DrivetrainError
from drivetrain_backend_api.log_probs import Head, LabelLogProbs, VocabShard, label_log_probs

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
    """Sees every operator that runs, also in backward: the largest tensor that one returned, and all-reduces."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0
        self.all_reduces = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.all_reduces += "allreduce" in str(function)
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


# -- a vocabulary that is cut over ranks -------------------------------------------------------------------------------

VOCAB_SIZE = 67
PADDED = {1: [67, 80], 2: [68, 80, 136], 4: [68, 80, 92]}
"""Rows by number of ranks: hardly any padding, much of it, and (for several ranks) a last rank of nothing else."""
CUT_TOKENS, CUT_HIDDEN = 23, 8


@dataclass(frozen=True, kw_only=True)
class Cut:
    """One problem that all ranks solve together."""

    padded: int
    dtype: torch.dtype = torch.float64
    with_entropy: bool = True
    bias: bool = True
    ruled_out: bool = False
    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0
    chunk_size: int = 5
    tokens: int = CUT_TOKENS


def cuts(size: int) -> dict[str, Cut]:
    cases = {}
    for padded in PADDED[size]:
        cases |= {
            f"{padded} rows": Cut(padded=padded),
            f"{padded} rows fp32": Cut(padded=padded, dtype=torch.float32),
            f"{padded} rows log-probs alone": Cut(padded=padded, bias=False, with_entropy=False, chunk_size=CUT_TOKENS),
            f"{padded} rows hot": Cut(padded=padded, temperature=1.7, chunk_size=1000),
            f"{padded} rows capped": Cut(padded=padded, temperature=0.6, scale=0.5, softcap=4.0, chunk_size=7),
            f"{padded} rows ruled out": Cut(padded=padded, ruled_out=True, chunk_size=8),
            f"{padded} rows no tokens": Cut(padded=padded, tokens=0),
        }
    return cases


def cut_inputs(cut: Cut) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Hidden states, whole weight and bias with padding that would win every softmax, and labels at all borders."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(cut.tokens, CUT_HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(cut.padded, CUT_HIDDEN, generator=generator, dtype=torch.float64)
    bias = torch.randn(cut.padded, generator=generator, dtype=torch.float64)
    weight[VOCAB_SIZE:] *= 50
    bias[VOCAB_SIZE:] = 1000
    borders = [0, VOCAB_SIZE - 1, 16, 17, 19, 20, 22, 23, 33, 34, 39, 40, 45, 46, 50, 51, 59, 60]
    labels = torch.cat([torch.tensor(borders), torch.randint(VOCAB_SIZE, (CUT_TOKENS,), generator=generator)])
    labels = labels[: cut.tokens]
    if cut.ruled_out:  # all that the ranks but the first hold
        bias[9:VOCAB_SIZE] = -math.inf
        labels = labels % 9
    return hidden.to(cut.dtype), weight.to(cut.dtype), bias.to(cut.dtype) if cut.bias else None, labels


def solve(cut: Cut, hidden: Tensor, weight: Tensor, bias: Tensor | None, shard: VocabShard | None) -> dict[str, Tensor]:
    """Values, and the gradients of one loss of them that every rank computes alike."""
    leaves = {"hidden": hidden, "weight": weight} | ({} if bias is None else {"bias": bias})
    leaves = {name: one.clone().requires_grad_() for name, one in leaves.items()}
    result = label_log_probs(
        leaves["hidden"],
        Head(weight=leaves["weight"], bias=leaves.get("bias"), scale=cut.scale, softcap=cut.softcap),
        cut_inputs(cut)[3],
        temperature=cut.temperature,
        chunk_size=cut.chunk_size,
        with_entropy=cut.with_entropy,
        shard=shard,
    )
    weights = torch.linspace(-1, 2, cut.tokens, dtype=cut.dtype)
    objective = (result.log_probs * weights).sum()
    found = {"log_probs": result.log_probs.detach()}
    if result.entropy is not None:
        objective = objective + (result.entropy * weights.flip(0)).sum()
        found["entropy"] = result.entropy.detach()
    gradients = torch.autograd.grad(objective, list(leaves.values()))
    return found | {f"gradient of {name}": one for name, one in zip(leaves, gradients, strict=True)}


def solve_cut(cut: Cut, shard: VocabShard) -> dict[str, Tensor]:
    hidden, weight, bias, _ = cut_inputs(cut)
    mine = slice(shard.rank * cut.padded // shard.size, (shard.rank + 1) * cut.padded // shard.size)
    return solve(cut, hidden, weight[mine], None if bias is None else bias[mine], shard)


def solve_whole(cut: Cut) -> dict[str, Tensor]:
    hidden, weight, bias, _ = cut_inputs(cut)
    return solve(cut, hidden, weight[:VOCAB_SIZE], None if bias is None else bias[:VOCAB_SIZE], None)


def costs(shard: VocabShard) -> dict[str, int]:
    """What 64 tokens in chunks of 8 take of a head of 4 x 64 rows on each rank."""
    hidden = torch.randn(64, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weight = torch.randn(256, 4, generator=torch.Generator().manual_seed(1 + shard.rank)).requires_grad_()
    with LargestTensor() as forward:
        result = label_log_probs(
            hidden, Head(weight=weight), torch.arange(64), chunk_size=8, with_entropy=True, shard=shard
        )
    assert result.entropy is not None
    with LargestTensor() as backward:
        (result.log_probs + result.entropy).sum().backward()
    return {
        "largest": max(forward.numel, backward.numel),
        "forward": forward.all_reduces,
        "backward": backward.all_reduces,
    }


def found_by(shard: VocabShard) -> dict[str, Any]:
    found: dict[str, Any] = {
        "cuts": {name: solve_cut(cut, shard) for name, cut in cuts(shard.size).items()},
        "costs": costs(replace(shard, vocab_size=shard.size * 256)),
    }
    if shard.size > 1:
        head, labels = Head(weight=torch.ones(68 // shard.size, 2)), torch.tensor([0, VOCAB_SIZE, -100])
        found["unknown"] = label_log_probs(torch.ones(3, 2), head, labels, shard=shard).log_probs
    return found


def one_of_four_ranks(rank: int, store: str, result: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    found = {}
    for size in PADDED:
        group = dist.new_group(list(range(size)))
        if rank < size:
            found[size] = found_by(VocabShard(group=group, rank=rank, size=size, vocab_size=VOCAB_SIZE))
    torch.save(found, result)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What each rank found, by size of the group; launched once for all tests, and a hang ends at the deadline."""
    folder = tmp_path_factory.mktemp("four_ranks")
    processes = []
    for rank in range(4):
        with (folder / f"{rank}.log").open("wb") as log:
            command = [sys.executable, __file__, str(rank), str(folder / "store"), str(folder / f"{rank}.pt")]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
    try:
        for rank, process in enumerate(processes):
            assert process.wait(timeout=300) == 0, (folder / f"{rank}.log").read_text()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(4)]
    return {size: [one[size] for one in found[:size]] for size in PADDED}


CUT_CASES = [(size, name) for size in PADDED for name in cuts(size)]
CUT_IDS = [f"{size}-{name.replace(' ', '-')}" for size, name in CUT_CASES]


@pytest.mark.parametrize(("size", "name"), CUT_CASES, ids=CUT_IDS)
def test_a_cut_vocabulary_gives_what_a_whole_one_gives(
    ranks: dict[int, list[dict[str, Any]]], size: int, name: str
) -> None:
    cut = cuts(size)[name]
    expected = solve_whole(cut)
    found = [rank["cuts"][name] for rank in ranks[size]]
    tolerance = TOLERANCE[cut.dtype]
    for kind in {"log_probs", "entropy"} & set(expected):
        for one in found:
            assert torch.equal(one[kind], found[0][kind]), f"{kind} differ between ranks"
        torch.testing.assert_close(found[0][kind], expected[kind], **tolerance)
    torch.testing.assert_close(
        torch.stack([one["gradient of hidden"] for one in found]).sum(0), expected["gradient of hidden"], **tolerance
    )
    for kind in {"gradient of weight", "gradient of bias"} & set(expected):
        whole = torch.cat([one[kind] for one in found])
        assert len(whole) == cut.padded
        torch.testing.assert_close(whole[:VOCAB_SIZE], expected[kind], **tolerance)
        assert not whole[VOCAB_SIZE:].any(), f"padding has a {kind}"


@pytest.mark.parametrize("size", list(PADDED))
def test_a_cut_vocabulary_takes_two_all_reduces_a_chunk_and_no_more_memory(
    ranks: dict[int, list[dict[str, Any]]], size: int
) -> None:
    for rank in ranks[size]:
        assert rank["costs"]["forward"] == (2 * 64 // 8 if size > 1 else 0)
        assert rank["costs"]["backward"] == 0
        assert rank["costs"]["largest"] <= 8 * 256


@pytest.mark.parametrize("size", [one for one in PADDED if one > 1])
def test_a_label_that_is_no_token_has_no_log_prob(ranks: dict[int, list[dict[str, Any]]], size: int) -> None:
    for rank in ranks[size]:
        assert rank["unknown"].isnan().tolist() == [False, True, True]


def test_padding_of_a_single_rank_needs_no_group_and_gives_the_bits_of_a_head_without_it() -> None:
    cut = Cut(padded=80)
    found = solve_cut(cut, VocabShard(group=None, rank=0, size=1, vocab_size=VOCAB_SIZE))
    for kind, expected in solve_whole(cut).items():
        of_tokens = found[kind] if kind == "gradient of hidden" else found[kind][:VOCAB_SIZE]
        assert torch.equal(of_tokens, expected), kind
    assert not found["gradient of weight"][VOCAB_SIZE:].any()


def test_a_hidden_output_hands_its_shard_on() -> None:
    cut = Cut(padded=80)
    hidden, weight, _, labels = cut_inputs(cut)
    shard = VocabShard(group=None, rank=0, size=1, vocab_size=VOCAB_SIZE)
    found = HiddenOutput(
        hidden=hidden, head=Head(weight=weight), labels=labels, temperature=0.9, chunk_size=5, shard=shard
    ).label_log_probs()
    expected = label_log_probs(hidden, Head(weight=weight[:VOCAB_SIZE]), labels, temperature=0.9, chunk_size=5)
    assert torch.equal(found.log_probs, expected.log_probs)


def test_a_cut_without_a_group_is_refused() -> None:
    with pytest.raises(DrivetrainError, match="cut over 2 ranks needs their process group"):
        VocabShard(group=None, rank=0, size=2, vocab_size=VOCAB_SIZE)


def test_fewer_rows_than_tokens_are_refused() -> None:
    shard = VocabShard(group=None, rank=0, size=1, vocab_size=VOCAB_SIZE)
    with pytest.raises(DrivetrainError, match="1 x 66 rows of the head cannot hold a vocabulary of 67"):
        label_log_probs(torch.ones(1, 2), Head(weight=torch.ones(66, 2)), torch.tensor([0]), shard=shard)


if __name__ == "__main__":
    one_of_four_ranks(int(sys.argv[1]), sys.argv[2], sys.argv[3])
