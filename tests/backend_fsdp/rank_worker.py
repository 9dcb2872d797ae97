"""One rank of a test: `rank_worker.py FOLDER RANK RANKS` does what follows and leaves what it found in `rankN.json`.

All in one launch, since starting a rank costs most of its time.
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from fsdp_testing import BUFFER, config_of

from drivetrain_backend_api.errors import DrivetrainError
from drivetrain_backend_api.parallel import Role
from drivetrain_backend_fsdp.backend import FsdpBackend
from drivetrain_backend_fsdp.checkpoint import save_checkpoint


class Rank:
    """Makes this rank's backends, each on a port of its own."""

    def __init__(self, rank: int, ranks: int, ports: Iterator[int]) -> None:
        self.rank, self.ranks, self.ports = rank, ranks, ports

    def backend(self, model: str) -> FsdpBackend:
        os.environ["MASTER_PORT"] = str(next(self.ports))
        return FsdpBackend(config_of(model), Role.POLICY, self.rank, self.ranks, "cpu")


def save(rank: Rank, model: str, target: Path) -> None:
    """Save a model that has a buffer, which is whole on every rank."""
    with rank.backend(model) as backend:
        backend.setup()
        whole = replace(backend._policy.model, weights={**backend._policy.model.weights, BUFFER: torch.tensor([7, 8])})
        save_checkpoint(target, whole, backend.optimizer, backend._scaler, backend._saver, next_rollout_id=0).finalize()


def refusal(rank: Rank, model: str) -> str:
    """What a rank says of a model folder that only rank 0 reads and that lacks a tensor."""
    try:
        with rank.backend(model) as backend:
            backend.setup()
    except DrivetrainError as error:
        return str(error)
    return ""


def unshared_save(rank: Rank, model: str, folder: Path) -> str:
    """What a rank says of a save into a folder that the last rank does not see, as on a node with a disk of its own."""
    target = folder / ("own_disk" if rank.rank == rank.ranks - 1 else "shared_disk") / "step_1"
    if rank.rank == 0:
        target.mkdir(parents=True)
    with rank.backend(model) as backend:
        backend.setup()
        try:
            backend.save_checkpoint(target)
        except DrivetrainError as error:
            return str(error)
    return ""


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    arguments = json.loads((folder / "arguments.json").read_text())
    this = Rank(int(sys.argv[2]), int(sys.argv[3]), iter(arguments["ports"]))
    save(this, arguments["model"], Path(arguments["checkpoint"]))
    found = {
        "refusal": refusal(this, arguments["broken_model"]),
        "unshared_save": unshared_save(this, arguments["model"], folder),
    }
    (folder / f"rank{this.rank}.json").write_text(json.dumps(found))
