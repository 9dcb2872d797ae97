"""The files of a checkpoint folder: what they are called, how they are read, and whether all of them are whole.

A folder holds `dcp/` (weights and Adam's moments, sharded), `trainer_state.json` (the scalars), one
`rng_rank*.safetensors` a rank, and `manifest.json` over all of these and over what others added. Nothing in it is
trusted: the metadata of `dcp/` passes through an unpickler that builds nothing but DCP's own objects. Knows nothing of
models, optimizers or process groups, and of backends only the name of the one that wrote the folder.
"""

import json
import math
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path, PosixPath
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint import metadata as metadata_module
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from drivetrain_backend_api.errors import DataError, DrivetrainError, printable
from drivetrain_backend_api.manifest import (
    MANIFEST,
    OTHER_CHECKPOINT,
    FileRecord,
    file_findings,
    not_a_file,
    read_manifest,
    record_of,
)

FORMAT = 1
"""Version of the folder's layout."""

TENSORS = "dcp"
STATE = "trainer_state.json"

_METADATA = ".metadata"

_ARCHIVE_START = b"PK\x03\x04"
"""First bytes of everything that `torch.save` writes, and so of each tensor in a shard."""

_METADATA_CLASSES = frozenset(
    {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    }
)
"""Of `torch.distributed.checkpoint.metadata`: what DCP's metadata is made of."""

_PLAN_CLASSES = frozenset({"BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"})
"""Of `torch.distributed.checkpoint.planner`: how a checkpoint was written, which Megatron-LM keeps and nobody reads."""


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """The scalars of a checkpoint.

    Attributes:
        format: layout of the folder.
        backend: name of the train backend that wrote it.
        next_rollout_id: how many rollouts the weights were trained on.
        optimizer_steps: steps taken, which is also the schedule's position.
        loss_scale: of fp16, 1 otherwise.
        loss_scale_good_steps: steps since the scale last changed.
        world_size: ranks that wrote it.
        layout: how these shared the model, for example {"tp": 2, "pp": 1}; empty where the rank count says all.
        moments: Adam's are there; without them no run can go on from it.
    """

    format: int
    backend: str
    next_rollout_id: int
    optimizer_steps: int
    loss_scale: float
    loss_scale_good_steps: int
    world_size: int
    layout: Mapping[str, int] = field(default_factory=dict)
    moments: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.layout, dict):
            raise ValueError(f"layout is {self.layout!r:.60}, which is no table")
        if not isinstance(self.moments, bool):
            raise ValueError(f"moments is {self.moments!r:.60}, which is neither true nor false")
        for one in fields(self):
            if one.type in (int, float):
                smallest = 1 if one.name == "world_size" else 0
                _check_number(one.name, getattr(self, one.name), smallest, whole=one.type is int)
        for name, size in self.layout.items():
            _check_number(f"layout {name!r:.60}", size, 1, whole=True)

    def same_layout(self, world_size: int, layout: Mapping[str, int]) -> bool:
        """Say whether ranks in this number and layout wrote it, so that each finds its own random state."""
        return self.world_size == world_size and self.layout == layout


def _check_number(name: str, value: Any, smallest: int, *, whole: bool) -> None:
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise ValueError(f"{name} is {value!r:.60}, which is no number of its kind")
    if not (math.isfinite(value) and value >= smallest):
        raise ValueError(f"{name} is {value}, out of range")


def rng_file(folder: Path, rank: int) -> Path:
    """Return where a rank's random states lie."""
    return folder / f"rng_rank{rank:05d}.safetensors"


def records_of(folder: Path, rank: int) -> dict[str, FileRecord]:
    """Compute the record of every file that a rank has written, by its path in the folder."""
    paths = [rng_file(folder, rank), *(folder / TENSORS).glob(f"__{rank}_*")]
    if rank == 0:
        paths += [folder / STATE, folder / TENSORS / _METADATA]
    return {str(one.relative_to(folder)): record_of(one) for one in sorted(paths)}


