"""Starting and ending Ray for real: where it listens, what it refuses, and what it leaves behind."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from drivetrain_backend_api import ConfigError, DrivetrainError
from drivetrain_infra.ray_runtime import (
    MAX_SOCKET_PATH,
    owned_temp_dir,
    ray_session,
    ray_temp_dir,
    refuse_if_running,
)

STORE = 80 * 1024**2


def test_the_temp_dir_is_short_stable_and_different_for_each_run(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["a-long-folder-name"] * 8)
    first = ray_temp_dir(deep, Path("/tmp"))
    assert first == ray_temp_dir(deep, Path("/tmp"))
    assert first != ray_temp_dir(deep / "other", Path("/tmp"))
    assert len(str(first)) <= len("/tmp/dt-01234567")


def test_a_temp_dir_too_long_for_sockets_is_refused_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / ("x" * 80)
    with pytest.raises(DrivetrainError, match=f"AF_UNIX takes {MAX_SOCKET_PATH}; point TMPDIR"):
        ray_temp_dir(tmp_path, root)


def test_a_folder_in_use_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    run = tmp_path / "run"
    refuse_if_running(run)
    for for_ray in (True, False):
        with owned_temp_dir(run, for_ray=for_ray):
            with pytest.raises(ConfigError, match="another process runs in"):
                refuse_if_running(run)
            refuse_if_running(tmp_path / "other")
        refuse_if_running(run)
    assert not run.exists()


def test_a_session_is_private_to_this_user_and_machine_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in [one for one in os.environ if one.startswith("RAY_")]:
        monkeypatch.delenv(name)
    environment = dict(os.environ)

    def worker_facts() -> tuple[str, str | None]:
        return sys.executable, os.environ.get("CUDA_VISIBLE_DEVICES")

    on_sigterm = signal.getsignal(signal.SIGTERM)
    error = RuntimeError("the run failed")
    with contextlib.suppress(RuntimeError), ray_session(tmp_path, num_cpus=5, object_store_bytes=STORE) as session:
        # more logical CPUs than cores: CPU ranks share them
        assert ray.cluster_resources()["CPU"] == 5
        assert session.temp_dir == ray_temp_dir(tmp_path)
        assert session.temp_dir.stat().st_mode & 0o077 == 0
        worker = ray.get(ray.remote(worker_facts).remote(), timeout=60)
        assert worker == (sys.executable, os.environ.get("CUDA_VISIBLE_DEVICES"))
        hosts = {one.laddr.ip.removeprefix("::ffff:") for one in listeners()}
        assert hosts == {"127.0.0.1"}
        assert signal.getsignal(signal.SIGTERM) == on_sigterm
        started = [one for one in psutil.Process().children(recursive=True) if "/ray/" in " ".join(one.cmdline())]
        assert {"gcs_server", "raylet"} <= {one.name() for one in started}
        # where a signal to this process's group does not reach them
        assert os.getpgrp() not in {os.getpgid(one.pid) for one in started}
        with pytest.raises(DrivetrainError, match="already initialised"), ray_session(tmp_path / "other"):
            pass
        raise error
    with pytest.raises(ray.exceptions.RaySystemError, match="Ray has not been started yet"):
        ray.put(0)  # which would start another Ray, as a thread that was left behind might
    assert not ray.is_initialized()
    assert not session.temp_dir.exists()
    assert not list(home.iterdir())
    assert dict(os.environ) == environment
    assert capfd.readouterr() == ("", "")


def test_a_folder_with_a_live_run_is_refused(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from pathlib import Path; from drivetrain_infra.ray_runtime import owned_temp_dir\n"
            f"with owned_temp_dir(Path({str(tmp_path)!r})): print('held', flush=True); sys.stdin.read()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(DrivetrainError, match="another process runs in"), ray_session(tmp_path):
            pass


@pytest.mark.parametrize(
    ("address", "message"), [("nowhere", "must be host:port"), ("127.0.0.1:1", "nothing answers there")]
)
def test_a_cluster_that_is_not_there_is_reported_at_once(tmp_path: Path, address: str, message: str) -> None:
    began = time.monotonic()
    with pytest.raises(DrivetrainError, match=message), ray_session(tmp_path, address=address):
        pass
    assert time.monotonic() - began < 30


@pytest.mark.slow
def test_a_port_where_something_else_answers_is_no_cluster(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(DrivetrainError, match="is no Ray head that this process may use"),
        ray_session(tmp_path, address=f"127.0.0.1:{other.getsockname()[1]}"),
    ):
        pass


@pytest.mark.slow
def test_engines_end_when_the_driver_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER.format(folder=str(tmp_path), store=STORE))
    driver = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    with driver:
        assert driver.stdout is not None
        pid = int(driver.stdout.readline())
        assert psutil.pid_exists(pid)
        driver.kill()
    end = time.monotonic() + 30
    while ray_temp_dir(tmp_path).exists():
        assert time.monotonic() < end, f"the temp dir outlived its driver, and so may the engine, process {pid}"
        time.sleep(0.1)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


DRIVER = """
import time
from pathlib import Path
import ray
from drivetrain_infra.config import PlacementConfig
from drivetrain_infra.engines.actor import EngineActor
from drivetrain_infra.engines.base import EngineSettings
from drivetrain_infra.engines.transformers_spec import TransformersEngineConfig
from drivetrain_infra.ray_runtime import ray_session

settings = EngineSettings(
    model="", device="cpu", dtype="float32", trust_remote_code=False, options=TransformersEngineConfig()
)
with ray_session(Path({folder!r}), num_cpus=2, object_store_bytes={store}):
    groups = {{"serve": 1, "weights": 1, "control": 2, "health": 1}}
    engine = ray.remote(concurrency_groups=groups)(EngineActor).remote("engine-0", "transformers", settings, 1)
    print(ray.get(engine.health.remote()).pid, flush=True)
    time.sleep(600)
"""


def listeners() -> list[Any]:
    """Listening TCP sockets of this process's descendants: Ray's daemons and workers."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found += [one for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    assert found
    return found
