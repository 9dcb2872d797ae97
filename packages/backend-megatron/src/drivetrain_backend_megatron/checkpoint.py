"""Checkpoints: PyTorch DCP files under Megatron's keys, read under any layout, exported to Hugging Face.

Nothing is gathered: each rank writes and reads the slices of weights and optimizer state that it owns, in place, as
rectangles of the whole tensors. So a torch_dist checkpoint of Megatron-LM is read by the same code. Which files a
folder holds, and how they are read without trust, is in backend-api's `checkpoint_files`; how they are written while
training goes on, in `background_save`; the keys are in `checkpoint_keys`. Which folder, and when it is complete, is not
decided here.
"""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from drivetrain_backend_api.backend import SaveHandle
from drivetrain_backend_api.background_save import CheckpointSaver
from drivetrain_backend_api.checkpoint_files import (
    FORMAT,
    TENSORS,
    TrainerState,
    read_metadata,
    read_state,
    require_moments,
    restore_random_state,
    rng_file,
    verify_files,
)
from drivetrain_backend_api.collectives import gathered, together
from drivetrain_backend_api.errors import DataError
from drivetrain_backend_api.hf_export import StoredTensor, export_dtypes, require_unused, write_model_folder
from drivetrain_backend_api.hf_folder import read_headers
from drivetrain_backend_api.schedule import LossScaler
from drivetrain_backend_api.sharded_checkpoint import Piece, Rectangle, read_pieces, stored_tensors
from drivetrain_backend_megatron.architectures import ModelShape, read_shape
from drivetrain_backend_megatron.checkpoint_files import BACKEND
from drivetrain_backend_megatron.checkpoint_keys import (
    StoredParameter,
    find_stored,
    slice_rectangles,
    whole_shape,
    write_place,
)
from drivetrain_backend_megatron.core import buffers
from drivetrain_backend_megatron.load_kind import LoadKind, LoadSource, find_source
from drivetrain_backend_megatron.model import ModelPart
from drivetrain_backend_megatron.name_map import Place, place_of, places, to_hf
from drivetrain_backend_megatron.optimizer import OwnedSlice, SlicedAdamW

_MAIN = "optimizer.state.fp32_param."
_MOMENTS = {"exp_avg": "optimizer.state.exp_avg.", "exp_avg_sq": "optimizer.state.exp_avg_sq."}
_NO_WEIGHT = re.compile(r"^(chained_\d+\.)?optimizer\.|\._extra_state")

_LOG = logging.getLogger(__name__)


def save_checkpoint(
    folder: Path,
    part: ModelPart,
    optimizer: SlicedAdamW,
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
        world_size=part.layout.world_size,
        layout=layout_facts(part),
        moments=moments,
    )
    return saver.begin(folder, pieces_to_write(part, optimizer, moments=moments), state)


def load_checkpoint(
    folder: Path,
    part: ModelPart,
    optimizer: SlicedAdamW,
    scaler: LossScaler,
    *,
    device: torch.device,
    control: dist.ProcessGroup | None,
    weights_only: bool = False,
    verify: bool = False,
) -> int:
    """Read whatever `--load` names into live tensors; collective.

    A checkpoint of this backend restores all that training needs, random states where the layout is the same. Of one of
    Megatron-LM's, and of a Hugging Face folder, the weights are taken and the optimizer begins anew.

    Args:
        weights_only: take nothing else of this backend's either.
        verify: of this backend's, read every byte of the files first, each rank its share.

    Returns: the next rollout id, equal on all ranks.

    Raises:
        DataError: nothing to load, something damaged or of another model; or ranks that see different folders.
    """
    source = together(lambda: find_source(folder), control)
    if len(set(gathered(source, control))) > 1:
        raise DataError(f"{folder}: ranks see different folders; --load must name one that all nodes share")
    if part.layout.rank == 0:
        _LOG.info("--load %s: %s", source.folder, source.kind)
    if source.kind is LoadKind.DRIVETRAIN and not weights_only:
        return _load_own(source.folder, part, optimizer, scaler, device=device, control=control, verify=verify)
    _take_weights(source, part, optimizer, control, verify=verify)
    return 0


