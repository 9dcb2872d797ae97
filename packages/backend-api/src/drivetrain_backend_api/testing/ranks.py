"""Real processes for the tests: a rank server in the background, and jobs that it runs on so many ranks.

Every wait has a deadline; only own children are killed.
"""

import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

START_DEADLINE = 180.0
"""Seconds in which a backend must be imported."""

JOB_DEADLINE = 120.0
"""Seconds that one job may take."""

GRACE = 5.0
"""Seconds that the other ranks get to end after one has failed, before they are killed."""


@dataclass(frozen=True, kw_only=True)
class RankError:
    """The exception that ended one rank."""

    rank: int
    kind: str
    message: str
    traceback: str
    time: float


class RanksFailedError(AssertionError):
    """A job whose ranks did not all return.

    Attributes:
        errors: of the ranks that raised, the first one first.
        ended: rank -> seconds after the start at which it ended by itself.
        killed: True when some rank had to be killed.
    """

    def __init__(self, message: str, *, errors: Sequence[RankError], ended: Mapping[int, float], killed: bool) -> None:
        super().__init__(message)
        self.errors, self.ended, self.killed = list(errors), dict(ended), killed


class Ranks:
    """Runs jobs for one backend; a context manager."""

    def __init__(self, backend: str, environment: Mapping[str, str]) -> None:
        self._backend = backend
        self._environment = environment
        self._folder = tempfile.TemporaryDirectory(prefix="conformance-", ignore_cleanup_errors=True)
        self.folder = Path(self._folder.name)
        self._server: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str] = queue.Queue()  # of the present server
        self._jobs = 0

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._folder.cleanup()

    def run(
        self,
        ranks: int,
        *,
        options: Mapping[str, Any],
        actions: Sequence[Mapping[str, Any]],
        deadline: float = JOB_DEADLINE,
        grace: float = GRACE,
    ) -> list[dict[str, Any]]:
        """Play actions on fresh processes; returns each rank's results, in rank order.

        Raises:
            RanksFailedError: a rank raised, or the deadline passed; shows the first error and where each rank stood.
        """
        try:
            return self._run(ranks, options, actions, deadline, grace)
        except RanksFailedError as error:
            if not any("address already in use" in one.message.lower() for one in error.errors):
                raise
        return self._run(ranks, options, actions, deadline, grace)  # somebody took the port first

    def _run(
        self,
        ranks: int,
        options: Mapping[str, Any],
        actions: Sequence[Mapping[str, Any]],
        deadline: float,
        grace: float,
    ) -> list[dict[str, Any]]:
        server = self._started()
        self._jobs += 1
        folder = self.folder / f"job{self._jobs}"
        folder.mkdir()
        (folder / "job.json").write_text(json.dumps({"options": dict(options), "actions": list(actions)}))
        job = {"folder": str(folder), "ranks": ranks, "port": free_port(), "deadline": deadline, "grace": grace}
        assert server.stdin is not None
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        answer = self._answer(deadline + grace + 30)
        if answer["codes"] != [0] * ranks:
            raise _failure(folder, ranks, answer, deadline)
        results = [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(ranks)]
        shutil.rmtree(folder)
        return results

    def stop(self) -> None:
        """End the server, and with it every rank."""
        if self._server is None:
            return
        server, self._server = self._server, None
        assert server.stdin is not None
        server.stdin.close()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        assert server.stdout is not None
        self._listener.join(10)
        server.stdout.close()

    def _started(self) -> "subprocess.Popen[str]":
        if self._server is not None and self._server.poll() is None:
            return self._server
        self._answers = queue.Queue()
        with (self.folder / "server.log").open("a") as output:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "drivetrain_backend_api.testing.rank_server", self._backend],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **self._environment},
            )
        self._listener = threading.Thread(target=_listen, args=(self._server, self._answers), daemon=True)
        self._listener.start()
        self._answer(START_DEADLINE)
        return self._server

    def _answer(self, deadline: float) -> dict[str, Any]:
        log = self.folder / "server.log"
        try:
            line = self._answers.get(timeout=deadline)
        except queue.Empty:
            line = ""
        if not line:
            self.stop()
            raise AssertionError(
                f"the process that imports backend {self._backend!r} ended or gave no answer within {deadline:.0f} s:\n"
                + log.read_text(errors="replace")[-4000:]
            )
        answer: dict[str, Any] = json.loads(line)
        return answer


def _listen(server: "subprocess.Popen[str]", answers: "queue.Queue[str]") -> None:
    assert server.stdout is not None
    for line in server.stdout:
        answers.put(line)
    answers.put("")


def _failure(folder: Path, ranks: int, answer: Mapping[str, Any], deadline: float) -> RanksFailedError:
    errors = []
    for rank in range(ranks):
        path = folder / f"rank{rank}.error.json"
        if path.exists():
            errors.append(RankError(rank=rank, **json.loads(path.read_text())))
    errors.sort(key=lambda one: one.time)
    lines = [f"rank {rank} {_end(code, deadline)}" for rank, code in enumerate(answer["codes"]) if code != 0]
    if errors:
        first = errors[0]
        lines += [f"first error, on rank {first.rank}: {first.kind}: {first.message}", first.traceback[-3000:]]
    for rank in range(ranks):
        if answer["codes"][rank] != 0 and all(one.rank != rank for one in errors):
            log = (folder / f"rank{rank}.log").read_text(errors="replace")[-3000:].strip()
            lines += [f"--- output of rank {rank}", log or "(none)"]
    return RanksFailedError(
        "\n".join(lines),
        errors=errors,
        ended={int(rank): seconds for rank, seconds in answer["ended"].items()},
        killed=answer["killed"],
    )


def _end(code: int | None, deadline: float) -> str:
    """Say in words how a rank ended."""
    if code is None:
        return f"was killed: it had not ended after {deadline:.0f} s, or long after another one failed"
    return f"ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def free_port() -> int:
    """Find a free port on the loopback."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
