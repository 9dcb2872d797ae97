"""A save is durable and whole or not there at all, whatever is killed, full or removed when.

Run as a program, this file is the process that is killed: see `Crashes`.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from drivetrain_backend_api import DataError, DrivetrainError
from drivetrain_backend_api.manifest import MANIFEST, manifest_findings, read_manifest, record_of, write_manifest
from drivetrain_infra.checkpoint_writer import CheckpointWriter, Saved
from drivetrain_infra.resume import find_resume
from drivetrain_infra.run_folder import RunFolder
from drivetrain_infra.run_state import RUN_STATE, RunState

STATE = RunState(
    next_rollout_id=0,
    checkpoint=None,
    weight_version=1,
    prompts_read=0,
    seed=7,
    metrics_bytes=0,
    backend="fsdp",
    versions={},
    layout={},
    model_sha256="",
    data_sha256="",
    options={},
)


def state(next_rollout_id: int) -> RunState:
    return replace(STATE, next_rollout_id=next_rollout_id, prompts_read=8 * next_rollout_id)


def write_files(folder: Path, content: str, *, manifest: bool = True) -> None:
    """Write what a backend writes: files in folders, their manifest last."""
    (folder / "dcp").mkdir()
    for name in ("trainer_state.json", "dcp/__0_0.distcp", "dcp/__1_0.distcp"):
        (folder / name).write_text(f"{name} {content}")
    if manifest:
        files = [path for path in folder.rglob("*") if path.is_file()]
        write_manifest(folder, {path.relative_to(folder).as_posix(): record_of(path) for path in files})


class Foreground:
    """Writes while the loop waits."""

    def __init__(self, content: str, *, manifest: bool = True) -> None:
        self.content, self.manifest = content, manifest

    def begin_save(self, folder: Path) -> None:
        write_files(folder, self.content, manifest=self.manifest)

    def poll_save(self) -> bool:
        return True

    def finish_save(self) -> None:
        pass


class Background:
    """Writes in a thread, when it is told to go on."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.go_on, self.finished = error, threading.Event(), 0
        self.thread: threading.Thread | None = None

    def begin_save(self, folder: Path) -> None:
        self.failure: Exception | None = None
        self.thread = threading.Thread(target=self.write, args=(folder,))
        self.thread.start()

    def write(self, folder: Path) -> None:
        assert self.go_on.wait(30)
        try:
            if self.error is not None:
                raise self.error
            write_files(folder, folder.name)
        except Exception as error:
            self.failure = error

    def poll_save(self) -> bool:
        assert self.thread is not None
        if self.thread.is_alive():
            return False
        if self.failure is not None:
            raise self.failure
        return True

    def finish_save(self) -> None:
        assert self.thread is not None
        self.thread.join(30)
        self.finished += 1
        assert self.poll_save()


def save(run: RunFolder, next_rollout_id: int, content: str = "old", **options: Any) -> Saved:
    writer = CheckpointWriter(run, Foreground(content), **options)
    writer.begin(state(next_rollout_id))
    saved = writer.finish()
    assert saved is not None
    return saved


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return new_run(tmp_path / "run")


def new_run(root: Path) -> RunFolder:
    folder = RunFolder(root)
    folder.create({})
    folder.metrics.write_text('{"rollout_id": 0}\n')
    return folder


def whole(folder: Path) -> list[str]:
    return manifest_findings(folder, full=True)


def files(run: RunFolder) -> list[str]:
    return sorted(path.name for path in run.root.iterdir())


def content_of(checkpoint: Path) -> str:
    return (checkpoint / "trainer_state.json").read_text().split()[1]


