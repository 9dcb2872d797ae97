"""The list of a checkpoint's files: what it finds by sizes alone, and what only by reading every byte."""

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from drivetrain_backend_api.errors import DataError
from drivetrain_backend_api.manifest import (
    MANIFEST,
    SMALL_BYTES,
    FileRecord,
    file_findings,
    manifest_findings,
    read_manifest,
    record_of,
    write_manifest,
)

LARGE = "dcp/large"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of one small and one large file, and their list."""
    (tmp_path / "dcp").mkdir()
    (tmp_path / "small").write_bytes(b"all of it")
    (tmp_path / LARGE).write_bytes(bytes(SMALL_BYTES + 1))
    write_manifest(tmp_path, {name: record_of(tmp_path / name) for name in ("small", LARGE)})
    return tmp_path


def test_a_whole_folder_has_no_findings_and_the_list_is_read_as_it_was_written(folder: Path) -> None:
    assert manifest_findings(folder) == manifest_findings(folder, full=True) == []
    assert read_manifest(folder)["small"] == FileRecord(size=9, crc32=zlib.crc32(b"all of it"))
    assert sorted(one.name for one in folder.iterdir()) == ["dcp", MANIFEST, "small"]


def test_a_file_that_is_added_with_its_record_belongs_to_the_folder(folder: Path) -> None:
    (folder / "later").write_text("more")
    (found,) = manifest_findings(folder)
    assert found.startswith(f"{folder / 'later'} is not in {MANIFEST}")
    write_manifest(folder, read_manifest(folder) | {"later": record_of(folder / "later")})
    assert manifest_findings(folder, full=True) == []


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: os.truncate(path, 3), "is cut short: it has 3 bytes of"),
        (lambda path: os.truncate(path, 2 * SMALL_BYTES), "is not what was written: it has"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "is not a file"),
    ],
    ids=["gone", "cut short", "too long", "a pipe"],
)
@pytest.mark.parametrize("name", ["small", LARGE])
def test_damage_that_sizes_show_is_found_cheaply(
    folder: Path, name: str, damage: Callable[[Path], object], said: str
) -> None:
    damage(folder / name)
    (found,) = manifest_findings(folder)
    assert found.startswith(f"{folder / name} ")
    assert said in found


def test_a_flipped_bit_is_found_in_small_files_always_and_in_large_ones_when_all_is_read(folder: Path) -> None:
    for name in ("small", LARGE):
        data = bytearray((folder / name).read_bytes())
        data[len(data) // 2] ^= 1
        (folder / name).write_bytes(data)
    said = "is damaged, or of another checkpoint: its checksum is not the one in manifest.json"
    assert [one.split(";")[0] for one in manifest_findings(folder)] == [f"{folder / 'small'} {said}"]
    assert [one.split(";")[0] for one in manifest_findings(folder, full=True)] == [
        f"{folder / LARGE} {said}",
        f"{folder / 'small'} {said}",
    ]


def test_shares_cover_every_file_once(folder: Path) -> None:
    (folder / "small").unlink()
    (folder / LARGE).unlink()
    (folder / "stray").touch()
    everything = manifest_findings(folder)
    assert len(everything) == 3
    shared = [one for rank in range(3) for one in file_findings(folder, share=(rank, 3)).values()]
    assert sorted(shared) == sorted(everything)
    assert file_findings(folder, skip=lambda name: True) == {}


def _edit(folder: Path, **fields: object) -> str:
    return json.dumps(json.loads((folder / MANIFEST).read_text()) | fields, indent=1) + "\n"


def test_a_list_that_is_missing_or_not_its_own_is_named(folder: Path) -> None:
    path = folder / MANIFEST
    whole = path.read_bytes()
    for damaged, said in (
        (b"", "is damaged"),
        (whole[:-5], "is damaged"),
        (whole.replace(b'"size": 9', b'"size": 8'), "its own checksum does not fit"),
        (b"[" * 100_000, "is damaged"),
        (b"\xff", "is damaged"),
        (_edit(folder, files={"small": {"size": 9, "crc32": True}}).encode(), "are no whole numbers"),
        (_edit(folder, files=[]).encode(), "is damaged"),
    ):
        path.write_bytes(damaged)
        (found,) = manifest_findings(folder)
        assert found.startswith(f"{path} ")
        assert said in found
        assert "\n" not in found
    path.unlink()
    with pytest.raises(DataError, match=f"^{folder} is no complete checkpoint: {path} is missing; use another"):
        read_manifest(folder)


@pytest.mark.parametrize("name", ["../elsewhere", "/etc/passwd", "a\0b"])
def test_a_list_that_points_out_of_its_folder_is_refused(folder: Path, name: str) -> None:
    write_manifest(folder, {name: FileRecord(size=0, crc32=0)})
    with pytest.raises(DataError, match="is no place in this folder"):
        read_manifest(folder)
