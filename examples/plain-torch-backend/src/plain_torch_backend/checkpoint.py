"""Checkpoints: tensors as safetensors, written, read back bit for bit, and exported to Hugging Face.

Which files there are and whether they are whole is in `checkpoint_files`. Which folder, and when it is complete, is not
decided here.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drivetrain_backend_api import DataError, DrivetrainError
from drivetrain_backend_api.manifest import OTHER_CHECKPOINT
from plain_torch_backend.checkpoint_files import FORMAT, OPTIMIZER, RANDOM, WEIGHTS, State, require_whole, write_state
from plain_torch_backend.model import load_model, require_same_weights, stored_dtypes, weights_of
from plain_torch_backend.optimizer import AdamW


def save_checkpoint(
    folder: Path, weights: Mapping[str, Tensor], optimizer: AdamW, *, next_rollout_id: int, moments: bool
) -> None:
    """Write everything that training needs to go on into an existing folder; the list of its files comes last.

    Args:
        moments: write Adam's; without them no run can go on from it.

    Raises:
        DrivetrainError: writing failed.
    """
    files = {WEIGHTS: weights, RANDOM: {"cpu": torch.get_rng_state()}}
    if moments:
        files[OPTIMIZER] = optimizer.moments()
    state = State(format=FORMAT, next_rollout_id=next_rollout_id, optimizer_steps=optimizer.steps, moments=moments)
    try:
        for name, tensors in files.items():
            save_file({key: one.detach().contiguous() for key, one in tensors.items()}, folder / name)
        write_state(folder, state)
    except (OSError, SafetensorError) as error:
        raise DrivetrainError(f"writing the checkpoint {folder} failed: {error}; make room there") from error


@torch.no_grad()
def load_checkpoint(
    folder: Path, weights: Mapping[str, Tensor], optimizer: AdamW, *, weights_only: bool, verify: bool
) -> int:
    """Read a checkpoint into live tensors, and the random states.

    Args:
        weights_only: take nothing else; training begins anew.
        verify: read every byte of the files first.

    Returns: the next rollout id; 0 with `weights_only`.

    Raises:
        DataError: no checkpoint, a damaged one, or one of another model.
    """
    state = require_whole(folder, full=verify)
    _read(folder / WEIGHTS, weights)
    if weights_only:
        return 0
    if not state.moments:
        raise DataError(
            f"{folder} was saved with --no-save-optim, so no run can be resumed from it; take another checkpoint, or "
            "begin a new run with its weights: add --finetune"
        )
    _read(folder / OPTIMIZER, optimizer.moments())
    optimizer.steps = state.optimizer_steps
    torch.set_rng_state(load_file(folder / RANDOM)["cpu"])
    return state.next_rollout_id


def _read(path: Path, live: Mapping[str, Tensor]) -> None:
    try:
        stored = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read: {error}; {OTHER_CHECKPOINT}") from error
    require_same_weights(live, stored, what=f"--load {path}")
    for name, tensor in live.items():
        tensor.copy_(stored[name])


def export_checkpoint(folder: Path, hf_checkpoint: Path, out: Path, dtype: torch.dtype | None = None) -> None:
    """Turn a checkpoint into a Hugging Face folder, written aside and renamed, so that it is complete or absent.

    Args:
        folder: written by `save_checkpoint`.
        hf_checkpoint: the model folder that training began with; its configuration and tokenizer are copied.
        out: must not exist, or be empty.
        dtype: of floating-point weights; None takes those of `hf_checkpoint`.

    Raises:
        DataError: `out` is in use, or a folder cannot be read, or they are of two models.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"--out {out} exists already; give a folder that does not")
    require_whole(folder, full=True)
    weights, model = load_file(folder / WEIGHTS), load_model(hf_checkpoint, trust_remote_code=False)
    require_same_weights(weights_of(model), weights, what=str(folder / WEIGHTS))
    dtypes = stored_dtypes(hf_checkpoint, model)
    cast = {
        name: one.to((dtype or dtypes[name]) if one.is_floating_point() else one.dtype) for name, one in weights.items()
    }
    aside = out.parent / f".{out.name}.partial"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        save_file(cast, aside / "model.safetensors", metadata={"format": "pt"})
        _copy_companions(hf_checkpoint, aside, dtype)
        if out.exists():
            out.rmdir()
        aside.rename(out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _copy_companions(hf_checkpoint: Path, aside: Path, dtype: torch.dtype | None) -> None:
    """Copy what a model folder holds beside its weights; `config.json` tells the dtype written."""
    for path in sorted(hf_checkpoint.iterdir()):
        weights = path.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
        if path.is_file() and not weights and not path.name.endswith(".index.json"):
            shutil.copyfile(path, aside / path.name)
    if dtype is not None:
        config = json.loads((aside / "config.json").read_bytes())
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
        (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n")
