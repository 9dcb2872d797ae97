"""The flag surface: every option of the chosen backend, engine and algorithm, as flags, file keys and variables.

One `Option` has one name in each of the three places; this module spells it, converts what was written there into a
value, and says what is wrong with what it does not know. It knows nothing of precedence (see `sources`) and never
imports an implementation, only specs.
"""

import argparse
import difflib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from importlib import resources
from typing import Any, NoReturn

from drivetrain_backend_api import (
    ALGORITHMS,
    TRAIN_BACKENDS,
    AlgorithmSpec,
    BackendSpec,
    ConfigError,
    DiscoveryError,
    Option,
    OptionGroup,
    PluginKind,
    PluginSpec,
    installed,
    load_spec,
    options,
    select_backend,
)
from drivetrain_backend_api.errors import printable
from drivetrain_infra.config import PlacementConfig, RunFolderConfig, SurvivalConfig, TrackingConfig, WeightSyncConfig
from drivetrain_infra.engines.base import ROLLOUT_ENGINES, EngineSpec
from drivetrain_launcher.config import DataConfig, EvalConfig, LoopConfig, RolloutConfig

VARIABLE_PREFIX = "DRIVETRAIN_"

CORE_GROUPS: dict[str, type[OptionGroup]] = {
    "placement": PlacementConfig,
    "data": DataConfig,
    "rollout": RolloutConfig,
    "evaluation": EvalConfig,
    "loop": LoopConfig,
    "weight_sync": WeightSyncConfig,
    "run_folder": RunFolderConfig,
    "survival": SurvivalConfig,
    "tracking": TrackingConfig,
}
"""Field of `DrivetrainConfig` -> the options that every run has, whatever trains, generates or computes the loss."""


def _selector(name: str, default: str | None, help: str) -> Option:
    return Option(
        name=name,
        type=str,
        many=False,
        optional=False,
        default=default,
        help=help,
        group="selection",
        metavar="NAME",
    )


SELECTORS: dict[str, tuple[PluginKind[Any], Option]] = {
    "backend": (
        TRAIN_BACKENDS,
        _selector("train_backend", None, "what trains (default: the preferred one that works on this machine)"),
    ),
    "engine": (ROLLOUT_ENGINES, _selector("rollout_engine", "transformers", "what generates")),
    "algorithm": (ALGORITHMS, _selector("algorithm", "grpo", "what computes advantages and loss")),
}
"""Field of `Surface` -> the kind of plugin, and the option that chooses it. These are resolved before all others."""

FLAG_ONLY = {"recipe": "NAME", "config": "FILE", "print_config": None, "dry_run": None}
"""What only the command line may say: where values come from, and how far to go; name -> metavar, None for a switch."""


class Spelling(StrEnum):
    """How an option is written in one of the places where it can be set."""

    FLAG = "flag"
    KEY = "key"
    VARIABLE = "environment variable"

    def write(self, name: str) -> str:
        """Spell an option's name: `--max-tokens-per-gpu`, `max-tokens-per-gpu`, `DRIVETRAIN_MAX_TOKENS_PER_GPU`."""
        if self is Spelling.VARIABLE:
            return VARIABLE_PREFIX + name.upper()
        hyphenated = name.replace("_", "-")
        return f"--{hyphenated}" if self is Spelling.FLAG else hyphenated

    def guess_name(self, text: str) -> str:
        """Return the option name that a person who wrote `text` has probably in mind."""
        if self is Spelling.VARIABLE:
            text = text.removeprefix(VARIABLE_PREFIX)
        return text.lstrip("-").replace("-", "_").lower()


