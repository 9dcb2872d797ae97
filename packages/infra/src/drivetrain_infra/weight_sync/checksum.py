"""A checksum of tensors' bytes, computed where they live, so that trainer and engine can compare weights.

Guards against transport and ordering faults, not against an adversary. Knows no model, engine or transport.

Each tensor's bytes, zero-padded to 64-bit words w_0, w_1, ..., digest to sum_i mix(w_i + (i + 1) G) modulo 2^64, where
`mix` is the finaliser of SplitMix64 (Steele et al., "Fast splittable pseudorandom number generators", 2014). It is a
bijection, so one changed word always changes the digest; and it spreads every bit, the sign bits too, so that moved
words change it but for a negligible chance. An integer sum does not depend on its order, so GPU and CPU agree exactly.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from drivetrain_backend_api.weights import WeightEntry, unflatten

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_MASK = 2**64 - 1

_WORDS_AT_ONCE = 2**18
"""Words mixed in one go: bounds the extra memory to a few MiB whatever the tensor's size."""


def checksum_tensors(tensors: Iterable[Tensor]) -> int:
    """Return the checksum of tensors' bytes, in order.

    It depends on every byte, on the order of elements and of tensors, and on where one tensor ends; not on shape,
    dtype, strides or device. The data is not copied to the host.

    Returns: an int64, so it can travel in a tensor.
    """
    sizes, digests = [], []
    for tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        sizes.append(len(flat))
        digests.append(_digest(flat))
    total = 0
    for size, digest in zip(sizes, _to_host(digests), strict=True):
        total = _mix(total + digest + (size + 1) * _GOLDEN)
    return _signed(total)


def checksum_bucket(data: Tensor, entries: Sequence[WeightEntry]) -> int:
    """Return `checksum_tensors` of the tensors in a bucket; the bytes between them do not count.

    Args:
        data: uint8 [bucket bytes].
        entries: what it holds.
    """
    return checksum_tensors(tensor for _, tensor in unflatten(data, entries))


def _digest(flat: Tensor) -> Tensor:
    """Digest bytes, uint8 [N], into an int64 scalar on their device."""
    words = _words(flat)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    steps = torch.arange(1, min(len(words), _WORDS_AT_ONCE) + 1, device=flat.device) * _signed(_GOLDEN)
    for start in range(0, len(words), _WORDS_AT_ONCE):
        part = words[start : start + _WORDS_AT_ONCE]
        mixed = part + steps[: len(part)]
        mixed += _signed(start * _GOLDEN)
        mixed ^= _shift_right(mixed, 30)
        mixed *= _signed(_FIRST)
        mixed ^= _shift_right(mixed, 27)
        mixed *= _signed(_SECOND)
        mixed ^= _shift_right(mixed, 31)
        total += mixed.sum()
    return total


def _shift_right(words: Tensor, bits: int) -> Tensor:
    """Shift int64 words as if they were unsigned, which torch's own shift does not."""
    return (words >> bits).bitwise_and_(2 ** (64 - bits) - 1)


def _words(flat: Tensor) -> Tensor:
    """View bytes as int64 words, copying only where the length or the alignment forbids a view."""
    padding = -len(flat) % 8
    if padding:
        flat = torch.cat([flat, flat.new_zeros(padding)])
    elif flat.storage_offset() % 8:
        flat = flat.clone()
    return flat.view(torch.int64)


def _to_host(digests: Sequence[Tensor]) -> list[int]:
    """Fetch all digests in one copy."""
    return [int(one) for one in torch.stack(list(digests)).tolist()] if digests else []


def _mix(word: int) -> int:
    word &= _MASK
    word = (word ^ word >> 30) * _FIRST & _MASK
    word = (word ^ word >> 27) * _SECOND & _MASK
    return word ^ word >> 31


def _signed(word: int) -> int:
    """Map an integer modulo 2^64 to the int64 of the same bits."""
    word &= _MASK
    return word - 2**64 if word >= 2**63 else word
