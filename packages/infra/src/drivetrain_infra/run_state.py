"""What a run must know of itself to go on: one small file, read back strictly.

It lies in each checkpoint (`run_state.json`, complete or absent with it, and the authority on that checkpoint), and
once more beside them (`resume_state.json`, the newest; it may lag). Never imports torch, and knows nothing of what a
checkpoint's other files hold.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from drivetrain_backend_api import DataError
from drivetrain_infra.run_folder import write_atomically

RUN_STATE = "run_state.json"
"""Name of the file in a checkpoint."""

SCHEMA = 1
"""Version of the file's fields."""

DISTRIBUTIONS = (
    "drivetrain-backend-api",
    "drivetrain-backend-fsdp",
    "drivetrain-backend-megatron",
    "drivetrain-infra",
    "drivetrain-launcher",
    "megatron-core",
    "numpy",
    "ray",
    "torch",
    "transformers",
)
"""Whose releases may change what a run computes."""


@dataclass(frozen=True, kw_only=True)
class LastSave:
    """How long the newest checkpoint took.

    Attributes:
        blocked_seconds: that training stood still for it.
        seconds: from its begin until it was durable.
    """

    blocked_seconds: float
    seconds: float

    def __post_init__(self) -> None:
        _check_number("last_save.blocked_seconds", self.blocked_seconds)
        _check_number("last_save.seconds", self.seconds)


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Where a run is, and what it is made of.

    Attributes:
        schema: version of these fields.
        next_rollout_id: how many rollouts are complete.
        checkpoint: name of the folder that holds the weights, None before the first.
        weight_version: what the engines have, or had when the state was written.
        prompts_read: prompts taken from the data so far.
        seed: of the run.
        metrics_bytes: length of the part of metrics.jsonl that belongs to this state; the file may be longer.
        lost_steps: optimizer steps in a row, up to here, that were skipped or had a loss that is not finite.
        lost_since: rollout that the first of them belongs to.
        wandb_run_id: None where nothing is logged to Weights & Biases.
        wall_seconds: time that the run has taken, over all starts.
        exit_reason: why the last start ended, None while it goes on or when it was killed.
        backend: name of the train backend.
        versions: installed distributions that the numbers depend on, name -> version.
        layout: how ranks share the model and the data: world_size, tp, pp, cp, ep, dp.
        model_sha256, data_sha256: fingerprints of what the run began with.
        options: the resolved configuration by file key.
        lineage: a word for all that the next rollout depends on: what the run began with, and what changed since.
        last_save: None before the first.
    """

    schema: int = SCHEMA
    next_rollout_id: int
    checkpoint: str | None
    weight_version: int
    prompts_read: int
    seed: int
    metrics_bytes: int
    lost_steps: int = 0
    lost_since: int = 0
    wandb_run_id: str | None = None
    wall_seconds: float = 0.0
    exit_reason: str | None = None
    backend: str
    versions: Mapping[str, str]
    layout: Mapping[str, int]
    model_sha256: str
    data_sha256: str
    options: Mapping[str, Any] = field(repr=False)
    lineage: str = ""
    last_save: LastSave | None = None

    def __post_init__(self) -> None:
        """Check every field. Raises ValueError, which names it."""
        for name in _COUNTS:
            _check_number(name, getattr(self, name), whole=True)
        _check_number("wall_seconds", self.wall_seconds)
        for name in _TEXTS:
            _check_type(name, getattr(self, name), str)
        for name in _OPTIONAL_TEXTS:
            if getattr(self, name) is not None:
                _check_type(name, getattr(self, name), str)
        if type(self.seed) is not int:  # which alone may be negative
            raise ValueError(f"seed is {self.seed!r:.60}, not a whole number")
        for name, text in _table("versions", self.versions).items():
            _check_type(f"versions.{name}", text, str)
        for name, size in _table("layout", self.layout).items():
            _check_number(f"layout.{name}", size, whole=True)
        _table("options", self.options)
        if self.last_save is not None:
            _check_type("last_save", self.last_save, LastSave)

    def write(self, path: Path) -> None:
        """Write the state, durably and in one go. Raises OSError."""
        write_atomically(path, json.dumps(asdict(self), indent=2) + "\n")

    @staticmethod
    def read(path: Path) -> "RunState":
        """Read a state back.

        Raises:
            DataError: missing, damaged, or of another schema; names the file, the field, and what to do.
        """
        try:
            if not path.is_file():  # to open a pipe is to wait
                raise DataError(f"{path}: {'is no file' if path.exists() else 'is missing'}; {_fix(path)}")
            table = json.loads(path.read_text("utf-8"))
            if not isinstance(table, dict):
                raise ValueError(f"it holds a {type(table).__name__}, not a table")
            if type(table.get("schema")) is int and table["schema"] != SCHEMA:
                raise DataError(
                    f"{path}: schema is {table['schema']}, and this release reads {SCHEMA}; go on with the release of "
                    "Drivetrain that wrote it"
                )
            names = [one.name for one in fields(RunState)]
            if strange := [f"{name} is missing" for name in names if name not in table] + [
                f"{name!r:.60} is no field" for name in table if name not in names
            ]:
                raise ValueError(", ".join(strange))
            last_save = table.pop("last_save")
            if isinstance(last_save, dict):
                last_save = LastSave(**last_save)
            return RunState(**table, last_save=last_save)
        except (OSError, ValueError, TypeError, RecursionError, OverflowError) as error:
            raise DataError(f"{path}: is damaged ({error}); {_fix(path)}") from error


_COUNTS = ("schema", "next_rollout_id", "weight_version", "prompts_read", "metrics_bytes", "lost_steps", "lost_since")
_TEXTS = ("backend", "model_sha256", "data_sha256", "lineage")
_OPTIONAL_TEXTS = ("checkpoint", "wandb_run_id", "exit_reason")


def _check_number(name: str, value: Any, *, whole: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise ValueError(f"{name} is {value!r:.60}, not a {'whole ' if whole else ''}number")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} is {value}, out of range")


def _check_type(name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {value!r:.60}, not a {_WORDS[kind]}")


def _table(name: str, value: Any) -> Mapping[str, Any]:
    _check_type(name, value, dict)
    table: dict[str, Any] = value
    return table


_WORDS = {str: "text", dict: "table", LastSave: "table of seconds"}


def _fix(path: Path) -> str:
    if path.name == RUN_STATE:
        return "use another checkpoint of the run (--ckpt-step)"
    return "remove it: the newest checkpoint has a state of its own"


def installed_versions(also: Iterable[str] = ()) -> dict[str, str]:
    """Return the releases of `DISTRIBUTIONS`, and of others asked for, that are installed."""
    found = {}
    for name in sorted({*DISTRIBUTIONS, *also}):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
