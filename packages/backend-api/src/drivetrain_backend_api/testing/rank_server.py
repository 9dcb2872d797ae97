"""The process that imports a backend once, and forks one child a rank for every job: each is fresh, and cheap.

    python -m drivetrain_backend_api.testing.rank_server BACKEND

reads one JSON job a line from stdin: {"folder", "ranks", "port", "deadline", "grace"}. `folder/job.json` holds options
and actions; each rank leaves `rank<N>.pt` or `rank<N>.error.json` there, and its output in `rank<N>.log`. Answers with
one JSON line a job. Ends its children and itself when stdin is closed.
"""

import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from drivetrain_backend_api.discovery import TRAIN_BACKENDS, load_implementation, load_spec
from drivetrain_backend_api.spec import BackendSpec
from drivetrain_backend_api.testing.actions import RAISED_AT, play
from drivetrain_backend_api.testing.models import ARCHITECTURES

_PR_SET_PDEATHSIG = 1


def serve(name: str) -> None:
    """Answer jobs until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")  # not inherited by what the ranks start
    os.dup2(2, 1)  # what imports print must not look like an answer
    spec = load_spec(TRAIN_BACKENDS, name)
    assert isinstance(spec, BackendSpec)
    load_implementation(TRAIN_BACKENDS, spec)
    torch.set_num_threads(1)
    for kind in ARCHITECTURES:  # else each child would import it anew
        importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    answers.write(json.dumps({"ready": True}) + "\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(_run(spec, json.loads(line))) + "\n")
        answers.flush()


def _run(spec: BackendSpec, job: Mapping[str, Any]) -> dict[str, Any]:
    """Fork the ranks of one job and wait: to the deadline, or `grace` seconds beyond the first failure."""
    ranks = int(job["ranks"])
    children = [_fork(spec, job, rank) for rank in range(ranks)]
    codes: dict[int, int | None] = {}  # None: killed
    ended: dict[int, float] = {}
    start = time.monotonic()
    end = start + job["deadline"]
    killed = False
    while len(codes) < ranks:
        for rank, pid in enumerate(children):
            if rank in codes:
                continue
            gone, status = os.waitpid(pid, os.WNOHANG)
            if gone:
                codes[rank] = os.waitstatus_to_exitcode(status)
                ended[rank] = time.monotonic() - start
                if codes[rank]:
                    end = min(end, time.monotonic() + job["grace"])
        if time.monotonic() > end or _parent_is_gone():
            killed = True
            _kill([pid for rank, pid in enumerate(children) if rank not in codes])
            for rank in range(ranks):
                codes.setdefault(rank, None)
        time.sleep(0.005)
    for pid in children:
        _kill_group(pid)
    return {"codes": [codes[rank] for rank in range(ranks)], "ended": ended, "killed": killed}


def _parent_is_gone() -> bool:
    """True when stdin was closed; a job is only written when the one before is answered."""
    readable, _, _ = select.select([sys.stdin], [], [], 0)
    return bool(readable)


def _kill(pids: list[int]) -> None:
    """Let the children write where they are, then kill them."""
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)
    time.sleep(0.3 if pids else 0.0)
    for pid in pids:
        _kill_group(pid)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _kill_group(pid: int) -> None:
    """Kill what a rank started and left behind."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _fork(spec: BackendSpec, job: Mapping[str, Any], rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    folder = Path(job["folder"])
    try:
        _become_rank(folder, rank)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job["port"]))
        order = json.loads((folder / "job.json").read_text())
        result = play(spec, order["options"], order["actions"], rank, int(job["ranks"]))
        torch.save(result, folder / f"rank{rank}.partial")
        (folder / f"rank{rank}.partial").rename(folder / f"rank{rank}.pt")
        code = 0
    except BaseException as error:  # whatever ends a rank, the test shows it
        report = {
            "kind": type(error).__name__,
            "message": str(error),
            "traceback": traceback.format_exc(),
            "time": _raised_at(error),
        }
        (folder / f"rank{rank}.error.json").write_text(json.dumps(report))
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _raised_at(error: BaseException) -> float:
    notes = [one for one in getattr(error, "__notes__", ()) if one.startswith(RAISED_AT)]
    return float(notes[0].removeprefix(RAISED_AT)) if notes else time.time()


def _become_rank(folder: Path, rank: int) -> None:
    """Lead a process group of its own in the job's folder, log there, die with the server, dump stacks on SIGUSR1."""
    server = os.getppid()
    os.setsid()
    os.chdir(folder)
    with (folder / f"rank{rank}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:
            os._exit(1)


if __name__ == "__main__":
    serve(sys.argv[1])