def verify_files(folder: Path, rank: int, ranks: int, *, same_ranks: bool, full: bool) -> None:
    """Compare one rank's part of a folder's files with their list.

    Args:
        folder: should have been written by `save_checkpoint` of a backend.
        rank: takes every `ranks`-th file.
        ranks: that share the work.
        same_ranks: ranks of the same layout wrote it; else nobody reads the random states, and they are left alone.
        full: read every byte, not only those of small files.

    Raises:
        DataError: a file is missing, or is not what was written; names the first.
    """
    records = read_manifest(folder)
    shards = [f"{TENSORS}/{one}" for one in _pieces_by_file(folder, read_metadata(folder))]
    for name in (STATE, f"{TENSORS}/{_METADATA}", *sorted(shards)):
        if name not in records:
            raise DataError(f"{folder / MANIFEST} does not cover {name}; {OTHER_CHECKPOINT}")
    findings = file_findings(
        folder, full=full, skip=lambda name: not same_ranks and _is_random_state(name), share=(rank, ranks)
    )
    for finding in findings.values():
        raise DataError(finding)


def _is_random_state(name: str) -> bool:
    return name.startswith("rng_rank")


def write_state(folder: Path, state: TrainerState) -> None:
    """Write the scalars of a checkpoint."""
    (folder / STATE).write_text(json.dumps(asdict(state), indent=2) + "\n")


def require_moments(folder: Path, state: TrainerState) -> None:
    """Refuse to go on from a checkpoint without the optimizer.

    Raises:
        DataError: with the way out.
    """
    if not state.moments:
        raise DataError(
            f"{folder} was saved with --no-save-optim, so no run can be resumed from it; take another checkpoint, or "
            "begin a new run with its weights: add --finetune"
        )


def read_state(folder: Path, backend: str) -> TrainerState:
    """Read the scalars of a checkpoint.

    Args:
        backend: that should have written it.

    Raises:
        DataError: there is none, or it is damaged, of another format or of another backend.
    """
    path = folder / STATE
    if not path.is_file():
        raise DataError(f"{folder} is no checkpoint of the {backend} backend: it has no {STATE}; {OTHER_CHECKPOINT}")
    try:
        table = json.loads(path.read_text("utf-8"))
        if isinstance(table, dict) and table.get("format", FORMAT) != FORMAT:
            raise DataError(
                f"{path} has format {table['format']!r:.60}, this release reads {FORMAT}; use the release that wrote it"
            )
        if isinstance(table, dict) and table.get("backend", backend) != backend:
            raise DataError(
                f"{folder} was written by the {printable(str(table['backend']))} backend, and {backend} cannot read "
                "it; turn it into a model folder (drivetrain export) and give that as --hf-checkpoint"
            )
        return TrainerState(**table)
    except (OSError, ValueError, TypeError, RecursionError, OverflowError) as error:
        raise DataError(f"{path} is damaged: {error}; {OTHER_CHECKPOINT}") from error


def read_metadata(folder: Path, tensors: str = TENSORS) -> Metadata:
    """Read what DCP says of a checkpoint's tensors, by an unpickler that builds nothing but DCP's own classes.

    Args:
        tensors: where in the folder they lie.

    Raises:
        DataError: it is missing, damaged, or holds anything else.
    """
    path = folder / tensors / _METADATA
    _require_file(path)
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except FileNotFoundError as error:
        raise DataError(f"{folder} is no complete checkpoint: {path} is missing; {OTHER_CHECKPOINT}") from error
    except Exception as error:  # which one depends on the bytes that are unpickled
        reason = str(error) or type(error).__name__  # a MemoryError has no words
        raise DataError(f"{path} is damaged: {reason}; {OTHER_CHECKPOINT}") from error
    if not isinstance(metadata, Metadata):
        raise DataError(f"{path} is damaged: it holds a {type(metadata).__name__}; {OTHER_CHECKPOINT}")
    return metadata


