"""Write a Hugging Face model folder: weights in files of bounded size, beside what the original folder holds.

Where the weights come from is the caller's: a function that reads some of them by name, so that only one file's worth
is ever in memory. Knows nothing of checkpoints and backends.
"""

import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from drivetrain_backend_api.errors import DataError
from drivetrain_backend_api.hf_folder import TensorHeader

SHARD_BYTES = 4 * 1024**3
"""What one file may hold, counted in the dtypes that are read."""

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """What is known of a tensor before it is read.

    Attributes:
        shape: of the whole tensor.
        dtype: in which it is read.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its size when it is read."""
        return math.prod(self.shape) * self.dtype.itemsize


def require_unused(out: Path) -> None:
    """Refuse to write over anything.

    Raises:
        DataError: the folder is there and not empty.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"--out {out} exists already; give a folder that does not")


def export_dtypes(
    names: Iterable[str],
    dtype: torch.dtype | None,
    *,
    hf_checkpoint: Path,
    headers: Mapping[str, TensorHeader],
    stored_name: Callable[[str], str],
) -> dict[str, torch.dtype]:
    """Return the dtype to write each weight in: the one asked for, or that of the original folder.

    Args:
        names: of the floating-point weights.
        dtype: of all of them; None takes each one's of the folder.
        hf_checkpoint: the original model folder.
        headers: of its tensors.
        stored_name: where the folder lacks a weight, the name that this is tied to; asked for no other.

    Raises:
        DataError: the folder has no such tensor under either name.
    """
    if dtype is not None:
        return dict.fromkeys(names, dtype)
    found = {}
    for name in names:
        place = name if name in headers else stored_name(name)
        if place not in headers:
            raise DataError(
                f"{hf_checkpoint} has no tensor {name!r}, which the checkpoint holds; "
                "give the --hf-checkpoint that training began with"
            )
        found[name] = headers[place].dtype
    return found


def write_model_folder(
    out: Path,
    hf_checkpoint: Path,
    stored: Mapping[str, StoredTensor],
    read: Callable[[Sequence[str]], dict[str, Tensor]],
    *,
    dtypes: Mapping[str, torch.dtype],
    dtype: torch.dtype | None,
) -> None:
    """Write weights, configuration and tokenizer files aside, and rename, so that `out` is complete or absent.

    Args:
        out: new or empty.
        hf_checkpoint: the model folder whose configuration and tokenizer are copied.
        stored: every tensor by name, in the order to write them.
        read: returns the named tensors; called once for each file.
        dtypes: to write each tensor in; those that are not named stay as they are.
        dtype: that `config.json` is to tell, None to leave it as it is.
    """
    aside = out.parent / f".{out.name}.partial"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        _copy_companions(hf_checkpoint, aside, dtype)
        _write_safetensors(aside, stored, read, dtypes)
        if out.exists():
            out.rmdir()
        aside.rename(out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _copy_companions(hf_checkpoint: Path, aside: Path, dtype: torch.dtype | None) -> None:
    """Copy what a model folder holds beside its weights; `config.json` tells the dtype written."""
    for path in sorted(hf_checkpoint.iterdir()):
        if path.is_file() and path.suffix not in _WEIGHTS and not path.name.endswith(".index.json"):
            shutil.copyfile(path, aside / path.name)
    if dtype is not None:
        try:
            config = dict(json.loads((aside / "config.json").read_text("utf-8")))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise DataError(f"{hf_checkpoint / 'config.json'} cannot be read: {error}; copy the model again") from error
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
        (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _write_safetensors(
    aside: Path,
    stored: Mapping[str, StoredTensor],
    read: Callable[[Sequence[str]], dict[str, Tensor]],
    dtypes: Mapping[str, torch.dtype],
) -> None:
    """Write the weights in files of bounded size, holding one of them at a time."""
    parts = _parts(stored)
    weight_map, total = {}, 0
    for index, names in enumerate(parts, start=1):
        file = "model.safetensors" if len(parts) == 1 else f"model-{index:05d}-of-{len(parts):05d}.safetensors"
        tensors = read(names)
        # one after the other, so that not all are held in both dtypes
        cast = {name: tensors.pop(name).to(dtypes.get(name, stored[name].dtype)).contiguous() for name in names}
        save_file(cast, aside / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
        total += sum(one.nbytes for one in cast.values())
    if len(parts) > 1:
        index_json = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (aside / "model.safetensors.index.json").write_text(json.dumps(index_json, indent=2) + "\n")


def _parts(stored: Mapping[str, StoredTensor]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    size = 0
    for name, one in stored.items():
        if parts[-1] and size + one.nbytes > SHARD_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += one.nbytes
    return parts
