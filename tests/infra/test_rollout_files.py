"""Rollouts come back as they were saved, or not at all; reading one runs no code."""

import io
import os
import pickle
import resource
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drivetrain_backend_api import DataError, DrivetrainError
from drivetrain_infra.rollout_files import FORMAT, load_rollout, rollout_file, save_rollout

CONTENT = {
    "tokens": torch.arange(10),
    "rewards": torch.tensor([0.5, float("nan")]),
    "flags": torch.tensor([True, False]),
    "half": torch.ones(2, 3, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 4),
    "metrics": {"reward": 0.5, "n": 2, "name": "ü", "none": None, "ok": True, "by_id": {3: [1, (2, "x")]}},
}


PAGE = 4096


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "rollout_ckpts"


def save(folder: Path, content: dict[str, Any] = CONTENT) -> Path:
    return save_rollout(folder, 12, content, lineage="abc")


def rewritten(path: Path, table: Any) -> Path:
    torch.save(table, path)
    return path


def table(**changed: Any) -> dict[str, Any]:
    fields = {"format": FORMAT, "rollout_id": 12, "lineage": "abc", "content": {}, **changed}
    return {name: value for name, value in fields.items() if value is not ...}


def test_a_rollout_comes_back_as_it_was(folder: Path) -> None:
    path = save(folder)
    assert path == folder / "rollout_12.pt" == rollout_file(folder, 12)
    saved = load_rollout(path, rollout_id=12)
    assert (saved.rollout_id, saved.lineage) == (12, "abc")
    assert saved.content.keys() == CONTENT.keys()
    assert saved.content["metrics"] == CONTENT["metrics"]
    for name, value in CONTENT.items():
        if isinstance(value, torch.Tensor):
            assert saved.content[name].dtype == value.dtype
            torch.testing.assert_close(saved.content[name], value, rtol=0, atol=0, equal_nan=True)
    assert [one.name for one in folder.iterdir()] == [path.name]


def test_any_reader_of_pytorch_files_takes_it_without_running_code(folder: Path) -> None:
    found = torch.load(save(folder), weights_only=True)
    assert found.keys() == {"format", "rollout_id", "lineage", "content"}


def test_a_view_is_saved_without_what_it_is_a_view_of(folder: Path) -> None:
    big = torch.zeros(1_000_000)
    path = save(folder, {"view": big[:3], "grad": torch.ones(2, requires_grad=True)})
    assert path.stat().st_size < 10_000
    content = load_rollout(path).content
    assert content["view"].tolist() == [0, 0, 0]
    assert not content["grad"].requires_grad


def test_saving_again_replaces_the_file(folder: Path) -> None:
    save(folder)
    path = save(folder, {"x": 1})
    assert load_rollout(path).content == {"x": 1}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"rows": [{"x": np.float32(1)}]}, r"\['rows'\]\[0\]\['x'\] is a numpy.float32"),
        ({"path": Path("x")}, r"\['path'\] is a pathlib"),
        ({"weight": torch.nn.Parameter(torch.ones(1))}, r"\['weight'\] is a torch.nn.parameter.Parameter"),
        ({"table": {(1, 2): 3}}, r"\['table'\] has the key \(1, 2\), which is neither text nor number"),
    ],
)
def test_what_is_neither_tensor_nor_plain_is_named_and_nothing_written(
    folder: Path, content: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError, match=rf"rollout 12 cannot be saved: {said}"):
        save(folder, content)
    assert not folder.exists()


class Code:
    """Runs something when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def test_a_file_that_holds_code_is_refused_and_the_code_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    path = rewritten(tmp_path / "rollout_12.pt", table(content={"x": Code(marker)}))
    with pytest.raises(DataError, match=r"rollout_12.pt: holds more than tensors and plain values; remove it"):
        load_rollout(path)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([1], "it holds a list"),
        (table(lineage=...), "it holds format, rollout_id, content"),
        (table(more=1), "it holds format, rollout_id, lineage, content, more"),
        (table(rollout_id="12"), "its fields are not of their types"),
        (table(rollout_id=True), "its fields are not of their types"),
        (table(lineage=None), "its fields are not of their types"),
        (table(content=[]), "its fields are not of their types"),
        (table(content={"x": torch.Size([1])}), r"\['x'\] is a torch.Size"),
        (table(rollout_id=13), "it holds rollout 13, not 12"),
    ],
)
def test_what_is_no_rollout_is_refused(tmp_path: Path, content: Any, said: str) -> None:
    path = rewritten(tmp_path / "rollout_12.pt", content)
    with pytest.raises(DataError, match=rf"rollout_12.pt: is damaged, or no rollout \(.*{said}.*\); get another"):
        load_rollout(path, rollout_id=12, fix="get another")


def test_another_format_is_told_from_damage(tmp_path: Path) -> None:
    path = rewritten(tmp_path / "rollout_12.pt", {"format": FORMAT + 1})
    with pytest.raises(DataError) as caught:
        load_rollout(path)
    assert str(caught.value) == (
        f"{path}: has format {FORMAT + 1}, and this release reads {FORMAT}; use the release that wrote it"
    )


def test_a_file_that_is_missing_or_no_file_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=r"rollout_12.pt: is missing; remove it, and the rollout is made again"):
        load_rollout(rollout_file(folder, 12))
    rollout_file(folder, 12).mkdir(parents=True)
    with pytest.raises(DataError, match=r"rollout_12.pt: is no file"):
        load_rollout(rollout_file(folder, 12))


def test_a_flipped_bit_of_any_tensor_and_any_missing_end_is_noticed(folder: Path) -> None:
    path = save(folder)
    good = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        parts = [one for one in archive.infolist() if one.file_size]
    with path.open("rb") as file:
        starts = [data_start(file, one.header_offset) for one in parts]
    for part, start in zip(parts, starts):
        damaged = bytearray(good)
        damaged[start + part.file_size - 1] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="is damaged"):
            load_rollout(path)
    for size in range(0, len(good), len(good) // 20):
        path.write_bytes(good[:size])
        with pytest.raises(DataError, match="is damaged"):
            load_rollout(path)
    path.write_bytes(good)
    load_rollout(path)


def data_start(file: io.BufferedReader, header: int) -> int:
    """Return where a part of a ZIP archive begins: after its local header, its name and its padding."""
    file.seek(header + 26)
    name, extra = (int.from_bytes(file.read(2), "little") for _ in range(2))
    return header + 30 + name + extra


def test_a_pickle_of_its_own_is_no_rollout(tmp_path: Path) -> None:
    path = tmp_path / "rollout_12.pt"
    path.write_bytes(pickle.dumps(table()))
    with pytest.raises(DataError, match="is damaged, or no rollout"):
        load_rollout(path)


def test_a_full_disk_is_named_and_keeps_the_file_that_was_there(folder: Path) -> None:
    path = save(folder, {"x": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE, before[1]))
    try:
        with pytest.raises(DrivetrainError, match=r"--save .*: rollout_12.pt could not be written \(File too large\)"):
            save(folder, {"x": torch.zeros(PAGE)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [one.name for one in folder.iterdir()] == [path.name]
    assert load_rollout(path).content == {"x": 1}


def test_a_run_folder_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    with pytest.raises(DrivetrainError, match="could not be written"):
        save(tmp_path / "gone" / "rollout_ckpts")
    assert not (tmp_path / "gone").exists()
