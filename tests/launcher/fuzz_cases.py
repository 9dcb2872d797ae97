"""What the fuzz draws: command lines, variables, files, and damage done to folders.

Everything is drawn near what is right, so that a fair share gets past the first check; how large the share is, the
tests count.
"""

import dataclasses
import json
import os
import pickle
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from scratch import GOOD

from drivetrain_backend_api import Option
from drivetrain_launcher.arguments import SELECTORS, flags_of, load_surface

CANARY = "canary"
"""A folder that a hostile pickle makes when something loads it."""


@dataclass(frozen=True, kw_only=True)
class Damage:
    """One thing done to a file of the scratch folder before the command runs.

    Attributes:
        path: of the file.
        kind: key of `DAMAGES`.
        seed: what the damage depends on beside.
    """

    path: str
    kind: str
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One command in one scratch folder."""

    words: Sequence[str]
    environ: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    damages: Sequence[Damage] = ()

    def arrange(self, folder: Path) -> None:
        """Write the files and do the damage."""
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        for damage in self.damages:
            DAMAGES[damage.kind](folder, folder / damage.path, damage.seed)


# -- words -------------------------------------------------------------------------------------------------------------

_SURFACES = [load_surface("fsdp", "transformers", algorithm) for algorithm in ("grpo", "opd", "sft")]
_OPTIONS = list({one.name: one for surface in _SURFACES for one in surface.options.values()}.values())
_FLAGS = [flag for one in _OPTIONS for flag in flags_of(one)]
_OTHER_FLAGS = ["--recipe", "--config", "--print-config", "--dry-run", "--help", "-h", "--version", "--", "-", "--="]
_PATHS = ["model", "train.jsonl", "run", "run/iter_0000001", "new", "absent", ".", "..", "/", "/dev/null", "/proc/new"]
_PATHS += ["model/", "./model/../model", "~", "/dev/full", "run/latest", "new/deep/deeper", "train.jsonl/new"]
_STRANGE = [
    "",
    " ",
    "\0",
    "a\0b",
    "a\nb",
    "\n",
    "\r\n",
    "\t",
    "-",
    "--",
    "=",
    "none",
    "null",
    "True",
    "0",
    "-1",
    "1e-5",
]
_STRANGE += ["nan", "inf", "-inf", "1e999", "9" * 30, "-" + "9" * 30, "9" * 5000, "0x10", "1_000", "1.5", "{}", "[]"]
_STRANGE += [
    "x" * 300,
    "x" * 5000,
    "ü",
    "\N{FULLWIDTH DIGIT ONE}",
    "\u202e",
    "\udc80",
    "\ud800",
    "\U0001f600",
    "%s%n",
    "'",
]
_FUNCTIONS = [
    "json:loads",
    "json:absent",
    "json",
    ":",
    "a:",
    ":a",
    "absent:score",
    "math:pi",
    "json.decoder:JSONDecoder.decode",
]


def _good_text(one: Option) -> SearchStrategy[str]:
    """Draw what an option probably takes."""
    if one.name in {option.name for _, option in SELECTORS.values()}:
        return st.sampled_from(["fsdp", "transformers", "grpo", "opd", "sft"])
    if one.choices:
        return st.sampled_from(list(one.choices))
    if one.metavar in ("DIR", "FILE"):
        return st.sampled_from(_PATHS)
    if one.runs_code:
        return st.sampled_from(["math", "exact", *_FUNCTIONS])
    if one.type is int:
        return st.sampled_from(["1", "2", "4", "16", "40", "64"]) | st.integers(0, 10**6).map(str)
    if one.type is float:
        return st.sampled_from(["0", "0.5", "1", "1e-6", "100"])
    if one.name in ("wall_time_limit", "wall_time_reserve"):
        return st.sampled_from(["0", "90s", "10m", "1.5h", "7d", "3600"])
    if one.name == "accept_change":
        return st.sampled_from(["all", "lr", "versions"])
    if one.many and one.type is str:
        return st.sampled_from(["answer", "text"])
    return st.sampled_from(["question", "answer", "a b", "text"])


_strange_text = st.sampled_from(_STRANGE) | st.sampled_from(_PATHS) | st.text(max_size=12)


@st.composite
def _flag_words(draw: DrawFn, *, strange: bool) -> list[str]:
    """Draw a flag with its values: a real one, or with `strange` perhaps not."""
    one = draw(st.sampled_from(_OPTIONS))
    if one.acts_with is not None and not strange and draw(st.booleans()):  # alone it is refused, more often than not
        one = next(other for other in _OPTIONS if other.name == one.acts_with)
    flag = draw(st.sampled_from(flags_of(one)))
    text = _good_text(one)
    if not strange:
        return [flag] if one.type is bool else [flag, draw(text)]
    kind = draw(st.integers(0, 7))
    if kind == 0:  # mistyped
        place = draw(st.integers(2, len(flag)))
        flag = flag[:place] + draw(st.sampled_from(["", "-", "x", "_", "=", "\0", "ü"])) + flag[place + 1 :]
    elif kind == 1:  # abbreviated, or another spelling
        flag = draw(
            st.sampled_from([flag[:-1], flag[: len(flag) // 2], flag.replace("-", "_"), flag.upper(), flag[1:]])
        )
    elif kind == 2:
        return [draw(_strange_text) for _ in range(draw(st.integers(1, 3)))]
    elif kind == 3:
        return [draw(st.sampled_from(_OTHER_FLAGS)), *draw(st.lists(_strange_text, max_size=1))]
    value = draw(text | _strange_text)
    if draw(st.booleans()):
        return [f"{flag}={value}"]
    return [flag, *([] if one.type is bool else [value] * draw(st.integers(0, 2)))]


@st.composite
def _good_flags(draw: DrawFn) -> list[list[str]]:
    """Draw the flags of a good run, mostly all of them."""
    changes: dict[str, str | None] = {}
    if draw(st.integers(0, 3)) == 0:
        changes[draw(st.sampled_from(list(GOOD)))] = None
    return [[flag, text] for flag, text in {**GOOD, **changes}.items() if text is not None]


@st.composite
def _train_words(draw: DrawFn) -> list[str]:
    flags = draw(_good_flags())
    names = {flag for flag, _ in flags}
    strange = draw(st.sampled_from([0, 0, 1, 3]))
    for _ in range(draw(st.integers(0, 4))):
        words = draw(_flag_words(strange=False))
        if words[0] in names:  # twice is an error, which other draws are for
            flags = [one for one in flags if one[0] != words[0]]
        names.add(words[0])
        flags.append(words)
    flags += [draw(_flag_words(strange=True)) for _ in range(strange)]
    if draw(st.integers(0, 39)) == 39:
        flags.append(["--recipe", "quickstart"])
    # a dry run first: behind `--` the switch would be a word like any other
    return ["train", "--dry-run", *(word for one in draw(st.permutations(flags)) for word in one)]


_other_words = st.one_of(
    st.lists(_strange_text, max_size=4),
    st.tuples(st.sampled_from(["backends", "recipes", "--help", "--version", "trian"]), _strange_text).map(list),
    st.sampled_from([["backends"], ["backends", "--json"], ["recipes"], ["train", "--help"], ["train", "-h"]]),
    st.lists(
        st.sampled_from(["run", "--out", "x", "model", "absent", "--dtype", "bfloat16", "int8", "--out=x", "--ou"])
        | _strange_text,
        max_size=6,
    ).map(lambda words: ["export", *words]),
)


def _variable_value(text: str) -> str:
    """Leave out what no environment can hold."""
    return text.replace("\0", "").encode("utf-8", "ignore").decode()


@st.composite
def _environ(draw: DrawFn) -> dict[str, str]:
    found = {}
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        one = draw(st.sampled_from(_OPTIONS))
        name = draw(st.sampled_from([one.name.upper(), one.name.upper(), one.name, "CONFIG", "RECIPE", "X", "", "LR_"]))
        found["DRIVETRAIN_" + name] = _variable_value(draw(_good_text(one) | _strange_text))
    return found


@st.composite
def command_lines(draw: DrawFn) -> Case:
    """Draw command lines of `train`, and now and then of the other commands."""
    words = draw(_train_words()) if draw(st.integers(0, 5)) else draw(_other_words)
    if words[:1] == ["train"] and not {"--dry-run", "--help", "-h"} & set(words):
        words = ["train", "--dry-run", *words[1:]]
    return Case(words=words, environ=draw(_environ()))


# -- configuration files -----------------------------------------------------------------------------------------------

_scalars: SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 100),
    st.sampled_from([10**30, -(10**30), 10**400, 0.5, 1e308, float("nan"), float("inf"), -0.0]),
    st.sampled_from(_STRANGE),
    st.sampled_from(_PATHS),
    st.text(max_size=8),
)
_values: SearchStrategy[Any] = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def _typed(one: Option, text: str) -> Any:
    """Give a text the type that a file would give it."""
    value: Any = text
    if one.type is bool:
        value = text == "question"
    elif one.type is int:
        value = int(text)
    elif one.type is float:
        value = float(text)
    return [value] if one.many else value


@st.composite
def _table(draw: DrawFn) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for flag, text in GOOD.items():
        table[flag[2:]] = int(text) if text.isdigit() else text
    for one in draw(st.lists(st.sampled_from(_OPTIONS), max_size=3)):
        table[one.name.replace("_", "-")] = _typed(one, draw(_good_text(one)))
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        name = draw(st.sampled_from([*table]) | st.text(min_size=1, max_size=8))
        change = draw(st.integers(0, 4))
        if change == 0:
            table.pop(name, None)
        elif change == 1:
            table[name.replace("-", "_") + draw(st.sampled_from(["", "x"]))] = table.pop(name, 1)
        elif change == 2:
            table[draw(st.sampled_from(["train", name]))] = {name: table.pop(name, 1)}
        else:
            table[name] = draw(_values)
    return table


def _toml(value: Any) -> str:
    """Write a value as TOML, or as nearly that as it can be."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if value is None:
        return '"none"'
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


