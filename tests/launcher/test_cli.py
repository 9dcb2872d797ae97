import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from drivetrain_backend_api import ConfigError, DrivetrainError
from drivetrain_infra.run_folder import RunFolder
from drivetrain_launcher.cli import main, write_traceback
from drivetrain_launcher.last_lines import DivergedError

HEAVY = {"torch", "ray", "transformers", "pydantic"}
MEASURE = """
import sys, time
started = time.perf_counter()
from drivetrain_launcher.cli import main
try:
    code = main({words!r})
except SystemExit as leaving:
    code = leaving.code
seconds = time.perf_counter() - started
import json
loaded = sorted({{name.partition(".")[0] for name in sys.modules}})
print(json.dumps([code or 0, seconds, loaded]), file=sys.stderr)
"""


def drivetrain(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DRIVETRAIN_")}
    command = [sys.executable, "-m", "drivetrain_launcher.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ | variables)


@pytest.mark.parametrize("words", [["--help"], ["backends"], ["backends", "--json"], ["recipes"], ["train", "--help"]])
def test_a_question_is_answered_at_once_and_without_the_heavy_libraries(words: list[str]) -> None:
    runs = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", MEASURE.format(words=words)], capture_output=True, text=True, timeout=60
        )
        assert done.stdout.strip(), done.stderr
        runs.append(json.loads(done.stderr))
    assert [code for code, _, _ in runs] == [0, 0, 0]
    assert HEAVY & set(runs[0][2]) == set()
    # a second is far above what it takes alone (0.2 s), the best of three forgives a busy machine
    assert min(seconds for _, seconds, _ in runs) < 1.0


def test_the_version_is_that_of_the_launcher() -> None:
    assert drivetrain("--version").stdout == f"drivetrain {version('drivetrain-launcher')}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "a command comes first: drivetrain train|backends|recipes|export; see `drivetrain --help`"),
        (["--recipe", "x"], "a command comes first: drivetrain train|backends|recipes|export; see `drivetrain --help`"),
        (["trian"], "no command 'trian'; did you mean train?"),
        (["zzz"], "no command 'zzz'; there are: train, backends, recipes, export"),
        (["backends", "--jso"], "unrecognized arguments: --jso"),
        (["export", "RUN"], "the following arguments are required: --out"),
        (["train", "--recipe"], "--recipe needs a value, and was given none"),
    ],
)
def test_a_command_line_that_cannot_be_read_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", f"drivetrain: error: {message}\n")


def test_each_finding_has_its_line_and_the_exit_code_is_2() -> None:
    done = drivetrain("train", "--train-backend", "fsdp", "--save", "S", "--lr", "-1", "--num-rollout", "1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "drivetrain: error: --lr -1.0: must be at least 0",
        "drivetrain: error: --hf-checkpoint is required: "
        "Hugging Face model folder to train (config, safetensors, tokenizer)",
        "drivetrain: error: --prompt-data is required: training prompts, .jsonl or .parquet",
    ]


def test_print_config_starts_nothing_and_reads_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRIVETRAIN_LR", "0.25")
    words = ["--hf-checkpoint", "M", "--prompt-data", "P", "--save", str(tmp_path / "run"), "--num-rollout", "1"]
    assert main(["train", "--train-backend", "fsdp", *words, "--print-config"]) == 0
    assert "lr = 0.25  # DRIVETRAIN_LR\n" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_recipes_lists_quickstart(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    assert capsys.readouterr().out.startswith("quickstart: ")


def test_a_traceback_goes_to_the_run_folder(tmp_path: Path) -> None:
    log = write_traceback(ValueError("broken \udcff \x1b[36min colour\x1b[39m"), tmp_path)
    assert log.parent == tmp_path
    assert log.read_text("utf-8") == "ValueError: broken \\udcff in colour\n"


def test_a_traceback_that_the_run_folder_cannot_take_goes_to_a_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    gone, full = tmp_path / "gone", tmp_path / "full"
    full.mkdir()
    assert write_traceback(ValueError("broken"), gone).is_relative_to(tmp_path / "tmp")
    assert not gone.exists()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):  # the temporary folder is full too
            write_traceback(ValueError("broken"), full)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(full.iterdir()) == []


class ChainedError(DrivetrainError):
    """An error as a failed call on a train worker raises it."""


def fail(request: object, stopping: object) -> int:
    try:
        raise RuntimeError("pages\nof text")
    except RuntimeError as cause:
        raise ChainedError("rank 0 failed: pages\nof text") from cause


WORDS = ["train", "--train-backend", "fsdp", "--hf-checkpoint", "M", "--prompt-data", "P", "--num-rollout", "3"]


def diverge(request: object, stopping: object) -> int:
    raise DivergedError("rank 0 failed: pages of text") from RuntimeError("pages\nof text")