def load_weights(
    folder: Path,
    flag: str,
    part: ModelPart,
    optimizer: SlicedAdamW,
    *,
    control: dist.ProcessGroup | None,
    verify: bool = False,
) -> None:
    """Read the weights alone, of any of the kinds that `--load` takes, into the live ones; collective.

    Args:
        folder: what `flag` names.
        flag: for messages.
        part: the model; its weights are overwritten.
        optimizer: its masters are overwritten too.
        control: a CPU group of all ranks.
        verify: as in `load_checkpoint`.

    Raises:
        DataError: nothing to load, something damaged or of another model.
    """
    source = together(lambda: find_source(folder, flag), control)
    if len(set(gathered(source, control))) > 1:
        raise DataError(f"{folder}: ranks see different folders; {flag} must name one that all nodes share")
    _take_weights(source, part, optimizer, control, verify=verify)


def export_checkpoint(folder: Path, hf_checkpoint: Path, out: Path, dtype: torch.dtype | None = None) -> None:
    """Turn a checkpoint into a Hugging Face folder, in one process and without process groups.

    Weights, configuration and tokenizer files are written aside and renamed, so that `out` is complete or absent. The
    host holds about one file's worth of weights at a time.

    Args:
        folder: written by `save_checkpoint`.
        hf_checkpoint: the model folder that training began with; its configuration and tokenizer are copied.
        out: must not exist, or be empty.
        dtype: of the weights; None takes those of `hf_checkpoint`.

    Raises:
        DataError: a folder cannot be read, `out` is in use, or the checkpoint is of another model.
    """
    require_unused(out)
    read_state(folder, BACKEND)
    metadata = read_metadata(folder)
    verify_files(folder, 0, 1, same_ranks=False, full=True)
    shape = read_shape(hf_checkpoint)
    model = StoredModel.of(folder, metadata, shape)
    owners = {name: place for place in places(shape) for name, _ in place.hf}
    # masters where there are any: what is written in fp32 should be more than widened weights
    sources = {place.name: model.find_weight(place, masters=True) for place in owners.values()}
    stored = {
        name: StoredTensor(shape=size, dtype=model.dtypes[sources[place.name].key])
        for name, place in owners.items()
        for hf, size in place.hf
        if hf == name
    }

    def read(names: Sequence[str]) -> dict[str, Tensor]:
        wanted = {owners[name].name: owners[name] for name in names}
        whole = {
            name: torch.empty(whole_shape(place), dtype=model.dtypes[sources[name].key])
            for name, place in wanted.items()
        }
        pieces = [_whole_piece(sources[name], tensor) for name, tensor in whole.items()]
        read_pieces(folder, pieces, None, metadata=metadata)
        pieces.clear()
        found = {}
        for name, place in wanted.items():
            tensors = to_hf([whole.pop(name)], place.rule, shape)
            found.update({hf: one for (hf, _), one in zip(place.hf, tensors) if hf in names})
        return found

    headers = read_headers(hf_checkpoint)
    tied = {"model.embed_tokens.weight": "lm_head.weight"} if shape.tied else {}
    dtypes = export_dtypes(
        stored, dtype, hf_checkpoint=hf_checkpoint, headers=headers, stored_name=lambda name: tied.get(name, name)
    )
    write_model_folder(out, hf_checkpoint, stored, read, dtypes=dtypes, dtype=dtype)


def layout_facts(part: ModelPart) -> dict[str, int]:
    """Return what a checkpoint says of how its ranks shared the model; the same facts, and random states fit."""
    layout = part.layout
    return {
        "tp": layout.tp_size,
        "pp": layout.pp_size,
        "cp": layout.cp_size,
        "ep": layout.ep_size,
        "dp": layout.dp_size,
        "model_chunks": len(part.chunks),
    }


