"""The weight checksum against its definition in plain integers, and the faults it must notice."""

import itertools

import pytest
import torch
from torch import Tensor

from drivetrain_backend_api.weights import flatten, plan_buckets
from drivetrain_infra.weight_sync.checksum import checksum_bucket, checksum_tensors

MASK = 2**64 - 1


def mix(word: int) -> int:
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & MASK
    word = (word ^ word >> 27) * 0x94D049BB133111EB & MASK
    return word ^ word >> 31


def reference(*parts: bytes) -> int:
    golden, total = 0x9E3779B97F4A7C15, 0
    for part in parts:
        padded = part + bytes(-len(part) % 8)
        words = [int.from_bytes(padded[at : at + 8], "little") for at in range(0, len(padded), 8)]
        digest = sum(mix(word + (place + 1) * golden & MASK) for place, word in enumerate(words))
        total = mix(total + digest + (len(part) + 1) * golden & MASK)
    return int.from_bytes(total.to_bytes(8, "little"), "little", signed=True)


def test_the_reference_is_splitmix64() -> None:
    assert mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # its published first output from state 0


def random_bytes(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 64, 2**21 + 13])
def test_agrees_with_its_definition_at_every_kind_of_length(count: int) -> None:
    data = random_bytes(count)
    assert checksum_tensors([data]) == reference(bytes(data.numpy()))


def test_several_tensors_agree_with_the_definition() -> None:
    parts = [random_bytes(count, seed=count) for count in (5, 0, 16, 33)]
    assert checksum_tensors(parts) == reference(*(bytes(one.numpy()) for one in parts))
    assert checksum_tensors([]) == 0


def test_every_flipped_bit_changes_it() -> None:
    data = random_bytes(43)
    sums = {checksum_tensors([data])}
    for place, bit in itertools.product(range(43), range(8)):
        flipped = data.clone()
        flipped[place] ^= 1 << bit
        sums.add(checksum_tensors([flipped]))
    assert len(sums) == 1 + 43 * 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_swapped_pair_changes_it_also_one_that_differs_in_sign_only(dtype: torch.dtype) -> None:
    values = torch.tensor([1.5, -1.5, 0.0, -0.0, 3.0, -3.0, 1e-30, 2.0, -2.0, 0.5, -0.5, 7.0], dtype=dtype)
    sums = {checksum_tensors([values])}
    pairs = list(itertools.combinations(range(len(values)), 2))
    for one, other in pairs:
        swapped = values.clone()
        swapped[one], swapped[other] = values[other].clone(), values[one].clone()
        sums.add(checksum_tensors([swapped]))
    assert len(sums) == 1 + len(pairs)


def test_order_and_borders_of_tensors_count() -> None:
    one, other = random_bytes(16, seed=1), random_bytes(16, seed=2)
    sums = {
        checksum_tensors(parts)
        for parts in ([one, other], [other, one], [torch.cat([one, other])], [one[:8], torch.cat([one[8:], other])])
    }
    assert len(sums) == 4


def test_trailing_zeros_count() -> None:
    assert len({checksum_tensors([torch.zeros(count)]) for count in range(5)}) == 5


def test_strides_shape_and_alignment_do_not_count() -> None:
    matrix = torch.arange(24, dtype=torch.float32).view(4, 6)
    expected = checksum_tensors([matrix])
    assert checksum_tensors([matrix.t().contiguous().t()]) == expected
    assert checksum_tensors([matrix.flatten()]) == expected
    assert checksum_tensors([torch.cat([torch.zeros(1), matrix.flatten()])[1:]]) == expected


def test_a_bucket_has_the_checksum_of_its_tensors_whatever_lies_between_them() -> None:
    generator = torch.Generator().manual_seed(3)
    tensors = {
        "a": torch.randn(3, 5, generator=generator).bfloat16(),
        "b": torch.randn(7, generator=generator),
        "scalar": torch.tensor(3.5),
        "c": torch.randn(2, 3, generator=generator).half(),
        "steps": torch.arange(3),
    }
    plan = plan_buckets([(name, tuple(one.shape), one.dtype, 0) for name, one in tensors.items()], 2**20)
    data = flatten(tensors.values(), plan.entries, device="cpu")
    expected = checksum_tensors(tensors.values())
    assert checksum_bucket(data, plan.entries) == expected
    data[plan.entries[0].offset + plan.entries[0].nbytes] = 99  # padding before the next tensor
    assert checksum_bucket(data, plan.entries) == expected
    data[plan.entries[1].offset] ^= 1
    assert checksum_bucket(data, plan.entries) != expected


def test_fits_an_int64_tensor() -> None:
    sums = [checksum_tensors([random_bytes(8, seed=seed)]) for seed in range(32)]
    assert torch.tensor(sums, dtype=torch.int64).tolist() == sums
    assert min(sums) < 0 < max(sums)
