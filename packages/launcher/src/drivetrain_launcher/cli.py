"""The `drivetrain` command: which subcommand, which exit code, and what a person sees when something goes wrong.

What a subcommand needs is imported when it runs, so that `--help` and `backends` answer at once.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path

from drivetrain_backend_api import ConfigError, DiscoveryError, DrivetrainError
from drivetrain_launcher.arguments import StrictParser
from drivetrain_launcher.export import DTYPES

REFUSED = 2
FAILED = 1
INTERRUPTED = 130
TERMINATED = 143


class Terminated(BaseException):
    """SIGTERM came. Passes through everything that handles errors, so that what was started is ended on the way."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0: done.
        1: it failed while it ran.
        2: it was refused before anything started: configuration or plugins.
        130: interrupted from the keyboard.
        143: ended by SIGTERM.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        _require_folder()
        # the flags of `train` depend on plugins that it chooses itself, so its words are not parsed here
        return _train(arguments[1:]) if arguments[:1] == ["train"] else _other(arguments)
    except KeyboardInterrupt:
        print("drivetrain: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Terminated:
        print("drivetrain: terminated", file=sys.stderr)
        return TERMINATED
    except DrivetrainError as error:
        for finding in str(error).splitlines():
            print(f"drivetrain: error: {finding}", file=sys.stderr)
        return REFUSED if isinstance(error, ConfigError | DiscoveryError) else FAILED
    except Exception as error:  # the last resort: no traceback on the screen, none lost
        return _report_unexpected(error, None)


def _parser() -> StrictParser:
    parser = StrictParser(
        prog="drivetrain", description="Train language models inside reinforcement-learning loops.", add_help=True
    )
    parser.add_argument("--version", action="version", version=f"drivetrain {version('drivetrain-launcher')}")
    commands = parser.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True, parser_class=StrictParser
    )
    commands.add_parser("train", help="run a training; `drivetrain train --help` lists its flags")
    backends = commands.add_parser("backends", help="list the installed train backends and whether they work here")
    backends.add_argument("--json", action="store_true", default=False, help="for programs")
    commands.add_parser("recipes", help="list the recipes of `drivetrain train --recipe NAME`")
    export = commands.add_parser("export", help="write the newest checkpoint of a run as a Hugging Face model folder")
    export.add_argument("run", metavar="RUN", type=Path, help="folder of the run, its --save")
    export.add_argument(
        "--dtype", default=None, choices=DTYPES, help="of the weights (default: as in the model the run started from)"
    )
    export.add_argument("--out", metavar="DIR", type=Path, required=True, help="folder to write, new or empty")
    return parser


def _train(words: Sequence[str]) -> int:
    from drivetrain_launcher.sources import format_request, read_request, train_help

    if "-h" in words or "--help" in words:
        print(train_help(words, os.environ), end="")
        return 0
    request = read_request(words, os.environ)
    if request.print_config:
        print(format_request(request), end="")
        return 0
    from drivetrain_launcher.run import run_train

    signal.signal(signal.SIGTERM, _terminate)
    try:
        return run_train(request)
    except DrivetrainError:
        raise
    except Exception as error:  # as in `main`, but the run has a folder to keep the traceback in
        return _report_unexpected(error, request.save)


def _terminate(number: int, frame: object) -> None:
    raise Terminated


def _require_folder() -> None:
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise ConfigError("the current folder does not exist any more; cd to one that does") from error


def _other(words: Sequence[str]) -> int:
    commands = {"backends": _backends, "recipes": _recipes, "export": _export}
    names = ["train", *commands]
    first = words[0] if words else ""
    if (first.startswith("-") and first not in ("-h", "--help", "--version")) or not first:
        raise ConfigError(f"a command comes first: drivetrain {'|'.join(names)}; see `drivetrain --help`")
    if not first.startswith("-") and first not in names:
        close = get_close_matches(first, names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(names)}"
        raise ConfigError(f"no command {first!r}; {hint}")
    arguments = _parser().parse_args(words)
    commands[arguments.command](arguments)
    return 0


def _backends(arguments: argparse.Namespace) -> None:
    from drivetrain_launcher.backends_command import describe_backends, format_json, format_table

    rows = describe_backends()
    print(format_json(rows) if arguments.json else format_table(rows))


def _recipes(_: argparse.Namespace) -> None:
    from drivetrain_launcher.sources import read_recipe, recipe_names, shipped_recipes

    for name in recipe_names(shipped_recipes()):
        print(f"{name}: {read_recipe(name, shipped_recipes()).description}")


def _export(arguments: argparse.Namespace) -> None:
    from drivetrain_launcher.export import export_run

    export_run(arguments.run, arguments.out, arguments.dtype)


def _report_unexpected(error: Exception, folder: Path | None) -> int:
    log = write_traceback(error, folder)
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    print(f"drivetrain: error: unexpected {reason}", file=sys.stderr)
    print(f"drivetrain: error: the full traceback is in {log}", file=sys.stderr)
    return FAILED


def write_traceback(error: BaseException, folder: Path | None) -> Path:
    """Write an error's traceback to a new file in `folder`, or in the system's temporary folder where that fails."""
    name = f"error_{time.strftime('%Y%m%d-%H%M%S')}_{os.getpid()}.log"
    text = "".join(traceback.format_exception(error))
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, "utf-8", "backslashreplace")
            return folder / name
        except OSError:  # a full or vanished disk may be the very error
            pass
    log = Path(tempfile.mkdtemp(prefix="drivetrain-")) / name
    log.write_text(text, "utf-8", "backslashreplace")
    return log


if __name__ == "__main__":
    sys.exit(main())
