"""Trackers write what they are given, where others can read it."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from wandb_server import WandbServer, wandb_server

from drivetrain_backend_api import DataError, DrivetrainError
from drivetrain_infra.config import TrackingConfig
from drivetrain_infra.tracking.base import Trackers
from drivetrain_infra.tracking.jsonl import JsonlTracker, read_metrics
from drivetrain_infra.tracking.wandb import WandbTracker, login_finding
from drivetrain_infra.tracking.wandb_files import id_of, run_folders


def test_each_line_is_strict_json_with_a_rollout_id(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(0, {"train/loss": 0.1})
    tracker.log(1, {"train/loss": float("nan"), "train/grad_norm": float("inf")})
    lines = path.read_text().splitlines()  # before close: each line is flushed
    tracker.close()

    def refuse(word: str) -> None:
        raise ValueError(word)

    assert [json.loads(line, parse_constant=refuse) for line in lines] == read_metrics(path)
    assert read_metrics(path) == [
        {"rollout_id": 0, "train/loss": 0.1},
        {"rollout_id": 1, "train/loss": None, "train/grad_norm": None},
    ]


def test_several_trackers_get_the_same(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b")]
    trackers = Trackers([JsonlTracker(path) for path in paths])
    trackers.log(3, {"x": 1.0})
    trackers.close()
    assert read_metrics(paths[0]) == read_metrics(paths[1]) == [{"rollout_id": 3, "x": 1.0}]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_run_folder_that_was_removed_is_noticed_at_the_next_line(tmp_path: Path, replaced: bool) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    tracker = JsonlTracker(folder / "metrics.jsonl")
    tracker.log(0, {"x": 1.0})
    shutil.rmtree(folder)
    if replaced:
        folder.mkdir()
        (folder / "metrics.jsonl").touch()
    with pytest.raises(DrivetrainError, match=f"because {folder} was removed or replaced while the run went on"):
        tracker.log(1, {"x": 1.0})
    tracker.close()
    assert folder.exists() is replaced


@pytest.mark.parametrize("kept", [["0"], ["0", "edited"], None])
def test_a_metrics_file_that_is_edited_or_removed_meanwhile_gets_the_next_lines(
    tmp_path: Path, kept: list[str] | None
) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(0, {"x": 1.0})
    path.unlink()
    if kept is not None:  # as an editor or `sed -i` does
        (tmp_path / "new").write_text("".join(f'{{"rollout_id": "{one}"}}\n' for one in kept))
        (tmp_path / "new").rename(path)
    tracker.log(1, {"x": 2.0})
    tracker.log(2, {"x": 3.0})
    tracker.close()
    assert [row["rollout_id"] for row in read_metrics(path)] == [*(kept or []), 1, 2]


def test_a_line_that_does_not_fit_on_the_disk_is_not_there_at_all(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(0, {"x": 1.0})
    whole = path.read_bytes()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 5, before[1]))
    try:
        with pytest.raises(DrivetrainError, match=r"metrics.jsonl: metrics cannot be written \(File too large\)"):
            tracker.log(1, {"x": 2.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == whole
    tracker.log(1, {"x": 2.0})
    tracker.close()
    assert [row["rollout_id"] for row in read_metrics(path)] == [0, 1]


def test_a_full_disk_is_named_with_its_file() -> None:
    tracker = JsonlTracker(Path("/dev/full"))
    with pytest.raises(
        DrivetrainError, match=r"/dev/full: metrics cannot be written \(No space left on device\); make room"
    ):
        tracker.log(0, {"x": 1.0})
    tracker.close()


def test_a_tracker_that_cannot_close_does_not_keep_the_others_open(tmp_path: Path) -> None:
    class Stuck:
        def log(self, rollout_id: int, metrics: object) -> None: ...

        def close(self) -> None:
            raise OSError("no network")

    last = JsonlTracker(tmp_path / "metrics.jsonl")
    with pytest.raises(OSError, match="no network"):
        Trackers([Stuck(), last]).close()
    with pytest.raises(ValueError, match="closed file"):
        last.log(0, {})


@pytest.mark.slow
def test_wandb_without_a_login_names_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # no .netrc
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(DrivetrainError, match=r"--use-wandb: W&B did not start .*or give --wandb-mode offline"):
        WandbTracker(TrackingConfig(use_wandb=True), tmp_path, {"lr": 0.5})


def filled(path: Path, lines: int) -> list[int]:
    """Write lines to a metrics file; return its length after each, the empty file's first."""
    tracker = JsonlTracker(path)
    lengths = [tracker.nbytes]
    for line in range(lines):
        tracker.log(line, {"x": 10.0**line})
        lengths.append(tracker.nbytes)
    tracker.close()
    return lengths


