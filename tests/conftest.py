"""For all tests: one torch thread a process, since several share few cores; signals; how to write docs anew."""

import os
import signal

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's background job has it, and its children would
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-docs", action="store_true", help="write the files that tests generate, instead of comparing with them"
    )
