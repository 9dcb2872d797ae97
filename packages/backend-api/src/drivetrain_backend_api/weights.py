"""Weights on their way out of a backend: the plan, the buckets, the collective iteration; and weights kept under tags.

A bucket is one flat byte buffer of whole tensors under Hugging Face names. The plan says, before any data moves and
identically on all ranks, what each bucket holds. Knows no engine and no transport.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain_backend_api.errors import DataError, IllegalStateError, WeightExportAbortedError
from drivetrain_backend_api.offload import wait_for_copies

ALIGNMENT = 16
"""Bytes to which every tensor's offset in a bucket is rounded up, so that any dtype can view it."""

POLICY_TAG = "policy"
"""The tag of the weights under training."""


class Holders(StrEnum):
    """Which ranks need the data of an export.

    ALL: every rank (CUDA IPC). STAGE_LEAD: one rank a pipeline stage (broadcast). RANK0: rank 0 (disk).
    """

    ALL = "all"
    STAGE_LEAD = "stage_lead"
    RANK0 = "rank0"


@dataclass(frozen=True, kw_only=True)
class WeightEntry:
    """One tensor of an export.

    Attributes:
        name: its Hugging Face name.
        dtype: name of the torch dtype, for example "bfloat16".
        stage: the pipeline stage that owns it.
        bucket: index of the bucket that carries it.
        offset: first byte in that bucket.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    stage: int
    bucket: int
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch knows it."""
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{self.dtype!r} is not a torch dtype")
        return dtype


@dataclass(frozen=True, kw_only=True)
class WeightPlan:
    """All tensors of an export, in bucket order; plain data that can be sent anywhere."""

    entries: tuple[WeightEntry, ...]

    @property
    def num_buckets(self) -> int:
        """How many buckets the export has."""
        return self.entries[-1].bucket + 1 if self.entries else 0

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors, without alignment."""
        return sum(one.nbytes for one in self.entries)

    def bucket(self, index: int) -> tuple[WeightEntry, ...]:
        """Entries of one bucket, by offset."""
        return tuple(one for one in self.entries if one.bucket == index)

    def bucket_bytes(self, index: int) -> int:
        """Size of one bucket's flat buffer."""
        last = self.bucket(index)[-1]
        return last.offset + last.nbytes


