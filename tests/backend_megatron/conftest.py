"""Marks as `exhaustive` what the suite's classes leave to runs by hand: see `in_ci` in `test_conformance`."""

import zlib
from collections import defaultdict
from typing import Any

import pytest


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep of each test of a class with `in_ci` so many runs, evenly spread; where they begin differs by test."""
    runs = defaultdict[Any, list[pytest.Item]](list)
    for item in items:
        if hasattr(getattr(item, "cls", None), "in_ci"):
            runs[item.cls, item.originalname].append(item)  # type: ignore[attr-defined]
    for (suite, test), found in runs.items():
        count = suite.in_ci.get(test, suite.in_ci["others"])
        first = zlib.crc32(test.encode())
        kept = {(first + turn * len(found) // count) % len(found) for turn in range(count)}
        for place, item in enumerate(found):
            if place not in kept:
                item.add_marker(pytest.mark.exhaustive)