def require_shared(folder: Path, rank: int) -> None:
    """Refuse to write into a folder that a rank does not see.

    Made there, it would lie on this node's own disk, and the checkpoint would lack its shards.

    Raises:
        DataError: with the rank.
    """
    if not folder.is_dir():
        raise DataError(
            f"rank {rank} does not see the checkpoint folder {folder}; "
            "--save must be a folder on a file system that all nodes share"
        )


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Copy this rank's random states, of the CPU and of the GPU where it trains on one."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def write_random_state(folder: Path, rank: int, states: dict[str, Tensor]) -> None:
    """Write what `random_state` gave."""
    try:
        save_file(states, rng_file(folder, rank))
    except SafetensorError as error:
        raise DrivetrainError(f"writing {rng_file(folder, rank)} failed: {error}") from error


def restore_random_state(path: Path, device: torch.device) -> None:
    """Make the random states that a file holds this process's own. Raises what `read_random_state` raises."""
    states = read_random_state(path)
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def read_random_state(path: Path) -> dict[str, Tensor]:
    """Read a rank's random states by device type: "cpu", and "cuda" where it trained on a GPU.

    Raises:
        DataError: missing or damaged.
    """
    _require_file(path)
    try:
        states = load_file(path)
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing; {OTHER_CHECKPOINT}") from error
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} is damaged: {error}; {OTHER_CHECKPOINT}") from error
    here, found = torch.get_rng_state(), states.get("cpu")
    if found is None or (found.dtype, found.shape) != (here.dtype, here.shape):
        raise DataError(f"{path} is damaged: it holds no random state of a CPU; {OTHER_CHECKPOINT}")
    return states


def check_checkpoint(folder: Path, backend: str, *, world_size: int | None = None, full: bool = False) -> list[str]:
    """Look for everything that would keep a checkpoint from being read: files missing, cut short or unreadable.

    Args:
        folder: should have been written by `save_checkpoint` of a backend.
        backend: its name.
        world_size: of the run that will load it, None to export it. Random states are looked at only where as many
            ranks wrote it, since no one else reads them.
        full: read every byte; else of the tensors only the sizes and the first bytes are looked at.

    Returns: one sentence for each thing wrong, empty when the checkpoint is whole.
    """
    others: dict[str, str] = {}
    random_states = False
    try:
        state = read_state(folder, backend)
        random_states = state.world_size == world_size
        if random_states:
            others |= _random_state_findings(folder, state.world_size)
    except DataError as error:
        others[STATE] = str(error)
    try:
        for name, finding in shard_findings(folder, read_metadata(folder)):
            others[f"{TENSORS}/{name}"] = finding
    except DataError as error:
        others[f"{TENSORS}/{_METADATA}"] = str(error)
    findings = file_findings(folder, full=full, skip=lambda name: not random_states and _is_random_state(name))
    # one sentence a file: what is wrong inside says more than that its checksum is not the listed one
    return list((findings | others).values())


def _require_file(path: Path) -> None:
    if finding := not_a_file(path):
        raise DataError(finding)


class _MetadataUnpickler(pickle.Unpickler):
    """Builds plain data and the objects of DCP's metadata.

    A pickle may set attributes on whatever it names. So it gets no class and no function to name, only stand-ins, made
    anew each time, that build an object when they are called; and all that it can name beside them cannot be changed.
    """

    def find_class(self, module: str, name: str) -> Any:
        if build := _builder(module, name):
            return _stand_in(build)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{f'{module}.{name}'!r} has no place in a checkpoint's metadata")


def _builder(module: str, name: str) -> Callable[..., object] | None:
    """Return what builds the objects of a class that DCP's metadata may hold, None for any other."""
    match module, name:
        case "torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING":
            return _MemoryFormat
        case "torch.distributed.checkpoint.metadata", _ if name in _METADATA_CLASSES:
            return partial(object.__new__, getattr(metadata_module, name))
        case "torch.distributed.checkpoint.filesystem", "_StorageInfo":
            return partial(object.__new__, _StorageInfo)
        case "torch.distributed.checkpoint.planner", _ if name in _PLAN_CLASSES:
            return _Ignored
        case "megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata" | "MCoreSavePlan":
            return _Ignored
        case "torch.serialization", "_get_layout":
            return _layout
        case "torch", "Size":
            return torch.Size
        case "pathlib" | "pathlib._local", "PosixPath":
            return PosixPath
    return None


