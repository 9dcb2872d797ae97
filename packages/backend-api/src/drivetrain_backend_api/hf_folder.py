"""Read the weights of a Hugging Face model folder: headers and tensors of its safetensors files.

Works a tensor at a time, so that no whole model is ever held. Knows nothing of transformers, sharding or groups.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drivetrain_backend_api.errors import DataError, UnsupportedModelError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, kw_only=True)
class TensorHeader:
    """What a safetensors file says of one tensor."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class _OpenFile(Protocol):
    def keys(self) -> Sequence[str]: ...

    def get_slice(self, name: str) -> Any: ...

    def get_tensor(self, name: str) -> Tensor: ...


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Read the header of every tensor, of one `model.safetensors` or of a sharded index.

    Raises:
        DataError: no weights, a damaged file, or an index that disagrees with its files.
        UnsupportedModelError: a dtype that cannot be trained, as in quantised checkpoints.
    """
    index = folder / "model.safetensors.index.json"
    expected: Mapping[str, str] | None = None
    if index.is_file():
        try:
            expected = json.loads(index.read_text())["weight_map"]
            files = sorted(set(expected.values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise DataError(f"{index} is not a safetensors index: {error!r}; copy the model again") from error
    else:
        files = ["model.safetensors"]
    headers: dict[str, TensorHeader] = {}
    for name in files:
        with _opened(folder / name) as file:
            for key in file.keys():  # noqa: SIM118 - not a mapping
                one = file.get_slice(key)
                if one.get_dtype() not in _DTYPES:
                    raise UnsupportedModelError(
                        f"{folder / name}: tensor {key!r} has dtype {one.get_dtype()}; only unquantised weights train"
                    )
                headers[key] = TensorHeader(file=name, shape=tuple(one.get_shape()), dtype=_DTYPES[one.get_dtype()])
    if expected is not None:
        for key, name in expected.items():
            if key not in headers or headers[key].file != name:
                raise DataError(f"{index} places tensor {key!r} in {name}, which lacks it; copy the model again")
    return headers


def read_tensors(folder: Path, headers: Mapping[str, TensorHeader], names: Sequence[str]) -> Iterator[Tensor]:
    """Read the named tensors one after the other, on the host."""
    for name in names:
        with _opened(folder / headers[name].file) as file:
            yield file.get_tensor(name)


def check_tied(folder: Path, headers: Mapping[str, TensorHeader], tied: Mapping[str, str]) -> None:
    """Check that tied tensors which the folder stores twice are equal.

    Raises:
        DataError: they differ, so that tying them would lose one.
    """
    for alias, source in tied.items():
        if alias in headers and source in headers:
            mine, theirs = read_tensors(folder, headers, [alias, source])
            if not torch.equal(mine, theirs):
                raise DataError(
                    f"{folder}: config.json ties {alias!r} to {source!r}, but the stored tensors differ; "
                    "set tie_word_embeddings to false in config.json, or drop one of them"
                )


@contextmanager
def _opened(path: Path) -> Iterator[_OpenFile]:
    if path.exists() and not path.is_file():  # to open a pipe is to wait
        raise DataError(f"{path} is not a file; copy the model again")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing; the model folder needs safetensors weights") from error
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} is damaged: {error}; copy the model again") from error
