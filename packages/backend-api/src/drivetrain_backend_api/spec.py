"""What a plugin says about itself before anything heavy is imported.

An entry point of the groups below resolves to one of these specs. Everything here is importable without torch, ray,
transformers or pydantic, so that `drivetrain --help` and `drivetrain backends` answer at once.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self

from drivetrain_backend_api.config import OptionGroup, TrainConfig
from drivetrain_backend_api.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from drivetrain_backend_api.algorithm import Algorithm
    from drivetrain_backend_api.backend import TrainBackend

API_VERSION = 1
"""Version of the contract that this distribution speaks; a plugin must have been written for the same one."""


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """Whether a plugin can work on this machine, found out without importing its heavy dependencies.

    Attributes:
        available: False when it certainly cannot work here.
        detail: one line for a person: versions found, or what is missing and what to type.
    """

    available: bool
    detail: str


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a train backend claims, as data.

    Attributes:
        parallelism: the kinds of parallelism, of "dp", "tp", "sp", "pp", "cp", "ep".
        precisions: of "bf16", "fp16", "fp32".
        devices: torch device types it trains on.
        cpu_offload: parameters, gradients and optimizer may live on the host.
        reference: how a KL reference is kept: "model", "tag", or "" when there is none.
        teacher: like `reference`, for an on-policy-distillation teacher.
        resharding: a checkpoint loads under another layout.
        async_save: checkpoints are written in the background.
    """

    parallelism: tuple[str, ...] = ("dp",)
    precisions: tuple[str, ...] = ("fp32",)
    devices: tuple[str, ...] = ("cpu",)
    cpu_offload: bool = False
    reference: str = ""
    teacher: str = ""
    resharding: bool = False
    async_save: bool = False


def no_findings(config: Any) -> list[str]:
    """Validate nothing: the default `validate` of a plugin whose ranges say it all."""
    return []


def no_environment(config: Any) -> Mapping[str, str]:
    """Ask for no environment variable: the default `worker_env`."""
    return {}


def always_available() -> ProbeResult:
    """Report that nothing can be missing: the default `probe`."""
    return ProbeResult(available=True, detail="")


class SpecVersionError(TypeError):
    """A spec was written for another API version; discovery tells the user which, and what to do.

    Attributes:
        api_version: the version that the spec was written for.
    """

    def __init__(self, api_version: Any) -> None:
        super().__init__(f"a spec for API version {api_version}, where the contract has version {API_VERSION}")
        self.api_version = api_version


@dataclass(frozen=True, kw_only=True)
class PluginSpec:
    """The part that train backends, rollout engines and algorithms have in common.

    Attributes:
        name: what the user types, equal to the entry point's name.
        api_version: the `API_VERSION` that the plugin was written for, as a literal in the plugin's own code.
        target: "module:Class" of the implementation, imported only by `load`.
        validate: takes the whole resolved configuration, returns one sentence for each combination that cannot work.
        probe: says cheaply whether the plugin can work on this machine.
        worker_env: environment variables that must exist before the process that runs the plugin starts.
    """

    name: str
    api_version: int
    target: str
    validate: Callable[[Any], list[str]] = no_findings
    probe: Callable[[], ProbeResult] = always_available
    worker_env: Callable[[Any], Mapping[str, str]] = no_environment

    def __new__(cls, **fields: Any) -> Self:
        """Refuse a spec of another API version before its fields are looked at: some may be unknown here."""
        theirs = fields.get("api_version", API_VERSION)
        if theirs != API_VERSION:
            raise SpecVersionError(theirs)
        return super().__new__(cls)

    def load_target(self) -> Any:
        """Import the implementation. Raises whatever its import raises."""
        return _import(self.target)


