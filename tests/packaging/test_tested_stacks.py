"""What a backend says it was tested with is what the wheel matrix runs, and what the docs list."""

import json
from pathlib import Path
from typing import Any

import pytest
from wheel_matrix import ROWS

from drivetrain_backend_api import TRAIN_BACKENDS, installed, load_spec

ROOT = Path(__file__).parents[2]
BACKENDS = sorted(installed(TRAIN_BACKENDS))
SILENT = (
    "from drivetrain_backend_api import BackendSpec, TrainConfig\n"
    "SPEC = BackendSpec(name='new', api_version=1, target='nowhere:Backend', config_class=TrainConfig)\n"
)
"""A backend that names no stack."""


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_names_the_stacks_that_the_wheel_matrix_trains_it_on(backend: str) -> None:
    lines = load_spec(TRAIN_BACKENDS, backend).tested_with
    trained = {f"images/{row.stack}.txt" for row in ROWS if row.backend == backend}
    assert {line.partition(":")[0] for line in lines} == trained
    assert all((ROOT / one).is_file() for one in trained)
    assert [line for line in lines if not line.partition(": ")[2]] == []


def test_the_docs_list_each_stack_with_the_backends_tested_with_it() -> None:
    text = (ROOT / "docs" / "releasing.md").read_text()
    for path in sorted((ROOT / "images").glob("*.txt")):
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `images/{path.name}` |")]
        for backend in BACKENDS:
            named = any(
                line.startswith(f"images/{path.name}:") for line in load_spec(TRAIN_BACKENDS, backend).tested_with
            )
            assert (backend in row.split("|")[3]) == named, row


def test_the_command_shows_them(site: Any) -> None:
    lines = load_spec(TRAIN_BACKENDS, "fsdp").tested_with
    rows = {row["name"]: row for row in json.loads(site.drivetrain("backends", "--json").stdout)}
    assert rows["fsdp"]["tested_with"] == list(lines)
    shown = site.drivetrain("backends").stdout
    assert f"  tested with   {lines[0]}\n                {lines[1]}\n" in shown
    site.install("backend-new", module="new_spec", name="new", code=SILENT)
    assert "  tested with   nothing that its author names" in site.drivetrain("backends").stdout
