"""Weights on their way out of a backend: the plan, the buckets, the collective iteration; and weights kept under tags.

A bucket is one flat byte buffer of whole tensors under Hugging Face names. The plan says, before any data moves and
identically on all ranks, what each bucket holds. Knows no engine and no transport.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType

import torch
from torch import Tensor

from drivetrain_backend_api.errors import IllegalStateError, WeightExportAbortedError

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


class WeightManager:
    """Keeps copies of this rank's weights on the host under tags, and switches the live model between them.

    Only model weights are touched. The live tag starts as "policy"; training is legal only under it.
    """

    def __init__(self, live_weights: Callable[[], Mapping[str, Tensor]]) -> None:
        """Manage the tensors that `live_weights` returns: name -> this rank's local tensor, always the same ones."""
        self._live_weights = live_weights
        self._kept: dict[str, dict[str, Tensor]] = {}
        self.live_tag = POLICY_TAG

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags that can be restored."""
        return tuple(self._kept)

    def backup(self, tag: str) -> None:
        """Copy the live weights to the host under `tag`, reusing the buffers of an earlier backup.

        Raises:
            IllegalStateError: the policy's copy would be overwritten by other weights.
        """
        if tag == POLICY_TAG:
            self.require_policy("backup_weights")
        live = self._live_weights()
        kept = self._kept.setdefault(tag, {})
        for name, tensor in live.items():
            if name not in kept:
                kept[name] = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
            kept[name].copy_(tensor)

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
        with torch.no_grad():
            for name, tensor in self._live_weights().items():
                tensor.copy_(self._kept[tag][name])
        self.live_tag = tag

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
