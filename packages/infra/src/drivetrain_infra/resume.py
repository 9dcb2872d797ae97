"""Going on with a run: where from, and whether what goes on is what was interrupted.

Two questions, answered before anything starts. `find_resume` picks the checkpoint; `differences` names all that would
make the rest of the run another run, and `require_same` refuses it unless the user accepts it by name. Never imports
torch; what only a backend can verify, it is given a function for.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drivetrain_backend_api import ConfigError, DataError
from drivetrain_backend_api.errors import printable
from drivetrain_infra.run_folder import RunFolder
from drivetrain_infra.run_state import RUN_STATE, RunState

ALL = "all"
"""What `--accept-change` takes for every difference."""

BACKEND = "train-backend"
"""The one difference that cannot be accepted."""

VERSIONS, MODEL, DATA, LAYOUT = "versions", "model", "data", "layout"
"""Differences that are no option's."""

ABSENT = "absent"
"""Stands for the value of what one side does not have."""


# -- where from --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """Where a run goes on.

    Attributes:
        checkpoint: to load; None for a run that was interrupted before its first.
        state: of the run at that point, with the clock, exit reason and W&B run of its last start; None where the run
            was killed before it wrote one.
        notes: what the user should know of the choice, one sentence each.
    """

    checkpoint: Path | None
    state: RunState | None
    notes: tuple[str, ...] = ()


def find_resume(
    folder: RunFolder,
    *,
    step: int | None = None,
    verify: Callable[[Path], Sequence[str]],
    fallback: bool = False,
) -> ResumePoint | None:
    """Find where the run in a folder goes on. Nothing is changed.

    Args:
        folder: of the run.
        step: id of the checkpoint to take (`--ckpt-step`), None for the newest.
        verify: returns a sentence for each thing that is wrong with a checkpoint.
        fallback: take the newest good checkpoint where the newest is damaged (`--load-fallback`).

    Returns: None where the folder holds no run.

    Raises:
        ConfigError: there is no checkpoint `step`.
        DataError: the checkpoint is damaged; names what is wrong with it and the newest good one.
    """
    raise NotImplementedError


# -- the same run? -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One thing that the run which goes on would have otherwise.

    Attributes:
        name: what `--accept-change` takes: an option's file key, "versions", "model", "data" or "layout".
        was, now: both values, as text.
        why: the reason that it matters.
    """

    name: str
    was: str
    now: str
    why: str

    @property
    def acceptable(self) -> bool:
        """Whether the run can go on with it at all."""
        return self.name != BACKEND


def differences(saved: RunState, now: RunState, free: Collection[str] = ()) -> list[Difference]:
    """Name all that differs between a run and what would go on with it.

    Args:
        saved: state of the run.
        now: state that a new run of this command would have.
        free: file keys of options that may change, because no number depends on them.
    """
    raise NotImplementedError


def require_same(
    found: Sequence[Difference], accepted: Collection[str] = (), *, options: Collection[str] | None = None
) -> list[str]:
    """Refuse differences that the user has not accepted.

    Args:
        found: all differences.
        accepted: values of `--accept-change`.
        options: file keys of all options, to tell a name that is none; None to take any.

    Returns: a note for each accepted difference, and for each name that accepts nothing.

    Raises:
        ConfigError: one finding a line, the flag that accepts all of them last.
    """
    raise NotImplementedError