@dataclass(frozen=True, kw_only=True)
class Surface:
    """Everything that can be set in a run with these three plugins.

    Raises:
        DiscoveryError: a plugin declares an option that someone else owns.
    """

    backend: BackendSpec
    engine: EngineSpec
    algorithm: AlgorithmSpec

    def __post_init__(self) -> None:
        owners = {Spelling.FLAG.write(name): "the launcher" for name in (*FLAG_ONLY, "help")}
        owners |= {selector.flag: "the launcher" for _, selector in SELECTORS.values()}
        for field in self.groups:
            for one in self.group_options(field):
                for spelled in flags_of(one):
                    if spelled in owners:
                        raise DiscoveryError(
                            f"{spelled} is declared by {self.owner(field, one)}, but it belongs to {owners[spelled]}; "
                            "its author must rename it, or choose another plugin"
                        )
                    owners[spelled] = self.owner(field, one)

    @cached_property
    def groups(self) -> dict[str, type[OptionGroup]]:
        """Field of `DrivetrainConfig` -> its class, in the order of `--help`."""
        return {
            "train": self.backend.config_class,
            "algorithm_options": self.algorithm.config_class,
            "engine_options": self.engine.config_class,
            **CORE_GROUPS,
        }

    def group_options(self, field: str) -> list[Option]:
        """List the options of one group."""
        return options(self.groups[field])

    @cached_property
    def options(self) -> dict[str, Option]:
        """Name -> option, of the selectors and of all groups."""
        found = {one.name: one for _, one in SELECTORS.values()}
        return found | {one.name: one for field in self.groups for one in self.group_options(field)}

    @cached_property
    def names(self) -> dict[str, Option]:
        """Everything that an option may be called -> option: its name, then its aliases."""
        return {name: one for one in self.options.values() for name in names_of(one)}

    def owner(self, field: str, one: Option) -> str:
        """Say who declares an option, for people."""
        if field == "train":
            return "every train backend" if one.group == "TrainConfig" else f"train backend {self.backend.name}"
        if field == "algorithm_options":
            return f"algorithm {self.algorithm.name}"
        if field == "engine_options":
            return f"rollout engine {self.engine.name}"
        return field.replace("_", " ")


def load_surface(train_backend: str | None, rollout_engine: str, algorithm: str) -> Surface:
    """Load the specs of the three plugins and nothing else of them.

    Args:
        train_backend: None for the preferred one that works here.

    Raises:
        DiscoveryError: one of them cannot be used, in one of the ways that discovery tells apart.
    """
    return Surface(
        backend=select_backend(train_backend),
        engine=load_spec(ROLLOUT_ENGINES, rollout_engine),
        algorithm=load_spec(ALGORITHMS, algorithm),
    )


def unavailable(backend: BackendSpec, engine: EngineSpec, algorithm: AlgorithmSpec) -> list[str]:
    """Say which of the three plugins cannot work on this machine, by their own probes."""
    specs: dict[str, PluginSpec] = {"--train-backend": backend, "--rollout-engine": engine, "--algorithm": algorithm}
    probes = {flag: spec.probe() for flag, spec in specs.items()}
    return [f"{flag} {specs[flag].name}: {probe.detail}" for flag, probe in probes.items() if not probe.available]


# -- the command line --------------------------------------------------------------------------------------------------


def flags_of(one: Option) -> list[str]:
    """Return an option's flag, and those of its aliases; after each of a switch the flag that turns it off."""
    flags = [Spelling.FLAG.write(name) for name in names_of(one)]
    return [each for flag in flags for each in (flag, "--no-" + flag[2:])] if one.type is bool else flags


def names_of(one: Option) -> tuple[str, ...]:
    """Return every name that an option may be written by, its own first."""
    return (one.name, *one.aliases)


@dataclass(frozen=True, kw_only=True)
class _Occurrence:
    """A flag as it was written, in its form without `--no-`, and its text or texts."""

    flag: str
    value: Any


class _Collect(argparse.Action):
    """Keep every occurrence of a flag, so that a repeated one can be told from a single one."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        flag, value = str(option_string), values
        if self.nargs == 0:  # the flags of a switch come in pairs: on, off
            turned_off = self.option_strings.index(flag) % 2
            flag = self.option_strings[self.option_strings.index(flag) - turned_off]
            value = "false" if turned_off else "true"
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, []), _Occurrence(flag=flag, value=value)])


class StrictParser(argparse.ArgumentParser):
    """A parser without abbreviations whose complaints are `ConfigError`s."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, argument_default=argparse.SUPPRESS, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting."""
        message = message.removeprefix("argument ")
        flags, _, rest = message.partition(": ")
        if rest.startswith("ignored explicit argument"):
            message = f"{flags.partition('/')[0]} takes no value; give {flags.replace('/', ' or ')}"
        elif rest == "expected one argument":
            message = f"{flags} needs a value, and was given none"
        raise ConfigError(message)


def _add_selection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--recipe", action=_Collect, metavar="NAME", help="start from a recipe; see `drivetrain recipes`"
    )
    parser.add_argument(
        "--config", action=_Collect, metavar="FILE", help="read options from a .toml file, or a run's config.json"
    )
    parser.add_argument(
        "--print-config", action=_Collect, nargs=0, help="print every value and where it comes from, then stop"
    )
    parser.add_argument(
        "--dry-run",
        action=_Collect,
        nargs=0,
        help="check everything that can be checked without starting Ray, then stop",
    )
    for _, one in SELECTORS.values():
        parser.add_argument(one.flag, action=_Collect, metavar=one.metavar, help=_help_of(one))


