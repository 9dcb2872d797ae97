"""Runs that are stopped, killed and gone on with: how to start them, and how to tell that two are the same run.

Two starts of a command are the same run as one where the metrics of every rollout and evaluation, every checkpoint's
tensors, random states and scalars, and the rollouts themselves are equal bit for bit; only how long things took may
differ. The user's own code that troubles the runs is `trouble.py`.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from trouble import Blow

from drivetrain_backend_api.manifest import manifest_findings
from drivetrain_infra.run_folder import RunFolder
from drivetrain_infra.run_state import RUN_STATE, RunState
from drivetrain_launcher.recipes import arithmetic

START_SECONDS = 600.0
"""Deadline of one start of the command, on a machine that does other things too."""

GONE_SECONDS = 60.0
"""Deadline for the processes of a run whose driver was killed."""

AT_ONCE_SECONDS = 15.0
"""Deadline for a run's end after a second signal."""

NUM_ROLLOUTS = 3

BACKENDS = {
    "fsdp": ("--train-backend", "fsdp", "--async-save"),
    "megatron": (
        *("--train-backend", "megatron", "--tensor-model-parallel-size", "2", "--sequence-parallel"),
        *("--lr-decay-style", "cosine", "--lr-warmup-iters", "2"),
    ),
}
"""Name -> flags: two data-parallel ranks, and two that share each matrix and each sequence."""

