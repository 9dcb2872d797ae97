"""The `drivetrain` command: which subcommand, which exit code, and what a person sees when something goes wrong.

What a subcommand needs is imported when it runs, so that `--help` and `backends` answer at once.
"""

import argparse
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import TextIO

from drivetrain_backend_api import ConfigError, DiscoveryError, DrivetrainError
from drivetrain_launcher.arguments import StrictParser
from drivetrain_launcher.export import DTYPES
from drivetrain_launcher.last_lines import DivergedError, newest_checkpoint, one_line, write_log
from drivetrain_launcher.stopping import Stopping, Terminated

REFUSED = 2
FAILED = 1
INTERRUPTED = 130
SIGNALLED = 128
"""Plus the number of the signal that ended the run at once; 143 for SIGTERM, 138 for SIGUSR1, 129 for SIGHUP."""

_LAST_SECONDS = 10.0
"""What threads of a user's code have to end in after a failure, once everything else has."""


class OutputError(Exception):
    """Standard output cannot be written; the reason is chained."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0: done, or stopped by a signal or the wall time with everything saved.
        1: it failed while it ran.
        2: it was refused before anything started: configuration or plugins.
        130: interrupted from the keyboard, before anything started or a second time.
        143, 138: likewise, by SIGTERM or SIGUSR1.
        129: ended by SIGHUP, as when a terminal closes.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        _require_folder()
        # the flags of `train` depend on plugins that it chooses itself, so its words are not parsed here
        code = _train(arguments[1:]) if arguments[:1] == ["train"] else _other(arguments)
    except BaseException as error:  # the last resort: no traceback on the screen, none lost
        code = _report(error)
    if (problem := _write_problem(sys.stdout)) and code == 0:
        code = _report_output(problem)
    if argv is None and code != 0:  # then this process is the command's own
        if arguments[:1] == ["train"]:
            from drivetrain_infra.guard import end_children
            from drivetrain_infra.tracking.wandb import tear_down

            tear_down()
            end_children()  # what a user's code has started and left behind
        _end_though_threads_hang(code)
    return code


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
        _print(train_help(words, os.environ))
        return 0
    request = read_request(words, os.environ)
    if request.print_config:
        _print(format_request(request))
        return 0
    from drivetrain_launcher.run import run_train

    folder = request.save.absolute()
    try:
        stopping = Stopping()
        with stopping.handling():
            code = run_train(request, stopping)
    except BaseException as error:  # as in `main`, but the run has a folder, and perhaps a checkpoint in it
        code = _report(error, folder)
        if code != REFUSED and not isinstance(error, DivergedError) and (newest := newest_checkpoint(folder)):
            _say(newest)
    return code


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
    _print((format_json(rows) if arguments.json else format_table(rows)) + "\n")


def _recipes(_: argparse.Namespace) -> None:
    from drivetrain_launcher.sources import read_recipe, recipe_names, shipped_recipes

    for name in recipe_names(shipped_recipes()):
        _print(f"{name}: {read_recipe(name, shipped_recipes()).description}\n")


def _export(arguments: argparse.Namespace) -> None:
    from drivetrain_launcher.export import export_run

    export_run(arguments.run, arguments.out, arguments.dtype)


def _report(error: BaseException, folder: Path | None = None) -> int:
    """Say what went wrong, keep the traceback where there is more to know, and return the exit code.

    Args:
        error: whatever ended the command.
        folder: of the run, if there is one.
    """
    match error:
        case KeyboardInterrupt():
            _say("interrupted")
            return INTERRUPTED
        case Terminated():
            _say(f"terminated by {signal.Signals(error.number).name}")
            return SIGNALLED + error.number
        case SystemExit():
            return error.code if isinstance(error.code, int) else FAILED if error.code else 0
        case ConfigError() | DiscoveryError():
            _say_findings(error)
            return REFUSED
        case DrivetrainError() if folder is None:
            _say_findings(error)
            if error.__cause__ is None:
                return FAILED
        case DrivetrainError():
            _say(f"error: {one_line(str(error))}")
        case OutputError(__cause__=OSError() as problem):
            return _report_output(problem)
        case OSError() if unwritten := _write_problem(sys.stdout):
            return _report_output(unwritten)
        case _:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            _say(f"error: unexpected {one_line(reason)}")
    try:
        _say(f"error: the full traceback is in {write_traceback(error, folder)}")
    except OSError as problem:
        _say(f"error: the full traceback has no file to go to ({problem}), so it follows")
        traceback.print_exception(error)
    return FAILED


def _say_findings(error: DrivetrainError) -> None:
    for finding in str(error).splitlines():
        _say(f"error: {finding}")


def _print(text: str) -> None:
    try:
        print(text, end="", flush=True)
    except OSError as error:
        _write_problem(sys.stdout)  # what is still in its buffer must not come up again at the end
        raise OutputError from error


def _report_output(problem: OSError) -> int:
    if not isinstance(problem, BrokenPipeError):  # who closed the pipe wants no more
        _say(f"error: standard output cannot be written ({problem.strerror}); make room, or send it elsewhere")
    return FAILED


def _say(text: str) -> None:
    if sys.stderr is not None:
        with suppress(OSError):
            print(f"drivetrain: {text}", file=sys.stderr)
        _write_problem(sys.stderr)  # where nobody can be told, the exit code still says it


def _write_problem(stream: TextIO | None) -> OSError | None:
    """Return why a standard stream cannot be written; it then goes nowhere, so that each problem is found once."""
    if stream is None or stream.closed:
        return None
    try:
        stream.flush()
    except OSError as error:
        with suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
        return error
    return None


def _end_though_threads_hang(code: int) -> None:
    """See that this process ends: a user's code may have left threads that never return, for which Python waits.

    It waits for those of an executor whether they are daemons or not.
    """
    if threading.active_count() == 1:
        return

    def end() -> None:
        time.sleep(_LAST_SECONDS)
        os._exit(code)

    threading.Thread(target=end, name="last resort", daemon=True).start()


def write_traceback(error: BaseException, folder: Path | None) -> Path:
    """Write an error's traceback to a new file in `folder`, or in the system's temporary folder where that fails."""
    # Ray colours the tracebacks of its workers
    text = re.sub(r"\x1b\[[0-9;]*m", "", "".join(traceback.format_exception(error)))
    return write_log(text, folder)


if __name__ == "__main__":
    sys.exit(main())
