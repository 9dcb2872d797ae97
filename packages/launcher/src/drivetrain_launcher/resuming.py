"""Where a stage begins: at the start, from what `--load` names, or where the run in `--save` stopped.

Resuming and initialising are different things: a folder that holds a run is resumed, exactly or with every difference
accepted by name, and `--load` only says where a new run takes its weights from. Nothing here starts anything.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from drivetrain_backend_api import ConfigError, DataError
from drivetrain_backend_api.manifest import MANIFEST
from drivetrain_infra.resume import VERSIONS, Difference, ResumePoint, differences, find_resume, require_same
from drivetrain_infra.run_folder import RunFolder
from drivetrain_infra.run_state import RUN_STATE, RunState, installed_versions
from drivetrain_infra.tracking.jsonl import require_lines
from drivetrain_launcher.arguments import Spelling, Surface
from drivetrain_launcher.config import DrivetrainConfig
from drivetrain_launcher.preflight.checkpoint import checkpoint_verifier, load_is_save, resolve_load
from drivetrain_launcher.sources import config_values

_WEIGHTS = (".safetensors",)

_SAMPLES, _SAMPLE_BYTES = 64, 4096
"""Of a weight file."""

_SMALL_FILES = (".json", ".jinja", ".model", ".tiktoken", ".txt")
"""Configuration, tokenizer, vocabulary and chat template."""


@dataclass(frozen=True, kw_only=True)
class Begin:
    """Where a stage begins.

    Attributes:
        load: what the train backend loads, None for the weights of `--hf-checkpoint`.
        finetune: it takes the weights alone.
        start: the first rollout id.
        state: of the run that it goes on from, None where there is none.
        in_place: the run in `--save` goes on; else a new one begins there.
        metrics_bytes: length of metrics.jsonl to keep.
        has_changed: something differs from the run that goes on, and the user has accepted it.
        notes: what the user should know.
    """

    load: Path | None
    finetune: bool
    start: int
    state: RunState | None
    in_place: bool
    metrics_bytes: int
    has_changed: bool = False
    notes: tuple[str, ...] = ()

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint of this run that it goes on from, None where there is none."""
        return self.load if self.in_place and self.state is not None and self.state.checkpoint is not None else None


def find_point(config: DrivetrainConfig, folder: RunFolder) -> ResumePoint | None:
    """Find where the run in a folder stopped; None where it holds none.

    Raises:
        ConfigError: its checkpoint is damaged or another backend's, or there is none of that number.
    """
    try:
        folder.root.stat()
    except (OSError, ValueError):  # nothing is there; or it is no usable path, which the preflight says
        return None
    _require_backend(config, folder)
    try:
        return find_resume(
            folder,
            # beside a --load it chooses among the checkpoints of that run, as long as nothing is saved here
            step=config.run_folder.ckpt_step if _resumes_itself(config) else None,
            verify=checkpoint_verifier(config),
            fallback=config.run_folder.load_fallback,
        )
    except DataError as error:  # nothing is started yet
        raise ConfigError(f"--save {error}") from error


def _require_backend(config: DrivetrainConfig, folder: RunFolder) -> None:
    """Refuse the run of another train backend, before a checkpoint is verified that this one cannot read."""
    try:
        newest = folder.newest()
        saved = RunState.read(newest / RUN_STATE) if newest is not None else None
    except DataError:  # found, with more words, where the checkpoint is verified
        return
    if saved is not None and saved.backend != config.backend.name:
        require_same(differences(saved, replace(saved, backend=config.backend.name)))


def begin_at(config: DrivetrainConfig, folder: RunFolder, point: ResumePoint | None) -> Begin:
    """Decide where a stage begins, of which everything else was found right.

    Args:
        config: resolved.
        point: what `find_point` found.

    Raises:
        ConfigError: the run in the folder is another one, and nobody accepted that; one finding a line.
    """
    if point is None:
        require_same([], config.run_folder.accept_change, options=config_values(config).keys())
        return _from_load(config)
    found = _differences(config, point.state) if point.state else []
    accepted = require_same(found, config.run_folder.accept_change, options=config_values(config).keys())
    notes = [*point.notes, *accepted]
    if point.checkpoint is None:
        begin = _from_load(config)
        return replace(begin, in_place=True, notes=(*notes, *begin.notes), metrics_bytes=0)
    assert point.state is not None
    state = point.state
    begin = Begin(
        load=point.checkpoint,
        finetune=False,
        start=state.next_rollout_id,
        state=state,
        in_place=True,
        metrics_bytes=_metrics_bytes(folder, state),
        has_changed=any(one.name != VERSIONS for one in found),
    )
    require_lines(folder.metrics, begin.metrics_bytes)
    notes.append(f"going on from {point.checkpoint}, after {state.next_rollout_id} rollouts")
    return replace(begin, notes=tuple(notes))


def require_optimizer(begin: Begin) -> None:
    """Refuse to go on from a checkpoint that was saved without its optimizer."""
    if begin.state is None or not begin.state.options.get(Spelling.KEY.write("no_save_optim")):
        return
    flag, what = ("--save", "begin a new run from") if begin.in_place else ("--load", "take")
    raise ConfigError(
        f"{flag} {begin.load}: was saved with --no-save-optim, so that no run can be resumed from it; {what} its "
        f"weights alone (--load {begin.load} --finetune --save NEW)"
    )