_TOML_WORDS = [
    "lr",
    "save",
    "=",
    "[",
    "]",
    "[[",
    "{",
    "}",
    '"',
    "'''",
    '"""',
    "\n",
    "#",
    ".",
    ",",
    "1979-05-27T07:32:00Z",
]
_TOML_WORDS += [
    "07:32:00",
    "0x1F",
    "1e5",
    "nan",
    "true",
    "\\u0000",
    "\\ud800",
    "\0",
    "-",
    "_",
    "hf-checkpoint",
    "\ufeff",
]
_toml_words = st.sampled_from(_TOML_WORDS)


@st.composite
def _file_content(draw: DrawFn, suffix: str) -> bytes:
    kind = draw(st.sampled_from(["table"] * 8 + ["cut", "bytes", "words", "deep"]))
    if kind == "bytes":
        return draw(st.binary(max_size=60))
    if kind == "words":
        return "".join(draw(st.lists(_toml_words, max_size=25))).encode("utf-8", "surrogatepass")
    if kind == "deep":
        depth = draw(st.sampled_from([10, 2000, 100_000]))
        opened = draw(st.sampled_from(["[", '{"a":', "{a=", "[["]))
        return f"{'' if suffix == '.json' else 'x = '}{opened * depth}".encode()
    table = draw(_table())
    if suffix == ".json":
        text = json.dumps(table)
    else:
        text = "".join(f"{_toml(key)} = {_toml(value)}\n" for key, value in table.items())
    if kind == "cut":  # cut off, or with something in it
        place = draw(st.integers(0, len(text)))
        text = text[:place] + draw(_toml_words | st.just(text))
    return text.encode("utf-8", "surrogatepass")