@pytest.mark.parametrize("behind", ["", '{"rollout_id": 5, "x'])
@pytest.mark.parametrize("kept", [0, 3, 5])
def test_a_resumed_run_writes_behind_what_its_checkpoint_has(tmp_path: Path, kept: int, behind: str) -> None:
    path = tmp_path / "metrics.jsonl"
    lengths = filled(path, 5)
    whole = path.read_bytes()
    with path.open("a") as file:
        file.write(behind)  # as a kill leaves it
    tracker = JsonlTracker(path, lengths[kept])
    assert (path.read_bytes(), tracker.nbytes) == (whole[: lengths[kept]], lengths[kept])
    for line in range(kept, 5):
        tracker.log(line, {"x": 10.0**line})
    tracker.close()
    assert path.read_bytes() == whole


@pytest.mark.parametrize("change", ["removed", "shorter", "edited"])
def test_a_metrics_file_without_the_lines_of_the_checkpoint_is_refused(tmp_path: Path, change: str) -> None:
    path = tmp_path / "metrics.jsonl"
    lengths = filled(path, 5)
    if change == "removed":
        path.unlink()
    elif change == "shorter":
        os.truncate(path, lengths[2])
    else:
        path.write_bytes(b" " + path.read_bytes())
    before = path.read_bytes() if path.exists() else None
    expected = (
        f"{path}: was changed since the checkpoint was saved, when it had {lengths[3]} bytes of whole lines; put "
    )
    with pytest.raises(DataError, match=expected):
        JsonlTracker(path, lengths[3])
    assert (path.read_bytes() if path.exists() else None) == before


RUN = Path(__file__).with_name("tracked_run.py")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    (tmp_path / "home").mkdir()
    with wandb_server() as state:
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.setenv("WANDB_BASE_URL", state.url)
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        yield state


