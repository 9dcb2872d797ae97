"""Checkpoints of this backend: written by PyTorch DCP, read under any number of ranks, exported to Hugging Face.

Which files a folder holds, and how they are read without trust, is in backend-api's `checkpoint_files`. Which folder,
and when it is complete, is not decided here.
"""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from drivetrain_backend_api.checkpoint_files import (
    FORMAT,
    OTHER_CHECKPOINT,
    TENSORS,
    TrainerState,
    checksums_of,
    read_metadata,
    read_state,
    require_shared,
    restore_random_state,
    rng_file,
    verify_checksums,
    write_checksums,
    write_random_state,
    write_state,
)
from drivetrain_backend_api.collectives import gathered, together
from drivetrain_backend_api.errors import DataError, DrivetrainError
from drivetrain_backend_api.hf_export import StoredTensor, export_dtypes, require_unused, write_model_folder
from drivetrain_backend_api.hf_folder import read_headers
from drivetrain_backend_api.schedule import LossScaler
from drivetrain_backend_api.sharded_checkpoint import Reader, first_failure, stored_tensors
from drivetrain_backend_fsdp.attention import PACKED_ATTENTION
from drivetrain_backend_fsdp.causal_lm import build, tied_names
from drivetrain_backend_fsdp.checkpoint_files import BACKEND
from drivetrain_backend_fsdp.hf_checkpoint import read_config
from drivetrain_backend_fsdp.model import ShardedModel, stored_name
from drivetrain_backend_fsdp.optimizer import ShardedAdamW

_MODEL_PREFIX = "model."
_OPTIMIZER_PREFIX = "optimizer."


def save_checkpoint(
    folder: Path,
    model: ShardedModel,
    optimizer: ShardedAdamW,
    scaler: LossScaler,
    *,
    next_rollout_id: int,
    device: torch.device,
    control: dist.ProcessGroup | None,
) -> None:
    """Write everything that training needs to go on; collective, ends when all of it is written.

    Args:
        folder: exists and is empty, on a file system that all ranks share.

    Raises:
        DataError: some rank does not see the folder; nothing was written.
        DrivetrainError: writing failed on some rank.
    """
    rank, ranks = model.mesh.get_rank(), model.mesh.size()

    def write_own() -> None:
        write_random_state(folder, rank, device)
        if rank == 0:
            state = TrainerState(
                format=FORMAT,
                backend=BACKEND,
                next_rollout_id=next_rollout_id,
                optimizer_steps=optimizer.steps,
                loss_scale=scaler.scale,
                loss_scale_good_steps=scaler.good_steps,
                world_size=ranks,
            )
            write_state(folder, state)

    together(lambda: require_shared(folder, rank), control)
    together(write_own, control)
    try:
        save(
            _tensors(model, optimizer),
            storage_writer=FileSystemWriter(folder / TENSORS),
            process_group=control,
        )
    except CheckpointException as error:
        raise DrivetrainError(f"writing the checkpoint {folder} failed: {first_failure(error)}") from error
    parts = gathered(together(lambda: checksums_of(folder, rank), control), control)
    checksums = {name: one for part in parts for name, one in part.items()}
    together(lambda: write_checksums(folder, checksums) if rank == 0 else None, control)


def load_checkpoint(
    folder: Path,
    model: ShardedModel,
    optimizer: ShardedAdamW,
    scaler: LossScaler,
    *,
    device: torch.device,
    control: dist.ProcessGroup | None,
) -> int:
    """Read a checkpoint into live tensors; collective. Random states come back where the rank count is the same.

    Returns: the next rollout id, equal on all ranks.

    Raises:
        DataError: no checkpoint, a damaged one, or one of another model; or ranks that see different ones.
    """

    rank, ranks = model.mesh.get_rank(), model.mesh.size()

    def look() -> TrainerState:
        state = read_state(folder, BACKEND)
        verify_checksums(folder, rank, ranks, same_ranks=state.world_size == ranks)
        tensors = _tensors(model, optimizer)
        _check_fit(folder, read_metadata(folder), {name: tuple(one.shape) for name, one in tensors.items()})
        return state

    state = together(look, control)
    if len(set(gathered(state.next_rollout_id, control))) > 1:
        raise DataError(
            f"{folder}: ranks see different checkpoints (next rollout ids {gathered(state.next_rollout_id, control)}); "
            "--load must name a folder that all nodes share"
        )
    try:
        load(_tensors(model, optimizer), storage_reader=Reader(folder), process_group=control)
    except CheckpointException as error:
        raise DataError(
            f"reading the checkpoint {folder} failed ({first_failure(error)}); {OTHER_CHECKPOINT}"
        ) from error
    optimizer.steps = state.optimizer_steps
    if scaler.enabled and (state.loss_scale, state.loss_scale_good_steps) != (1.0, 0):  # those of bf16 and fp32
        scaler.scale, scaler.good_steps = state.loss_scale, state.loss_scale_good_steps
    if state.world_size == ranks:
        together(lambda: restore_random_state(rng_file(folder, rank), device), control)
    return state.next_rollout_id


