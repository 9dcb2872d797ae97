"""Going on with a run: where from, and whether what goes on is what was interrupted.

Two questions, answered before anything starts. `find_resume` picks the checkpoint; `differences` names all that would
make the rest of the run another run, and `require_same` refuses it unless the user accepts it by name. Never imports
torch; what only a backend can verify, it is given a function for.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from drivetrain_backend_api import ConfigError, DataError
from drivetrain_backend_api.errors import printable
from drivetrain_infra.run_folder import RunFolder, checkpoint_id, checkpoint_name
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
    if not folder.is_used():
        return None
    recorded = RunState.read(folder.state) if folder.state.exists() else None
    if step is not None:
        chosen = _step(folder, step)
        if findings := _findings(chosen, verify):
            good = _newest_good(folder, verify, [one for one in folder.checkpoints() if one != step])
            raise DataError("\n".join([*findings, _go_on_from(good, "--ckpt-step {id}")]))
        return _point(chosen, recorded, f"going on from {checkpoint_name(chosen)}, as --ckpt-step says")
    newest, findings = _newest(folder)
    if newest is None and not findings:
        return _from_the_beginning(folder, recorded)
    older = folder.checkpoints()
    if newest is not None:
        findings = _findings(newest, verify)
        if not findings:
            return _point(newest, recorded)
        older = [one for one in older if one < checkpoint_id(newest)]
    good = _newest_good(folder, verify, older)
    if good is None or not fallback:
        raise DataError("\n".join([*findings, _go_on_from(good, "--load-fallback")]))
    return _point(good, recorded, *findings, f"going on from {checkpoint_name(good)}, as --load-fallback says")


def _newest(folder: RunFolder) -> tuple[Path | None, list[str]]:
    try:
        return folder.newest(), []
    except DataError as error:  # `latest` names nothing, which is as good as a damaged checkpoint
        return None, [str(error)]


def _step(folder: RunFolder, step: int) -> Path:
    found = folder.find(step)
    if found is None:
        there = ", ".join(map(str, folder.checkpoints()))
        raise ConfigError(
            f"--ckpt-step {step}: {folder.root} has no checkpoint {folder.checkpoint(step).name}; "
            + (f"choose one of {there}" if there else "it has none yet, so leave the flag out")
        )
    return found


def _from_the_beginning(folder: RunFolder, recorded: RunState | None) -> ResumePoint:
    if recorded is not None and recorded.checkpoint is not None:
        raise DataError(
            f"{folder.state}: the run has saved {printable(recorded.checkpoint)}, but {folder.root} holds no "
            "checkpoint; bring it back, or begin a new run with another --save"
        )
    return ResumePoint(
        checkpoint=None, state=recorded, notes=("the run was interrupted before its first checkpoint, and begins anew",)
    )


def _findings(checkpoint: Path, verify: Callable[[Path], Sequence[str]]) -> list[str]:
    if findings := list(verify(checkpoint)):
        return findings
    try:
        _read(checkpoint)
    except DataError as error:
        return [str(error)]
    return []


def _read(checkpoint: Path) -> RunState:
    """Read the state of a checkpoint, which must be its own."""
    path = checkpoint / RUN_STATE
    if not path.exists():
        raise DataError(
            f"{path}: is missing, so that no run can go on from here; begin a new one with --load {checkpoint} "
            "--save NEW"
        )
    state = RunState.read(path)
    if (state.checkpoint, state.next_rollout_id) != (checkpoint_name(checkpoint), checkpoint_id(checkpoint)):
        raise DataError(
            f"{path}: belongs to {printable(str(state.checkpoint))} with {state.next_rollout_id} rollouts, so the "
            "folder was renamed or mixed; use another checkpoint of the run (--ckpt-step)"
        )
    return state


def _newest_good(folder: RunFolder, verify: Callable[[Path], Sequence[str]], ids: Sequence[int]) -> Path | None:
    found = (folder.find(one) for one in sorted(ids, reverse=True))
    return next((one for one in found if one is not None and not _findings(one, verify)), None)


def _go_on_from(good: Path | None, flag: str) -> str:
    if good is None:
        return "No other checkpoint of the run is whole; begin a new run with another --save"
    flag = flag.format(id=checkpoint_id(good))
    return f"The newest good checkpoint of the run is {checkpoint_name(good)}; add {flag} to go on from it"


def _point(checkpoint: Path, recorded: RunState | None, *notes: str) -> ResumePoint:
    """Take the state of a checkpoint, and of the newest state what belongs to the run and not to its weights."""
    state = _read(checkpoint)
    if recorded is not None:
        lags = recorded.next_rollout_id < state.next_rollout_id
        state = replace(
            state,
            wall_seconds=max(state.wall_seconds, recorded.wall_seconds),
            exit_reason=None if lags else recorded.exit_reason,
            wandb_run_id=(None if lags else recorded.wandb_run_id) or state.wandb_run_id,
        )
    return ResumePoint(checkpoint=checkpoint, state=state, notes=notes)


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

    Returns: only the train backend where that differs, since then nothing else can be compared.
    """
    if saved.backend != now.backend:
        return [Difference(name=BACKEND, was=saved.backend, now=now.backend, why=_WHY[BACKEND])]
    found = [
        Difference(name=name, was=was, now=current, why=_WHY.get(name, _WHY_OPTION))
        for name, was, current in _changed(saved.options, now.options)
        if name not in free and name != BACKEND
    ]
    for name, before, after in [(VERSIONS, saved.versions, now.versions), (LAYOUT, saved.layout, now.layout)]:
        if changed := _changed(before, after):
            was = ", ".join(f"{one} {value}" for one, value, _ in changed)
            current = ", ".join(f"{one} {value}" for one, _, value in changed)
            found.append(Difference(name=name, was=was, now=current, why=_WHY[name]))
    for name, one, other in [
        (MODEL, saved.model_sha256, now.model_sha256),
        (DATA, saved.data_sha256, now.data_sha256),
    ]:
        if one != other:
            found.append(Difference(name=name, was=_fingerprint(one), now=_fingerprint(other), why=_WHY[name]))
    return found


