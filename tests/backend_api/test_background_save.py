"""Saves behind training's back, on one rank: what is copied, what is told of failures, what a host must have."""

import datetime
import logging
import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from drivetrain_backend_api import background_save
from drivetrain_backend_api.background_save import CheckpointSaver
from drivetrain_backend_api.checkpoint_files import (
    FORMAT,
    TrainerState,
    check_checkpoint,
    read_metadata,
    read_random_state,
    read_state,
    rng_file,
)
from drivetrain_backend_api.errors import DataError, DrivetrainError
from drivetrain_backend_api.host_memory import HostNeed, available_memory, need_findings
from drivetrain_backend_api.sharded_checkpoint import Piece, read_pieces

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


def saver_of(*, in_background: bool = True) -> CheckpointSaver:
    return CheckpointSaver(
        rank=0,
        device=torch.device("cpu"),
        control=None,
        in_background=in_background,
        timeout=datetime.timedelta(seconds=60),
    )


def state_of(rollout: int = 0) -> TrainerState:
    return TrainerState(
        format=FORMAT,
        backend="mine",
        next_rollout_id=rollout,
        optimizer_steps=0,
        loss_scale=1.0,
        loss_scale_good_steps=0,
        world_size=1,
    )


def pieces_of(tensors: dict[str, Tensor]) -> list[Piece]:
    return [Piece(key=key, shape=tuple(one.shape), offsets=(0,) * one.ndim, tensor=one) for key, one in tensors.items()]


def live_tensors() -> dict[str, Tensor]:
    tensors = {str(dtype): (torch.randn(5, 3) * 9).to(dtype) for dtype in DTYPES}
    return tensors | {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 3)}


