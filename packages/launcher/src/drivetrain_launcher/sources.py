"""Where values come from: recipe, file, environment and flags, in rising precedence, into one `DrivetrainConfig`.

`read_request` reads everything the user wrote and refuses what is wrong with it; `build_config` makes the
configuration of one stage of the run, once the paths that a recipe prepares are known. Knows no option by name except
`--save`, and starts nothing.
"""

import json
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import StrEnum
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from drivetrain_backend_api import ConfigError, Option, OptionGroup
from drivetrain_backend_api.errors import printable
from drivetrain_launcher.arguments import (
    SELECTORS,
    VARIABLE_PREFIX,
    Spelling,
    Surface,
    build_parser,
    convert_text,
    convert_typed,
    explain_stranger,
    load_surface,
    parse_flags,
    parse_selection,
    two_names,
    unavailable,
)
from drivetrain_launcher.config import DrivetrainConfig


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A value, where it was written, and what is wrong with it ("" when nothing)."""

    value: Any
    source: str
    finding: str = ""


_FLAG = "flag"
"""The source of what the command line sets."""

Layer = Mapping[str, Setting]
"""Everything that one source sets: option name -> setting."""


class Stage(StrEnum):
    """A recipe may train twice: a warm-up first, then what was asked for."""

    WARMUP = "warmup"
    MAIN = "main"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A named set of options that ships with the launcher.

    Attributes:
        make: name of what must be prepared before the run, None when nothing.
        values: file key -> value.
        warmup: file keys that win, over flags too, in a warm-up stage before the main one; None without such a stage.
    """

    name: str
    description: str
    make: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    warmup: Mapping[str, Any] | None = None

    @property
    def source(self) -> str:
        """What `DrivetrainConfig.sources` says of its values."""
        return f"recipe {self.name}"


@dataclass(frozen=True, kw_only=True)
class Warmup:
    """The warm-up stage of a recipe: its own surface, since it may use another algorithm, and what it sets."""

    surface: Surface
    layer: Layer


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asked for, read and checked, but for the values that a recipe makes.

    Attributes:
        recipe_layer: what the recipe sets.
        user_layers: file, environment, flags; later ones win.
        print_config: show the configuration instead of running it.
        dry_run: check everything, start nothing.
    """

    surface: Surface
    recipe: Recipe | None
    recipe_layer: Layer
    user_layers: tuple[Layer, ...]
    warmup: Warmup | None
    print_config: bool
    dry_run: bool

    @property
    def save(self) -> Path:
        """The run's folder."""
        return Path(_merge([self.recipe_layer, *self.user_layers])["save"].value)


# -- recipes -----------------------------------------------------------------------------------------------------------


def shipped_recipes() -> Traversable:
    """Return the folder of the recipes that ship with the launcher."""
    return resources.files("drivetrain_launcher.recipes")


def recipe_names(folder: Traversable) -> list[str]:
    """List the recipes of a folder."""
    return sorted(one.name.removesuffix(".toml") for one in folder.iterdir() if one.name.endswith(".toml"))


def read_recipe(name: str, folder: Traversable) -> Recipe:
    """Read a recipe by name.

    Raises:
        ConfigError: there is none of that name.
    """
    names = recipe_names(folder)
    if name not in names:
        close = get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(names) or 'none'}"
        raise ConfigError(f"--recipe {name}: no such recipe; {hint}")
    return parse_recipe(name, (folder / f"{name}.toml").read_text("utf-8"))


def parse_recipe(name: str, text: str) -> Recipe:
    """Turn the text of a recipe file into a recipe. Without a `save` of its own it saves to runs/NAME."""
    table = tomllib.loads(text)
    return Recipe(
        name=name,
        description=table.pop("description"),
        make=table.pop("make", None),
        warmup=table.pop("warmup", None),
        values={"save": f"runs/{name}"} | table,
    )


# -- files -------------------------------------------------------------------------------------------------------------


def read_file(path: Path) -> dict[str, Any]:
    """Read a configuration file: .toml, or .json as saved with a run.

    Raises:
        ConfigError: it cannot be read or parsed.
    """
    parsers: dict[str, Callable[[str], Any]] = {".toml": tomllib.loads, ".json": _load_json}
    if path.suffix not in parsers:
        raise ConfigError(f"--config {path}: must end in .toml or .json")
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise ConfigError(f"--config {path}: is not a file; give a .toml or .json file")
        table = parsers[path.suffix](path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"--config {path}: {error.strerror or error}; give a .toml or .json file that can be read"
        ) from error
    except (ValueError, RecursionError) as error:  # every parse or encoding error is a ValueError
        raise ConfigError(f"--config {path}: {error}") from error
    if not isinstance(table, dict):
        raise ConfigError(f"--config {path}: must be a table of options, found {type(table).__name__}")
    return table


