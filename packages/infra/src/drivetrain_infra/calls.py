"""Calls on several Ray actors at once: wait for all, and blame the one at fault when some fail.

The one place that turns Ray's errors into sentences. Knows no train worker, no engine and no phase of anything.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Generic, TypeVar

import ray
import torch.distributed as dist
from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError, RayError, RayTaskError, WorkerCrashedError

from drivetrain_backend_api import DrivetrainError
from drivetrain_backend_api.errors import WeightExportAbortedError, in_one_line
from drivetrain_infra import daemons
from drivetrain_infra.deadline import Deadline

Key = TypeVar("Key")

GRACE_SECONDS = 5.0
"""What the others have to end after the first failure, so that the cause is told apart from its effects."""

_LOST_CONNECTION = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed out", re.IGNORECASE)
"""What the plain RuntimeErrors of torch.distributed say when another process is gone or stuck."""


class Blame(IntEnum):
    """How surely a failure is the cause of the others; the smallest is the surest."""

    DIED = 0
    OWN_ERROR = 1
    OTHER_ERROR = 2
    LATE = 3
    EFFECT = 4


class LostProcessError(DrivetrainError):
    """A process died, hangs, or failed in a way that says nothing of what it was asked to do: a new one may do better.

    Attributes:
        who: its name, as in the message.
        died: whether it is gone.
    """

    def __init__(self, message: str, who: str, died: bool = False) -> None:
        super().__init__(message)
        self.who, self.died = who, died

    def __reduce__(self) -> tuple[Any, ...]:
        return LostProcessError, (str(self), self.who, self.died)


@dataclass(frozen=True, kw_only=True)
class Failure(Generic[Key]):
    """Why one call brought no result.

    Attributes:
        who: its key.
        blame: how surely it is the cause.
        problem: what follows the name of `who` in a sentence.
        raised: what was raised inside the process, if it got that far.
        error: what Ray raised here; None for a call that is late.
    """

    who: Key
    blame: Blame
    problem: str
    raised: BaseException | None = None
    error: RayError | None = None

    @property
    def is_lost(self) -> bool:
        """Whether the process is at fault, and not what it was asked to do."""
        return self.blame is not Blame.OWN_ERROR


def gather(
    calls: Mapping[Key, "ray.ObjectRef[Any]"], *, what: str, seconds: float | None, flag: str | None = None
) -> dict[Key, Any]:
    """Return everybody's result.

    Args:
        calls: who was called (for the message) -> the result to come.
        what: what they are doing, for the message.
        seconds: deadline, None for none.
        flag: the option that sets the deadline, for the message.

    Raises:
        LostProcessError: somebody died, did not answer in time, or failed with an error that is not ours.
        DrivetrainError: somebody raised one. Either names the one most surely at fault, in one sentence.
    """
    results, failures = collect(calls, None if seconds is None else Deadline(seconds))
    if not failures:
        return results
    first = failures[0]
    if first.blame is not Blame.LATE:
        message = f"{what}: {first.who} {first.problem}"
        if not first.is_lost:
            raise DrivetrainError(message) from first.error
        raise LostProcessError(message, str(first.who), first.blame is Blame.DIED) from first.error
    late = ", ".join(str(one.who) for one in failures if one.blame is Blame.LATE)
    noticed = failures[-1]
    if noticed.blame is Blame.EFFECT:
        raise LostProcessError(
            f"{what}: no answer from {late}, and {noticed.who} {noticed.problem}", str(first.who)
        ) from noticed.error
    raise LostProcessError(
        f"{what}: no answer from {late} within {flag + ' ' if flag else ''}{seconds:g} s", str(first.who)
    )


def collect(
    calls: Mapping[Key, "ray.ObjectRef[Any]"],
    deadline: Deadline | None,
    *,
    effects: tuple[type[BaseException], ...] = (),
) -> tuple[dict[Key, Any], list[Failure[Key]]]:
    """Wait until all calls have ended; once one has failed, the others have `GRACE_SECONDS` more.

    Args:
        calls: who was called -> the result to come.
        deadline: of all together, None for none.
        effects: exceptions that follow from a failure elsewhere, beside those of torch.distributed.

    Returns:
        The results, and the failures with the one most surely at fault first; of equals, the one that came first.
    """
    waiting = {reference: who for who, reference in calls.items()}
    results: dict[Key, Any] = {}
    failures: list[Failure[Key]] = []
    limit = deadline
    while waiting:
        ready = daemons.wait(list(waiting), seconds=None if limit is None else limit.left)
        if not ready:
            break
        who = waiting.pop(ready[0])
        try:
            results[who] = ray.get(ready[0])
        except RayError as error:
            failures.append(_failure(who, error, effects))
            if len(failures) == 1:
                limit = Deadline(GRACE_SECONDS if deadline is None else min(GRACE_SECONDS, deadline.left))
    # silent beside one that lost a connection: more likely the one that is stuck or gone than the one that noticed
    failures += [Failure(who=one, blame=Blame.LATE, problem="gave no answer") for one in waiting.values()]
    return results, sorted(failures, key=lambda one: one.blame)


def _failure(who: Key, error: RayError, effects: tuple[type[BaseException], ...]) -> Failure[Key]:
    raised = _raised(error)
    if raised is not None:
        return Failure(
            who=who, blame=_blame(raised, effects), problem=f"failed: {_message(raised)}", raised=raised, error=error
        )
    if isinstance(error, RayActorError | WorkerCrashedError | NodeDiedError | OutOfMemoryError):
        return Failure(who=who, blame=Blame.DIED, problem=f"died ({_death(error)})", error=error)
    return Failure(who=who, blame=Blame.OTHER_ERROR, problem=f"failed: {_message(error)}", error=error)


def _raised(error: RayError) -> BaseException | None:
    """Find what was raised in the process: by the call, or by the actor's constructor before it."""
    if isinstance(error, RayActorError):
        # the text of a failed construction is Ray's; the task error that it was made from is the only argument
        inner = error.args[0] if error.args else None
        return _raised(inner) if isinstance(inner, RayTaskError) else None
    if not isinstance(error, RayTaskError):
        return None
    cause = error.cause
    # an argument that another process failed to make
    return _raised(cause) if isinstance(cause, RayTaskError) else cause


def _blame(raised: BaseException, effects: tuple[type[BaseException], ...]) -> Blame:
    if isinstance(raised, (WeightExportAbortedError, dist.DistError, *effects)):
        return Blame.EFFECT
    if isinstance(raised, DrivetrainError):
        return Blame.OWN_ERROR
    if isinstance(raised, RuntimeError) and _LOST_CONNECTION.search(str(raised)):
        return Blame.EFFECT
    return Blame.OTHER_ERROR


def _message(error: BaseException) -> str:
    """Our own messages as they are; of others the type and the first line, for what follows is a stack."""
    if isinstance(error, DrivetrainError):
        return str(error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _death(error: RayError) -> str:
    """Take Ray's reason and the process id out of its page of text."""
    text = in_one_line(error)
    found = re.search(r"\b(?:dead|died) because (.+?)(?:\. |\.?$)", text)
    reason = found[1] if found else text.partition(". ")[0]
    pid = re.search(r"\bpid: (\d+)", text)
    hint = "; unless somebody ended it, look whether the machine ran out of memory" if "SYSTEM_ERROR" in text else ""
    return f"{f'process {pid[1]}: ' if pid else ''}{reason}{hint}"
