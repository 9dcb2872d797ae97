"""How much host memory a run needs at least, and how much there is, by the files in which Linux says so."""

from pathlib import Path

import pytest

from drivetrain_launcher.preflight.machine import PROCESS_BYTES, available_memory, host_memory_need
from drivetrain_launcher.preflight.size import RunSize, gib

KIB, MIB = 1024, 1024**2


def size(**changes: int) -> RunSize:
    given = {"ranks": 2, "engines": 3, "gpus": 0, "parameters": 1000, "frozen_parameters": 0, "compute_bytes": 2}
    return RunSize(**(given | changes))


@pytest.mark.parametrize(
    ("changes", "offloads", "expected"),
    [
        ({}, False, 16 * 1000 + 3 * 2 * 1000),
        ({"engines": 0}, False, 16 * 1000 - 3 * PROCESS_BYTES),
        ({"compute_bytes": 4, "frozen_parameters": 500}, False, 16 * 1000 + 3 * 4 * 1000 + 4 * 500),
        ({"gpus": 8, "frozen_parameters": 500}, False, 2 * 500),
        ({"gpus": 8, "frozen_parameters": 500}, True, 12 * 1000 + 2 * 500),
    ],
)
def test_the_need_is_processes_and_what_they_hold(changes: dict[str, int], offloads: bool, expected: int) -> None:
    assert host_memory_need(size(**changes), offloads_optimizer=offloads) == 5 * PROCESS_BYTES + expected


def system(root: Path, **files: str) -> Path:
    """Write files of /proc and /sys; "__" stands for a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal:  4000 kB\nMemFree:  10 kB\nMemAvailable:  3000 kB\nSwapFree:  500 kB\nHugePages_Total:  0\n"


def test_without_groups_what_is_free_counts_with_the_swap(tmp_path: Path) -> None:
    assert available_memory(system(tmp_path, proc__meminfo=MEMINFO)) == 3500 * KIB


def test_a_group_of_version_2_limits_what_is_free_less_its_file_cache(tmp_path: Path) -> None:
    root = system(tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup="0::/job/step\n")
    group = root / "sys/fs/cgroup/job"
    (group / "step").mkdir(parents=True)
    (group / "step" / "memory.max").write_text("max\n")
    (group / "step" / "memory.current").write_text("0\n")
    (group / "memory.max").write_text(f"{2000 * KIB}\n")
    (group / "memory.current").write_text(f"{1500 * KIB}\n")
    (group / "memory.stat").write_text(f"anon 7\ninactive_file {300 * KIB}\nactive_file {200 * KIB}\n")
    assert available_memory(root) == 1000 * KIB
    (group / "memory.current").write_text(f"{3000 * KIB}\n")
    assert available_memory(root) == 0


def test_a_group_of_version_1_limits_too_under_the_path_that_a_container_sees(tmp_path: Path) -> None:
    root = system(tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup="5:cpu,cpuacct:/\n3:memory:/docker/abc\n")
    group = root / "sys/fs/cgroup/memory"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text(str(1000 * KIB))
    (group / "memory.usage_in_bytes").write_text(str(500 * KIB))
    (group / "memory.stat").write_text(f"total_inactive_file {100 * KIB}\ntotal_active_file 0\n")
    assert available_memory(root) == 600 * KIB


def test_a_system_without_these_files_still_tells_what_it_has(tmp_path: Path) -> None:
    assert (available_memory(tmp_path) or 0) > 256 * MIB


def test_this_machine_has_memory_for_the_tests() -> None:
    assert (available_memory() or 0) > 256 * MIB


@pytest.mark.parametrize(
    ("count", "text"),
    [(5, "5 bytes"), (MIB, "1.0 MiB"), (1536 * MIB, "1.5 GiB"), (10**30, "909494701772928237.9 TiB")],
)
def test_bytes_are_written_as_a_person_reads_them(count: int, text: str) -> None:
    assert gib(count) == text
