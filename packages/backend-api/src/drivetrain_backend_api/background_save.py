"""Saves that training waits for only as long as it takes to copy its tensors to the host; a thread writes the copies.

What both backends share: each names its pieces and scalars, and decides when. Without a thread the same code writes
live tensors while training waits. Which folder, and when it is complete, is not decided here. Knows no model and no
optimizer.
"""

import datetime
import logging
import mmap
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain_backend_api.backend import SaveHandle
from drivetrain_backend_api.checkpoint_files import (
    TENSORS,
    TrainerState,
    random_state,
    records_of,
    require_shared,
    write_random_state,
    write_state,
)
from drivetrain_backend_api.collectives import all_agree, gathered, together
from drivetrain_backend_api.errors import DrivetrainError, in_one_line
from drivetrain_backend_api.host_memory import HostNeed, need_findings
from drivetrain_backend_api.manifest import write_manifest
from drivetrain_backend_api.offload import wait_for_copies
from drivetrain_backend_api.sharded_checkpoint import Piece, write_pieces

_LOG = logging.getLogger(__name__)

_ALIGNMENT = 64
"""Bytes: every tensor of the buffer begins at a multiple."""

_PORTABLE = 1
"""CUDA's flag cudaHostRegisterPortable: pinned for every context of this process."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All that a rank writes.

    Attributes:
        folder: exists and is empty, on a file system that all ranks share.
        pieces: of this rank.
        state: the scalars; rank 0 writes them.
        random_state: of this rank.
    """

    folder: Path
    pieces: Sequence[Piece]
    state: TrainerState
    random_state: dict[str, Tensor]