# -- what a save does --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("manifest", [True, False])
def test_a_saved_checkpoint_is_whole_and_has_its_state(run: RunFolder, manifest: bool) -> None:
    writer = CheckpointWriter(run, Foreground("new", manifest=manifest))
    assert writer.poll() is None
    assert writer.begin(state(4)) is None
    saved = writer.poll()
    assert saved is not None
    assert (saved.next_rollout_id, saved.checkpoint) == (4, run.checkpoint(4))
    assert not writer.pending
    assert whole(saved.checkpoint) == []
    assert read_manifest(saved.checkpoint).keys() == {
        RUN_STATE,
        "trainer_state.json",
        "dcp/__0_0.distcp",
        "dcp/__1_0.distcp",
    }
    own = RunState.read(saved.checkpoint / RUN_STATE)
    assert own == replace(state(4), checkpoint="iter_0000004")
    newest = RunState.read(run.state)
    assert newest == writer.last_state
    assert newest.last_save is not None
    assert newest == replace(own, last_save=newest.last_save)
    assert (newest.last_save.seconds, newest.last_save.blocked_seconds) == (saved.seconds, saved.blocked_seconds)
    assert run.latest() == saved.checkpoint
    assert writer.finish() is None


def test_a_background_save_is_not_there_until_it_is_written(run: RunFolder) -> None:
    save(run, 2)
    trainer = Background()
    writer = CheckpointWriter(run, trainer)
    writer.begin(state(4))
    assert writer.poll() is None
    assert run.latest() == run.checkpoint(2)
    assert run.checkpoints() == [2]
    trainer.go_on.set()
    saved = writer.finish()
    assert saved is not None
    assert run.latest() == run.checkpoint(4)
    assert trainer.finished == 1
    assert saved.blocked_seconds <= saved.seconds


def test_the_time_that_training_goes_on_is_not_counted_as_blocked(run: RunFolder) -> None:
    trainer = Background()
    writer = CheckpointWriter(run, trainer)
    writer.begin(state(4))
    pause = 0.3
    assert not threading.Event().wait(pause)
    trainer.go_on.set()
    saved = writer.finish()
    assert saved is not None
    assert saved.seconds - saved.blocked_seconds >= pause


def test_a_pending_save_is_finished_before_the_next_begins(run: RunFolder) -> None:
    trainer = Background()
    trainer.go_on.set()
    writer = CheckpointWriter(run, trainer)
    assert writer.begin(state(2)) is None
    before = writer.begin(state(4))
    assert before is not None
    assert (before.next_rollout_id, run.latest()) == (2, run.checkpoint(2))
    assert writer.finish() is not None
    assert run.checkpoints() == [2, 4]


def test_old_checkpoints_go_once_a_newer_one_is_durable(run: RunFolder) -> None:
    save(run, 2)
    save(run, 4)
    trainer = Background()
    writer = CheckpointWriter(run, trainer, keep=1, protect=[run.checkpoint(2)])
    writer.begin(state(6))
    assert run.checkpoints() == [2, 4]
    trainer.go_on.set()
    writer.finish()
    assert run.checkpoints() == [2, 6]


def test_saving_a_checkpoint_again_replaces_it(run: RunFolder) -> None:
    save(run, 4, "old")
    save(run, 4, "new")
    assert content_of(run.latest()) == "new"
    assert files(run) == ["config.json", "iter_0000004", "latest", "metrics.jsonl", "resume_state.json"]