def _import(target: str) -> Any:
    """Resolve "module:attribute"."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


class CheckCheckpoint(Protocol):
    """The function that `BackendSpec.check_checkpoint` names."""

    def __call__(self, folder: "Path", *, world_size: int | None, full: bool = False) -> list[str]:
        """Return one sentence for each thing wrong."""


def _unchecked(folder: "Path", *, world_size: int | None, full: bool = False) -> list[str]:
    return []


def _takes_nothing_else(folder: "Path") -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class BackendSpec(PluginSpec):
    """Spec of a train backend (entry point group `drivetrain.train_backends`).

    Attributes:
        config_class: the backend's `TrainConfig` subclass; its fields become flags.
        capabilities: what the backend claims.
        neutral_options: sets of the backend's own options that change where and when things are computed, never what
            comes out; the conformance suite trains with each and compares.
        preference: the available backend with the highest value is used when `--train-backend` is not given.
        export_checkpoint: "module:function" with the parameters (folder, hf_checkpoint, out, dtype=None) that turns a
            folder written by `save_checkpoint` into a Hugging Face folder, in one process and without groups;
            imported only by `load_export_checkpoint`. "" when the backend has none.
        check_checkpoint: "module:function" with the parameters (folder, *, world_size, full=False) that returns one
            sentence for each thing wrong with a folder that `save_checkpoint` should have written, each with its file
            and the way out; it executes nothing of the folder, and reads no tensor unless `full` asks for every byte.
            `world_size` is the number of ranks that will load the folder, None where it is exported; files that they
            do not read are not looked at. That others have added files, and listed them (`manifest`), is nothing
            wrong. Imported only by `load_check_checkpoint`. "" when the backend has none.
        takes_weights_of: "module:function" with the parameter (folder) that says, by the names of files alone, whether
            the backend takes the weights out of a folder that is no checkpoint of its own; `check_checkpoint` then
            says what is wrong with it. Training begins anew with those weights. Imported only by
            `load_takes_weights_of`. "" where there are no such folders.
        tested_with: the sets of versions that the backend was run with, one line each: the name of a stack (a
            constraint file, an image), then what was run on it.
    """

    config_class: type[TrainConfig]
    capabilities: Capabilities = field(default_factory=Capabilities)
    neutral_options: tuple[Mapping[str, Any], ...] = ()
    preference: int = 0
    export_checkpoint: str = ""
    check_checkpoint: str = ""
    takes_weights_of: str = ""
    tested_with: tuple[str, ...] = ()

    def load(self) -> "type[TrainBackend]":
        """Import and return the backend's class."""
        return self.load_target()  # type: ignore[no-any-return]

    def load_export_checkpoint(self) -> Callable[..., None]:
        """Import and return the checkpoint exporter.

        Raises:
            ConfigError: the backend has none.
        """
        if not self.export_checkpoint:
            raise ConfigError(f"train backend {self.name!r} cannot export a checkpoint to a Hugging Face folder")
        return _import(self.export_checkpoint)  # type: ignore[no-any-return]

    def load_check_checkpoint(self) -> "CheckCheckpoint":
        """Import and return the checkpoint check; where the backend has none, one that finds nothing."""
        if not self.check_checkpoint:
            return _unchecked
        return _import(self.check_checkpoint)  # type: ignore[no-any-return]

    def load_takes_weights_of(self) -> Callable[["Path"], bool]:
        """Import and return what knows folders of weights alone; where the backend has none, what knows no folder."""
        if not self.takes_weights_of:
            return _takes_nothing_else
        return _import(self.takes_weights_of)  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class AlgorithmSpec(PluginSpec):
    """Spec of an algorithm (entry point group `drivetrain.algorithms`).

    Attributes:
        config_class: the algorithm's options; its fields become flags.
        generates: True when samples come from a rollout engine, False when they are read from the prompt data.
    """

    config_class: type[OptionGroup]
    generates: bool = True

    def load(self) -> "type[Algorithm]":
        """Import and return the algorithm's class."""
        return self.load_target()  # type: ignore[no-any-return]


def merge_environments(parties: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Merge the `worker_env` of several parties of one process.

    Args:
        parties: who asks for it (for the message) -> variables.

    Raises:
        ConfigError: two parties set one variable to different values.
    """
    merged: dict[str, str] = {}
    owner: dict[str, str] = {}
    for party, variables in parties.items():
        for name, value in variables.items():
            if merged.setdefault(name, value) != value:
                raise ConfigError(
                    f"{owner[name]} needs {name}={merged[name]!r} and {party} needs {name}={value!r} in one process; "
                    "choose options of one of them so that both agree, or place them in separate processes"
                )
            owner.setdefault(name, party)
    return merged