def _from_load(config: DrivetrainConfig) -> Begin:
    train, step = config.train, config.run_folder.ckpt_step
    if train.load is None or load_is_save(config):
        return Begin(load=None, finetune=False, start=0, state=None, in_place=False, metrics_bytes=0)
    loaded = resolve_load(config.backend, train.load, step)
    resumes = loaded.run is not None and not train.finetune
    state = None
    notes: tuple[str, ...] = ()
    if resumes and (loaded.folder / RUN_STATE).exists():
        state = RunState.read(loaded.folder / RUN_STATE)
        now = replace(facts(config), layout=state.layout)
        found = differences(state, now, free_keys(config) | {"load", "finetune"})
        if found:
            notes = (f"differs from the run of {loaded.folder} in: {', '.join(one.name for one in found)}",)
    return Begin(
        load=loaded.folder,
        finetune=train.finetune,
        start=loaded.rollouts if resumes else 0,
        state=state and replace(state, checkpoint=None, wandb_run_id=None, wall_seconds=0.0, exit_reason=None),
        in_place=False,
        metrics_bytes=0,
        notes=notes,
    )


def _differences(config: DrivetrainConfig, saved: RunState) -> list[Difference]:
    free = free_keys(config)
    if _resumes_itself(config):
        free.add("load")  # asks for what is done anyway
    return differences(saved, replace(facts(config), layout=saved.layout), free)


def _resumes_itself(config: DrivetrainConfig) -> bool:
    """Say whether `--load` names nothing, or the run in `--save`."""
    return config.train.load is None or load_is_save(config)


def _metrics_bytes(folder: RunFolder, state: RunState) -> int:
    """Return how much of metrics.jsonl to keep: all, where the last start ended well behind this very checkpoint."""
    try:
        newest = RunState.read(folder.state)
    except DataError:
        return state.metrics_bytes
    if newest.exit_reason is None or newest.checkpoint != state.checkpoint:
        return state.metrics_bytes
    return max(state.metrics_bytes, newest.metrics_bytes)


# -- facts -------------------------------------------------------------------------------------------------------------


def facts(config: DrivetrainConfig) -> RunState:
    """Return the state of a new run of this configuration: what it is made of, at rollout 0."""
    train = config.train
    models = [train.hf_checkpoint, train.ref_load, train.opd_teacher_load]
    files = [config.data.prompt_data, config.evaluation.eval_prompt_data]
    return RunState(
        next_rollout_id=0,
        checkpoint=None,
        weight_version=1,
        prompts_read=0,
        seed=train.seed,
        metrics_bytes=0,
        backend=config.backend.name,
        versions=installed_versions(),
        layout={},
        model_sha256=_sha256(_describe_model(Path(one)) if one else b"" for one in models),
        data_sha256=_sha256(_digest(Path(one)) if one else b"" for one in files),
        options=config_values(config),
    )


def lineage(config: DrivetrainConfig, begin: Begin, now: RunState) -> str:
    """Return a word for all that the rollouts from here on depend on, beside the versions of what computes them.

    A run that goes on unchanged keeps its word. One that begins, or goes on with something changed, gets a new one,
    made of where and with what that happens. So rollouts of two branches never meet.

    Args:
        now: what `facts` returns.
    """
    before = ""
    if begin.checkpoint is not None and begin.state is not None:
        if not begin.has_changed:
            return begin.state.lineage
        before = begin.state.lineage
    elif begin.load is not None:
        manifest = begin.load / MANIFEST
        before = _digest(manifest).hex() if manifest.is_file() else _describe_model(begin.load).decode()
    free = free_keys(config)
    options = {key: value for key, value in now.options.items() if key not in free}
    facts_now = [options, now.model_sha256, now.data_sha256, now.backend]
    return hashlib.sha256(json.dumps([before, begin.start, facts_now], sort_keys=True).encode()).hexdigest()


def free_keys(config: DrivetrainConfig) -> set[str]:
    """Return the file keys of options that no number depends on."""
    surface = Surface(backend=config.backend, engine=config.engine, algorithm=config.algorithm)
    return {
        Spelling.KEY.write(one.name) for group in surface.groups for one in surface.group_options(group) if one.free
    }


def _describe_model(folder: Path) -> bytes:
    """Return what configures model and tokenizer, and samples of the weights, which are too long to be read."""
    files = sorted(one for one in folder.glob("*") if one.suffix in (*_WEIGHTS, *_SMALL_FILES) and one.is_file())
    return json.dumps(
        [(one.name, (_sampled if one.suffix in _WEIGHTS else _digest)(one).hex()) for one in files]
    ).encode()


def _sampled(path: Path) -> bytes:
    """Digest the size of a file and blocks spread over all of it: its header, and some of every large tensor."""
    size, total = path.stat().st_size, hashlib.sha256()
    total.update(str(size).encode())
    with path.open("rb") as file:
        for block in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * block // (_SAMPLES - 1))
            total.update(file.read(_SAMPLE_BYTES))
    return total.digest()


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _sha256(parts: Iterable[bytes]) -> str:
    total = hashlib.sha256()
    for one in parts:
        total.update(hashlib.sha256(one).digest())
    return total.hexdigest()
