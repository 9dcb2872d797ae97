"""Differences between what ranks found and what was expected, each as one number or a list of names."""

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from drivetrain_backend_api.testing.reference import TokenKey


def worst(differences: Iterable[float]) -> float:
    """Largest of some differences, nan when any of them is nan (which `max` would lose), 0 when there are none."""
    found = list(differences)
    return math.nan if any(math.isnan(one) for one in found) else max(found, default=0.0)


def scalars(found: Sequence[float], expected: Sequence[float]) -> float:
    """Largest difference, relative to the expected value where that is above 1; inf for another count."""
    if len(found) != len(expected):
        return float("inf")
    return worst(abs(one - other) / max(1.0, abs(other)) for one, other in zip(found, expected))


def relative(found: Sequence[float], expected: Sequence[float], floor: float) -> float:
    """Largest difference relative to the expected value, or to `floor` where that is larger; inf for another count."""
    if len(found) != len(expected):
        return float("inf")
    return worst(abs(one - other) / max(floor, abs(other)) for one, other in zip(found, expected))


def tensors(found: Mapping[Any, Tensor], expected: Mapping[Any, Tensor]) -> float:
    """Largest relative error of any tensor, in the Euclidean norm; inf when names or shapes differ."""
    if set(found) != set(expected) or any(found[name].shape != one.shape for name, one in expected.items()):
        return float("inf")
    return worst(
        float((found[name].double() - one.double()).norm() / (one.double().norm() or 1.0))
        for name, one in expected.items()
    )


def updates(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> float:
    """Relative error of the whole update from `before`, in the Euclidean norm; inf when names differ."""
    if not set(found) == set(expected) == set(before):
        return float("inf")
    off = sum(float((found[name].double() - one.double()).square().sum()) for name, one in expected.items())
    whole = sum(float((one.double() - before[name].double()).square().sum()) for name, one in expected.items())
    return float((off / whole) ** 0.5)


def values(found: Mapping[Any, Tensor], expected: Mapping[Any, Tensor]) -> float:
    """Largest difference of any element, relative to the expected one where that is above 1; inf for other keys."""
    if set(found) != set(expected) or any(found[name].shape != one.shape for name, one in expected.items()):
        return float("inf")
    parts = [(found[key] - one).abs() / one.abs().clamp(min=1) for key, one in expected.items() if one.numel()]
    return worst(float(one.max()) for one in parts)


def tokens(found: Mapping[TokenKey, Iterable[float]], expected: Mapping[TokenKey, float]) -> float:
    """Largest difference of any token's values, relative above 1; inf when tokens are missing or too many."""
    if set(found) != set(expected):
        return float("inf")
    return worst(abs(one - expected[key]) / max(1.0, abs(expected[key])) for key, ones in found.items() for one in ones)


def different(found: Any, expected: Any, name: str = "") -> list[str]:
    """Name every leaf of two nested results that is not equal bit for bit."""
    if isinstance(expected, Tensor):
        same = (
            isinstance(found, Tensor)
            and found.dtype == expected.dtype
            and found.shape == expected.shape
            and torch.equal(_bytes(found), _bytes(expected))
        )
        return [] if same else [name]
    if isinstance(expected, Mapping):
        if not isinstance(found, Mapping) or set(found) != set(expected):
            return [name or "names"]
        return [leaf for key in expected for leaf in different(found[key], expected[key], f"{name}.{key}".strip("."))]
    if isinstance(expected, list | tuple):
        if not isinstance(found, list | tuple) or len(found) != len(expected):
            return [name or "length"]
        return [
            leaf
            for place, (one, other) in enumerate(zip(found, expected))
            for leaf in different(one, other, f"{name}[{place}]")
        ]
    if isinstance(expected, float):
        return [] if isinstance(found, float) and struct.pack("d", found) == struct.pack("d", expected) else [name]
    return [] if found == expected else [name]


def _bytes(one: Tensor) -> Tensor:
    return one.detach().contiguous().reshape(-1).view(torch.uint8)


def merged_log_probs(results: Sequence[Mapping[str, Any]]) -> tuple[dict[int, Tensor], list[str]]:
    """Join the ranks' log-probs by sample index; also name the samples on which two ranks differ in any bit."""
    whole: dict[int, Tensor] = {}
    unequal = []
    for result in results:
        for index, one in zip(result["index"], result["values"], strict=True):
            if index in whole and different(one, whole[index]):
                unequal.append(f"sample {index}")
            whole.setdefault(index, one)
    return whole, unequal


def merged_tokens(results: Sequence[Mapping[str, Any]], column: str) -> dict[TokenKey, list[float]]:
    """Join what all ranks recorded of the loss tokens: every value seen of each."""
    whole: dict[TokenKey, list[float]] = {}
    for result in results:
        for one in result["seen"]:
            for index, position, value in zip(one["index"].tolist(), one["position"].tolist(), one[column].tolist()):
                whole.setdefault((one["step"], index, position), []).append(value)
    return whole
