"""One rank of a test: `rank_worker.py PROGRAM FOLDER RANK RANKS` calls a function below and saves what it returns."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from fsdp_testing import config_of, exported, make_rollout, train_here

from drivetrain_backend_api.errors import DrivetrainError, WeightExportAbortedError
from drivetrain_backend_api.parallel import Role
from drivetrain_backend_api.weights import Holders, unflatten
from drivetrain_backend_fsdp.backend import FsdpBackend
from drivetrain_backend_fsdp.config import FsdpConfig

PORTS = iter(os.environ.pop("DRIVETRAIN_TEST_PORTS").split(","))


def backend_of(config: FsdpConfig, rank: int, ranks: int) -> FsdpBackend:
    os.environ["MASTER_PORT"] = next(PORTS)
    return FsdpBackend(config, Role.POLICY, rank, ranks, "cpu")


def parity(arguments: Any, folder: Path, rank: int, ranks: int) -> Any:
    """Train once for each case (overrides of the configuration, and the rollout's size)."""
    results = []
    for case in arguments["cases"]:
        with backend_of(config_of(**case["config"]), rank, ranks) as backend:
            results.append(train_here(backend, make_rollout(case["samples"])))
    return results


def checkpoint(arguments: Any, folder: Path, rank: int, ranks: int) -> Any:
    """Two steps, a save, a third step; then load the save and take the third step again; also an export's rules."""
    first, second = make_rollout(8, seed=1), make_rollout(8, seed=2)
    target = Path(arguments["checkpoint"])
    with backend_of(config_of(arguments["model"], global_batch_size=4), rank, ranks) as backend:
        train_here(backend, first)
        backend.save_checkpoint(target).finalize()
        saved = exported(backend)
        shard = backend.preprocess_rollout_data(second)
        from fsdp_testing import PolicyGradient

        expected_metrics = backend.train(1, shard, PolicyGradient(None))
        expected = exported(backend)
        holders = {one.value: _held(backend, one) for one in Holders}
        aborted = _abandoned(backend, leaver=ranks - 1)
        backend.sleep()
        backend.wake_up()
        woken = exported(backend)
    with backend_of(config_of(arguments["model"], global_batch_size=4, load=str(target)), rank, ranks) as backend:
        next_rollout_id = backend.setup()
        loaded = exported(backend)
        found_metrics = backend.train(1, backend.preprocess_rollout_data(second), PolicyGradient(None))
        found = exported(backend)
    try:
        with backend_of(config_of(arguments["broken_model"]), rank, ranks) as backend:
            backend.setup()
        refusal = ""
    except DrivetrainError as error:
        refusal = str(error)
    return {
        "next_rollout_id": next_rollout_id,
        "saved": saved,
        "loaded": loaded,
        "expected": expected,
        "found": found,
        "expected_metrics": expected_metrics,
        "found_metrics": found_metrics,
        "holders": holders,
        "aborted": aborted,
        "woken": woken,
        "refusal": refusal,
    }


def _held(backend: FsdpBackend, holders: Holders) -> dict[str, torch.Tensor]:
    held = {}
    with backend.export_weights(4096, holders, torch.float32) as export:
        for bucket in export:
            if bucket.data is not None:
                held |= {name: one.clone() for name, one in unflatten(bucket.data, bucket.entries)}
    return held


def _abandoned(backend: FsdpBackend, leaver: int) -> bool:
    """One rank leaves an export after its first bucket; True where the others were told instead of left waiting."""
    try:
        with backend.export_weights(1024) as export:
            for _ in export:
                if backend.rank == leaver:
                    return False
    except WeightExportAbortedError:
        return True
    return False


if __name__ == "__main__":
    program, folder, rank, ranks = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    result = globals()[program](json.loads((folder / "arguments.json").read_text()), folder, rank, ranks)
    torch.save(result, folder / f"rank{rank}.pt")
