"""A backend of one rank in this process, a launcher of two real ones, and ways to compare weights.

Models, rollouts, the algorithm and the reference are those of the conformance suite.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drivetrain_backend_api.batch import RolloutBatch
from drivetrain_backend_api.parallel import Role
from drivetrain_backend_api.testing.algorithms import TokenMean
from drivetrain_backend_api.testing.ranks import free_port
from drivetrain_backend_api.testing.rollouts import RolloutSpec, draw_rollout
from drivetrain_backend_api.weights import Holders, unflatten
from drivetrain_backend_fsdp.backend import FsdpBackend
from drivetrain_backend_fsdp.config import FsdpConfig

# Models this small gain nothing from threads, and lose much where other processes want the same cores.
torch.set_num_threads(1)

BUFFER = "model.seen"
"""Name of a buffer in the checkpoint that two ranks save."""

RANK_WORKER = Path(__file__).with_name("rank_worker.py")


def rollout_of(samples: int = 8, seed: int = 1) -> RolloutBatch:
    return draw_rollout(RolloutSpec(samples=samples, seed=seed))


def model_weights(model: Any) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in model.named_parameters()}


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Bit for bit."""
    assert set(found) == set(expected)
    different = [name for name, one in expected.items() if not torch.equal(found[name], one)]
    assert different == []


def config_of(folder: str | Path, **overrides: Any) -> FsdpConfig:
    """fp32, and an Adam epsilon large enough that rounding of tiny gradients cannot flip an update's sign."""
    settings: dict[str, Any] = {
        "hf_checkpoint": str(folder),
        "lr": 1e-2,
        "adam_eps": 1e-5,
        "log_probs_chunk_size": 16,
        "distributed_timeout_minutes": 1.0,
    }
    if not any(name in overrides for name in ("bf16", "fp16")):
        settings["fp32"] = True
    return FsdpConfig(**(settings | overrides))


def exported(backend: FsdpBackend, *, dtype: torch.dtype | None = torch.float32) -> dict[str, Tensor]:
    """All weights as this rank gets them."""
    found: dict[str, Tensor] = {}
    with backend.export_weights(4096, Holders.ALL, dtype) as export:
        for one in export:
            assert one.data is not None
            found |= {name: tensor.clone() for name, tensor in unflatten(one.data, one.entries)}
    return found


def train(backend: FsdpBackend, rollout: RolloutBatch, rollout_id: int = 0) -> list[dict[str, float]]:
    """Train on one rollout; returns each optimizer step's metrics."""
    return backend.train(rollout_id, backend.preprocess_rollout_data(rollout), TokenMean())


@contextlib.contextmanager
def one_rank(config: FsdpConfig, device: str = "cpu") -> Iterator[FsdpBackend]:
    """A backend of one rank in this process, not set up yet."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    with FsdpBackend(config, Role.POLICY, 0, 1, device) as backend:
        yield backend


def launch(ranks: int, arguments: Mapping[str, Any], folder: Path, *, deadline: float) -> list[Any]:
    """Run rank_worker.py on real processes; returns what each rank found.

    Raises AssertionError with the ranks' output when one fails or the deadline passes; kills only its own children.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "arguments.json").write_text(json.dumps(dict(arguments) | {"ports": [free_port() for _ in range(3)]}))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    children = []
    with contextlib.ExitStack() as stack:
        for rank in range(ranks):
            log = stack.enter_context((folder / f"rank{rank}.log").open("w"))
            command = [sys.executable, str(RANK_WORKER), str(folder), str(rank), str(ranks)]
            children.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        end = time.monotonic() + deadline
        try:
            while any(one.poll() is None for one in children) and time.monotonic() < end:
                if any(one.poll() for one in children):
                    break
                time.sleep(0.05)
            codes = [one.poll() for one in children]
        finally:
            for one in children:
                if one.poll() is None:
                    one.kill()
                one.wait()
    if codes != [0] * ranks:
        logs = "\n".join(
            f"--- rank {rank}\n{(folder / f'rank{rank}.log').read_text()[-3000:]}" for rank in range(ranks)
        )
        raise AssertionError(f"{ranks} ranks: exit codes {codes} within {deadline} s\n{logs}")
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