def _help_of(one: Option) -> str:
    text = one.help
    if one.required:
        text += " (required)"
    elif one.default not in (None, (), False) and "(default" not in text:
        shown = f"{one.default:g}" if isinstance(one.default, float) else str(one.default)
        text += f" (default: {shown.lower() if one.type is bool else shown})"
    return text.replace("%", "%%")


def build_parser(surface: Surface) -> StrictParser:
    """Make the parser of `drivetrain train` with these plugins. It collects text; `convert_text` gives it meaning."""
    parser = StrictParser(
        prog="drivetrain train",
        usage="drivetrain train [--recipe NAME] [--config FILE] [--flag VALUE ...]",
        description="Train a language model inside a reinforcement-learning loop.",
        epilog="Each flag is also a key of --config (lr = 1e-6) and a variable (DRIVETRAIN_LR=1e-6). "
        "Flags win over variables, variables over the file, the file over the recipe.",
    )
    _add_selection(parser.add_argument_group("selection"))  # type: ignore[arg-type]
    sections: dict[str, Any] = {}
    for field in surface.groups:
        for one in surface.group_options(field):
            owner = surface.owner(field, one)
            section = sections.setdefault(owner, None) or parser.add_argument_group(owner)
            sections[owner] = section
            shape: dict[str, Any] = {"nargs": 0} if one.type is bool else {"nargs": "+"} if one.many else {}
            if one.type is not bool:
                shape["metavar"] = one.metavar or ("{" + ",".join(one.choices) + "}" if one.choices else _metavar(one))
            section.add_argument(*flags_of(one), dest=one.name, action=_Collect, help=_help_of(one), **shape)
    return parser


def _metavar(one: Option) -> str:
    return {int: "N", float: "X", str: "TEXT"}[one.type]


def parse_selection(argv: Sequence[str]) -> dict[str, str]:
    """Read the flags that decide which other flags there are: name -> text.

    Raises:
        ConfigError: one of them is given twice, or without a value.
    """
    parser = StrictParser(add_help=False)
    _add_selection(parser)
    found, _ = parser.parse_known_args(argv)
    repeated = [finding for occurrences in vars(found).values() if (finding := _repeated(occurrences))]
    if repeated:
        raise ConfigError("\n".join(repeated))
    return {name: occurrences[0].value for name, occurrences in vars(found).items()}