# -- what a checkpoint holds -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """The tensors of a checkpoint, found to be those of a model.

    Attributes:
        folder: for messages.
        shape: of the model.
        sizes: shape of every tensor by key.
        dtypes: of every tensor by key.
    """

    folder: Path
    shape: ModelShape
    sizes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]

    @classmethod
    def of(cls, folder: Path, metadata: Metadata, shape: ModelShape) -> "StoredModel":
        """Match a checkpoint's weights with those of a model.

        Raises:
            DataError: some are missing, too many, or of another shape.
        """
        stored = stored_tensors(metadata)
        model = cls(
            folder=folder,
            shape=shape,
            sizes={key: tuple(one.size) for key, one in stored.items()},
            dtypes={key: one.properties.dtype for key, one in stored.items()},
        )
        needed = {model.find_weight(place).key for place in places(shape)}
        for key in sorted(set(model.sizes) - needed):
            if not _NO_WEIGHT.search(key):
                raise model.misfit(f"tensor {key!r} has shape {model.sizes[key]} there and none in the model")
        return model

    def find_weight(self, place: Place, *, masters: bool = False) -> StoredParameter:
        """Return where a weight is; `masters` prefers the optimizer's copy of it, where there is one."""
        weight = self._find(place, "")
        return self._find(place, _MAIN) if masters and _MAIN + weight.key in self.sizes else weight

    def find_moment(self, place: Place, kind: str) -> StoredParameter:
        """Return where one of Adam's moments of a parameter is."""
        return self._find(place, _MOMENTS[kind])

    def misfit(self, reason: object) -> DataError:
        """Say that the checkpoint does not belong to the model."""
        return DataError(
            f"{self.folder} is a checkpoint of another model: {reason}; "
            "give the --hf-checkpoint that training began with"
        )

    def _find(self, place: Place, prefix: str) -> StoredParameter:
        try:
            return find_stored(place, self.shape, self.sizes, prefix=prefix)
        except DataError as error:
            raise self.misfit(error) from error


def pieces_to_write(part: ModelPart, optimizer: SlicedAdamW, *, moments: bool) -> list[Piece]:
    """Name what this rank writes: of the slices that it owns weights, masters and moments."""
    slices = part.owned_slices()
    pieces: list[Piece] = []
    for name in part.first_copies(slices):
        place, own = place_of(name, part.shape), slices[name]
        stored = write_place(place, part.shape)
        pieces += _pieces(part, place, own, stored, "", own.weight)
        for prefix, tensor in _state_to_write(optimizer, name, own, moments=moments):
            pieces += _pieces(part, place, own, stored, prefix, tensor)
    return pieces


def _state_to_write(
    optimizer: SlicedAdamW, name: str, own: OwnedSlice, *, moments: bool
) -> Iterator[tuple[str, Tensor]]:
    state = optimizer.slice_state(name)
    if not _is_same(state["main"], own.weight):
        yield _MAIN, state["main"]
    for kind, prefix in _MOMENTS.items() if moments else ():
        yield prefix, state[kind]


def _pieces(
    part: ModelPart, place: Place, own: OwnedSlice, stored: StoredParameter, prefix: str, flat: Tensor
) -> Iterator[Piece]:
    """Show the parts of a flat slice as rectangles of the stored tensor, sharing their memory."""
    for one in _rectangles(part, place, own):
        yield Piece(
            key=prefix + stored.key,
            shape=stored.shape,
            offsets=(*stored.index, *one.offsets),
            tensor=flat[one.start : one.start + one.count].view((1,) * len(stored.index) + one.sizes),
        )


def _rectangles(part: ModelPart, place: Place, own: OwnedSlice) -> list[Rectangle]:
    return slice_rectangles(
        place,
        own.start,
        own.weight.numel(),
        shape=part.shape,
        tp_size=part.layout.tp_size,
        tp_rank=part.layout.tp_rank,
        padded_vocab=part.padded_vocab,
    )


def _whole_piece(stored: StoredParameter, tensor: Tensor) -> Piece:
    lead = len(stored.index)
    return Piece(
        key=stored.key,
        shape=stored.shape,
        offsets=(*stored.index, *(0,) * tensor.ndim),
        tensor=tensor.view((1,) * lead + tuple(tensor.shape)),
    )


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr()


# -- loading -----------------------------------------------------------------------------------------------------------


def _load_own(
    folder: Path,
    part: ModelPart,
    optimizer: SlicedAdamW,
    scaler: LossScaler,
    *,
    device: torch.device,
    control: dist.ProcessGroup | None,
    verify: bool,
) -> int:
    rank, ranks = part.layout.rank, part.layout.world_size
    facts = layout_facts(part)

    def look() -> TrainerState:
        state = read_state(folder, BACKEND)
        require_moments(folder, state)
        verify_files(folder, rank, ranks, same_ranks=state.same_layout(ranks, facts), full=verify)
        return state

    state = together(look, control)
    if len(set(gathered(state.next_rollout_id, control))) > 1:
        raise DataError(
            f"{folder}: ranks see different checkpoints (next rollout ids {gathered(state.next_rollout_id, control)}); "
            "--load must name a folder that all nodes share"
        )
    _load_tensors(LoadSource(kind=LoadKind.DRIVETRAIN, folder=folder), part, optimizer, control, moments=True)
    optimizer.steps = state.optimizer_steps
    if scaler.enabled and (state.loss_scale, state.loss_scale_good_steps) != (1.0, 0):  # those of bf16 and fp32
        scaler.scale, scaler.good_steps = state.loss_scale, state.loss_scale_good_steps
    if state.same_layout(ranks, facts):
        together(lambda: restore_random_state(rng_file(folder, rank), device), control)
    return state.next_rollout_id