def _load_json(text: str) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if repeated := sorted({key for key in keys if keys.count(key) > 1}):
            raise ValueError(f"{', '.join(repeated)} given twice")
        return dict(pairs)

    return json.loads(text, object_pairs_hook=once)


# -- layers ------------------------------------------------------------------------------------------------------------


def _layer(
    surface: Surface,
    spelling: Spelling,
    written: Mapping[str, Any],
    convert: Callable[[Option, Any], Any],
    source: Callable[[str], str],
) -> tuple[Layer, list[str]]:
    """Convert what one source sets. Returns the settings, and a finding for each name that is no option."""
    names = {spelling.write(name): one.name for name, one in surface.names.items()}
    layer: dict[str, Setting] = {}
    strangers = []
    spelled: dict[str, str] = {}
    for text, raw in written.items():
        place = source(text)
        where = "" if spelling is Spelling.FLAG else f" (in {place})"
        if isinstance(raw, dict):
            strangers.append(f"table [{printable(text)}]: options stand at the top level, outside tables{where}")
        elif text in names:
            if double := two_names(dict.fromkeys([spelled.setdefault(names[text], text), text])):
                strangers.append(double if spelling is Spelling.VARIABLE else double + where)
            layer[names[text]] = _setting(surface.options[names[text]], raw, convert, place, where)
        else:
            stranger = explain_stranger(spelling, text, surface)
            strangers.append(stranger if spelling is Spelling.VARIABLE else stranger + where)
    return layer, strangers


def _setting(one: Option, raw: Any, convert: Callable[[Option, Any], Any], source: str, where: str) -> Setting:
    try:
        value = convert(one, raw)
    except ConfigError as error:
        return Setting(value=None, source=source, finding=f"{error}{where}")
    finding = one.finding(value)
    return Setting(value=value, source=source, finding=f"{finding}{where}" if finding else "")


def _table_layer(surface: Surface, table: Mapping[str, Any], source: str) -> tuple[Layer, list[str]]:
    return _layer(surface, Spelling.KEY, table, convert_typed, lambda _: source)


def _environment_layer(surface: Surface, environ: Mapping[str, str]) -> tuple[Layer, list[str]]:
    written = {name: text for name, text in sorted(environ.items()) if name.startswith(VARIABLE_PREFIX)}

    def convert(one: Option, text: str) -> Any:
        try:
            return convert_text(one, shlex.split(text) if one.many and text else [text])
        except ValueError as error:  # an open quote
            raise ConfigError(f"{one.flag} {printable(text)}: {error}") from error

    return _layer(surface, Spelling.VARIABLE, written, convert, lambda name: name)


def _flag_layer(surface: Surface, argv: Sequence[str]) -> tuple[Layer, list[str]]:
    texts, strangers = parse_flags(surface, argv)
    written = {Spelling.FLAG.write(name): each for name, each in texts.items()}
    layer, _ = _layer(surface, Spelling.FLAG, written, convert_text, lambda _: _FLAG)
    return layer, strangers


def _where(setting: Setting) -> str:
    return "" if setting.source == _FLAG else f" (in {setting.source})"


def _code_findings(surface: Surface, settings: Layer) -> list[str]:
    """Refuse values that run code, unless the command line gives them: who writes a file must not choose what runs."""
    findings = []
    for name, setting in settings.items():
        one = surface.options[name]
        if setting.source != _FLAG and one.names_code(setting.value):
            word = one.flag if one.type is bool else f"{one.flag} {printable(str(setting.value))}"
            findings.append(
                f"{word} runs code, so that only the command line may ask for it; add {word}{_where(setting)}"
            )
    return findings


def _inert_findings(surface: Surface, settings: Layer, flags: Layer) -> list[str]:
    """Refuse flags that nothing would read.

    Files and variables are spared: they are kept for many runs, of which some switch a part off.
    """
    findings = []
    for name, setting in flags.items():
        one = surface.options[name]
        if one.acts_with is None or setting.value == one.default:
            continue
        other = surface.options[one.acts_with]
        if not (settings[other.name].value if other.name in settings else other.default):
            findings.append(f"{one.flag} acts only with {other.flag}; give both or neither")
    return findings