class CheckpointSaver:
    """Writes the checkpoints of one backend on one rank, in the background where that was asked for.

    At most one save is on its way: the next one, and `close`, wait for it. Every method but `close` is collective.
    """

    def __init__(
        self,
        *,
        rank: int,
        device: torch.device,
        control: dist.ProcessGroup | None,
        in_background: bool,
        timeout: datetime.timedelta,
    ) -> None:
        """Make the thread's process group where there will be one; collective. No memory is taken yet.

        Args:
            rank: of this process.
            device: that training uses.
            control: a CPU group of all ranks; None for one rank.
            in_background: write in a thread.
            timeout: deadline of one collective of the thread's group.
        """
        self._rank, self._device, self._control = rank, device, control
        self._in_background = in_background
        self._group: dist.ProcessGroup | None = None
        if in_background and control is not None:
            group = dist.new_group(backend="gloo", timeout=timeout)
            assert isinstance(group, dist.ProcessGroup)
            self._group = group
        self._buffer: HostBuffer | None = None
        self._pending: BackgroundSave | None = None
        self._writer: Writer | None = None

    @property
    def staging_bytes(self) -> int:
        """Bytes of host memory that this rank's copies take; 0 where nothing is copied."""
        return self._buffer.nbytes if self._buffer is not None else 0

    def reserve(self, pieces: Sequence[Piece]) -> None:
        """Take the host memory for copies of such pieces, once; nothing is taken where saves are in the foreground.

        Raises:
            DrivetrainError: some node does not have it; nothing was taken.
        """
        if not self._in_background:
            return
        self._buffer = None
        needs = gathered(HostNeed.of_this_process(HostBuffer.size_of(pieces)), self._control)
        if findings := need_findings(needs):
            raise DrivetrainError(
                f"--async-save copies what is saved to the host: {'; '.join(findings)}; leave out --async-save, or "
                "spread the ranks over more nodes"
            )
        self._buffer = together(lambda: HostBuffer(pieces, pin=self._device.type == "cuda"), self._control)
        if self._rank == 0:
            _LOG.info("--async-save: %.1f MiB of host memory on each rank", self.staging_bytes / 2**20)

    def begin(self, folder: Path, pieces: Sequence[Piece], state: TrainerState) -> SaveHandle:
        """Write everything that training needs to go on; an earlier save is waited for.

        Args:
            folder: exists and is empty, on a file system that all ranks share.
            pieces: of this rank, always in the same places of the same tensors; they may change as soon as this
                returns.
            state: the scalars.

        Returns: what tells when all of it is written; in the foreground it is.

        Raises:
            DataError: some rank does not see the folder; nothing was written.
            DrivetrainError: writing failed on some rank, now or in the earlier save.
        """
        self.finish()
        together(lambda: require_shared(folder, self._rank), self._control)
        states = random_state(self._device)
        snapshot = Snapshot(folder=folder, pieces=pieces, state=state, random_state=states)
        if not self._in_background:
            _write(snapshot, self._rank, self._control)
            return SaveHandle()
        if not all_agree(self._buffer is not None and self._buffer.fits(pieces), self._control):
            self.reserve(pieces)
        assert self._buffer is not None
        buffer = self._buffer
        copies = together(_told(folder, self._rank, lambda: buffer.copy(pieces)), self._control)
        copied = replace(snapshot, pieces=copies)

        def write() -> None:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a thread begins with the first
            _write(copied, self._rank, self._group)

        self._writer = self._writer or Writer()
        self._pending = BackgroundSave(folder, self._control, write)
        self._writer.begin(self._pending)
        return self._pending

    def finish(self) -> None:
        """Wait for a save that is on its way. Raises what `SaveHandle.finalize` raises."""
        pending, self._pending = self._pending, None
        if pending is not None and not pending.was_told:
            pending.finalize()

    def close(self) -> None:
        """Wait for a save that is on its way, and free the host memory; the last use.

        Other ranks may be gone, so nothing is agreed; a failure that nobody was told is logged.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.close()
        if self._writer is not None:
            self._writer.close()
        self._writer = self._buffer = None


class BackgroundSave(SaveHandle):
    """A save that a thread writes from copies."""

    def __init__(self, folder: Path, control: dist.ProcessGroup | None, write: Callable[[], None]) -> None:
        """Take what the thread will do: `run` is its part, all else is that of the thread that saves.

        Args:
            folder: for messages.
            control: a CPU group of all ranks, which `write` does not use.
            write: writes this rank's part.
        """
        self._folder, self._control, self._write = folder, control, write
        self._written = threading.Event()
        self._failure: DrivetrainError | None = None
        self._ended = False
        self.was_told = False

    def run(self) -> None:
        """Write, and keep what went wrong."""
        try:
            self._write()
        except DrivetrainError as error:
            self._failure = error
        except BaseException as error:  # whatever it is, whoever waits must hear of it
            said = f"{type(error).__name__}: {in_one_line(error)}"
            self._failure = DrivetrainError(f"writing the checkpoint {self._folder} failed: {said}")
        finally:
            self._written.set()

    def poll(self) -> bool:
        """See `SaveHandle.poll`. Raises the first failure, on all ranks, once all have ended."""
        if not self._ended and not all_agree(self._written.is_set(), self._control):
            return False
        self.finalize()
        return True

    def finalize(self) -> None:
        """See `SaveHandle.finalize`; asked again, it answers the same without the other ranks."""
        if not self._ended:
            self._written.wait()
            failures = gathered(self._failure, self._control)
            self._failure = next((one for one in failures if one is not None), None)
            self._ended = True
        self.was_told = True
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Wait for this rank's part, and log a failure that nobody was told."""
        self._written.wait()
        self._ended = True
        if self._failure is not None and not self.was_told:
            _LOG.error("the checkpoint %s is not complete: %s", self._folder, self._failure)


class Writer:
    """The thread that writes: one for all saves, since each new one would take memory of its own from malloc."""

    def __init__(self) -> None:
        self._saves: queue.SimpleQueue[BackgroundSave | None] = queue.SimpleQueue()
        # a daemon, so that a process that has to end at once does
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def begin(self, save: BackgroundSave) -> None:
        """Write a save as soon as those before it are written."""
        self._saves.put(save)

    def close(self) -> None:
        """End the thread once it has nothing to write."""
        self._saves.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (save := self._saves.get()) is not None:
            save.run()
            del save  # with what it refers to: the next one may be long in coming


