"""Start Ray on this machine or connect to a running cluster, and leave nothing behind.

The one place that knows Ray's environment variables and start-up quirks. Knows nothing of training, engines or
placement.
"""

import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from drivetrain_backend_api import ConfigError, DrivetrainError
from drivetrain_infra.daemons import Daemons, watched_daemons
from drivetrain_infra.deadline import Deadline
from drivetrain_infra.guard import END_SECONDS, LOCK, guarded, is_gone

MAX_SOCKET_PATH = 103 if sys.platform == "darwin" else 107
"""Longest AF_UNIX path in bytes that the operating system takes."""

_LONGEST_SOCKET = "/ray/session_2000-01-01_00-00-00_000000_0000000/sockets/plasma_store_1"
"""What is appended to the temp dir for the longest of its sockets, with a seven-digit process id."""

_CPU_OBJECT_STORE_BYTES = 256 * 1024**2
"""Object store of a machine without GPUs: rollout batches are a few MiB, and containers often have little /dev/shm."""

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class RaySession:
    """A Ray that this process is connected to.

    Attributes:
        address: of its head, host:port.
        temp_dir: Ray's files, when they were made by this session; None on a cluster that was there before.
    """

    address: str
    temp_dir: Path | None


@dataclass(frozen=True, kw_only=True)
class NodeAddress:
    """Where a process runs.

    Attributes:
        node_id: Ray's id of the node.
        host: address at which other nodes reach it.
    """

    node_id: str
    host: str


def this_node() -> NodeAddress:
    """Say where the calling Ray worker or driver runs."""
    import ray

    host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return NodeAddress(node_id=ray.get_runtime_context().get_node_id(), host=host)


def ray_temp_dir(run_folder: Path, root: Path | None = None) -> Path:
    """Derive Ray's temp dir from the run folder: short, stable, and different for different runs.

    Args:
        run_folder: folder of the run; need not exist.
        root: parent of the temp dir; the system's by default.

    Raises:
        DrivetrainError: Ray's sockets would have paths that are too long for the operating system.
    """
    folder = _temp_dir(run_folder, root)
    length = len(os.fsencode(f"{folder}{_LONGEST_SOCKET}"))
    if length > MAX_SOCKET_PATH:
        raise DrivetrainError(
            f"Ray's sockets below {folder} would have paths of {length} bytes, but AF_UNIX takes {MAX_SOCKET_PATH}; "
            f"point TMPDIR to a folder at least {length - MAX_SOCKET_PATH} bytes shorter, for example TMPDIR=/tmp"
        )
    return folder


def _temp_dir(run_folder: Path, root: Path | None = None) -> Path:
    digest = hashlib.sha256(str(run_folder.resolve()).encode()).hexdigest()[:8]
    return (root or Path(tempfile.gettempdir())) / f"dt-{digest}"


@contextlib.contextmanager
def ray_session(
    run_folder: Path,
    *,
    address: str | None = None,
    num_cpus: int | None = None,
    object_store_bytes: int | None = None,
    log_to_driver: bool = False,
    on_stuck: Callable[[str], object] = lambda sentence: print(sentence, file=sys.stderr, flush=True),
) -> Iterator[RaySession]:
    """Connect this process to Ray: start one here, or join a running cluster; end what was started on the way out.

    A Ray that is started here listens on the loopback interface only and wants a token that only this user can read.
    Ray's own `uv run` hook stays off: it would build another environment for every worker.

    Nothing of a Ray that is started here outlives this process, even if it is killed. When one of Ray's daemons dies,
    `daemons.wait` raises, and a process that is then stuck in Ray for `daemons.UNWIND_SECONDS` exits with code 1.

    On a cluster that was there before, only what this process itself has started is ended with it. After the first
    session a process never connects to Ray by itself again, as calls to Ray otherwise do where there is no connection.

    Args:
        run_folder: names the temp dir; a second session for the same folder is refused while the first one lives.
        address: "host:port" of a running cluster's head; None starts Ray here.
        num_cpus: logical CPUs of a Ray started here. Train ranks and engines share the cores of a machine without GPUs,
            so this may exceed the cores there are: pass what the placement needs.
        object_store_bytes: of a Ray started here; by default small without GPUs and Ray's own choice with them.
        log_to_driver: print what workers print.
        on_stuck: called with a sentence before this process exits because it is stuck in Ray.

    Raises:
        DrivetrainError: Ray is already initialised here, the cluster cannot be reached, or Ray does not start.
    """
    if address is None:
        with (
            owned_temp_dir(run_folder) as temp_dir,
            local_environment(temp_dir),
            watched_daemons(on_stuck) as daemons,
            _initialised(
                {
                    "address": "local",
                    "num_cpus": num_cpus,
                    "object_store_memory": object_store_bytes or _default_object_store_bytes(),
                    "include_dashboard": False,
                    "log_to_driver": log_to_driver,
                    "_temp_dir": str(temp_dir / "ray"),
                    "_node_ip_address": LOOPBACK,
                },
                "start Ray on this machine",
                daemons,
            ) as head,
        ):
            yield RaySession(address=head, temp_dir=temp_dir)
    else:
        _require_reachable(address)
        with (
            owned_temp_dir(run_folder, for_ray=False),
            _environment(_QUIRKS, RAY_ENABLE_UV_RUN_RUNTIME_ENV=False),
            _initialised({"address": address, "log_to_driver": log_to_driver}, f"connect to Ray at {address}") as head,
        ):
            yield RaySession(address=head, temp_dir=None)