def plan_buckets(tensors: Iterable[tuple[str, Sequence[int], torch.dtype, int]], bucket_bytes: int) -> WeightPlan:
    """Lay tensors out in buckets, in the order given; a bucket never mixes stages.

    Args:
        tensors: (name, shape, dtype, stage).
        bucket_bytes: most bytes a bucket may have; a single larger tensor gets a bucket of its own.
    """
    entries: list[WeightEntry] = []
    bucket, offset, stage_before = -1, 0, None
    for name, shape, dtype, stage in tensors:
        size = math.prod(shape) * dtype.itemsize
        start = -(-offset // ALIGNMENT) * ALIGNMENT
        if bucket < 0 or stage != stage_before or start + size > bucket_bytes:
            bucket, start, stage_before = bucket + 1, 0, stage
        entries.append(
            WeightEntry(
                name=name,
                shape=tuple(shape),
                dtype=str(dtype).removeprefix("torch."),
                stage=stage,
                bucket=bucket,
                offset=start,
            )
        )
        offset = start + size
    return WeightPlan(entries=tuple(entries))


@dataclass(frozen=True, kw_only=True)
class WeightBucket:
    """One bucket. `data` is uint8 [bucket_bytes] on holders and None elsewhere."""

    index: int
    entries: tuple[WeightEntry, ...]
    data: Tensor | None


def unflatten(data: Tensor, entries: Iterable[WeightEntry]) -> Iterator[tuple[str, Tensor]]:
    """View each tensor of a bucket in its flat uint8 buffer, without copying."""
    for one in entries:
        yield one.name, data[one.offset : one.offset + one.nbytes].view(one.torch_dtype).view(one.shape)


def flatten(tensors: Iterable[Tensor], entries: Sequence[WeightEntry], *, device: torch.device | str) -> Tensor:
    """Copy tensors into one flat uint8 buffer at their entries' offsets."""
    last = entries[-1]
    data = torch.zeros(last.offset + last.nbytes, dtype=torch.uint8, device=device)
    for (_, place), tensor in zip(unflatten(data, entries), tensors, strict=True):
        place.copy_(tensor)
    return data


class WeightExport:
    """A collective iteration over the buckets of a plan; use it as a context manager, on all ranks.

    Before each bucket all ranks agree to go on. A rank that leaves the `with` block early says so at that point, and
    every other rank then gets `WeightExportAbortedError` instead of waiting for it.
    """

    def __init__(
        self,
        plan: WeightPlan,
        gather: Callable[[int], Tensor | None],
        agree: Callable[[bool], bool],
    ) -> None:
        """Bind an export to its plan.

        Args:
            plan: identical on all ranks.
            gather: collective; bucket index -> flat buffer on holders, None elsewhere.
            agree: collective; True when every rank passed True.
        """
        self.plan = plan
        self._gather = gather
        self._agree = agree
        self._ended = False

    def __enter__(self) -> "WeightExport":
        return self

    def __iter__(self) -> Iterator[WeightBucket]:
        for index in range(self.plan.num_buckets):
            self._step()
            yield WeightBucket(index=index, entries=self.plan.bucket(index), data=self._gather(index))
        self._step()
        self._ended = True

    def _step(self) -> None:
        if self._ended:
            raise IllegalStateError("this weight export has ended; it needs a new export_weights() call")
        if not self._agree(True):
            self._ended = True
            raise WeightExportAbortedError("another rank abandoned the weight export; see that rank's error")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._ended:
            self._ended = True
            self._agree(False)


@dataclass(frozen=True, kw_only=True)
class ReplicaGroup:
    """The ranks over which a tensor is the same, bit for bit.

    Attributes:
        rank: this process's rank in `group`.
        size: how many ranks `group` has.
    """

    group: dist.ProcessGroup
    rank: int
    size: int


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """A stretch of one tensor's share, in bytes: where in the share, how long, and where in the bucket."""

    name: str
    start: int
    length: int
    offset: int


@dataclass(kw_only=True)
class _HostBucket:
    """Pieces that have a host buffer, and an all-gather, in common."""

    replicas: ReplicaGroup | None
    device: torch.device
    pieces: list[_Piece] = field(default_factory=list)
    nbytes: int = 0


class _HostLayout:
    """Where the bytes of every weight are kept on the host: the same for all tags.

    Of a tensor that is the same on n ranks, each keeps the share of 1/n that its rank there says, padded. Shares fill
    buckets of bounded size, and large ones go over several.
    """

    def __init__(
        self,
        live: Mapping[str, Tensor],
        replicas: Callable[[str], ReplicaGroup | None] | None,
        staging_bytes: int,
    ) -> None:
        self.buckets: list[_HostBucket] = []
        self.share: dict[str, int] = {}
        self._pieces: dict[str, list[tuple[int, _Piece]]] = {}
        filling: dict[tuple[dist.ProcessGroup | None, torch.device], int] = {}
        for name, tensor in live.items():
            found = None if replicas is None else replicas(name)
            among = found if found is not None and found.size > 1 else None
            size = 1 if among is None else among.size
            capacity = max(ALIGNMENT, staging_bytes // size // ALIGNMENT * ALIGNMENT)
            self.share[name] = _aligned(-(-tensor.nbytes // size))
            self._pieces[name] = []
            where = (None if among is None else among.group, tensor.device)
            start = 0
            while start < self.share[name]:
                index = filling.get(where)
                if index is None or self.buckets[index].nbytes == capacity:
                    index = filling[where] = len(self.buckets)
                    self.buckets.append(_HostBucket(replicas=among, device=tensor.device))
                bucket = self.buckets[index]
                length = min(self.share[name] - start, capacity - bucket.nbytes)
                piece = _Piece(name=name, start=start, length=length, offset=bucket.nbytes)
                bucket.pieces.append(piece)
                bucket.nbytes += length
                self._pieces[name].append((index, piece))
                start += length
        # One group's all-gathers after the other's, in an order that all ranks with the same tensors have.
        self.order = sorted(range(len(self.buckets)), key=lambda one: list(filling).index(self._where(one)))

    def _where(self, index: int) -> tuple[dist.ProcessGroup | None, torch.device]:
        bucket = self.buckets[index]
        return (None if bucket.replicas is None else bucket.replicas.group, bucket.device)

    def allocate(self) -> list[Tensor]:
        """Make a tag's host buffers, one a bucket."""
        return [
            torch.empty(one.nbytes, dtype=torch.uint8, pin_memory=one.device.type == "cuda") for one in self.buckets
        ]

    def keep(self, name: str, tensor: Tensor, buffers: Sequence[Tensor]) -> None:
        """Copy this rank's share of one tensor to its places in the host buffers."""
        data = _bytes_of(tensor.detach().contiguous())
        for index, piece in self._pieces[name]:
            replicas = self.buckets[index].replicas
            start = piece.start + (0 if replicas is None else replicas.rank * self.share[name])
            length = max(0, min(piece.length, data.numel() - start))
            buffers[index][piece.offset : piece.offset + length].copy_(data[start : start + length], non_blocking=True)

    def bring(self, buffers: Sequence[Tensor], live: Mapping[str, Tensor]) -> None:
        """Fill the live tensors; collective over each bucket's ranks."""
        staging: dict[torch.device, Tensor] = {}
        for device in {one.device for one in self.buckets if one.replicas is not None}:
            sizes = [
                one.nbytes * (one.replicas.size + 1)
                for one in self.buckets
                if one.replicas is not None and one.device == device
            ]
            staging[device] = torch.empty(max(sizes), dtype=torch.uint8, device=device)
        contiguous: dict[str, Tensor] = {}  # stand-ins for live tensors that are not
        for index in self.order:
            bucket = self.buckets[index]
            shares = self._gather(bucket, buffers[index], staging)
            for piece in bucket.pieces:
                name, tensor = piece.name, live[piece.name].detach()
                if not tensor.is_contiguous():
                    tensor = contiguous.setdefault(
                        name, torch.empty_like(tensor, memory_format=torch.contiguous_format)
                    )
                data = _bytes_of(tensor)
                for rank, one in enumerate(shares):
                    start = rank * self.share[name] + piece.start
                    length = max(0, min(piece.length, data.numel() - start))
                    data[start : start + length].copy_(one[piece.offset : piece.offset + length], non_blocking=True)
                if name in contiguous and piece.start + piece.length == self.share[name]:
                    live[name].copy_(contiguous.pop(name))

    def _gather(self, bucket: _HostBucket, buffer: Tensor, staging: Mapping[torch.device, Tensor]) -> Sequence[Tensor]:
        """Return every rank's share of a bucket, in rank order; views of `staging`."""
        if bucket.replicas is None:
            return [buffer]
        size = bucket.replicas.size
        space = staging[bucket.device]
        mine, gathered = space[: bucket.nbytes], space[bucket.nbytes : bucket.nbytes * (size + 1)]
        mine.copy_(buffer, non_blocking=True)
        dist.all_gather_into_tensor(gathered, mine, group=bucket.replicas.group)
        return gathered.view(size, bucket.nbytes).unbind()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _bytes_of(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as its bytes."""
    return tensor.view(-1).view(torch.uint8)


class WeightManager:
    """Keeps copies of this rank's weights on the host under tags, and switches the live model between them.

    Only model weights are touched. The live tag starts as "policy"; training is legal only under it.

    With `replicas` the ranks that hold the same tensor share its host copies, and `restore` and `switch` are
    collective; `backup` and `add` move nothing between ranks, but every rank must call them too.
    """

    def __init__(
        self,
        live_weights: Callable[[], Mapping[str, Tensor]],
        *,
        replicas: Callable[[str], ReplicaGroup | None] | None = None,
        staging_bytes: int = 256 * 2**20,
    ) -> None:
        """Manage the tensors that `live_weights` returns: name -> this rank's local tensor, always the same ones.

        Args:
            replicas: name -> the ranks over which that tensor is the same; None where it is this rank's alone. The
                ranks of a group give the same tensors in the same order.
            staging_bytes: most device memory that `restore` gathers into at a time; a share of it on top for sending.
        """
        self._live_weights = live_weights
        self._replicas = replicas
        self._staging_bytes = staging_bytes
        self._layout_of_all: _HostLayout | None = None
        self._kept: dict[str, list[Tensor]] = {}
        self.live_tag = POLICY_TAG

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags that can be restored."""
        return tuple(self._kept)

    def host_bytes(self, tag: str) -> int:
        """Return the host memory that this rank's copies under `tag` take; 0 where nothing is kept."""
        return sum(one.nbytes for one in self._kept.get(tag, ()))

    def backup(self, tag: str) -> None:
        """Copy the live weights to the host under `tag`, reusing the buffers of an earlier backup.

        Raises:
            IllegalStateError: the policy's copy would be overwritten by other weights.
        """
        if tag == POLICY_TAG:
            self.require_policy("backup_weights")
        live = self._live_weights()
        layout = self._layout(live)
        buffers = self._kept.get(tag) or layout.allocate()
        for name, tensor in live.items():
            layout.keep(name, tensor, buffers)
        wait_for_copies()
        self._kept[tag] = buffers

    def add(self, tag: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Keep given weights under `tag`, in place of what it had, without making them live.

        Args:
            tensors: (name, this rank's local tensor, whole even where ranks share the copies) of every live weight, in
                any order; taken one at a time, so that they need never be in memory together. Cast to the live dtype.

        Raises:
            IllegalStateError: the tag is the policy's or is live.
            DataError: a tensor is missing, unknown, given twice or of another shape; the tag is then gone.
        """
        if tag in (POLICY_TAG, self.live_tag):
            raise IllegalStateError(f"add({tag!r}) would change weights that are live; use a tag that is not")
        live = self._live_weights()
        layout = self._layout(live)
        buffers = self._kept.pop(tag, None) or layout.allocate()
        missing = dict.fromkeys(live)
        for name, tensor in tensors:
            if name not in live:
                raise DataError(f"weights for tag {tag!r} have {name!r}, which the model has not")
            if name not in missing:
                raise DataError(f"weights for tag {tag!r} have {name!r} twice")
            if tensor.shape != live[name].shape:
                raise DataError(
                    f"weights for tag {tag!r} have {name!r} in shape {list(tensor.shape)}, the model in "
                    f"{list(live[name].shape)}; a tag needs weights of the model's own shapes"
                )
            layout.keep(name, tensor.to(live[name].dtype), buffers)
            del missing[name]
        wait_for_copies()
        if missing:
            raise DataError(
                f"weights for tag {tag!r} lack {len(missing)} of the model's tensors, the first {next(iter(missing))!r}"
            )
        self._kept[tag] = buffers

    def restore(self, tag: str) -> None:
        """Copy the weights kept under `tag` into the live model, bit for bit.

        Raises:
            IllegalStateError: nothing is kept under that tag.
        """
        if tag not in self._kept:
            raise IllegalStateError(
                f"no weights are kept under tag {tag!r} (kept: {', '.join(self._kept) or 'none'}); "
                f"call backup_weights({tag!r}) first"
            )
        live = self._live_weights()
        with torch.no_grad():
            self._layout(live).bring(self._kept[tag], live)
        wait_for_copies()
        self.live_tag = tag

    def _layout(self, live: Mapping[str, Tensor]) -> _HostLayout:
        if self._layout_of_all is None:
            self._layout_of_all = _HostLayout(live, self._replicas, self._staging_bytes)
        return self._layout_of_all

    def switch(self, tag: str) -> None:
        """Make `tag` live; leaving the policy backs it up first, so that coming back is exact."""
        if tag == self.live_tag:
            return
        if self.live_tag == POLICY_TAG:
            if tag not in self._kept:
                self.restore(tag)  # raises, before anything is copied
            self.backup(POLICY_TAG)
        self.restore(tag)

    def require_policy(self, call: str) -> None:
        """Refuse a call that needs the policy's own weights.

        Raises:
            IllegalStateError: another tag is live.
        """
        if self.live_tag != POLICY_TAG:
            raise IllegalStateError(
                f"{call}() is illegal while the weights are tag {self.live_tag!r}; it needs tag {POLICY_TAG!r}: "
                f"call switch_weights({POLICY_TAG!r}) first"
            )