def _take_weights(
    source: LoadSource, part: ModelPart, optimizer: SlicedAdamW, control: dist.ProcessGroup | None, *, verify: bool
) -> None:
    if source.kind is LoadKind.HUGGING_FACE:
        part.load(source.folder, also=optimizer.take_master)
        return

    def look() -> None:
        read_state(source.folder, BACKEND)
        verify_files(source.folder, part.layout.rank, part.layout.world_size, same_ranks=False, full=verify)

    if source.kind is LoadKind.DRIVETRAIN:
        together(look, control)
    _load_tensors(source, part, optimizer, control, moments=False)


@torch.no_grad()
def _load_tensors(
    source: LoadSource,
    part: ModelPart,
    optimizer: SlicedAdamW,
    control: dist.ProcessGroup | None,
    *,
    moments: bool,
) -> None:
    """Fill this rank's slices, then spread the weights; Adam's moments only where they are wanted."""
    own = source.kind is LoadKind.DRIVETRAIN
    tensors = TENSORS if own else ""
    slices = part.owned_slices()

    def plan() -> tuple[Metadata, list[Piece]]:
        metadata = read_metadata(source.folder, tensors)
        model = StoredModel.of(source.folder, metadata, part.shape)
        _say_casts(model, slices, optimizer, part, own=own, moments=moments)
        return metadata, [
            piece
            for name, one in slices.items()
            for piece in _pieces_to_read(model, part, optimizer, name, one, own=own, moments=moments)
        ]

    metadata, pieces = together(plan, control)
    _zero_padding(part, optimizer, slices)
    read_pieces(source.folder, pieces, control, metadata=metadata, tensors=tensors)
    # rounded from the masters, whatever the checkpoint's weights were rounded to
    optimizer.give_weights()
    buffers.gather_weights(part.chunks)
    buffers.finish_gathering(part.chunks)


def _pieces_to_read(
    model: StoredModel, part: ModelPart, optimizer: SlicedAdamW, name: str, one: OwnedSlice, *, own: bool, moments: bool
) -> Iterator[Piece]:
    place, state = place_of(name, part.shape), optimizer.slice_state(name)
    # weights are made from the masters afterwards, where they are not the masters themselves
    yield from _pieces(part, place, one, model.find_weight(place, masters=own), "", state["main"])
    if moments:
        for kind in _MOMENTS:
            yield from _pieces(part, place, one, model.find_moment(place, kind), "", state[kind])


def _zero_padding(part: ModelPart, optimizer: SlicedAdamW, slices: Mapping[str, OwnedSlice]) -> None:
    """Padded rows of a vocabulary are in no checkpoint."""
    for name, own in slices.items():
        place = place_of(name, part.shape)
        if place.rule.vocab:
            filled = sum(one.count for one in _rectangles(part, place, own))
            for tensor in (own.weight, *optimizer.slice_state(name).values()):
                tensor[filled:].zero_()


def _say_casts(
    model: StoredModel,
    slices: Mapping[str, OwnedSlice],
    optimizer: SlicedAdamW,
    part: ModelPart,
    *,
    own: bool,
    moments: bool,
) -> None:
    if part.layout.rank != 0:
        return
    found = set()
    for name in slices:
        place, state = place_of(name, part.shape), optimizer.slice_state(name)
        kinds = {"main": model.find_weight(place, masters=own)}
        if moments:
            kinds |= {kind: model.find_moment(place, kind) for kind in _MOMENTS}
        found |= {(kind, model.dtypes[one.key], state[kind].dtype) for kind, one in kinds.items()}
    casts = [f"{kind} from {there} to {here}" for kind, there, here in sorted(found, key=str) if there != here]
    if casts:
        _LOG.warning("%s: cast %s", model.folder, ", ".join(casts).replace("torch.", ""))