_WHY_OPTION = "the rest of the run would be another one"

_WHY = {
    BACKEND: (
        "neither can read the other's checkpoints; turn the run into a model folder (drivetrain export), and begin a "
        "new run from that"
    ),
    "load": "the run began from another --load, and goes on from its own checkpoint",
    "finetune": "the run took other things from --load when it began, and goes on from its own checkpoint",
    VERSIONS: "other releases may round and draw differently",
    LAYOUT: "sums are taken in another order, and each rank draws from other random states",
    MODEL: "the run began from another model, or its tokenizer was another",
    DATA: "the prompts are others, and a run counts how many of them it has read",
}


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (name, value before, value after), as text, of all that is not the same in two tables."""
    return [
        (name, _text(before, name), _text(after, name))
        for name in sorted({*before, *after})
        if (name in before) != (name in after) or _plain(before.get(name)) != _plain(after.get(name))
    ]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _text(table: Mapping[str, Any], name: str) -> str:
    if name not in table:
        return ABSENT
    value = table[name]
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list | tuple):
        return printable(" ".join(map(str, value))) or "none"
    return printable(str(value)) or "empty"


def _fingerprint(sha256: str) -> str:
    return f"SHA-256 {sha256[:12]}" if sha256 else ABSENT


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
    accepted = list(dict.fromkeys(one.removeprefix("--").replace("_", "-") for one in accepted))
    names = [one.name for one in found]
    known = {ALL, VERSIONS, LAYOUT, MODEL, DATA, *names, *(options or ())}
    findings = [_stranger(one, known) for one in accepted if options is not None and one not in known]
    refused = [one for one in found if not one.acceptable or not {one.name, ALL} & set(accepted)]
    findings += [_describe(one) for one in refused]
    if acceptable := [one.name for one in refused if one.acceptable]:
        words = [*(one for one in accepted if one in known), *acceptable]
        findings.append(f"To go on all the same: --accept-change {' '.join(words)}")
    if findings:
        raise ConfigError("\n".join(findings))
    return [f"accepted: {_describe(one)}" for one in found] + [
        f"--accept-change {one} accepts nothing: that does not differ" for one in accepted if one not in {ALL, *names}
    ]


def _describe(one: Difference) -> str:
    what = one.name if one.name in (VERSIONS, LAYOUT, MODEL, DATA) else f"--{one.name}"
    return f"{what}: {one.was} in the run that is there, {one.now} now; {one.why}"


def _stranger(name: str, known: Collection[str]) -> str:
    close = get_close_matches(name, sorted(known), n=1)
    return f"--accept-change {printable(name)}: no such option" + (f"; did you mean {close[0]}?" if close else "")