def stored(folder: Path, like: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {key: torch.empty_like(one) for key, one in like.items()}
    read_pieces(folder, pieces_of(found), None, metadata=read_metadata(folder))
    return found


@contextmanager
def slow_storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing becomes durable until the event."""
    confirm, sync = threading.Event(), os.fsync
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: (confirm.wait(30), sync(file)))
        yield confirm


@contextmanager
def full_disk() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def folder_in(root: Path, name: str = "save") -> Path:
    (root / name).mkdir()
    return root / name


def test_what_changes_after_the_call_is_not_in_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, live = folder_in(tmp_path), live_tensors()
    before, random = {key: one.clone() for key, one in live.items()}, torch.get_rng_state()
    saver = saver_of()
    with slow_storage(monkeypatch) as confirm:
        handle = saver.begin(folder, pieces_of(live), state_of(rollout=7))
        for one in live.values():
            one.zero_()
        torch.rand(3)
        assert handle.poll() is False
        assert check_checkpoint(folder, "mine") != []
        confirm.set()
        handle.finalize()
    assert handle.poll() is True
    assert check_checkpoint(folder, "mine", world_size=1, full=True) == []
    found = stored(folder, before)
    assert [key for key, one in before.items() if not torch.equal(found[key], one)] == []
    assert torch.equal(read_random_state(rng_file(folder, 0))["cpu"], random)
    assert read_state(folder, "mine").next_rollout_id == 7
    saver.close()


def test_a_background_save_writes_what_one_in_the_foreground_writes(tmp_path: Path) -> None:
    live, folders = live_tensors(), [folder_in(tmp_path, name) for name in ("behind", "before")]
    savers = [saver_of(in_background=one) for one in (True, False)]
    for folder, saver in zip(folders, savers):
        saver.begin(folder, pieces_of(live), state_of()).finalize()
        saver.close()
    names = [sorted(str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file()) for folder in folders]
    assert names[0] == names[1]
    unique = ("dcp/.metadata", "manifest.json")  # the first holds an id of the save
    different = [one for one in names[0] if len({(folder / one).read_bytes() for folder in folders}) > 1]
    assert set(different) <= set(unique)


def test_buffers_are_taken_once_and_their_size_is_known_before(tmp_path: Path) -> None:
    live = live_tensors()
    foreground, saver = saver_of(in_background=False), saver_of()
    foreground.reserve(pieces_of(live))
    assert foreground.staging_bytes == saver.staging_bytes == 0
    saver.reserve(pieces_of(live))
    exact = sum(one.nbytes for one in live.values())
    assert exact <= saver.staging_bytes < exact + 64 * len(live)
    buffer = saver._buffer
    for number in range(3):
        saver.begin(folder_in(tmp_path, str(number)), pieces_of(live), state_of()).finalize()
        assert saver._buffer is buffer
    saver.begin(folder_in(tmp_path, "another model"), pieces_of({"one": torch.ones(1000)}), state_of()).finalize()
    assert saver.staging_bytes == 4032
    saver.close()
    assert saver.staging_bytes == 0


def test_the_next_save_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live, folders = live_tensors(), [folder_in(tmp_path, name) for name in ("first", "second")]
    saver = saver_of()
    with slow_storage(monkeypatch) as confirm:
        first = saver.begin(folders[0], pieces_of(live), state_of())
        threading.Timer(0.2, confirm.set).start()
        second = saver.begin(folders[1], pieces_of(live), state_of())
        assert check_checkpoint(folders[0], "mine") == []
    assert first.poll() is True
    second.finalize()
    saver.close()


def failed_save(saver: CheckpointSaver, folder: Path) -> None:
    """Begin a save that fails, and wait for that without being told."""
    with full_disk():
        handle = saver.begin(folder, pieces_of({"one": torch.ones(1000)}), state_of())
        assert handle._written.wait(30)  # type: ignore[attr-defined]


@pytest.mark.parametrize("call", ["poll", "finalize", "finish", "begin"])
def test_a_failure_is_raised_by_whatever_comes_next_and_once_by_the_saver(tmp_path: Path, call: str) -> None:
    saver, pieces = saver_of(), pieces_of({"one": torch.ones(1000)})
    with full_disk():
        handle = saver.begin(folder_in(tmp_path), pieces, state_of())
        assert handle._written.wait(30)  # type: ignore[attr-defined]
    calls: dict[str, Callable[[], object]] = {
        "poll": handle.poll,
        "finalize": handle.finalize,
        "finish": saver.finish,
        "begin": lambda: saver.begin(folder_in(tmp_path, "other"), pieces, state_of()),
    }
    said = rf"^writing {tmp_path}/save/rng_rank00000\.safetensors failed: .*File too large"
    with pytest.raises(DrivetrainError, match=said):
        calls[call]()
    with pytest.raises(DrivetrainError, match=said):
        handle.finalize()
    saver.begin(folder_in(tmp_path, "next"), pieces, state_of()).finalize()
    saver.close()
    assert check_checkpoint(tmp_path / "next", "mine") == []


def test_a_failure_that_nobody_asked_for_is_logged_when_the_saver_closes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saver = saver_of()
    failed_save(saver, folder_in(tmp_path))
    with caplog.at_level(logging.ERROR):
        saver.close()
    assert f"the checkpoint {tmp_path / 'save'} is not complete: writing " in caplog.text
    saver.close()


def test_a_failure_that_was_raised_is_not_logged_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saver = saver_of()
    failed_save(saver, folder_in(tmp_path))
    with pytest.raises(DrivetrainError):
        saver.finish()
    saver.finish()
    saver.close()
    assert "is not complete" not in caplog.text


def test_what_is_no_exception_is_told_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(*_: object) -> None:
        raise SystemExit("the library gives up")

    monkeypatch.setattr(background_save, "write_pieces", end)
    saver = saver_of()
    handle = saver.begin(folder_in(tmp_path), pieces_of(live_tensors()), state_of())
    with pytest.raises(
        DrivetrainError, match=f"^writing the checkpoint {tmp_path / 'save'} failed: SystemExit: the library gives up$"
    ):
        handle.finalize()
    saver.close()


def test_a_save_that_is_never_asked_for_is_whole_when_the_saver_is_closed(tmp_path: Path) -> None:
    saver, folder = saver_of(), folder_in(tmp_path)
    saver.begin(folder, pieces_of(live_tensors()), state_of())
    saver.close()
    assert check_checkpoint(folder, "mine", world_size=1) == []


def test_a_folder_that_is_not_there_is_refused_at_once(tmp_path: Path) -> None:
    saver = saver_of()
    with pytest.raises(DataError, match="rank 0 does not see the checkpoint folder"):
        saver.begin(tmp_path / "nowhere", pieces_of(live_tensors()), state_of())
    saver.finish()
    saver.close()


# -- host memory -------------------------------------------------------------------------------------------------------


def need(host: str, needed: int, free: int | None) -> HostNeed:
    return HostNeed(host=(host, "boot"), needed=needed, free=free)


def test_each_host_must_hold_what_its_ranks_need_together() -> None:
    assert need_findings([need("a", 40, 100), need("a", 60, 120), need("b", 10, 10)]) == []
    assert need_findings([need("a", 41, 100), need("a", 60, 120), need("b", 11, 10), need("c", 99, None)]) == [
        "the 2 ranks on host a need 101 bytes of memory and 100 are free",
        "a rank on b needs 11 bytes of memory and 10 are free",
    ]


def test_copies_that_the_host_cannot_hold_are_refused_before_the_first_save() -> None:
    free = available_memory()
    assert free is not None
    nbytes = 2 * free // 64 * 64
    huge = torch.empty(nbytes, dtype=torch.uint8, device="meta")
    saver = saver_of()
    said = rf"^--async-save copies .* a rank on \S+ needs {nbytes} bytes of memory and \d+ are free; leave out --"
    with pytest.raises(DrivetrainError, match=said):
        saver.reserve(pieces_of({"huge": huge}))
    assert saver.staging_bytes == 0
    saver.close()