def _merge(layers: Sequence[Layer]) -> dict[str, Setting]:
    return {name: setting for layer in layers for name, setting in layer.items()}


def _made_layer(surface: Surface, values: Mapping[str, object], source: str) -> Layer:
    unknown = sorted(set(values) - set(surface.options))
    if unknown:
        raise ConfigError(f"{source} sets {', '.join(unknown)}, which this run has no option for")
    return {
        name: Setting(value=convert_typed(surface.options[name], value), source=source)
        for name, value in values.items()
    }


# -- the request -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Selection:
    """What decides which options there are, and the tables it was found in."""

    surface: Surface
    recipe: Recipe | None
    file: str
    file_table: Mapping[str, Any]
    print_config: bool
    dry_run: bool


def _select(argv: Sequence[str], environ: Mapping[str, str], recipes: Traversable | None) -> _Selection:
    flags = parse_selection(argv)
    recipe = read_recipe(flags["recipe"], recipes or shipped_recipes()) if "recipe" in flags else None
    file_table = read_file(Path(flags["config"])) if "config" in flags else {}
    return _Selection(
        surface=_select_surface(flags, environ, [file_table, recipe.values if recipe else {}]),
        recipe=recipe,
        file=flags.get("config", ""),
        file_table=file_table,
        print_config="print_config" in flags,
        dry_run="dry_run" in flags,
    )


def read_request(argv: Sequence[str], environ: Mapping[str, str], recipes: Traversable | None = None) -> Request:
    """Read flags, environment, file and recipe, strictly.

    Everything that can be known to be wrong before a recipe prepares its files is found here, all at once.

    Args:
        argv: what follows `drivetrain train`.
        recipes: folder of recipes, None for those that ship with the launcher.

    Raises:
        ConfigError: one finding a line.
        DiscoveryError: train backend, engine or algorithm cannot be used.
    """
    selection = _select(argv, environ, recipes)
    surface, recipe = selection.surface, selection.recipe
    warmup_surface = None
    readings = [
        _table_layer(surface, recipe.values if recipe else {}, recipe.source if recipe else ""),
        _table_layer(surface, selection.file_table, selection.file),
        _environment_layer(surface, environ),
        _flag_layer(surface, argv),
    ]
    if recipe and recipe.warmup is not None:
        warmup_surface = _select_surface({}, {}, [recipe.warmup], default=surface)
        readings.append(_table_layer(warmup_surface, recipe.warmup, recipe.source))
    layers = [layer for layer, _ in readings]

    findings = [] if selection.print_config else unavailable(surface.backend, surface.engine, surface.algorithm)
    findings += [one for _, strangers in readings for one in strangers]
    findings += [setting.finding for layer in layers for setting in layer.values() if setting.finding]
    settings = _merge(layers[:4])
    findings += _code_findings(surface, settings)
    if recipe is None or recipe.make is None:  # else some values, on which others depend, are yet to be made
        findings += _inert_findings(surface, settings, layers[3])
        findings += _build_groups(surface, settings)[1]
    if findings:
        raise ConfigError("\n".join(dict.fromkeys(findings)))
    return Request(
        surface=surface,
        recipe=recipe,
        recipe_layer=layers[0],
        user_layers=tuple(layers[1:4]),
        warmup=Warmup(surface=warmup_surface, layer=layers[4]) if warmup_surface else None,
        print_config=selection.print_config,
        dry_run=selection.dry_run,
    )


