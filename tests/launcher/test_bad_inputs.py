"""Every bad input gets the message that docs/bad-input.md shows; `--write-docs` writes that page."""

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from bad_inputs import FAILED, REFUSED, BadInput
from scratch import inside, run_in

from drivetrain_backend_api import ConfigError, DiscoveryError, DrivetrainError

PAGE = Path(__file__).parents[2] / "docs" / "bad-input.md"
PREFIX = "drivetrain: error: "
LOG = "the full traceback is in "
FOLDER = "..."
"""What the page shows where a message has the absolute path of the scratch folder."""

INTRODUCTION = f"""\
# What drivetrain says to bad input

Each error is one line on stderr that begins with `{PREFIX}`, which is left out below; what is wrong is said at once,
not one finding a try. Where there is more to know, a last line says in which file the full traceback is. Exit codes:
0 done, or stopped by a signal or the wall time with everything saved; 2 refused before anything was started or written;
1 failed while it ran; 130, 143 and 138 ended at once by SIGINT, SIGTERM or SIGUSR1, before anything was started or the
second time ([survival.md](survival.md#signals)); 129 ended by SIGHUP.
`drivetrain train ... --dry-run` checks all that can be checked and starts nothing.

This page is written by the tests that try each line of it:
`uv run pytest tests/launcher/test_bad_inputs.py --write-docs`. The training of its examples has the flags
`--hf-checkpoint model --prompt-data train.jsonl --input-key question --label-key answer --num-rollout 2
--rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 5 --save new` beside those that are shown.
`{FOLDER}` stands for the current folder, and at the end of a message for words of another library, which change with
its versions.
"""

_ROW = re.compile(r"\| (?P<wrong>.*) \| (?P<said>.*) \|")

Said = dict[tuple[str, str], str]
"""(heading, what is wrong) -> the right-hand cell."""

TITLES = {
    "Refused before anything starts: exit code 2": REFUSED,
    "Failed while it ran: exit code 1": FAILED,
}


def render(said: Mapping[tuple[str, str], str]) -> str:
    """Write the page."""
    parts = [INTRODUCTION]
    for title, table in TITLES.items():
        parts.append(f"## {title}\n")
        for heading, rows in table.items():
            cells = [f"| {cell(one.wrong)} | {said.get((heading, one.wrong), 'nothing yet')} |" for one in rows]
            parts.append(
                "\n".join([f"### {heading}\n", "| what is wrong | what drivetrain says |", "|---|---|", *cells])
            )
            parts.append("")
    return "\n".join(parts)


def read_page() -> Said:
    """Read the cells of the page back."""
    said: Said = {}
    heading = ""
    for line in PAGE.read_text("utf-8").splitlines() if PAGE.exists() else ():
        if line.startswith("### "):
            heading = line.removeprefix("### ")
        elif match := _ROW.fullmatch(line):
            said[heading, match["wrong"].replace("\\|", "|")] = match["said"]
    return said


def cell(text: str) -> str:
    """Escape what would end a cell of a table."""
    return text.replace("|", "\\|")


def code(text: str) -> str:
    """Quote a message as code, whatever is in it."""
    return cell(f"`` {text} ``" if "`" in text else f"`{text}`")


def messages_of(one: BadInput, folder: Path) -> tuple[int, list[str]]:
    """Do it; return the exit code and the messages without what every line begins with."""
    one.arrange(folder)
    if one.call is None:
        ended = run_in(folder, one.words, one.environ)
        lines = ended.err.splitlines()
        assert [line for line in lines if not line.startswith(PREFIX)] == []
        return ended.code, [line.removeprefix(PREFIX) for line in lines if not line.startswith(PREFIX + LOG)]
    with inside(folder, {}), pytest.raises(DrivetrainError) as caught:
        one.call()
    refused = isinstance(caught.value, ConfigError | DiscoveryError)
    return 2 if refused else 1, str(caught.value).splitlines()


def shown(one: BadInput, messages: Sequence[str], folder: Path) -> str:
    """Write messages as the page shows them."""
    kept = []
    for message in messages:
        text = message.replace(str(folder), FOLDER)
        if one.cut is not None:
            assert one.cut in text, f"{one.wrong}: {text!r} lacks {one.cut!r}"
            before, marker, _ = text.partition(one.cut)
            text = before + marker + FOLDER
        for pattern, replacement in one.varying.items():
            text = re.sub(pattern, replacement, text)
        kept.append(code(text))
    return "<br>".join(kept)


@pytest.fixture(scope="module")
def page(pytestconfig: pytest.Config) -> Iterator[Said]:
    """The page's cells; with --write-docs it is written from what the tests put in."""
    writes = pytestconfig.getoption("--write-docs")
    said = read_page()
    yield said
    if writes:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(render(said), "utf-8")


@pytest.mark.parametrize(
    ("heading", "one", "expected_code"),
    [
        pytest.param(heading, one, expected_code, id=f"{heading}: {one.wrong}")
        for table, expected_code in ((REFUSED, 2), (FAILED, 1))
        for heading, rows in table.items()
        for one in rows
    ],
)
def test_the_message_is_the_one_on_the_page(
    heading: str,
    one: BadInput,
    expected_code: int,
    good_scratch: Path,
    tmp_path: Path,
    short_tempdir: Path,
    page: Said,
    pytestconfig: pytest.Config,
) -> None:
    folder = tmp_path / "here"
    shutil.copytree(good_scratch, folder)
    found_code, messages = messages_of(one, folder)
    found = shown(one, messages, folder)
    assert messages, f"{heading}, {one.wrong}: nothing was said"
    assert found_code == expected_code, found
    assert not (folder / "new").exists(), "a refused run left its --save behind"
    assert not (folder / "x").exists(), "a failed export left its --out behind"
    assert not (folder / "canary").exists(), "code in a file that was read has run"
    if pytestconfig.getoption("--write-docs"):
        page[heading, one.wrong] = found
    expected = page.get((heading, one.wrong))
    assert found == expected, (
        f"{heading}, {one.wrong}\n  it says:        {found}\n  docs/{PAGE.name}: {expected}\n"
        "run again with --write-docs if the new message is right"
    )


def test_the_page_is_the_one_that_is_written(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--write-docs"):
        pytest.skip("it is being written")
    assert PAGE.read_text("utf-8") == render(read_page())


def test_the_table_is_large_and_names_each_input_once() -> None:
    names = [(heading, one.wrong) for table in TITLES.values() for heading, rows in table.items() for one in rows]
    assert len(names) == len(set(names))
    assert len(names) >= 75