_WORDS = (
    *("train", "--fp32", "--hf-checkpoint", "sums/model", "--prompt-data", "sums/train.jsonl", "--rollout-shuffle"),
    *("--input-key", "question", "--label-key", "answer", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4"),
    *("--rollout-max-response-len", "5", "--reward", "trouble:odd_digits", "--lr", "1e-3", "--global-batch-size", "8"),
    *("--actor-num-gpus-per-node", "2", "--eval-prompt-data", "sums/few.jsonl", "--eval-interval", "1"),
    *("--save-interval", "1"),
)
"""Flags of every run: two optimizer steps a rollout, and after each a checkpoint and an evaluation."""

_SITE = """import sys

if any("default_worker.py" in one for one in sys.orig_argv):
    import trouble
"""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A start of the command that ended.

    Attributes:
        hits: what happened to it, in order, as `trouble` wrote it down.
        seconds: that it took.
        ended: when it did, in seconds since the epoch.
    """

    code: int
    output: str
    hits: Sequence[Mapping[str, Any]]
    seconds: float
    ended: float


@dataclass
class Place:
    """A working folder for runs of one backend on the sums.

    Attributes:
        straight_seconds: that the straight run took, once it is made.
    """

    backend: str
    folder: Path
    num_rollouts: int = NUM_ROLLOUTS
    straight_seconds: float = field(default=0.0, init=False)
    _straight: RunFolder | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        arithmetic.make(self.folder / "sums", seed=7)
        few = (self.folder / "sums" / "held_out.jsonl").read_text().splitlines(keepends=True)[:4]
        (self.folder / "sums" / "few.jsonl").write_text("".join(few))
        shutil.copy(Path(__file__).with_name("trouble.py"), self.folder)
        (self.folder / "site").mkdir()
        (self.folder / "site" / "sitecustomize.py").write_text(_SITE)

    @property
    def straight(self) -> RunFolder:
        """The run that nothing happened to, with all its checkpoints; made when it is first asked for."""
        if self._straight is None:
            finished = self.train("STRAIGHT")
            assert finished.code == 0, finished.output
            self.straight_seconds = finished.seconds
            run = self._straight = RunFolder(self.folder / "STRAIGHT")
            assert run.checkpoints() == list(range(1, self.num_rollouts + 1))
            # two tests that compare with it would hold for runs that learn nothing
            first, last = (tensors_of(run.checkpoint(one)) for one in (1, self.num_rollouts))
            assert [name for name in first if name.endswith("weight") and torch.equal(first[name], last[name])] == []
        return self._straight

    def words(self, save: str, *more: str) -> list[str]:
        """Return the command's words; further flags stand in place of the same ones of every run."""
        usual = [*_WORDS, *BACKENDS[self.backend], "--num-rollout", str(self.num_rollouts), "--save", save]
        given = {_flag(one[0]) for one in _groups(more)}
        return [word for one in _groups(usual) if _flag(one[0]) not in given for word in one] + list(more)

    def copy(self, save: str) -> RunFolder:
        """Copy the straight run, to do something to the copy."""
        shutil.copytree(self.straight.root, self.folder / save)
        return RunFolder(self.folder / save)

    def train(
        self,
        save: str,
        *more: str,
        blows: Iterable[Blow] = (),
        environment: dict[str, str] | None = None,
        seconds: float = START_SECONDS,
    ) -> Finished:
        """Start the command once, and wait until it has ended and nothing of it is left.

        Args:
            save: of the run.
            more: further flags.
            blows: what happens to it.
            environment: further variables.
            seconds: deadline.
        """
        return self.run(self.words(save, *more), blows=blows, environment=environment, seconds=seconds)

    def run(
        self,
        words: Sequence[str],
        *,
        blows: Iterable[Blow] = (),
        environment: dict[str, str] | None = None,
        seconds: float = START_SECONDS,
    ) -> Finished:
        """Start the command with these words; see `train`."""
        began = time.monotonic()
        # short, for the paths of Ray's sockets
        with tempfile.TemporaryDirectory(prefix="dk-", dir="/tmp") as temp:
            hits = Path(temp) / "trouble"
            hits.mkdir()
            variables = self.environment(temp) | (environment or {})
            variables |= {"TROUBLE": json.dumps([asdict(one) for one in blows]), "TROUBLE_FOLDER": str(hits)}
            command = [sys.executable, "-m", "drivetrain_launcher.cli", *words]
            with (Path(temp) / "output").open("w+") as output:
                process = subprocess.Popen(
                    command,
                    cwd=self.folder,
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
                try:
                    process.wait(seconds)
                finally:
                    process.kill()
                    process.wait()
                    ended = time.time()
                    text = Path(output.name).read_text(errors="replace")
                    print(f"--- {' '.join(words)}\n{text}--- exit code {process.returncode}")
            require_nothing_left(temp)
            file = hits / "hits.jsonl"
            lines = file.read_text().splitlines() if file.exists() else []
        return Finished(
            code=process.returncode,
            output=text,
            hits=[json.loads(one) for one in lines],
            seconds=time.monotonic() - began,
            ended=ended,
        )

    def environment(self, temp: str) -> dict[str, str]:
        """Return the variables of a run, whose temporary files are in `temp`."""
        strange = ("DRIVETRAIN_", "RAY_", "WALL_TIME_", "SLURM_", "WANDB_")
        variables = {name: value for name, value in os.environ.items() if not name.startswith(strange)}
        return variables | {
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "160",
            "TMPDIR": temp,
            "PYTHONPATH": os.pathsep.join([str(self.folder / "site"), str(self.folder)]),
        }


def _groups(words: Iterable[str]) -> list[list[str]]:
    """Divide words into flags with their values; the command's name comes first."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not groups:
            groups.append([])
        groups[-1].append(word)
    return groups


def _flag(word: str) -> str:
    return word.removeprefix("--").removeprefix("no-")


_PLACES: dict[tuple[str, int], Place] = {}


def place_of(backend: str, folder: Path, num_rollouts: int = NUM_ROLLOUTS) -> Place:
    """Return the one place of a backend, made in `folder` the first time: its straight run serves many tests."""
    key = (backend, num_rollouts)
    if key not in _PLACES:
        _PLACES[key] = Place(backend, folder, num_rollouts)
    return _PLACES[key]


def require_nothing_left(temp: str) -> None:
    """Assert that no process is left whose temporary folder this is, a while after the command has ended."""

    def left() -> list[str]:
        found = []
        for one in psutil.process_iter():
            try:
                if one.status() != psutil.STATUS_ZOMBIE and one.environ().get("TMPDIR") == temp:
                    found.append(f"{one.pid} {one.name()}")
            except psutil.Error:  # somebody else's, or gone meanwhile
                continue
        return found

    deadline = time.monotonic() + GONE_SECONDS
    while (found := left()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert found == []


# -- what a run has left -----------------------------------------------------------------------------------------------


def metrics_of(run: RunFolder) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl, without how long things took."""
    return [
        {
            name: value
            for name, value in json.loads(line).items()
            if not name.startswith("perf/") and not name.endswith("tokens_per_second")
        }
        for line in run.metrics.read_text().splitlines()
    ]


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    """Read every tensor of a checkpoint: weights, optimizer, random states."""
    reader = FileSystemReader(checkpoint / "dcp")
    found: dict[str, Tensor] = {}
    for name, one in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(one, TensorStorageMetadata), name
        found[name] = torch.zeros(one.size, dtype=one.properties.dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it is here, for good reason
        load(found, storage_reader=reader, no_dist=True)
    for file in sorted(checkpoint.glob("rng_rank*.safetensors")):
        found |= {f"{file.stem}/{name}": tensor for name, tensor in load_file(file).items()}
    return found


def state_of(run: RunFolder) -> RunState:
    return RunState.read(run.state)


def require_same_checkpoint(mine: Path, other: Path) -> None:
    """Assert that two checkpoints are the same moment of the same run."""
    left, right = tensors_of(mine), tensors_of(other)
    assert left.keys() == right.keys(), mine
    assert [name for name in left if not torch.equal(left[name], right[name])] == [], f"differ in {mine}"
    assert len(left) > 20  # weights and two moments of each
    scalars = [json.loads((one / "trainer_state.json").read_text()) for one in (mine, other)]
    assert scalars[0] == scalars[1], mine
    states = [RunState.read(one / RUN_STATE) for one in (mine, other)]
    for name in ("next_rollout_id", "weight_version", "prompts_read", "seed", "lost_steps", "layout"):
        assert getattr(states[0], name) == getattr(states[1], name), (mine, name)


def rollout_of(run: RunFolder, rollout_id: int) -> dict[str, Any]:
    """Read the batch of a rollout file, without running what it may hold."""
    table = torch.load(run.rollouts / f"rollout_{rollout_id}.pt", weights_only=True)
    batch: dict[str, Any] = table["content"]["batch"]
    return batch


def require_same_rollout(run: RunFolder, straight: RunFolder, rollout_id: int) -> None:
    """Assert that a rollout has the same tokens, log-probs, rewards and all else."""
    mine, other = (rollout_of(one, rollout_id) for one in (run, straight))
    assert _flat(mine).keys() == _flat(other).keys()
    others = _flat(other)
    assert [name for name, value in _flat(mine).items() if not _equal(value, others[name])] == []


def _flat(value: Any, place: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {key: leaf for name, one in value.items() for key, leaf in _flat(one, f"{place}/{name}").items()}
    return {place: value}


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def require_durable(run: RunFolder, straight: RunFolder) -> None:
    """Assert that each checkpoint is whole, and what the unbroken run had there, whatever has just ended the run."""
    for one in run.checkpoints():
        found = run.find(one)
        assert found is not None
        assert manifest_findings(found, full=True) == []
        require_same_checkpoint(found, straight.checkpoint(one))
    newest = run.newest()
    if newest is not None:
        assert newest.is_dir()
        rows = metrics_of(run)[: len(metrics_of(straight))]
        # a line may be cut off, and what comes after the newest checkpoint is made again
        assert rows == metrics_of(straight)[: len(rows)]


def require_same_run(run: RunFolder, straight: RunFolder) -> None:
    """Assert that a run which has come to its end is the unbroken one, and left nothing else behind."""
    assert metrics_of(run) == metrics_of(straight)
    require_durable(run, straight)
    last = straight.newest()
    assert last is not None
    assert (run.root / "latest").read_text() == f"{last.name}\n"
    for rollout in sorted(run.rollouts.glob("rollout_*.pt")):
        require_same_rollout(run, straight, int(rollout.stem.removeprefix("rollout_")))
    assert state_of(run).exit_reason == "completed"
    names = {one.name for one in run.root.iterdir() if not one.name.endswith(".log")}
    names -= {one.name for one in map(run.checkpoint, run.checkpoints())}
    assert names - {"wandb"} == {"config.json", "latest", "lock", "metrics.jsonl", "resume_state.json", "rollout_ckpts"}
    assert [one.name for one in run.rollouts.iterdir() if one.name.startswith(".")] == []


def may_mount() -> bool:
    """Say whether this user may mount a tmpfs in a namespace of their own; some systems forbid it."""
    try:
        words = ["unshare", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
        return subprocess.run(words, capture_output=True, timeout=30, check=False).returncode == 0
    except OSError:
        return False
