"""The two sides of a weight update for tests: a train worker of a real backend, and an engine that can be told to fail.

Imported by Ray workers, so it must be on their path.
"""

import os
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import TCPStore

from drivetrain_backend_api import TRAIN_BACKENDS, TrainConfig, load_spec
from drivetrain_backend_api.parallel import Role
from drivetrain_infra.engines.base import EngineSpec
from drivetrain_infra.engines.transformers_engine import TransformersEngine
from drivetrain_infra.engines.transformers_spec import TransformersEngineConfig
from drivetrain_infra.weight_sync.sender import WeightSender


class SyncWorker:
    """One rank of a train backend, reduced to what a weight update needs."""

    def __init__(self, rank: int, world_size: int, config: TrainConfig) -> None:
        torch.set_num_threads(1)
        self._rank, self._world_size = rank, world_size
        self._backend = load_spec(TRAIN_BACKENDS, "fsdp").load()(config, Role.POLICY, rank, world_size, "cpu")
        self._store: Any = None

    def open_rendezvous(self) -> int:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        return int(self._store.port)

    def setup(self, port: int) -> None:
        os.environ.update(
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            RANK=str(self._rank),
            WORLD_SIZE=str(self._world_size),
            TORCHELASTIC_USE_AGENT_STORE="True",
            TORCHELASTIC_RESTART_COUNT="0",
        )
        self._backend.setup()
        self._sender = WeightSender(self._backend)

    def weight_sender(self, method: str, *arguments: Any) -> Any:
        return getattr(self._sender, method)(*arguments)

    def collective_sum(self) -> int:
        """Reduce over all ranks: shows that their own group still works and that none is stuck."""
        ones = torch.ones(1)
        torch.distributed.all_reduce(ones)
        return int(ones)


class FaultyEngine(TransformersEngine):
    """The transformers engine; keeps what it commits, and fails as the file FAULTS/<its pid> says, at bucket 1.

    Faults: "die", "hang SECONDS", "flip" (one bit of one weight), "refuse" (raises).
    """

    def start(self) -> None:
        super().start()
        self._folder = Path(os.environ["FAULTS"])
        self._bucket = 0

    def begin_weight_update(self, plan: Any) -> None:
        super().begin_weight_update(plan)
        self._bucket = 0

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        tensors = list(tensors)
        order = self._folder / str(os.getpid())
        if self._bucket == 1 and order.exists():
            kind, *argument = order.read_text().split()
            order.unlink()
            if kind == "die":
                os._exit(1)
            if kind == "hang":
                time.sleep(float(argument[0]))
            if kind == "refuse":
                raise RuntimeError("the engine's memory is full")
            if kind == "flip":
                name, tensor = tensors[0]
                tensors[0] = (name, flip_one_bit(tensor))
        self._bucket += 1
        super().load_weights(tensors)

    def commit_weight_update(self, version: int) -> None:
        super().commit_weight_update(version)
        held = {name: tensor.detach().clone() for name, tensor in self._lm.model.state_dict().items()}
        save_file(held, self._folder / f"{os.getpid()}-{version}.safetensors")


def flip_one_bit(tensor: Tensor) -> Tensor:
    flipped = tensor.clone()
    flipped.view(-1).view(torch.uint8)[0] ^= 1
    return flipped


SPEC = EngineSpec(
    name="faulty",
    api_version=1,
    target="sync_parties:FaultyEngine",
    config_class=TransformersEngineConfig,
    devices=("cpu",),
)
