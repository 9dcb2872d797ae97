"""A scratch folder with everything of a good run in it, and the command run in it, in this process.

Commands run in-process because importing torch and transformers anew takes thousands of times as long as refusing a
flag. They only ever get as far as `--dry-run` does, so that nothing is started.
"""

import contextlib
import io
import logging
import os
import signal
import socket
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from drivetrain_backend_api import TrainConfig
from drivetrain_backend_api.parallel import Role
from drivetrain_backend_fsdp.backend import FsdpBackend
from drivetrain_backend_fsdp.config import FsdpConfig
from drivetrain_infra.checkpoint_writer import CheckpointWriter
from drivetrain_infra.run_folder import RunFolder
from drivetrain_infra.run_state import RunState
from drivetrain_launcher.cli import main
from drivetrain_launcher.recipes import arithmetic
from drivetrain_launcher.resuming import facts, lineage
from drivetrain_launcher.run import PreparedStage, first_state, open_folder, prepare
from drivetrain_launcher.sources import config_values, read_request

GOOD: Mapping[str, str] = {
    "--train-backend": "fsdp",
    "--hf-checkpoint": "model",
    "--prompt-data": "train.jsonl",
    "--input-key": "question",
    "--label-key": "answer",
    "--num-rollout": "2",
    "--rollout-batch-size": "4",
    "--n-samples-per-prompt": "4",
    "--rollout-max-response-len": "5",
    "--save": "new",
}
"""Flags with which a training could start in a scratch folder."""

LAYOUT = {"world_size": 1, "tp": 1, "pp": 1, "dp": 1, "cp": 1, "ep": 1}
"""Of one rank."""

PROMPTS = 12
"""Lines of train.jsonl: few, since most tests read them all."""


@dataclass(frozen=True)
class Ended:
    """A command that ended."""

    code: int
    out: str
    err: str


def good_words(changes: Mapping[str, str | None] | None = None) -> list[str]:
    """Return the words of a dry run, with some flags changed, or left out where the value is None."""
    flags = {**GOOD, **(changes or {})}
    words = [word for flag, value in flags.items() if value is not None for word in (flag, value)]
    return ["train", *words, "--dry-run"]


class OneRank:
    """A train group of one backend in this process, as `CheckpointWriter` knows it."""

    def __init__(self, backend: FsdpBackend) -> None:
        self._backend = backend

    def begin_save(self, folder: Path) -> None:
        """Write all of it."""
        self._backend.save_checkpoint(folder).finalize()

    def poll_save(self) -> bool:
        """It is written."""
        return True

    def finish_save(self) -> None:
        """It is written."""


def make_scratch(folder: Path) -> None:
    """Fill a folder: model/, train.jsonl, and run/, half of a run, whose checkpoint a real backend has written."""
    made = folder / "made"
    arithmetic.make(made, seed=7)
    (made / "model").rename(folder / "model")
    lines = (made / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "train.jsonl").write_text("".join(lines[:PROMPTS]))
    for path in made.iterdir():
        path.unlink()
    made.rmdir()
    with inside(folder, {}):
        stage = prepared("run")
        with one_rank(FsdpConfig(hf_checkpoint="model", fp32=True)) as backend:
            backend.setup()
            save_run(stage, backend, [1])
        # which a copy of the folder takes along
        paths = {"hf-checkpoint": "model", "prompt-data": "train.jsonl", "save": "run"}
        stage.folder.reopen({**config_values(stage.config), **paths})


def prepared(save: str, *more: str) -> PreparedStage:
    """Prepare the training that the good flags ask for, in the current folder, as a start of the command does."""
    words = good_words({"--save": save, **{flag: None for flag in GOOD if flag in more}})[1:-1]
    request = read_request([*words, *more], os.environ)
    stages = prepare(request, RunFolder(request.save.absolute()), Console(quiet=True), made=Path("made").absolute())
    return stages[0]


def state_at_start(stage: PreparedStage) -> RunState:
    """Return the state that a start of the command writes before its first rollout."""
    base = facts(stage.config)
    return replace(first_state(base, stage.begin, lineage(stage.config, stage.begin, base)), layout=LAYOUT)


def save_run(stage: PreparedStage, backend: FsdpBackend, rollouts: Sequence[int]) -> None:
    """Write a run that was killed after its last checkpoint: a line of metrics a rollout, and some checkpoints."""
    stage = open_folder(stage)
    folder, state = stage.folder, state_at_start(stage)
    state.write(folder.state)
    writer = CheckpointWriter(folder, OneRank(backend))
    for done in range(1, max(rollouts) + 1):
        with folder.metrics.open("a") as file:
            file.write(f'{{"rollout_id": {done - 1}, "rollout/reward": 0.5}}\n')
        if done in rollouts:
            backend.next_rollout_id = done
            read = stage.config.rollout.rollout_batch_size * done
            size = folder.metrics.stat().st_size
            writer.begin(
                replace(state, next_rollout_id=done, weight_version=done + 1, prompts_read=read, metrics_bytes=size)
            )
            writer.finish()


def run_in(folder: Path, words: Sequence[str], environ: Mapping[str, str] | None = None) -> Ended:
    """Run `drivetrain` in a folder as a process of its own would, and undo what it leaves in this one."""
    # encoded as Python does it on a terminal: what stdout cannot hold is an error there
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="strict", newline="")
    err = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace", newline="")
    with (
        inside(folder, environ or {}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        _warnings_to(err),
    ):
        try:
            code = main(list(words))
        except SystemExit as leaving:  # --help and --version
            code = leaving.code if isinstance(leaving.code, int) else 1
    return Ended(code=code, out=_written(out), err=_written(err))


def _written(file: io.TextIOWrapper) -> str:
    file.flush()
    file.buffer.seek(0)
    return file.buffer.read().decode("utf-8")


@contextlib.contextmanager
def _warnings_to(file: io.TextIOWrapper) -> Iterator[None]:
    """Show what users would see: warnings as lines, not as errors, and the log of transformers beside them."""
    # pytest's own handlers are of a subclass, and hear of everything
    streams = [one for one in logging.getLogger("transformers").handlers if type(one) is logging.StreamHandler]
    before = [one.setStream(file) for one in streams]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            yield
    finally:
        for handler, stream in zip(streams, before, strict=True):
            handler.setStream(stream)


@contextlib.contextmanager
def inside(folder: Path, environ: Mapping[str, str]) -> Iterator[None]:
    """Current folder, environment, module path and signal handler of one command."""
    before = dict(os.environ), Path.cwd(), list(sys.path), set(sys.modules), signal.getsignal(signal.SIGTERM)
    os.chdir(folder)
    for name in [*os.environ]:
        if name.startswith("DRIVETRAIN_"):
            del os.environ[name]
    # as on a machine without GPUs, wherever the tests run
    os.environ.update({"CUDA_VISIBLE_DEVICES": "", **environ})
    try:
        yield
    finally:
        variables, here, path, modules, handler = before
        os.environ.clear()
        os.environ.update(variables)
        os.chdir(here)
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(folder)):
                del sys.modules[name]
        signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def one_rank(config: TrainConfig) -> Iterator[FsdpBackend]:
    """A train backend of one rank in this process, constructed."""
    assert isinstance(config, FsdpConfig)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with FsdpBackend(config, Role.POLICY, 0, 1, "cpu") as backend:
        yield backend
