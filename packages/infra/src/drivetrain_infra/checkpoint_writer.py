"""Saving: the train group writes a checkpoint, in the background where it can, and this makes it durable.

One save at a time. What the loop sees of it is `begin`, then `poll` at each step until there is a `Saved`, or `finish`.
Knows of the trainer only that it can begin, poll and finish; never imports torch.
"""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from drivetrain_backend_api import DataError, DrivetrainError
from drivetrain_backend_api.manifest import MANIFEST, manifest_findings, read_manifest, record_of, write_manifest
from drivetrain_infra.run_folder import RunFolder, sync
from drivetrain_infra.run_state import RUN_STATE, LastSave, RunState

_SHARED = "--save must be a folder on a file system that all nodes share"


class SavingGroup(Protocol):
    """What writes a checkpoint's files: all train workers together."""

    def begin_save(self, folder: Path) -> None:
        """Begin to write into an empty folder; returns once training may go on."""

    def poll_save(self) -> bool:
        """Say whether all ranks have written everything. Raises what failed on any of them."""

    def finish_save(self) -> None:
        """Wait until all ranks have written everything, and let go of the save. Raises what failed on any of them.

        Called once a save, also after `poll_save` has said yes.
        """


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint that has become durable.

    Attributes:
        next_rollout_id: how many rollouts it has behind it.
        checkpoint: its folder.
        blocked_seconds: that the loop stood still for it.
        seconds: from its begin until it was durable.
    """

    next_rollout_id: int
    checkpoint: Path
    blocked_seconds: float
    seconds: float


@dataclass(kw_only=True)
class _Pending:
    """A save that is under way."""

    state: RunState
    aside: Path
    began: float
    blocked: float = 0.0


class CheckpointWriter:
    """Turns what the train workers write into durable checkpoints, one at a time, and removes old ones.

    Attributes:
        last_state: state of the newest checkpoint that this made durable, None before the first.
    """

    def __init__(
        self, folder: RunFolder, trainer: SavingGroup, *, keep: int | None = None, protect: Collection[Path] = ()
    ) -> None:
        """Take over the checkpoints of a run.

        Args:
            folder: of the run, which exists.
            trainer: writes the files.
            keep: checkpoints that may stay once a newer one is durable, None for all.
            protect: checkpoints that are never removed, for example one that the run was started from.
        """
        self.last_state: RunState | None = None
        self._folder = folder
        self._trainer = trainer
        self._keep = keep
        self._protect = tuple(protect)
        self._pending: _Pending | None = None

    @property
    def pending(self) -> bool:
        """Whether a save is under way."""
        return self._pending is not None

    def begin(self, state: RunState) -> Saved | None:
        """Begin the checkpoint after which `state.next_rollout_id` comes next.

        Args:
            state: of the run at this moment; its `checkpoint` is filled in.

        Returns: the one before, where that was still pending and is finished first.

        Raises:
            DrivetrainError: that one or this one failed; older checkpoints are as they were.
        """
        before = self.finish()
        began = time.monotonic()
        next_rollout_id = state.next_rollout_id
        with self._undone_on_failure(next_rollout_id):
            pending = self._pending = _Pending(
                state=replace(state, checkpoint=self._folder.checkpoint(next_rollout_id).name),
                aside=self._folder.make_aside(next_rollout_id),
                began=began,
            )
            self._trainer.begin_save(pending.aside)
        pending.blocked = time.monotonic() - began
        return before

    def poll(self) -> Saved | None:
        """Return the pending checkpoint once it is durable; None while it is not, or where there is none.

        Raises:
            DrivetrainError: it failed, and is gone; older ones are as they were.
        """
        return self._step(self._trainer.poll_save)

    def finish(self) -> Saved | None:
        """Wait for the pending checkpoint and return it, durable; None where there is none. Raises as `poll` does."""
        return self._step(lambda: True)

    def abandon(self) -> None:
        """Forget the pending checkpoint and remove what is there of it, without asking the train workers; never raises.

        For what cannot wait: a second signal, a train worker that died.
        """
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._folder.drop_aside(pending.state.next_rollout_id)

    def _step(self, is_written: Callable[[], bool]) -> Saved | None:
        if self._pending is None:
            return None
        pending, began = self._pending, time.monotonic()
        with self._undone_on_failure(pending.state.next_rollout_id):
            written = is_written()
            if written:
                self._trainer.finish_save()
                checkpoint = self._commit(pending)
        now = time.monotonic()
        pending.blocked += now - began
        if not written:
            return None
        self._pending = None
        saved = Saved(
            next_rollout_id=pending.state.next_rollout_id,
            checkpoint=checkpoint,
            blocked_seconds=pending.blocked,
            seconds=now - pending.began,
        )
        self._record(pending.state, saved)
        self._folder.prune(self._keep, self._protect)
        return saved

    @contextmanager
    def _undone_on_failure(self, next_rollout_id: int) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._pending = None
            self._folder.drop_aside(next_rollout_id)
            if sentence := self._folder.storage_failure(error, next_rollout_id):
                raise DrivetrainError(sentence) from error
            raise

    def _commit(self, pending: _Pending) -> Path:
        """Check what the train workers wrote, add the run's state, and make it durable under its name."""
        aside = pending.aside
        complete_manifest(aside)
        pending.state.write(aside / RUN_STATE)
        write_manifest(aside, {**read_manifest(aside), RUN_STATE: record_of(aside / RUN_STATE)})
        if self._folder.metrics.exists():  # a checkpoint is worth nothing without the curve that led to it
            sync(self._folder.metrics)
        return self._folder.commit(pending.state.next_rollout_id)

    def _record(self, state: RunState, saved: Saved) -> None:
        last_save = LastSave(blocked_seconds=saved.blocked_seconds, seconds=saved.seconds)
        self.last_state = replace(state, last_save=last_save)
        try:
            self.last_state.write(self._folder.state)
        except OSError as error:
            raise DrivetrainError(
                f"--save {self._folder.root}: {self._folder.state.name} could not be written ({error.strerror}); make "
                f"room there, and go on from checkpoint {saved.checkpoint.name}, which is whole"
            ) from error


def complete_manifest(folder: Path) -> None:
    """See that a folder holds what its manifest lists; write a manifest where the train backend wrote none.

    Raises:
        DataError: the folder is empty, or not what the ranks wrote.
        OSError: a file cannot be read.
    """
    # NFS keeps under such a name what was removed while someone had it open
    files = sorted(one for one in folder.rglob("*") if not one.is_dir() and not one.name.startswith(".nfs"))
    if not files:
        raise DataError(f"{folder} is empty though the train workers wrote a checkpoint; {_SHARED}")
    if not (folder / MANIFEST).exists():
        write_manifest(folder, {one.relative_to(folder).as_posix(): record_of(one) for one in files})
    elif findings := manifest_findings(folder):
        raise DataError("\n".join([*findings, f"{folder.name} is not what the train workers wrote; {_SHARED}"]))