def export_checkpoint(folder: Path, hf_checkpoint: Path, out: Path, dtype: torch.dtype | None = None) -> None:
    """Turn a checkpoint into a Hugging Face folder, in one process and without process groups.

    Weights, configuration and tokenizer files are written aside and renamed, so that `out` is complete or absent.

    Args:
        folder: written by `save_checkpoint`.
        hf_checkpoint: the model folder that training began with; its configuration and tokenizer are copied.
        out: must not exist, or be empty.
        dtype: of floating-point weights; None takes those of `hf_checkpoint`. Other tensors keep the checkpoint's.

    Raises:
        DataError: a folder cannot be read, `out` is in use, or `hf_checkpoint` does not tell a weight's dtype.
    """
    require_unused(out)
    read_state(folder, BACKEND)
    metadata = read_metadata(folder)
    verify_checksums(folder, 0, 1, same_ranks=False)
    stored = {
        name.removeprefix(_MODEL_PREFIX): StoredTensor(shape=tuple(one.size), dtype=one.properties.dtype)
        for name, one in stored_tensors(metadata).items()
        if name.startswith(_MODEL_PREFIX)
    }
    headers = read_headers(hf_checkpoint)
    aliases: dict[str, str] = {}

    def tied_name(name: str) -> str:
        if not aliases:
            aliases.update(_aliases(hf_checkpoint))
        return stored_name(name, headers, aliases)

    def read(names: Sequence[str]) -> dict[str, Tensor]:
        tensors = {
            f"{_MODEL_PREFIX}{name}": torch.empty(stored[name].shape, dtype=stored[name].dtype) for name in names
        }
        _load_alone(folder, tensors)
        return {name.removeprefix(_MODEL_PREFIX): one for name, one in tensors.items()}

    floating = [name for name, one in stored.items() if one.dtype.is_floating_point]
    dtypes = export_dtypes(floating, dtype, hf_checkpoint=hf_checkpoint, headers=headers, stored_name=tied_name)
    write_model_folder(out, hf_checkpoint, stored, read, dtypes=dtypes, dtype=dtype)


def _tensors(model: ShardedModel, optimizer: ShardedAdamW) -> dict[str, Tensor]:
    """Name every tensor of a checkpoint: live ones, moments as DTensors cut like their weights."""
    host = None
    tensors: dict[str, Tensor] = {f"{_MODEL_PREFIX}{name}": one for name, one in model.weights.items()}
    for kind, moments in optimizer.moments().items():
        for name, local in moments.items():
            weight = model.weights[name]
            assert isinstance(weight, DTensor)
            mesh = model.mesh
            if local.device.type != mesh.device_type:
                # Offloaded moments: from_local would copy them to the mesh's device.
                host = host or init_device_mesh("cpu", (model.mesh.size(),))
                mesh = host
            tensors[f"{_OPTIMIZER_PREFIX}{kind}.{name}"] = _sharded_like(weight, local, mesh)
    return tensors


def _sharded_like(weight: DTensor, local: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(
        local, mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )


def _check_fit(folder: Path, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]]) -> None:
    stored = {name: tuple(one.size) for name, one in stored_tensors(metadata).items()}
    for name in sorted({*shapes, *stored}):
        if shapes.get(name) != stored.get(name):
            raise DataError(
                f"{folder} is a checkpoint of another model: tensor {name!r} has shape {stored.get(name, 'none')} "
                f"there and {shapes.get(name, 'none')} in the model; give the --hf-checkpoint that training began with"
            )


def _aliases(hf_checkpoint: Path) -> dict[str, str]:
    """Ask the architecture which weights are tied; code inside the folder is not run."""
    try:
        config = read_config(hf_checkpoint, trust_remote_code=False)
        with torch.device("meta"):
            module = build(config, attention=PACKED_ATTENTION, dtype=torch.float32, trust_remote_code=False)
    except DrivetrainError as error:
        raise DataError(
            f"{hf_checkpoint} does not tell the dtype of every weight, and which are tied is unknown: {error}; "
            "choose one dtype with --dtype"
        ) from error
    return {source: alias for alias, source in tied_names(module).items()}


def _load_alone(folder: Path, tensors: dict[str, Tensor]) -> None:
    try:
        with warnings.catch_warnings():
            # DCP warns that no process group exists, which is the point.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            load(tensors, storage_reader=Reader(folder), no_dist=True)
    except CheckpointException as error:
        raise DataError(
            f"reading the checkpoint {folder} failed ({first_failure(error)}); {OTHER_CHECKPOINT}"
        ) from error