def train_help(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the help of `drivetrain train` for the plugins that are chosen so far."""
    return build_parser(_select(argv, environ, None).surface).format_help()


def _select_surface(
    flags: Mapping[str, str],
    environ: Mapping[str, str],
    tables: Sequence[Mapping[str, Any]],
    default: Surface | None = None,
) -> Surface:
    """Resolve the three plugins: flag, then environment, then each table in turn, then the default."""
    chosen: dict[str, Any] = {}
    for plugin, (_, one) in SELECTORS.items():
        given = [flags.get(one.name), environ.get(Spelling.VARIABLE.write(one.name))]
        given += [table.get(Spelling.KEY.write(one.name)) for table in tables]
        given += [getattr(default, plugin).name if default else one.default]
        chosen[one.name] = next((value for value in given if value is not None), None)
        if chosen[one.name] is not None:
            convert_typed(one, chosen[one.name])
    return load_surface(**chosen)


# -- the configuration -------------------------------------------------------------------------------------------------


def build_config(
    request: Request,
    *,
    stage: Stage = Stage.MAIN,
    made: Mapping[str, object] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> DrivetrainConfig:
    """Make the configuration of one stage.

    Args:
        made: what the recipe prepared, option name -> value; the user's file, environment and flags win over it.
        overrides: what the launcher decides for this stage; it wins over everything.

    Raises:
        ConfigError: required options are missing, or values cannot work together; one finding a line.
    """
    source = request.recipe.source if request.recipe else "launcher"
    surface, last = request.surface, []
    layers = [request.recipe_layer, _made_layer(surface, made or {}, source), *request.user_layers]
    if stage is Stage.WARMUP:
        if request.warmup is None:
            raise ConfigError(f"{source} has no warm-up stage")
        surface, last = request.warmup.surface, [request.warmup.layer]
        # options of the main stage's plugins that the warm-up does not have mean nothing to it
        layers = [
            {
                name: setting
                for name, setting in layer.items()
                if surface.options.get(name) == request.surface.options[name]
            }
            for layer in layers
        ]
    settings = _merge([*layers, *last, _made_layer(surface, overrides or {}, source)])
    groups, findings = _build_groups(surface, settings)
    if stage is Stage.MAIN:  # a warm-up is not what the flags were given for
        findings = _inert_findings(surface, settings, request.user_layers[2]) + findings
    if findings:
        raise ConfigError("\n".join(findings))
    return DrivetrainConfig(
        backend=surface.backend,
        engine=surface.engine,
        algorithm=surface.algorithm,
        **groups,
        sources={name: settings[name].source if name in settings else "default" for name in surface.options},
    )


def _build_groups(surface: Surface, settings: Layer) -> tuple[dict[str, Any], list[str]]:
    """Construct every group whose options are all there and right by themselves.

    Returns: the groups by field of `DrivetrainConfig`, and what is missing or cannot work together.
    """
    groups: dict[str, OptionGroup] = {}
    findings = [
        f"{one.flag} is required: {one.help}"
        for one in surface.options.values()
        if one.required and one.name not in settings
    ]
    for name, config_class in surface.groups.items():
        group_options = surface.group_options(name)
        given = {one.name: settings[one.name] for one in group_options if one.name in settings}
        if any(one.required and one.name not in given for one in group_options):
            continue
        if any(setting.finding for setting in given.values()):
            continue
        try:
            groups[name] = config_class(**{one: setting.value for one, setting in given.items()})
        except ConfigError as error:
            findings += str(error).split("\n")
    return groups, findings


# -- showing and saving ------------------------------------------------------------------------------------------------


def config_values(config: DrivetrainConfig) -> dict[str, Any]:
    """Return every value under its file key: what is saved as a run's config.json, and what --config reads back."""
    values: dict[str, Any] = {
        Spelling.KEY.write(one.name): getattr(config, plugin).name for plugin, (_, one) in SELECTORS.items()
    }
    surface = Surface(backend=config.backend, engine=config.engine, algorithm=config.algorithm)
    for group in surface.groups:
        for one in surface.group_options(group):
            value = getattr(getattr(config, group), one.name)
            values[Spelling.KEY.write(one.name)] = list(value) if isinstance(value, tuple) else value
    return values


def format_request(request: Request) -> str:
    """Write what `--print-config` shows: a file for --config, with the source of each value as a comment."""
    settings = _merge([request.recipe_layer, *request.user_layers])
    chosen = {one.name: getattr(request.surface, plugin).name for plugin, (_, one) in SELECTORS.items()}
    maker = request.recipe.source if request.recipe else ""
    lines = []
    for one in request.surface.options.values():
        key = Spelling.KEY.write(one.name)
        if one.name in settings:
            setting = settings[one.name]
            lines.append(f"{key} = {_toml(setting.value)}  # {setting.source}")
        elif one.required:
            lines.append(f"# {key} is made by {maker} when it runs")
        elif (value := chosen.get(one.name, one.default)) is None:
            # left out of what can be read back, for a recipe may yet make it
            lines.append(f"# {key} is not set")
        else:
            lines.append(f"{key} = {_toml(value)}  # default")
    if request.warmup is not None:
        lines.append("# in the warm-up stage before:")
        lines += [f"#   {Spelling.KEY.write(name)} = {_toml(one.value)}" for name, one in request.warmup.layer.items()]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(one) for one in value) + "]"
    if isinstance(value, str):
        # JSON and TOML basic strings escape alike, except that TOML wants DEL escaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value) if isinstance(value, bool) else repr(value)