@st.composite
def config_files(draw: DrawFn) -> Case:
    """Draw a configuration file, and a command line that reads it."""
    suffix = draw(st.sampled_from([".toml", ".json"]))
    words = ["train", "--dry-run", "--config", "c" + suffix]
    if draw(st.integers(0, 3)) == 0:
        words += draw(_flag_words(strange=False))
    environ = draw(_environ()) if draw(st.integers(0, 4)) == 0 else {}
    return Case(words=words, environ=environ, files={"c" + suffix: draw(_file_content(suffix))})


# -- prompt files ------------------------------------------------------------------------------------------------------

_message = st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "x", ""]), "content": _scalars})
_prompt = st.one_of(
    st.just("1+1="), st.text("0123456789+=", min_size=1, max_size=30), st.lists(_message, max_size=3), _values
)
_row = st.fixed_dictionaries(
    {
        "question": st.just("1+1=") | _prompt,
        "answer": st.just("2") | st.sampled_from(["#### 2", 2, 2.5, "two", 1e300]) | _values,
    },
    optional={"meta": st.just({}) | _values, "other": _values},
)
_STRANGE_LINES = [b"", b" ", b"\xef\xbb\xbf{}", b"\xff\xfe{\x00}\x00", b"{", b"[]", b"1", b"null", b"NaN", b'"', b"\0"]
_STRANGE_LINES += [b"[" * 100_000, b'{"question":' * 50_000, b'{"question": "1", "question": "2", "answer": "3"}']
_STRANGE_LINES += [
    rb'{"question": "\ud800", "answer": "1"}',
    rb'{"question": "1", "answer": "\udc00"}',
    b"{}" + b" " * 70_000,
]
_STRANGE_LINES += [b'{"question": "1", "answer": ' + b"9" * 5000 + b"}", b'{"question": "1", "answer": 1e999}']
_STRANGE_LINES += [
    b'{"question": "1+1=", "answer": "' + b"9" * 2000 + b'"}',
    b'{"question": "' + b"1" * 100_000 + b'", "answer": 1}',
]


