"""Checkpoints of this backend: files of PyTorch DCP, read under any number of ranks, exported to Hugging Face.

Which files a folder holds, and how they are read without trust, is in backend-api's `checkpoint_files`; how they are
written while training goes on, in `background_save`. Which folder, and when it is complete, is not decided here.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor

from drivetrain_backend_api.backend import SaveHandle
from drivetrain_backend_api.background_save import CheckpointSaver
from drivetrain_backend_api.checkpoint_files import (
    FORMAT,
    TrainerState,
    read_metadata,
    read_state,
    require_moments,
    restore_random_state,
    rng_file,
    verify_files,
)
from drivetrain_backend_api.collectives import gathered, together
from drivetrain_backend_api.errors import DataError, DrivetrainError
from drivetrain_backend_api.hf_export import StoredTensor, export_dtypes, require_unused, write_model_folder
from drivetrain_backend_api.hf_folder import read_headers
from drivetrain_backend_api.schedule import LossScaler
from drivetrain_backend_api.sharded_checkpoint import Piece, read_pieces, stored_tensors
from drivetrain_backend_fsdp.attention import PACKED_ATTENTION
from drivetrain_backend_fsdp.causal_lm import build, tied_names
from drivetrain_backend_fsdp.checkpoint_files import BACKEND
from drivetrain_backend_fsdp.hf_checkpoint import read_config
from drivetrain_backend_fsdp.model import ShardedModel, local_part, stored_name
from drivetrain_backend_fsdp.optimizer import ShardedAdamW

_MODEL_PREFIX = "model."
_OPTIMIZER_PREFIX = "optimizer."


def save_checkpoint(
    folder: Path,
    model: ShardedModel,
    optimizer: ShardedAdamW,
    scaler: LossScaler,
    saver: CheckpointSaver,
    *,
    next_rollout_id: int,
    moments: bool = True,
) -> SaveHandle:
    """Write everything that training needs to go on; collective. See `CheckpointSaver.begin`.

    Args:
        folder: exists and is empty, on a file system that all ranks share.
        moments: write Adam's; without them no run can go on from it.

    Raises:
        DataError: some rank does not see the folder; nothing was written.
        DrivetrainError: writing failed on some rank.
    """
    state = TrainerState(
        format=FORMAT,
        backend=BACKEND,
        next_rollout_id=next_rollout_id,
        optimizer_steps=optimizer.steps,
        loss_scale=scaler.scale,
        loss_scale_good_steps=scaler.good_steps,
        world_size=model.mesh.size(),
        moments=moments,
    )
    return saver.begin(folder, pieces_to_write(model, optimizer, moments=moments), state)


def load_checkpoint(
    folder: Path,
    model: ShardedModel,
    optimizer: ShardedAdamW,
    scaler: LossScaler,
    *,
    device: torch.device,
    control: dist.ProcessGroup | None,
    weights_only: bool = False,
    verify: bool = False,
) -> int:
    """Read a checkpoint into live tensors; collective. Random states come back where the rank count is the same.

    Args:
        weights_only: take nothing else; training begins anew.
        verify: read every byte of the files first, each rank its share.

    Returns: the next rollout id, equal on all ranks; 0 with `weights_only`.

    Raises:
        DataError: no checkpoint, a damaged one, or one of another model; or ranks that see different ones.
    """

    rank, ranks = model.mesh.get_rank(), model.mesh.size()
    pieces = [one for _, one in _pieces(model, optimizer, moments=not weights_only)]

    def look() -> tuple[TrainerState, Metadata]:
        state = read_state(folder, BACKEND)
        if not weights_only:
            require_moments(folder, state)
        same_ranks = state.world_size == ranks and not weights_only
        verify_files(folder, rank, ranks, same_ranks=same_ranks, full=verify)
        metadata = read_metadata(folder)
        _check_fit(folder, metadata, {one.key: one.shape for one in pieces}, weights_only=weights_only)
        return state, metadata

    state, metadata = together(look, control)
    if len(set(gathered(state.next_rollout_id, control))) > 1:
        raise DataError(
            f"{folder}: ranks see different checkpoints (next rollout ids {gathered(state.next_rollout_id, control)}); "
            "--load must name a folder that all nodes share"
        )
    read_pieces(folder, [one for one in pieces if one.tensor.numel()], control, metadata=metadata)
    if weights_only:
        return 0
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
    verify_files(folder, 0, 1, same_ranks=False, full=True)
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
        tensors = {name: torch.empty(stored[name].shape, dtype=stored[name].dtype) for name in names}
        pieces = [_whole_piece(f"{_MODEL_PREFIX}{name}", one) for name, one in tensors.items()]
        read_pieces(folder, pieces, None, metadata=metadata)
        return tensors

    floating = [name for name, one in stored.items() if one.dtype.is_floating_point]
    dtypes = export_dtypes(floating, dtype, hf_checkpoint=hf_checkpoint, headers=headers, stored_name=tied_name)
    write_model_folder(out, hf_checkpoint, stored, read, dtypes=dtypes, dtype=dtype)


def pieces_to_write(model: ShardedModel, optimizer: ShardedAdamW, *, moments: bool) -> list[Piece]:
    """Name what this rank writes: its shards, and on rank 0 the buffers that every rank has whole."""
    is_first = model.mesh.get_rank() == 0
    return [
        piece
        for weight, piece in _pieces(model, optimizer, moments=moments)
        if (piece.tensor.numel() if isinstance(weight, DTensor) else is_first)
    ]


def _pieces(model: ShardedModel, optimizer: ShardedAdamW, *, moments: bool) -> Iterator[tuple[Tensor, Piece]]:
    """Show this rank's part of every tensor of a checkpoint, sharing its memory, and the weight that it is cut like."""
    for name, weight in model.weights.items():
        yield weight, _piece(f"{_MODEL_PREFIX}{name}", weight, local_part(weight), model)
    for kind, tensors in optimizer.moments().items() if moments else ():
        for name, local in tensors.items():
            weight = model.weights[name]
            yield weight, _piece(f"{_OPTIMIZER_PREFIX}{kind}.{name}", weight, local, model)


def _piece(key: str, weight: Tensor, local: Tensor, model: ShardedModel) -> Piece:
    """Say where a shard begins: rows are dealt out as by `torch.chunk`, so the last ranks may have fewer or none."""
    offsets = [0] * weight.ndim
    if isinstance(weight, DTensor):
        rows = -(-weight.shape[0] // model.mesh.size())
        offsets[0] = min(model.mesh.get_rank() * rows, weight.shape[0])
    return Piece(key=key, shape=tuple(weight.shape), offsets=tuple(offsets), tensor=local)


def _whole_piece(key: str, tensor: Tensor) -> Piece:
    return Piece(key=key, shape=tuple(tensor.shape), offsets=(0,) * tensor.ndim, tensor=tensor)


def _check_fit(folder: Path, metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], *, weights_only: bool) -> None:
    stored = {
        name: tuple(one.size)
        for name, one in stored_tensors(metadata).items()
        if not (weights_only and name.startswith(_OPTIMIZER_PREFIX))
    }
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