_QUIRKS: Mapping[str, str] = {
    # workers run in the driver's own environment; the hook would resolve and install one anew for each of them
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # a process that asks for no GPU keeps the CUDA_VISIBLE_DEVICES it inherits
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # actors start processes of their own; one idle worker for each logical CPU would only take the cores from them
    "RAY_prestart_worker_first_driver": "0",
    # workers are where the work is; by default Ray runs them at the lowest priority but four
    "RAY_worker_niceness": "0",
}


def _default_object_store_bytes() -> int | None:
    import torch

    return None if torch.cuda.is_available() else _CPU_OBJECT_STORE_BYTES


@contextlib.contextmanager
def owned_temp_dir(run_folder: Path, *, for_ray: bool = True) -> Iterator[Path]:
    """Own the run's temp dir: private to this user and locked, until all that was started in the block has ended.

    At the end of the block, or when this process dies, processes of the run are killed and the folder is removed.

    Args:
        run_folder: names the temp dir.
        for_ray: whether Ray's sockets go there, for which its path must be short.
    """
    # who joins a cluster that this process has started is another owner
    folder = ray_temp_dir(run_folder) if for_ray else _temp_dir(run_folder).with_suffix(".driver")
    with _lock(folder, run_folder) as lock, guarded(folder, lock.fileno()):
        yield folder


def refuse_if_running(run_folder: Path) -> None:
    """Refuse, before anything is started or written, a run folder in which another run is at work.

    Raises:
        ConfigError: a process that lives holds its lock.
    """
    try:
        own = _temp_dir(run_folder)
    except (OSError, RuntimeError, ValueError):  # a path that cannot be looked up is in nobody's use
        return
    for folder in (own, own.with_suffix(".driver")):
        with contextlib.suppress(FileNotFoundError), (folder / LOCK).open() as lock:
            holder = lock.read()
            if holder.isdecimal() and psutil.pid_exists(int(holder)):
                try:
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise ConfigError(_held(run_folder, folder / LOCK)) from error


def _held(run_folder: Path, lock: Path) -> str:
    return f"another process runs in {run_folder} (it holds {lock}); wait for it, end it, or use another --save folder"


def _lock(folder: Path, run_folder: Path) -> IO[str]:
    """Make the temp dir and lock it; waits while the guard of a killed driver is still cleaning up."""
    deadline = Deadline(END_SECONDS + 5.0)
    while True:
        # not found: its former owner has just removed it
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as stack:
            _make_private(folder)
            lock = stack.enter_context((folder / LOCK).open("a+"))
            try:
                # the kernel drops this lock when the last process that holds it dies, however it dies
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                lock.seek(0)
                _refuse_held(lock.read(), folder / LOCK, run_folder, deadline, error)
            else:
                if os.path.samestat(os.fstat(lock.fileno()), (folder / LOCK).stat()):
                    lock.truncate(0)
                    lock.write(str(os.getpid()))
                    lock.flush()
                    stack.pop_all()
                    return lock
        time.sleep(0.1)


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise DrivetrainError(f"{folder} belongs to somebody else; remove it, or point TMPDIR to a folder of your own")
    folder.chmod(0o700)


def _refuse_held(holder: str, lock: Path, run_folder: Path, deadline: Deadline, error: BlockingIOError) -> None:
    """Refuse a folder whose driver, the process id in `holder`, lives, or whose guard does not come to an end."""
    try:
        alive = not is_gone(psutil.Process(int(holder)))
    except (ValueError, psutil.Error):
        alive = False
    if alive:
        raise DrivetrainError(_held(run_folder, lock)) from error
    if not deadline.left:
        raise DrivetrainError(
            f"the last run in {run_folder} was killed, and what it started has not ended yet (a process holds {lock}); "
            "try again later, or use another --save folder"
        ) from error


@contextlib.contextmanager
def _environment(variables: Mapping[str, str], **constants: bool) -> Iterator[None]:
    """Set environment variables that are not set yet, for this process and its children, until the end.

    Args:
        variables: name -> value.
        constants: what Ray made of them when it was imported, which may have been before this.
    """
    from ray._private import ray_constants

    new = {name: value for name, value in variables.items() if name not in os.environ}
    imported = {name: getattr(ray_constants, name) for name in constants}
    os.environ.update(new)
    for name, value in constants.items():
        setattr(ray_constants, name, value)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)
        for name, value in imported.items():
            setattr(ray_constants, name, value)


