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
from dataclasses import dataclass
from pathlib import Path

from drivetrain_backend_api.parallel import Role
from drivetrain_backend_fsdp.backend import FsdpBackend
from drivetrain_backend_fsdp.config import FsdpConfig
from drivetrain_infra.run_folder import RunFolder
from drivetrain_launcher.cli import main
from drivetrain_launcher.recipes import arithmetic
from drivetrain_launcher.sources import build_config, config_values, read_request

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


def make_scratch(folder: Path) -> None:
    """Fill a folder: model/, train.jsonl, and run/, which a real backend of one rank has written a checkpoint into."""
    made = folder / "made"
    arithmetic.make(made, seed=7)
    (made / "model").rename(folder / "model")
    lines = (made / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "train.jsonl").write_text("".join(lines[:PROMPTS]))
    for path in made.iterdir():
        path.unlink()
    made.rmdir()
    with inside(folder, {}):
        run = RunFolder(Path("run"))
        run.create(config_values(build_config(read_request(good_words({"--save": "run"})[1:], {}))))
        run.metrics.write_text('{"rollout_id": 0, "rollout/reward": 0.5}\n')
        with _one_rank(FsdpConfig(hf_checkpoint="model", fp32=True)) as backend:
            backend.setup()
            backend.next_rollout_id = 1
            with run.new_checkpoint(1) as aside:
                backend.save_checkpoint(aside).finalize()


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
    streams = [one for one in logging.getLogger("transformers").handlers if isinstance(one, logging.StreamHandler)]
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
def _one_rank(config: FsdpConfig) -> Iterator[FsdpBackend]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with FsdpBackend(config, Role.POLICY, 0, 1, "cpu") as backend:
        yield backend