@st.composite
def _json_lines(draw: DrawFn) -> bytes:
    lines = [
        json.dumps({"question": f"{one}+1=", "answer": str(one + 1)}).encode() for one in range(draw(st.integers(1, 5)))
    ]
    for _ in range(draw(st.integers(0, 2))):
        kind = draw(st.integers(0, 3))
        place = draw(st.integers(0, len(lines) - 1))
        if kind == 0:
            lines[place] = draw(st.sampled_from(_STRANGE_LINES))
        elif kind == 1:
            cut = draw(st.integers(0, len(lines[place])))
            lines[place] = lines[place][:cut] + draw(st.binary(max_size=3)) + lines[place][cut + 1 :]
        else:
            lines.insert(place, json.dumps(draw(_row)).encode())
    return draw(st.sampled_from([b"\n", b"\n", b"\r\n", b"\n\n"])).join(lines)


def _parquet(columns: Mapping[str, Sequence[Any]]) -> bytes:
    import pyarrow
    from pyarrow import parquet

    file = BytesIO()
    try:
        table = pyarrow.table({name: list(values) for name, values in columns.items()})
        parquet.write_table(table, file)
    except (pyarrow.ArrowException, OverflowError, UnicodeError, ValueError, TypeError):  # no column has such values
        return b"PAR1"
    return file.getvalue()


@st.composite
def _parquet_content(draw: DrawFn) -> bytes:
    rows = draw(st.integers(0, 3))
    columns: dict[str, Sequence[Any]] = {"question": ["1+1="] * rows, "answer": ["2"] * rows}
    if draw(st.booleans()):
        name = draw(st.sampled_from(["question", "answer", "meta", ""]))
        column: SearchStrategy[Any] = st.one_of(
            st.none(), st.integers(0, 9), st.floats(), st.binary(max_size=4), st.lists(_message, max_size=2), _values
        )
        columns[name] = draw(st.lists(column, min_size=rows, max_size=rows))
    if draw(st.integers(0, 4)) == 0:
        del columns[draw(st.sampled_from(list(columns)))]
    content = bytearray(_parquet(columns))
    damage = draw(st.integers(0, 3))
    if damage == 0:
        content = content[: draw(st.integers(0, len(content)))]
    elif damage == 1:
        for _ in range(draw(st.integers(1, 4))):
            content[draw(st.integers(0, len(content) - 1))] ^= 1 << draw(st.integers(0, 7))
    return bytes(content)