@contextlib.contextmanager
def local_environment(temp_dir: Path) -> Iterator[None]:
    """Keep a Ray that is started here on the loopback interface, with a token of its own."""
    token = temp_dir / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    variables = {
        **_QUIRKS,
        "RAY_AUTH_MODE": "token",
        # Ray makes a folder `ray` in it that all users may write, hence the private parent
        "RAY_TMPDIR": str(temp_dir),
        # Ray's name for "use the node's outside address"; it has no option for loopback
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # else a process that sets its title, as Ray's agents do, writes it over its environment, which the guard reads
        "SPT_NOENV": "1",
    }
    if "RAY_AUTH_TOKEN" not in os.environ:
        variables["RAY_AUTH_TOKEN_PATH"] = str(token)
    try:
        with _environment(variables, RAY_ENABLE_UV_RUN_RUNTIME_ENV=False, ENABLE_RAY_CLUSTER=False):
            _reload_authentication()
            yield
    finally:
        _reload_authentication()


def _reload_authentication() -> None:
    """Make Ray read its authentication variables again: it keeps the first token that a process ever had."""
    try:
        from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]
    except ImportError:  # Ray before 2.52 has no token authentication
        return
    # mode first: a thread that still ends the last session must not look for a token that is gone
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@contextlib.contextmanager
def _initialised(arguments: Mapping[str, Any], doing: str, daemons: Daemons | None = None) -> Iterator[str]:
    """Call `ray.init`, yield the head's address, shut Ray down; `daemons` are those that it starts."""
    import ray

    _never_connect_unasked()
    if ray.is_initialized():
        raise DrivetrainError(
            f"Ray is already initialised in this process (at {ray.get_runtime_context().gcs_address}); Drivetrain "
            f"starts and ends Ray itself: call ray.shutdown() first, or pass --ray-address to share a cluster"
        )
    on_sigterm = signal.getsignal(signal.SIGTERM)
    breakpoint_hook = os.environ.get("PYTHONBREAKPOINT")
    try:
        with _daemons_in_their_own_group():
            ray.init(logging_level=logging.ERROR, **arguments)
    except Exception as error:  # Ray raises bare exceptions too, for example when a node is slow to start
        ray.shutdown()
        raise DrivetrainError(f"could not {doing}: {error}; is the machine overloaded or out of memory?") from error
    try:
        # Ray takes SIGTERM for itself; the handler that was there is the one that knows how to stop
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)
        if not arguments["log_to_driver"]:
            _keep_reports_off_the_screen()
        if daemons is not None:
            daemons.expect_all()
        yield str(ray.get_runtime_context().gcs_address)
    finally:
        if daemons is not None:
            daemons.expect_end()
        ray.shutdown()
        # Ray points breakpoint() at its own debugger, which would outlive it
        if breakpoint_hook is None:
            os.environ.pop("PYTHONBREAKPOINT", None)
        else:
            os.environ["PYTHONBREAKPOINT"] = breakpoint_hook


@contextlib.contextmanager
def _daemons_in_their_own_group() -> Iterator[None]:
    """Start Ray's daemons in process groups of their own.

    A signal to the driver's group, as a shell and a supervisor send it, asks the driver to save: without daemons it
    could not. Ray (2.60) only keeps SIGINT from them.
    """
    from ray._private import services

    starter = services.ConsolePopen
    services.ConsolePopen = functools.partial(starter, process_group=0)  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        services.ConsolePopen = starter  # type: ignore[misc]


def _never_connect_unasked() -> None:
    """Keep calls to Ray from starting another one, as a thread that was left behind would after the end of the session.

    For the life of the process, which may outlast the session.
    """
    from ray._private import auto_init_hook

    auto_init_hook.enable_auto_connect = False


def _keep_reports_off_the_screen() -> None:
    """Stop the thread that prints Ray's page on every dead worker: whoever called it says so in a sentence.

    They are in Ray's log files all the same.
    """
    from ray._private import worker

    global_worker: Any = worker.global_worker  # Ray sets these attributes without declaring them
    # as ray.shutdown() does, which finds it done
    global_worker.threads_stopped.set()
    global_worker.gcs_error_subscriber.close()
    global_worker.listener_thread.join()
    global_worker.threads_stopped.clear()


def _require_reachable(address: str) -> None:
    """Fail at once where Ray would retry for a long time."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise DrivetrainError(f"--ray-address {address}: must be host:port of a Ray head")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        raise DrivetrainError(
            f"--ray-address {address}: nothing answers there ({error}); start a head with "
            f"'ray start --head --port {port}', or leave the flag out to start Ray on this machine"
        ) from error
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.exceptions import RayError

    try:
        GcsClient(address=address)
    except RayError as error:
        raise DrivetrainError(
            f"--ray-address {address}: what answers there is no Ray head that this process may use ({error}); look at "
            "the port, and set RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH as the cluster was started with"
        ) from error