def test_everything_is_synced_before_it_is_named(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order in which a loss of power may not overtake: files, folders, name, parent, `latest`, parent."""
    events: list[str] = []
    fsync, rename, replace_ = os.fsync, os.rename, os.replace

    def spy_fsync(descriptor: Any) -> None:
        fsync(descriptor)
        events.append("sync " + os.readlink(f"/proc/self/fd/{descriptor}").removeprefix(f"{run.root}"))

    def spy_rename(source: Any, target: Any) -> None:
        (replace_ if os.path.isfile(target) else rename)(source, target)
        events.append("name " + str(target).removeprefix(f"{run.root}"))

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "rename", spy_rename)
    monkeypatch.setattr(os, "replace", spy_rename)
    save(run, 4)
    aside = "/iter_0000004.partial"
    named = events.index("name /iter_0000004")
    contents = ["trainer_state.json", "dcp/__0_0.distcp", "dcp/__1_0.distcp", RUN_STATE, MANIFEST]
    synced = events[:named]
    assert {f"sync {aside}/{name}" for name in contents} <= set(synced)
    assert "sync /metrics.jsonl" in synced
    assert synced.index(f"sync {aside}/dcp/__1_0.distcp") < synced.index(f"sync {aside}/dcp")
    assert synced[-1] == f"sync {aside}"
    assert [one for one in events[named:] if "/." not in one] == [
        "name /iter_0000004",
        "sync ",
        "name /latest",
        "sync ",
        "name /resume_state.json",
        "sync ",
    ]


# -- what can go wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [CheckpointWriter.poll, CheckpointWriter.finish])
def test_a_background_save_that_fails_is_raised_and_leaves_what_was_durable(
    run: RunFolder, end: Callable[[CheckpointWriter], Any]
) -> None:
    save(run, 2)
    before = files(run)
    cause = DrivetrainError("rank 1 died")
    trainer = Background(cause)
    writer = CheckpointWriter(run, trainer)
    writer.begin(state(4))
    trainer.go_on.set()
    assert trainer.thread is not None
    trainer.thread.join(30)
    with pytest.raises(DrivetrainError) as caught:
        end(writer)
    assert caught.value is cause
    assert files(run) == before
    assert run.latest() == run.checkpoint(2)
    assert not writer.pending
    trainer.error = None
    writer.begin(state(4))
    assert writer.finish() is not None
    assert run.checkpoints() == [2, 4]


def test_an_abandoned_save_leaves_nothing(run: RunFolder) -> None:
    save(run, 2)
    before = files(run)
    trainer = Background(ValueError("unseen"))
    writer = CheckpointWriter(run, trainer)
    writer.abandon()
    writer.begin(state(4))
    writer.abandon()
    assert files(run) == before
    assert not writer.pending
    trainer.go_on.set()
    assert writer.finish() is None


def test_a_folder_that_is_removed_during_a_save_is_named(run: RunFolder) -> None:
    trainer = Background()
    writer = CheckpointWriter(run, trainer)
    writer.begin(state(4))
    shutil.rmtree(run.root)
    trainer.go_on.set()
    with pytest.raises(DrivetrainError, match=r"--save .*/run: the folder is gone, so checkpoint iter_0000004 cannot"):
        writer.finish()
    writer.abandon()
    with pytest.raises(DrivetrainError, match=r"--save .*/run: the folder is gone"):
        writer.begin(state(4))
    assert not run.root.exists()


class Careless(Foreground):
    """Leaves the folder other than its manifest says."""

    def __init__(self, spoil: Callable[[Path], Any]) -> None:
        super().__init__("new")
        self.spoil = spoil

    def begin_save(self, folder: Path) -> None:
        super().begin_save(folder)
        self.spoil(folder)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "dcp/__1_0.distcp").unlink(), "dcp/__1_0.distcp is missing"),
        (lambda folder: os.truncate(folder / "dcp/__1_0.distcp", 3), "dcp/__1_0.distcp is cut short"),
        (lambda folder: (folder / MANIFEST).write_text("{}"), "manifest.json is damaged"),
        (lambda folder: (folder / "stray").write_text(""), "stray is not in manifest.json"),
        (
            lambda folder: [shutil.rmtree(one) if one.is_dir() else one.unlink() for one in folder.iterdir()],
            "is empty though the train workers wrote",
        ),
        (shutil.rmtree, "is empty though the train workers wrote"),
    ],
)
def test_a_folder_that_is_not_what_the_ranks_wrote_is_not_committed(
    run: RunFolder, spoil: Callable[[Path], Any], said: str
) -> None:
    save(run, 2)
    before = files(run)
    writer = CheckpointWriter(run, Careless(spoil))
    writer.begin(state(4))
    with pytest.raises(DataError, match=said) as caught:
        writer.poll()
    assert "--save must be a folder on a file system that all nodes share" in str(caught.value)
    assert files(run) == before
    assert run.latest() == run.checkpoint(2)


# -- a full disk -------------------------------------------------------------------------------------------------------

PAGE = 4096


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for 64 pages."""
    mount = tmp_path / "disk"
    mount.mkdir()
    size = f"size={64 * PAGE}"
    try:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", mount], capture_output=True, timeout=20)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted: {done.stderr.decode().strip()}")
    yield mount
    subprocess.run(["umount", mount], check=True, timeout=20)


