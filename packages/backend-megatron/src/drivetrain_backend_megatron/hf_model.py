"""Fill Megatron parameters from a Hugging Face model folder, reading only what this rank holds of each tensor.

`find_hf` looks at headers alone and can run on one rank for all; `load_hf` then reads. Never imports Megatron; knows no
process group.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drivetrain_backend_api.errors import DataError
from drivetrain_backend_api.hf_folder import TensorHeader, check_tied, read_headers
from drivetrain_backend_megatron.architectures import ModelShape, Rule
from drivetrain_backend_megatron.name_map import Place, fuse, local_slice, place_of, places

_TIED = {"lm_head.weight": "model.embed_tokens.weight"}

# Old checkpoints store these computed buffers too.
_COMPUTED = "rotary_emb.inv_freq"


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """The tensors of a model folder, found to be those of the model; plain data that can be sent anywhere.

    Attributes:
        headers: Hugging Face name in the model -> header in the folder.
        names: Hugging Face name in the model -> name in the folder; a tied weight may be stored under its other name.
    """

    folder: Path
    headers: Mapping[str, TensorHeader]
    names: Mapping[str, str]

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Hugging Face name -> dtype in the folder: what an export writes by default."""
        return {name: one.dtype for name, one in self.headers.items()}


def find_hf(folder: Path, shape: ModelShape) -> StoredModel:
    """Match the tensors of a model folder with those that the model needs.

    Raises:
        DataError: missing, unexpected or differently shaped tensors, with file and tensor; tied ones that differ.
        UnsupportedModelError: quantised weights.
    """
    headers = read_headers(folder)
    tied = _TIED if shape.tied else {}
    check_tied(folder, headers, tied)
    needed = {name: size for place in places(shape) for name, size in place.hf}
    names = {name: _stored_name(name, headers, tied) for name in needed}
    problems = [
        problem for name, size in needed.items() if (problem := _problem(names[name], size, headers.get(names[name])))
    ]
    problems += [
        f"tensor {name!r} in {header.file} belongs to nothing in the model"
        for name, header in headers.items()
        if name not in needed and name not in tied and _COMPUTED not in name
    ]
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise DataError(f"{folder} does not fit its config.json: {shown}; copy the model again")
    return StoredModel(folder=folder, headers={name: headers[names[name]] for name in needed}, names=names)


def _stored_name(name: str, headers: Mapping[str, TensorHeader], tied: Mapping[str, str]) -> str:
    if name in headers:
        return name
    return next((alias for alias, source in tied.items() if source == name and alias in headers), name)


def _problem(name: str, size: tuple[int, ...], header: TensorHeader | None) -> str | None:
    if header is None:
        return f"tensor {name!r} is missing"
    if header.shape != size:
        return f"tensor {name!r} in {header.file} has shape {list(header.shape)}, config.json needs {list(size)}"
    if not header.dtype.is_floating_point:
        return f"tensor {name!r} in {header.file} has dtype {header.dtype}"
    return None


@torch.no_grad()
def load_hf(
    stored: StoredModel,
    parameters: Iterable[tuple[str, Tensor]],
    shape: ModelShape,
    *,
    tp_size: int,
    tp_rank: int,
    padded_vocab: int,
) -> None:
    """Fill parameters, one at a time, so that the host never holds more than one of them.

    Args:
        stored: from `find_hf`.
        parameters: Megatron name with global indices (see `name_map.global_name`), and this rank's tensor, of any dtype
            and device.
        shape: of the model.
        tp_size: tensor-parallel ranks.
        tp_rank: which of them this is.
        padded_vocab: see `name_map.padded_vocab_size`.

    Raises:
        UnsupportedModelError: the model has no such parameter.
        DataError: a parameter has another shape than the folder gives it, or a file cannot be read.
    """
    with _Reader(stored) as reader:
        for name, parameter in parameters:
            place = place_of(name, shape)
            rule = place.rule
            pieces = list(_pieces(reader, place, tp_size=tp_size, tp_rank=tp_rank, padded_vocab=padded_vocab))
            ranks = 1 if rule.split_dim is None else tp_size
            value = fuse(pieces, rule, shape, tp_size=ranks, padded_vocab=padded_vocab)
            if value.shape != parameter.shape:
                raise DataError(
                    f"{stored.folder}: {', '.join(hf for hf, _ in place.hf)} give Megatron's {name!r} the shape "
                    f"{list(value.shape)} here, and it has {list(parameter.shape)}"
                )
            parameter.copy_(value)


def _pieces(reader: "_Reader", place: Place, *, tp_size: int, tp_rank: int, padded_vocab: int) -> Iterator[Tensor]:
    for name, size in place.hf:
        yield reader.read(name, _index(place.rule, size, tp_size, tp_rank, padded_vocab))


def _index(rule: Rule, size: tuple[int, ...], tp_size: int, tp_rank: int, padded_vocab: int) -> tuple[slice, ...]:
    index = [slice(0, one) for one in size]
    if (dim := rule.split_dim) is not None:
        index[dim] = local_slice(rule, size[dim], tp_size=tp_size, tp_rank=tp_rank, padded_vocab=padded_vocab)
    return tuple(index)


class _Reader:
    """Reads parts of tensors; each file is opened once."""

    def __init__(self, stored: StoredModel) -> None:
        self._stored = stored
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}

    def __enter__(self) -> "_Reader":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """Read the part of a tensor that `index` gives."""
        file, path = self._stored.headers[name].file, self._stored.folder / self._stored.headers[name].file
        try:
            if file not in self._files:
                self._files[file] = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            part: Tensor = self._files[file].get_slice(self._stored.names[name])[index]
        except (SafetensorError, OSError) as error:
            raise DataError(f"{path} cannot be read: {error}; copy the model again") from error
        return part