@pytest.mark.parametrize(("saved", "run"), [(True, fail), (False, fail), (True, diverge)])
def test_a_run_that_fails_says_where_its_traceback_and_its_newest_checkpoint_are(
    saved: bool,
    run: Callable[[object, object], int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = RunFolder(tmp_path / "a run")
    folder.create({})
    if saved:
        with folder.new_checkpoint(2) as checkpoint:
            (checkpoint / "weights").touch()
    monkeypatch.setattr("drivetrain_launcher.run.run_train", run)
    assert main([*WORDS, "--save", str(folder.root)]) == 1
    first, second, *last = capsys.readouterr().err.splitlines()
    assert first == "drivetrain: error: rank 0 failed: pages of text"
    log = Path(second.removeprefix("drivetrain: error: the full traceback is in "))
    assert log.parent == folder.root
    assert "RuntimeError: pages\nof text" in log.read_text()
    hint = (
        f"drivetrain: the newest checkpoint is {folder.root}/iter_0000002; to go on from it, run the same command again"
    )
    # the newest checkpoint of a run that has diverged may be one of the bad ones
    assert last == ([hint] if saved and run is fail else [])


def test_a_refused_run_leaves_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(request: object, stopping: object) -> int:
        raise ConfigError("--lr: too high\n--save: is full")

    monkeypatch.setattr("drivetrain_launcher.run.run_train", refuse)
    assert main([*WORDS, "--save", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "drivetrain: error: --lr: too high\ndrivetrain: error: --save: is full\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [("--help", ""), ("--version", ""), *((w, u) for w in ("train --help", "backends --json") for u in ("", "1"))],
)
def test_a_full_standard_output_is_said_without_a_traceback(words: str, unbuffered: str) -> None:
    done = redirected(">/dev/full", words, PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, done.stderr) == (
        1,
        "drivetrain: error: standard output cannot be written (No space left on device); make room, or send it "
        "elsewhere\n",
    )


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_pipe_that_its_reader_has_closed_ends_quietly(unbuffered: str) -> None:
    done = redirected("| true; exit ${PIPESTATUS[0]}", "train --help", PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(("redirection", "code"), [("2>/dev/full", 2), ("2>&-", 2), (">&-", 2), (">&- 2>&-", 2)])
def test_the_exit_code_says_it_where_nothing_can_be_printed(redirection: str, code: int) -> None:
    done = redirected(redirection, "trian")
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr == (
        "" if "2>" in redirection else "drivetrain: error: no command 'trian'; did you mean train?\n"
    )


def redirected(redirection: str, words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = f"{shlex.quote(sys.executable)} -m drivetrain_launcher.cli {words} {redirection}"
    return subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=60, env={**os.environ, **variables}
    )


@pytest.mark.parametrize(
    "start",
    [
        "threading.Thread(target=wait).start()",
        "ThreadPoolExecutor().submit(wait)",
        "threading.Thread(target=lambda: ThreadPoolExecutor().submit(wait).result(), daemon=True).start()",
    ],
    ids=["thread", "executor", "executor of a daemon"],
)
def test_a_thread_that_never_returns_does_not_keep_the_process(start: str) -> None:
    code = (
        "import sys, threading, drivetrain_launcher.cli as cli\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "wait = threading.Event().wait\n"
        "cli._LAST_SECONDS = 0.2\n"
        f"{start}\n"
        "sys.exit(cli.main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code, "trian"], timeout=30, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "drivetrain: error: no command 'trian'; did you mean train?\n")


def test_after_success_a_users_thread_may_take_its_time(tmp_path: Path) -> None:
    code = (
        "import sys, threading, time, drivetrain_launcher.cli as cli\n"
        "def upload():\n"
        "    time.sleep(1)\n"
        f"    open({str(tmp_path / 'uploaded')!r}, 'w').close()\n"
        "cli._LAST_SECONDS = 0.1\n"
        "threading.Thread(target=upload).start()\n"
        "sys.exit(cli.main())\n"
    )
    subprocess.run([sys.executable, "-c", code, "recipes"], timeout=30, capture_output=True, check=True)
    assert (tmp_path / "uploaded").exists()


def test_the_readme_shows_what_is_printed() -> None:
    readme = Path(__file__).parents[2] / "packages" / "launcher" / "README.md"
    _, _, block = readme.read_text("utf-8").partition("    $ DRIVETRAIN_GRAD_CLIP=-1 drivetrain ")
    command, *shown = block.partition("    ...")[0].strip().splitlines()
    printed = drivetrain(*command.split(), DRIVETRAIN_GRAD_CLIP="-1").stderr.splitlines()
    assert len(shown) == 5
    assert [line.strip() for line in shown] == printed[: len(shown)]