def leave_pages(disk: Path, pages: int) -> Path:
    """Fill a disk but for some pages."""
    ballast = disk / "ballast"
    free = os.statvfs(disk).f_bavail
    ballast.write_bytes(bytes((free - pages) * PAGE))
    assert os.statvfs(disk).f_bavail == pages
    return ballast


def test_a_disk_that_is_full_at_any_point_of_a_save_costs_only_that_save(small_disk: Path) -> None:
    """Each file takes a page, so that each number of free pages ends at another file."""
    run = new_run(small_disk / "run")
    save(run, 2, keep=None)
    ended = []
    for pages in range(12):
        shutil.rmtree(run.checkpoint(4), ignore_errors=True)
        run.rewind_to(run.checkpoint(2))
        ballast = leave_pages(small_disk, pages)
        try:
            save(run, 4, "new")
        except DrivetrainError as error:
            text = str(error)
            assert text.startswith(f"--save {run.root}: ")
            assert "No space left on device" in text
            assert "make room there" in text
            assert not list(run.root.glob("*.partial"))
            assert not list(run.root.glob(".*"))
            ended.append("state" if "resume_state.json" in text else "checkpoint")
            # only the state that may lag is missing, or `latest` still names the one before
            newest = run.latest()
            assert newest == run.checkpoint(4 if ended[-1] == "state" else 2)
            assert whole(newest) == []
        else:
            ended.append("saved")
        ballast.unlink()
        point = find_resume(run, verify=whole)
        assert point is not None
        assert save(run, 4, "again").checkpoint == run.latest()
        assert content_of(run.latest()) == "again"
    assert ended == sorted(ended, key=["checkpoint", "state", "saved"].index)
    assert set(ended) >= {"checkpoint", "saved"}
    assert ended.count("checkpoint") >= 6  # one for each file of a checkpoint, and `latest`


# -- kills -------------------------------------------------------------------------------------------------------------


class Crashes:
    """A process that forks a child for each request, which dies by SIGKILL just before its n-th system call.

    Counted are the calls that change what a folder holds or make it durable: opening, renaming, removing, making
    folders, fsync. A process of its own, because forking this one, with its threads, is not safe.
    """

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def killed(self, deed: str, root: Path, at: int) -> bool:
        """Do something and be killed on the way; False where it ended before the n-th call."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(deed, root, at, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline().strip()
        assert answer in ("killed", "done"), f"{deed} failed: {answer}"
        return answer == "killed"

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(20) == 0
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """A folder where syncing costs nothing, which a kill does not ask for anyway."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def crashes() -> Iterator[Crashes]:
    process = Crashes()
    yield process
    process.close()


def save_new(run: RunFolder) -> None:
    save(run, 4, "new", keep=1)


def save_first(run: RunFolder) -> None:
    save(run, 2, "new", keep=1)


DEEDS: dict[str, Callable[[RunFolder], Any]] = {
    "first": save_first,
    "next": save_new,
    "start": RunFolder.remove_leftovers,
    "rewind": lambda run: run.rewind_to(run.checkpoint(2)),
    "state": lambda run: replace(state(4), exit_reason="SIGTERM").write(run.state),
}


def serve_crashes() -> None:
    with TemporaryDirectory() as scratch:  # so that no child has anything left to import
        save(new_run(Path(scratch) / "run"), 2)
    for line in sys.stdin:
        deed, root, at = line.split()
        child = os.fork()
        if child == 0:
            die_at(int(at), Path(root))
            try:
                DEEDS[deed](RunFolder(Path(root)))
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print({0: "done", -signal.SIGKILL: "killed"}.get(status, f"exit status {status}"), flush=True)


