"""One rank of a test: `rank_worker.py PROGRAM FOLDER RANK RANKS` calls a function below and saves what it returns."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from fsdp_testing import PolicyGradient, config_of, exported, make_rollout, train_here

from drivetrain_backend_api.errors import DrivetrainError, WeightExportAbortedError
from drivetrain_backend_api.parallel import Role
from drivetrain_backend_api.weights import Holders, unflatten
from drivetrain_backend_fsdp.backend import FsdpBackend
from drivetrain_backend_fsdp.config import FsdpConfig

PORTS = iter(os.environ.pop("DRIVETRAIN_TEST_PORTS").split(","))


def backend_of(config: FsdpConfig, rank: int, ranks: int) -> FsdpBackend:
    os.environ["MASTER_PORT"] = next(PORTS)
    return FsdpBackend(config, Role.POLICY, rank, ranks, "cpu")


def everything(arguments: Any, folder: Path, rank: int, ranks: int) -> Any:
    """All programs in one launch, since starting a rank costs most of its time."""
    return {
        "parity": parity(arguments["cases"], rank, ranks),
        "checkpoint": checkpoint(arguments["model"], Path(arguments["checkpoint"]), rank, ranks),
        "refusal": refusal(arguments["broken_model"], rank, ranks),
        "unshared_save": unshared_save(arguments["model"], folder, rank, ranks),
    }


def parity(cases: Any, rank: int, ranks: int) -> Any:
    """Train once for each case: a model, overrides of the configuration, and the rollout's size."""
    results = []
    for case in cases:
        with backend_of(config_of(case["model"], **case["config"]), rank, ranks) as backend:
            results.append(train_here(backend, make_rollout(case["samples"])))
    return results


def checkpoint(model: str, target: Path, rank: int, ranks: int) -> Any:
    """Two steps, a save, two more; then load the save and take the last two again. Also export, sleep and wake."""
    with backend_of(config_of(model, global_batch_size=4), rank, ranks) as backend:
        train_here(backend, make_rollout(8, seed=1))
        backend.save_checkpoint(target).finalize()
        saved = exported(backend)
        moments = {name: one.clone() for name, one in backend.optimizer.state().items()}
        shard = backend.preprocess_rollout_data(make_rollout(8, seed=2))
        expected_metrics = backend.train(1, shard, PolicyGradient(None))
        expected = exported(backend)
        holders = {one.value: _held(backend, one) for one in Holders}
        told = _abandoned(backend, leaver=ranks - 1)
        backend.sleep()
        backend.wake_up()
        woken = exported(backend)
    with backend_of(config_of(model, global_batch_size=4, load=str(target)), rank, ranks) as backend:
        next_rollout_id = backend.setup()
        loaded = exported(backend)
        shard = backend.preprocess_rollout_data(make_rollout(8, seed=2))
        found_metrics = backend.train(1, shard, PolicyGradient(None))
        found = exported(backend)
    return {
        "next_rollout_id": next_rollout_id,
        "saved": saved,
        "moments": moments,
        "loaded": loaded,
        "expected": expected,
        "found": found,
        "expected_metrics": expected_metrics,
        "found_metrics": found_metrics,
        "holders": holders,
        "told_of_abandoned_export": told,
        "woken": woken,
    }


def refusal(model: str, rank: int, ranks: int) -> str:
    """What a rank says of a model folder that only rank 0 reads and that lacks a tensor."""
    try:
        with backend_of(config_of(model), rank, ranks) as backend:
            backend.setup()
    except DrivetrainError as error:
        return str(error)
    return ""


def unshared_save(model: str, folder: Path, rank: int, ranks: int) -> str:
    """What a rank says of a save into a folder that the last rank does not see, as on a node with a disk of its own."""
    target = folder / ("own_disk" if rank == ranks - 1 else "shared_disk") / "step_1"
    if rank == 0:
        target.mkdir(parents=True)
    with backend_of(config_of(model), rank, ranks) as backend:
        backend.setup()
        try:
            backend.save_checkpoint(target)
        except DrivetrainError as error:
            return str(error)
    return ""


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