@st.composite
def prompt_files(draw: DrawFn) -> Case:
    """Draw a prompt file, and a good command line that reads it."""
    suffix = draw(st.sampled_from([".jsonl", ".jsonl", ".parquet"]))
    content = draw(_parquet_content() if suffix == ".parquet" else _json_lines() | st.binary(max_size=60))
    flags = {**GOOD, "--prompt-data": "p" + suffix}
    if draw(st.integers(0, 4)) == 0:
        flags = {**GOOD, "--eval-prompt-data": "p" + suffix}
    more = draw(
        st.lists(
            st.sampled_from(
                [
                    ("--apply-chat-template", "--hf-checkpoint=chat"),
                    ("--metadata-key=meta",),
                    ("--reward=exact",),
                    ("--rollout-max-prompt-len=5",),
                    ("--algorithm=sft", "--n-samples-per-prompt=1"),
                    ("--use-dynamic-batch-size", "--max-tokens-per-gpu=20"),
                ]
            ),
            max_size=2,
            unique=True,
        )
    )
    extra = [word for words in more for word in words]
    kept = {name: text for name, text in flags.items() if not any(word.startswith(name + "=") for word in extra)}
    if any(word == "--apply-chat-template" for word in extra) and draw(st.booleans()):
        extra.append("--system-prompt=Be brief.")
    words = ["train", "--dry-run", *(word for pair in kept.items() for word in pair), *extra]
    return Case(words=words, files={"p" + suffix: content})


# -- damaged folders ---------------------------------------------------------------------------------------------------

_MODEL_FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
_RUN_FILES = ["config.json", "latest", "metrics.jsonl", "iter_0000001/trainer_state.json"]
_RUN_FILES += ["iter_0000001/rng_rank00000.safetensors", "iter_0000001/dcp/.metadata", "iter_0000001/dcp/__0_0.distcp"]
_FOLDERS = ["model", "run", "run/iter_0000001", "run/iter_0000001/dcp"]
_PATHS_TO_DAMAGE = [f"model/{name}" for name in _MODEL_FILES] + [f"run/{name}" for name in _RUN_FILES]


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif path.parent.is_dir():
        path.unlink(missing_ok=True)


def _replace(path: Path, content: bytes) -> None:
    _remove(path)
    if path.parent.is_dir():
        path.write_bytes(content)


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _flipped(content: bytes, seed: int) -> bytes:
    """Flip bits, near the beginning more often, where headers are."""
    flipped = bytearray(content)
    numbers = _numbers(seed)
    for _ in range(1 + next(numbers) % 8):
        if flipped:
            reach = len(flipped) if next(numbers) % 2 else min(len(flipped), 2000)
            flipped[next(numbers) % reach] ^= 1 << next(numbers) % 8
    return bytes(flipped)


def _numbers(seed: int) -> Any:
    import random

    source = random.Random(seed)
    while True:
        yield source.getrandbits(32)


class _Hostile:
    """Makes the canary when it is unpickled."""

    def __init__(self, canary: str) -> None:
        self._canary = canary

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self._canary,)


def _edited(content: bytes, seed: int) -> bytes:
    """Change one value of a JSON file, at any depth; of another file, some bytes."""
    try:
        table = json.loads(content)
    except ValueError:
        return _flipped(content, seed)
    numbers = _numbers(seed)
    strange = [
        None,
        -1,
        0,
        10**30,
        1.5,
        "",
        "x",
        "a\0b",
        [],
        {},
        [[1]],
        {"a": 1},
        True,
        "../../x",
        "9" * 400,
        float("nan"),
    ]
    where = table
    while isinstance(where, dict | list) and where:
        keys = list(where) if isinstance(where, dict) else list(range(len(where)))
        key = keys[next(numbers) % len(keys)]
        if not isinstance(where[key], dict | list) or next(numbers) % 3 == 0:
            if next(numbers) % 5:
                where[key] = strange[next(numbers) % len(strange)]
            else:
                del where[key]
            break
        where = where[key]
    return json.dumps(table).encode()