def _stand_in(build: Callable[..., object]) -> type:
    class StandIn:
        __slots__ = ()

        def __new__(cls, *arguments: object) -> Any:
            return build(*arguments)

    return StandIn


class _Ignored:
    """Stands for an object whose content nobody reads."""

    def __init__(self, *_: object) -> None: ...


class _MemoryFormat:
    """Equals the member of DCP's enumeration of this number; the members themselves are shared, and can be changed."""

    __slots__ = ("number",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, number: object) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return self.number == getattr(other, "value", None)


def _layout(name: str) -> torch.layout:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.layout):
        raise pickle.UnpicklingError(f"{name!r:.60} is no layout of tensors")
    return found


def _random_state_findings(folder: Path, world_size: int) -> dict[str, str]:
    """Stop at the first missing file, after which most are missing."""
    findings = {}
    for rank in range(world_size):
        path = rng_file(folder, rank)
        try:
            read_random_state(path)
        except DataError as error:
            findings[path.name] = str(error)
            if not path.exists():
                break
    return findings


def shard_findings(folder: Path, metadata: Metadata, tensors: str = TENSORS) -> Iterator[tuple[str, str]]:
    """Yield name and one sentence for each file of tensors that is missing, cut short or holds something else.

    Raises:
        DataError: the metadata contradicts itself.
    """
    for name, pieces in sorted(_pieces_by_file(folder, metadata, tensors).items()):
        path = folder / tensors / name
        promised = max(offset + length for offset, length in pieces)
        try:
            _require_file(path)
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                if size < promised:
                    yield name, f"{path} is cut short: it has {size} bytes of {promised}; {OTHER_CHECKPOINT}"
                elif not all(_begins_archive(file, offset) for offset, _ in (min(pieces), max(pieces))):
                    yield name, f"{path} is damaged: it holds something else than tensors; {OTHER_CHECKPOINT}"
        except DataError as error:
            yield name, str(error)
        except FileNotFoundError:
            yield name, f"{path} is missing; {OTHER_CHECKPOINT}"
        except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
            yield name, f"{path} cannot be read: {error}; {OTHER_CHECKPOINT}"


def _begins_archive(file: BinaryIO, offset: int) -> bool:
    file.seek(offset)
    return file.read(len(_ARCHIVE_START)) == _ARCHIVE_START


def _pieces_by_file(folder: Path, metadata: Metadata, tensors: str = TENSORS) -> dict[str, list[tuple[int, int]]]:
    """Return (offset, length) of each stored piece of a tensor, by file.

    Raises:
        DataError: the metadata contradicts itself.
    """
    files: dict[str, list[tuple[int, int]]] = {}
    try:
        for info in metadata.storage_data.values():
            name, offset, length = info.relative_path, info.offset, info.length
            if Path(name).name != name or type(offset) is not int or not 0 <= offset <= offset + length:
                raise ValueError(f"{name!r:.60} at {offset!r:.60} is no place in this folder")
            files.setdefault(name, []).append((offset, length))
        for name, one in metadata.state_dict_metadata.items():
            chunks = one.chunks if isinstance(one, TensorStorageMetadata) else []
            if any(MetadataIndex(name, chunk.offsets) not in metadata.storage_data for chunk in chunks):
                raise ValueError(f"it does not say where all of tensor {name!r:.60} lies")
    except (AttributeError, TypeError, ValueError) as error:
        raise DataError(f"{folder / tensors / _METADATA} is damaged: {error}; {OTHER_CHECKPOINT}") from error
    return files
