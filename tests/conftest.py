"""For all tests: one torch thread a process, since several processes share few cores; and how to write docs anew."""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-docs", action="store_true", help="write the files that tests generate, instead of comparing with them"
    )