def track(folder: Path, **plan: Any) -> str:
    """Run `tracked_run` as a process; return the W&B id that it prints, "" where it is killed."""
    folder.mkdir(exist_ok=True)
    words = [sys.executable, str(RUN), str(folder), json.dumps(plan)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == (-signal.SIGKILL if plan.get("killed") else 0), done.stderr
    assert "Tried to log to step" not in done.stderr  # W&B drops and complains of what it has already
    return done.stdout.strip()


def sync(folder: Path) -> None:
    """Upload as a user does: `wandb sync SAVE/wandb/offline-run-*`."""
    wandb = Path(sys.executable).with_name("wandb")
    words = [str(wandb), "sync", *map(str, folder.glob("wandb/offline-run-*"))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, "ERROR" in done.stderr) == (0, False), done.stderr


def require_curve(server: WandbServer, run_id: str, folder: Path, *, first: int = 0) -> None:
    """Check that W&B has each line of metrics.jsonl once, at its step, and nothing else from `first` on."""
    rows = [row or {} for row in server.rows[run_id]]
    assert [row["_step"] for row in rows] == list(range(len(rows)))
    logged = [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows]
    assert logged[first:] == read_metrics(folder / "metrics.jsonl")


@pytest.mark.slow
def test_runs_killed_offline_and_resumed_are_one_wandb_curve(tmp_path: Path, server: WandbServer) -> None:
    folder = tmp_path / "run"
    # W&B writes its files in blocks, so that a kill takes rows of either process with it
    track(folder, mode="offline", stop=400, killed=200)
    track(folder, mode="offline", keep=150, stop=600, killed=400)
    run_id = track(folder, mode="offline", keep=590, stop=610)
    assert {id_of(one) for one in run_folders(folder / "wandb")} == {run_id}
    assert len(run_folders(folder / "wandb")) == 3
    sync(folder)
    require_curve(server, run_id, folder)
    assert len(server.rows[run_id]) == 610


@pytest.mark.slow
def test_an_online_run_that_is_resumed_is_one_wandb_curve(tmp_path: Path, server: WandbServer) -> None:
    folder = tmp_path / "run"
    run_id = track(folder, mode="online", stop=40)
    require_curve(server, run_id, folder)
    del server.rows[run_id][30:]  # a kill takes what was on its way
    assert track(folder, mode="online", keep=35, stop=40) == run_id
    require_curve(server, run_id, folder)
    # another run goes on with the same curve, and is resumed in its turn
    for plan in ({"stop": 10}, {"keep": 5, "stop": 12}):
        assert track(tmp_path / "next", mode="online", resume_id=run_id, **plan) == run_id
        require_curve(server, run_id, tmp_path / "next", first=40)


def test_wandb_online_wants_a_login_before_anything_starts(tmp_path: Path) -> None:
    online = TrackingConfig(use_wandb=True)
    home = {"HOME": str(tmp_path)}
    finding = login_finding(online, home)
    assert finding is not None
    assert "api.wandb.ai" in finding
    assert "wandb login" in finding
    assert login_finding(TrackingConfig(), home) is None
    assert login_finding(TrackingConfig(use_wandb=True, wandb_mode="offline"), home) is None
    assert login_finding(online, {**home, "WANDB_API_KEY": "k"}) is None
    (tmp_path / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password k\n")
    assert login_finding(online, home) is None
    assert login_finding(online, {**home, "WANDB_BASE_URL": "https://wandb.example"}) is not None
    (tmp_path / ".netrc").write_text("no netrc at all {")
    assert login_finding(online, home) is not None


HOST = "https://wandb.example:8443"


@pytest.mark.parametrize(
    ("netrc", "settings", "environ"),
    [
        ("machine wandb.example:8443 login user password k", None, {"WANDB_BASE_URL": HOST}),
        ("machine wandb.example login user password k", None, {"WANDB_BASE_URL": HOST}),
        ("machine wandb.example:8443 login user password k", f"base_url = {HOST}", {}),
        ("machine api.forge.coreweave.com login user password k", None, {}),
        ("machine api.wandb.ai login user password k", None, {"WANDB_BASE_URL": "https://api.forge.coreweave.com"}),
        ("default login user password k", None, {}),
        ("", "api_key = k", {}),
        ("", "= nothing that can be read", {}),
        ("", None, {"WANDB_BASE_URL": "https://[nothing"}),
        ("", None, {"WANDB_IDENTITY_TOKEN_FILE": "token"}),
        ("", None, {"SM_TRAINING_ENV": "{}"}),
    ],
)
def test_whoever_may_be_logged_in_to_wandb_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, netrc: str, settings: str | None, environ: dict[str, str]
) -> None:
    (tmp_path / "netrc").write_text(netrc)
    for place in ("config", "here/wandb"):
        (tmp_path / place).mkdir(parents=True)
        monkeypatch.chdir(tmp_path)
        variables = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "WANDB_DIR": "here"}
        variables |= {"WANDB_CONFIG_DIR": str(tmp_path / "config"), **environ}
        if settings is not None:
            (tmp_path / place / "settings").write_text(f"[default]\n{settings}\n")
        assert login_finding(TrackingConfig(use_wandb=True), variables) is None
        (tmp_path / place / "settings").unlink(missing_ok=True)


def test_a_login_to_another_server_than_the_settings_name_is_none(tmp_path: Path) -> None:
    settings = tmp_path / ".config" / "wandb" / "settings"
    settings.parent.mkdir(parents=True)
    settings.write_text(f"[default]\nbase_url = {HOST}\n")
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password k")
    assert login_finding(TrackingConfig(use_wandb=True), {"HOME": str(tmp_path)}) == (
        f"--use-wandb: nobody is logged in to wandb.example:8443; run `wandb login --host {HOST}`, set WANDB_API_KEY, "
        "or give --wandb-mode offline"
    )