def _swap(folder: Path, path: Path, seed: int) -> None:
    other = folder / _PATHS_TO_DAMAGE[seed % len(_PATHS_TO_DAMAGE)]
    mine, theirs = _content(path), _content(other)
    _replace(path, theirs)
    _replace(other, mine)


def _to_folder(folder: Path, path: Path, seed: int) -> None:
    _remove(path)
    if path.parent.is_dir():
        path.mkdir()


def _to_link(target: str) -> Callable[[Path, Path, int], None]:
    def link(folder: Path, path: Path, seed: int) -> None:
        _remove(path)
        if path.parent.is_dir():
            path.symlink_to(path if target == "itself" else target)

    return link


def _to_fifo(folder: Path, path: Path, seed: int) -> None:
    _remove(path)
    if path.parent.is_dir():
        os.mkfifo(path)


DAMAGES: Mapping[str, Callable[[Path, Path, int], None]] = {
    "remove": lambda folder, path, seed: _remove(path),
    "empty": lambda folder, path, seed: _replace(path, b""),
    "truncate": lambda folder, path, seed: _replace(path, _content(path)[: seed % (len(_content(path)) + 1)]),
    "flip": lambda folder, path, seed: _replace(path, _flipped(_content(path), seed)),
    "edit": lambda folder, path, seed: _replace(path, _edited(_content(path), seed)),
    "noise": lambda folder, path, seed: _replace(path, seed.to_bytes(8, "little") * (seed % 50)),
    "append": lambda folder, path, seed: _replace(path, _content(path) + seed.to_bytes(8, "little")),
    "hostile": lambda folder, path, seed: _replace(path, pickle.dumps(_Hostile(str(folder / CANARY)), seed % 6)),
    "swap": _swap,
    "folder": _to_folder,
    "dangling": _to_link("nowhere"),
    "loop": _to_link("itself"),
    "parent": _to_link(".."),
    "fifo": _to_fifo,
}
"""What can happen to a file: kind -> (scratch folder, file, seed)."""

_seed = st.integers(0, 2**31)
_damage = st.builds(
    Damage,
    path=st.sampled_from(_PATHS_TO_DAMAGE) | st.sampled_from(_PATHS_TO_DAMAGE + _FOLDERS),
    kind=st.sampled_from(list(DAMAGES)) | st.sampled_from(["flip", "edit"]),
    seed=_seed,
)


@st.composite
def damaged_folders(draw: DrawFn) -> Case:
    """Draw damage to a model folder and a run, and a command that reads them."""
    damages = [draw(_damage) for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3])))]
    good = [word for pair in GOOD.items() for word in pair]
    commands = [
        ["train", "--dry-run", *good],
        ["train", "--dry-run", *good, "--load", "run"],
        ["train", "--dry-run", *good, "--load", "run/iter_0000001"],
        ["train", "--dry-run", *good, "--use-kl-loss", "--ref-load", "model"],
        ["train", "--dry-run", "--config", "run/config.json", "--save", "new"],
        ["export", "run", "--out", "x"],
        ["export", "run", "--out", "x", "--dtype", "bfloat16"],
        ["export", "run/iter_0000001", "--out", "x"],
    ]
    about_run = any(one.path.startswith("run") for one in damages)
    words = draw(st.sampled_from(commands[1:3] + commands[4:]) if about_run else st.sampled_from(commands))
    return Case(words=words, damages=damages)


def shown(case: Case) -> str:
    """Write a case so that it can be tried again."""
    return repr(dataclasses.replace(case, files={name: content[:300] for name, content in case.files.items()}))