def die_at(last: int, root: Path) -> None:
    """Kill this process before the call of that number."""
    count = 0
    fsync = os.fsync
    watched = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir")

    def call(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event not in watched or not isinstance(arguments[0], str | os.PathLike):
            return
        path = Path(arguments[0])
        if path.is_absolute() and root not in (path, *path.parents):
            return  # of an import
        count += 1
        if count == last:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted_fsync(descriptor: Any) -> None:
        call("open", (root,))
        fsync(descriptor)

    vars(os)["fsync"] = counted_fsync  # which Python does not audit
    sys.addaudithook(call)


def prepared(root: Path, name: str) -> RunFolder:
    """Make the folder that a deed begins with."""
    run = new_run(root)
    if name == "first":
        return run
    save(run, 2)
    run.rollouts.mkdir()
    for one in (1, 2, 5):
        (run.rollouts / f"rollout_{one}.pt").write_text("")
    if name != "next":
        save(run, 4)
    if name == "leftovers":  # of a save of 6, of one of 4 again, and of a retention that removed 1
        write_files(run.make_aside(6), "half")
        write_files(run.make_aside(4), "new")
        run.checkpoint(4).rename(run.root / "iter_0000004.replaced")
        shutil.copytree(run.checkpoint(2), run.root / "iter_0000001.removed")
        (run.root / ".latest.4711").write_text("")
    return run


@pytest.mark.parametrize(
    ("folder", "deed", "before", "after", "at_least"),
    [
        ("first", "first", None, ("iter_0000002", "new"), 30),
        ("next", "next", ("iter_0000002", "old"), ("iter_0000004", "new"), 50),
        ("both", "next", ("iter_0000004", "old"), ("iter_0000004", "new"), 50),
        ("leftovers", "start", ("iter_0000004", "old"), ("iter_0000004", "old"), 10),
        ("both", "rewind", ("iter_0000004", "old"), ("iter_0000002", "old"), 4),
        ("both", "state", ("iter_0000004", "old"), ("iter_0000004", "old"), 4),
    ],
    ids=["first save", "next save and retention", "replacing save", "cleaning up", "going back", "writing the state"],
)
def test_a_run_that_is_killed_before_any_system_call_goes_on_from_the_old_or_the_new_checkpoint(
    crashes: Crashes,
    in_memory: Path,
    folder: str,
    deed: str,
    before: tuple[str, str] | None,
    after: tuple[str, str],
    at_least: int,
) -> None:
    template = prepared(in_memory / "template", folder).root
    seen = []
    killed, at = True, 0
    while killed:
        at += 1
        run = RunFolder(in_memory / f"run{at}")
        shutil.copytree(template, run.root)
        killed = crashes.killed(deed, run.root, at)
        seen.append(found(run))
        for one in run.checkpoints():
            assert whole(run.find(one) or run.root) == [], "a checkpoint is complete or absent"
        if run.state.exists():
            named = RunState.read(run.state).next_rollout_id
            assert named in run.checkpoints(), "the newest state names a checkpoint that is gone"
        assert not (run.root / "iter_0000006").exists()
        run.remove_leftovers()
        assert found(run) == seen[-1], f"cleaning up after a kill before call {at} changed where the run goes on"
        assert not [name for name in files(run) if re.match(r"\.|iter_.*\.", name)]
        save(run, 4, "later", keep=1)  # and the next start saves as if nothing had been
        assert found(run) == ("iter_0000004", "later")
        assert sorted(path.name for path in run.root.glob("iter*")) == ["iter_0000004"]
        shutil.rmtree(run.root)
    assert at > at_least, f"only {at - 1} calls were counted"
    assert seen[0] == before
    assert seen[-1] == after
    assert seen == sorted(seen, key=[before, after].index), "the new checkpoint was there, and then was not"


def found(run: RunFolder) -> tuple[str, str] | None:
    """Where a run would go on: name and content of a checkpoint of which every byte is right."""
    point = find_resume(run, verify=whole)
    assert point is not None
    if point.checkpoint is None:
        return None
    assert point.state is not None
    assert point.state.prompts_read == 8 * point.state.next_rollout_id
    assert point.state.checkpoint is not None
    return point.state.checkpoint, content_of(point.checkpoint)


if __name__ == "__main__":
    serve_crashes()
