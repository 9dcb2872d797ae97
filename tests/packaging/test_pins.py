"""The constraint files of images/: as uv.lock and the packages say, and found stale when they are not."""

import dataclasses
import shutil
from pathlib import Path

import pins
import pytest
from packaging.requirements import Requirement


@pytest.fixture
def stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, pins.Stack]:
    """The stacks, with copies of their files that a test may change."""
    shutil.copytree(pins.IMAGES, tmp_path / "images")
    monkeypatch.setattr(pins, "IMAGES", tmp_path / "images")
    return {one.name: one for one in pins.STACKS}


def test_the_files_are_fresh_and_no_others_are_there() -> None:
    assert [one for stack in pins.STACKS for one in pins.findings(stack)] == []
    assert sorted(one.stem for one in pins.IMAGES.iterdir()) == sorted(one.name for one in pins.STACKS)


@pytest.mark.parametrize("stack", pins.STACKS, ids=lambda one: one.name)
def test_every_line_is_one_exact_pin_from_no_named_host(stack: pins.Stack) -> None:
    lines = [one for one in stack.path.read_text().splitlines() if not one.startswith("#")]
    wanted = [Requirement(one) for one in lines]
    assert lines
    assert [str(one) for one in wanted if [bound.operator for bound in one.specifier] != ["=="] or one.url] == []
    assert [one.name for one in wanted if one.name.startswith("drivetrain")] == []


def test_the_cpu_stack_is_the_newest_without_the_libraries_of_gpus() -> None:
    newest, cpu = ((pins.IMAGES / f"{name}.txt").read_text().splitlines() for name in ("newest", "cpu"))
    dropped = {one.split("==")[0] for one in set(newest) - set(cpu) if not one.startswith("#")}
    assert {"nvidia-nccl-cu13", "triton"} <= dropped
    assert all(one.startswith(("nvidia-", "cuda-", "triton")) for one in dropped)
    assert {one for one in cpu if not one.startswith("#")} < set(newest)


def test_the_lowest_stack_is_at_the_lower_bounds_of_what_the_packages_name() -> None:
    found = pins.read_pins((pins.IMAGES / "lowest.txt").read_text())
    assert found["torch"].startswith("2.11.")
    assert found["transformers"].startswith("5.17.")
    assert found["ray"].startswith("2.60.")


@pytest.mark.parametrize("name", ["newest", "cpu"])
def test_an_export_that_differs_from_the_lock_is_stale(name: str, stacks: dict[str, pins.Stack]) -> None:
    text = stacks[name].path.read_text()
    stacks[name].path.write_text(text.replace("ray==", "ray==0."))
    assert pins.findings(stacks[name]) == [
        f"images/{name}.txt differs from uv.lock; write it anew: uv run python scripts/pins.py"
    ]


def test_a_missing_file_is_stale(stacks: dict[str, pins.Stack]) -> None:
    stacks["sglang"].path.unlink()
    assert pins.findings(stacks["sglang"]) == [
        "images/sglang.txt is missing; write it anew: uv run python scripts/pins.py"
    ]


def test_a_pin_that_a_package_refuses_is_stale(stacks: dict[str, pins.Stack]) -> None:
    text = stacks["lowest"].path.read_text()
    stacks["lowest"].path.write_text(text.replace("transformers==5.17.", "transformers==4.17."))
    (found,) = pins.findings(stacks["lowest"])
    assert found.startswith("images/lowest.txt pins transformers 4.17.0, but 'transformers>=5.17,<6' is required; ")


def test_a_requirement_without_a_pin_is_stale(stacks: dict[str, pins.Stack]) -> None:
    lines = stacks["lowest"].path.read_text().splitlines(keepends=True)
    stacks["lowest"].path.write_text("".join(one for one in lines if not one.startswith("psutil==")))
    (found,) = pins.findings(stacks["lowest"])
    assert found.startswith("images/lowest.txt pins no psutil, but 'psutil>=5.9' is required; ")


def test_another_requirement_makes_the_resolved_files_stale(stacks: dict[str, pins.Stack]) -> None:
    changed = dataclasses.replace(stacks["sglang"], extra=("sglang==0.5.22",))
    changes, pin = pins.findings(changed)
    assert changes.startswith("images/sglang.txt: the packages' requirements changed; ")
    assert pin.startswith("images/sglang.txt pins sglang 0.5.23, but 'sglang==0.5.22' is required; ")


def test_the_command_reports_what_is_stale(stacks: dict[str, pins.Stack], capsys: pytest.CaptureFixture[str]) -> None:
    assert pins.main(["--check"]) == 0
    assert capsys.readouterr().out == "4 constraint files are as uv.lock and the packages' requirements say\n"
    stacks["cpu"].path.write_text("")
    assert pins.main(["--check"]) == 1
    assert capsys.readouterr().out.startswith("images/cpu.txt differs from uv.lock; ")