def _write(snapshot: Snapshot, rank: int, group: dist.ProcessGroup | None) -> None:
    """Write all files of a checkpoint, the list of them last; collective."""
    folder = snapshot.folder

    def write_own() -> None:
        write_random_state(folder, rank, snapshot.random_state)
        if rank == 0:
            write_state(folder, snapshot.state)

    together(_told(folder, rank, write_own), group)
    write_pieces(folder / TENSORS, snapshot.pieces, group)
    parts = gathered(together(_told(folder, rank, lambda: records_of(folder, rank)), group), group)
    records = {name: one for part in parts for name, one in part.items()}
    together(_told(folder, rank, lambda: write_manifest(folder, records) if rank == 0 else None), group)


def _told(folder: Path, rank: int, do: Callable[[], T]) -> Callable[[], T]:
    """Let the other ranks hear of any failure, also of those that `together` does not expect, with its place."""

    def run() -> T:
        try:
            return do()
        except DrivetrainError:
            raise
        except Exception as error:
            said = f"rank {rank}: {type(error).__name__}: {in_one_line(error)}"
            raise DrivetrainError(f"writing the checkpoint {folder} failed: {said}") from error

    return run


class HostBuffer:
    """Host memory for copies of a rank's pieces, used for every save; pinned where they come from a GPU.

    One block of just the size that is needed: torch's own pinned memory comes in powers of two.
    """

    def __init__(self, pieces: Sequence[Piece], *, pin: bool) -> None:
        """Take the memory.

        Args:
            pieces: of which copies will be made.
            pin: so that a GPU copies into it directly.

        Raises:
            DrivetrainError: there is not enough of it.
        """
        self.nbytes = self.size_of(pieces)
        self._facts = _facts(pieces)
        try:
            # at once: what is taken page by page is found missing when it is too late
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
            self._memory = mmap.mmap(-1, max(1, self.nbytes), flags=flags)
        except (OSError, ValueError) as error:
            raise DrivetrainError(
                f"no {self.nbytes} bytes of host memory for --async-save: {error}; leave it out"
            ) from error
        self._pinned = self._pin() if pin and self.nbytes else None
        self._copies = [replace(piece, tensor=self._tensor(start, piece.tensor)) for start, piece in _places(pieces)]

    @staticmethod
    def size_of(pieces: Sequence[Piece]) -> int:
        """Return the bytes that copies of pieces take."""
        return sum(_padded(one.tensor) for one in pieces)

    def fits(self, pieces: Sequence[Piece]) -> bool:
        """Say whether the copies are of just such pieces."""
        return self._facts == _facts(pieces)

    @torch.no_grad()
    def copy(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """Copy pieces as they are now; the copies are valid until the next call."""
        for copy, piece in zip(self._copies, pieces):
            copy.tensor.copy_(piece.tensor, non_blocking=True)
        wait_for_copies()
        return self._copies

    def _tensor(self, start: int, like: Tensor) -> Tensor:
        """Make a tensor whose storage is its own part of the memory, so that nobody copies it to write it."""
        if not like.numel():
            return torch.empty(like.shape, dtype=like.dtype)
        return torch.frombuffer(self._memory, dtype=like.dtype, count=like.numel(), offset=start).view(like.shape)

    def _pin(self) -> "_Pinned":
        # a child's copy on write would leave the GPU writing to pages that are no longer ours
        self._memory.madvise(mmap.MADV_DONTFORK)
        address = torch.frombuffer(self._memory, dtype=torch.uint8, count=1).data_ptr()
        return _Pinned(address, self.nbytes)


class _Pinned:
    """Pins memory for as long as this object lives."""

    def __init__(self, address: int, nbytes: int) -> None:
        self._address: int | None = None
        found = torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE)  # type: ignore[no-untyped-call]
        if int(found) != 0:
            raise DrivetrainError(
                f"{nbytes} bytes of host memory for --async-save cannot be pinned: {found}; leave it out"
            )
        self._address = address

    def __del__(self) -> None:
        if self._address is not None:
            torch.cuda.cudart().cudaHostUnregister(self._address)  # type: ignore[no-untyped-call]


def _facts(pieces: Sequence[Piece]) -> list[tuple[object, ...]]:
    return [(one.key, one.shape, one.offsets, one.tensor.shape, one.tensor.dtype) for one in pieces]


def _places(pieces: Sequence[Piece]) -> Iterator[tuple[int, Piece]]:
    start = 0
    for one in pieces:
        yield start, one
        start += _padded(one.tensor)


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