def parse_flags(surface: Surface, argv: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Read the whole command line of `drivetrain train`.

    Returns: option name -> its text or texts, for each option that was given; and what is wrong.

    Raises:
        ConfigError: a flag without its value, after which the rest cannot be read.
    """
    found, rest = build_parser(surface).parse_known_args(argv)
    texts: dict[str, list[str]] = {}
    findings = []
    for name, occurrences in vars(found).items():
        if name in FLAG_ONLY:
            continue
        many = surface.options[name].many
        texts[name] = [text for one in occurrences for text in one.value] if many else [occurrences[-1].value]
        finding = two_names(dict.fromkeys(one.flag for one in occurrences))
        if finding := finding or (None if many else _repeated(occurrences)):
            findings.append(finding)
    after_stranger = False
    for word in rest:
        if word.startswith("-"):
            findings.append(explain_stranger(Spelling.FLAG, word.partition("=")[0], surface))
            after_stranger = "=" not in word
        elif not after_stranger:
            findings.append(f"{word!r} stands alone; values follow their flag, as in --lr 1e-6")
    return texts, findings


def _repeated(occurrences: Sequence[_Occurrence]) -> str | None:
    if len(occurrences) < 2:
        return None
    texts = ", ".join(printable(one.value or "") for one in occurrences)
    return f"{occurrences[0].flag} is given {len(occurrences)} times ({texts}); give it once"


def two_names(written: Iterable[str]) -> str | None:
    """Say that one option is written by several of its names; None where it is not."""
    spelled = list(written)
    return f"{' and '.join(spelled)} are one option; give one of them" if len(spelled) > 1 else None


# -- from what was written to values -----------------------------------------------------------------------------------


def convert_text(one: Option, texts: Sequence[str]) -> Any:
    """Convert what stands on a command line or in a variable; "none" unsets an option that may be unset.

    Raises:
        ConfigError: the text does not spell a value of the option's type.
    """
    if one.optional and list(texts) == ["none"]:
        return None
    values = tuple(_scalar_from_text(one, text) for text in texts)
    return values if one.many else values[0]


def _scalar_from_text(one: Option, text: str) -> Any:
    if not text:
        raise ConfigError(f"{one.flag} needs a value, and was given an empty one")
    if one.type is bool:
        if text.lower() not in ("true", "false", "1", "0"):
            raise ConfigError(f"{one.flag} {printable(text)}: must be true or false")
        return text.lower() in ("true", "1")
    try:
        return one.type(text)
    except ValueError:
        raise ConfigError(f"{one.flag} {printable(text)}: must be {_wanted(one)}") from None


def convert_typed(one: Option, value: object) -> Any:
    """Convert a value that has a type already: from a file, or from code.

    Raises:
        ConfigError: it has another type than the option.
    """
    if one.optional and value in (None, "none"):
        return None
    if not one.many:
        return _scalar_from_typed(one, value)
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{one.flag} {value!r}: must be a list, each item {_wanted(one)}")
    return tuple(_scalar_from_typed(one, each) for each in value)


def _scalar_from_typed(one: Option, value: object) -> Any:
    if one.type is str and isinstance(value, os.PathLike):
        value = os.fspath(value)
    accepted: Any = (int, float) if one.type is float else one.type
    # a bool is an int to Python, but not to a person
    if not isinstance(value, accepted) or (isinstance(value, bool) and one.type is not bool):
        raise ConfigError(f"{one.flag} {value!r}: must be {_wanted(one)}")
    if isinstance(value, str):
        if not value:
            raise ConfigError(f"{one.flag} needs a value, and was given an empty one")
        if "\0" in value:
            raise ConfigError(f"{one.flag} {value!r}: must not contain the character NUL")
    try:
        return float(value) if one.type is float else value
    except OverflowError:
        raise ConfigError(f"{one.flag}: an integer of that size is no finite number") from None


def _wanted(one: Option) -> str:
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[one.type]


# -- strangers ---------------------------------------------------------------------------------------------------------


def explain_stranger(spelling: Spelling, text: str, surface: Surface) -> str:
    """Say of an unknown flag, key or variable whose it is, or what was probably meant."""
    name = spelling.guess_name(text)
    text = printable(text)
    if name in FLAG_ONLY:
        return f"{text} can only be given as the flag {Spelling.FLAG.write(name)}"
    for kind, owner, chosen in _owners_of(name, surface):
        return (
            f"{text} belongs to {kind.noun} {owner!r}, but this run uses {chosen!r}; "
            f"drop it, or choose {kind.flag} {owner}"
        )
    if kind_and_owner := _not_installed_owner(name):
        kind, owner = kind_and_owner
        return f"{text} belongs to {kind.noun} {owner!r}, which is not installed; {kind.install_hint(owner)}"
    guess = _nearest(name, surface, spelling)
    hint = f"did you mean {guess}?" if guess else "`drivetrain train --help` lists all"
    return f"unknown {spelling.value} {text}; {hint}"


def _owners_of(name: str, surface: Surface) -> Iterator[tuple[PluginKind[Any], str, str]]:
    """Yield the installed plugins, other than the chosen ones, that declare an option."""
    if name in surface.names:
        return
    for field, (kind, _) in SELECTORS.items():
        chosen = getattr(surface, field).name
        for plugin in installed(kind):
            if plugin == chosen:
                continue
            try:
                spec = load_spec(kind, plugin)
            except DiscoveryError:  # a broken plugin that this run does not use must not change its message
                continue
            if any(Spelling.FLAG.write(name) in flags_of(one) for one in options(spec.config_class)):
                yield kind, plugin, chosen


def known_options() -> dict[str, list[str]]:
    """Return the options that each official train backend declares beyond `TrainConfig`, installed or not."""
    table: dict[str, list[str]] = json.loads(
        resources.files("drivetrain_launcher").joinpath("known_backend_options.json").read_text("utf-8")
    )
    return table


def _not_installed_owner(name: str) -> tuple[PluginKind[Any], str] | None:
    """Find the official train backend that has an option and is not installed."""
    present = installed(TRAIN_BACKENDS)
    for backend, names in known_options().items():
        if backend not in present and name.removeprefix("no_") in names:
            return TRAIN_BACKENDS, backend
    return None


def _nearest(name: str, surface: Surface, spelling: Spelling) -> str | None:
    known = dict.fromkeys(surface.names)
    if spelling is Spelling.FLAG:
        known |= dict.fromkeys([*FLAG_ONLY, *("no_" + name for name, one in surface.names.items() if one.type is bool)])
    if name in known:
        return spelling.write(name)
    abbreviated = [one for one in known if one.startswith(name)]
    close = abbreviated if len(abbreviated) == 1 else difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return spelling.write(close[0]) if close else None
