"""Signals as a cluster, a terminal and a job send them: to real child processes, which say how they took them."""

import subprocess
import sys
import textwrap
from contextlib import suppress

import pytest

from drivetrain_launcher.stopping import Stopping, StopRequested

CHILD = """
import os, signal, threading, time
from drivetrain_launcher import cli
from drivetrain_launcher.stopping import Stopping, StopRequested

def send(*names):
    for name in names:
        os.kill(os.getpid(), getattr(signal, name))

def work(seconds=0.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)
    print("worked", flush=True)

def told(reason):
    # as a train worker that was sent a signal tells it
    return lambda: reason

stopping = Stopping()
try:
    with stopping.handling():
{body}
except BaseException as error:
    print(cli._report(error))
print("asked:", stopping.reason)
"""


def child(body: str, *, before: str = "") -> subprocess.CompletedProcess[str]:
    code = CHILD.format(body=textwrap.indent(textwrap.dedent(body), " " * 8))
    return subprocess.run([sys.executable, "-c", before + code], capture_output=True, text=True, timeout=60)


def said(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def wish(reason: str) -> str:
    return f"drivetrain: {reason}: saving and stopping; a second signal ends the run at once\n"


ENDINGS = [
    ("SIGINT", 130, "interrupted"),
    ("SIGTERM", 143, "terminated by SIGTERM"),
    ("SIGUSR1", 138, "terminated by SIGUSR1"),
    ("SIGHUP", 129, "terminated by SIGHUP"),
]


# -- at once -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "code", "why"), ENDINGS)
def test_before_anything_is_started_the_first_signal_ends_the_command(first: str, code: int, why: str) -> None:
    done = child(f"""
        try:
            send({first!r})
            work()
        finally:
            send("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")
            print("cleaned up")
    """)
    # later ones leave the cleaning up alone
    assert said(done) == ["cleaned up", str(code), "asked: None"]
    assert done.stderr == f"drivetrain: {why}\n"


def test_a_hangup_ends_a_run_at_once_for_nobody_is_left_to_be_told() -> None:
    done = child("""
        with stopping.graceful():
            send("SIGHUP")
            work()
    """)
    assert said(done) == ["129", "asked: None"]


@pytest.mark.parametrize(("second", "code", "why"), ENDINGS)
@pytest.mark.parametrize("first", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_second_signal_ends_a_run_at_once(first: str, second: str, code: int, why: str) -> None:
    done = child(f"""
        with stopping.graceful():
            send({first!r})
            work()
            try:
                send({second!r})
                work()
            finally:
                send("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")
                print("cleaned up")
    """)
    assert said(done) == ["worked", "cleaned up", str(code), f"asked: {first}"]
    assert done.stderr == wish(first) + f"drivetrain: {why}\n"


def test_after_the_run_a_first_signal_ends_at_once_again() -> None:
    done = child("""
        with stopping.graceful():
            work()
        send("SIGTERM")
        work()
    """)
    assert said(done) == ["worked", "143", "asked: None"]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"])
def test_a_signal_that_was_ignored_stays_ignored(name: str) -> None:
    # as nohup does with SIGHUP, and a shell with the SIGINT of what it starts with `&`
    done = child(
        f"""
        with stopping.graceful():
            send({name!r}, {name!r})
            work()
        """,
        before=f"import signal; signal.signal(signal.{name}, signal.SIG_IGN)\n",
    )
    assert said(done) == ["worked", "asked: None"]
    assert done.stderr == ""


def test_handlers_of_before_come_back() -> None:
    done = child(
        "work()",
        before=textwrap.dedent("""
            import atexit, signal
            names = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")
            signal.signal(signal.SIGUSR1, lambda *_: None)
            before = {one: signal.getsignal(getattr(signal, one)) for one in names}
            now = lambda: {one: signal.getsignal(getattr(signal, one)) for one in names}
            atexit.register(lambda: print("as before:", now() == before))
        """),
    )
    assert said(done) == ["worked", "asked: None", "as before: True"]


# -- a wish ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_first_signal_lets_what_is_done_be_finished(name: str) -> None:
    done = child(f"""
        with stopping.graceful():
            send({name!r})
            work()
            try:
                stopping.check()
            except StopRequested as stop:
                print("stopped by", stop.reason)
    """)
    assert said(done) == ["worked", f"stopped by {name}", f"asked: {name}"]
    assert done.stderr == wish(name)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_first_signal_ends_what_may_be_abandoned_at_once(name: str) -> None:
    done = child(f"""
        threading.Timer(0.2, send, [{name!r}]).start()
        began = time.monotonic()
        with stopping.graceful():
            try:
                with stopping.abandoning():
                    threading.Event().wait(50)
                    work()
            except StopRequested as stop:
                print("stopped by", stop.reason, time.monotonic() - began < 20)
            print("saving")
    """)
    assert said(done) == [f"stopped by {name} True", "saving", f"asked: {name}"]


def test_nothing_that_may_be_abandoned_begins_after_a_signal() -> None:
    done = child("""
        with stopping.graceful():
            send("SIGTERM")
            try:
                with stopping.abandoning():
                    work()
            except StopRequested as stop:
                print("stopped by", stop.reason)
    """)
    assert said(done) == ["stopped by SIGTERM", "asked: SIGTERM"]


def test_the_cleaning_up_of_what_was_abandoned_is_not_abandoned() -> None:
    done = child("""
        with stopping.graceful():
            try:
                with stopping.abandoning():
                    try:
                        send("SIGTERM")
                        work()
                    finally:
                        stopping.ask("wall time limit")
                        print("cleaned up")
            except StopRequested as stop:
                print("stopped by", stop.reason)
    """)
    assert said(done) == ["cleaned up", "stopped by SIGTERM", "asked: SIGTERM"]


def test_a_stop_passes_through_what_handles_errors() -> None:
    stopping = Stopping()
    stopping.ask("SIGTERM")

    def user_code() -> None:
        with suppress(Exception):
            stopping.check()

    with pytest.raises(StopRequested) as caught:
        user_code()
    assert caught.value.reason == "SIGTERM"


def test_of_several_reasons_the_first_counts(capfd: pytest.CaptureFixture[str]) -> None:
    stopping = Stopping()
    stopping.check()
    stopping.ask("wall time limit")
    stopping.ask("SIGTERM")
    assert stopping.reason == "wall time limit"
    assert capfd.readouterr().err == wish("wall time limit")


# -- failures beside a signal ------------------------------------------------------------------------------------------


def test_what_fails_once_a_stop_is_asked_for_is_the_stop() -> None:
    # the signal of a job ends its engines too
    stopping = Stopping()

    def generate() -> None:
        stopping.reason = "SIGTERM"
        raise ValueError("engine-0 died")

    with pytest.raises(StopRequested) as caught, stopping.abandoning():
        generate()
    assert str(caught.value.__cause__) == "engine-0 died"


def test_what_fails_without_a_stop_is_a_failure() -> None:
    stopping = Stopping()
    with pytest.raises(ValueError, match="engine-0 died"), stopping.abandoning():
        raise ValueError("engine-0 died")
    stopping.ask("SIGTERM")  # and is over: this raises nothing


def test_what_was_finished_before_anybody_looked_is_stopped_behind_it() -> None:
    stopping = Stopping()
    done = []

    def generate() -> None:
        stopping.reason = "SIGTERM"
        done.append("generated")

    with pytest.raises(StopRequested), stopping.abandoning():
        generate()
    assert done == ["generated"]


# -- signals to train workers ------------------------------------------------------------------------------------------


def test_what_a_worker_tells_ends_what_may_be_abandoned() -> None:
    done = child("""
        began = time.monotonic()
        with stopping.graceful():
            try:
                with stopping.abandoning(), stopping.watching(told("SIGTERM to train rank 1")):
                    threading.Event().wait(50)
                    work()
            except StopRequested as stop:
                print("stopped by", stop.reason, time.monotonic() - began < 20)
    """)
    assert said(done) == ["stopped by SIGTERM to train rank 1 True", "asked: SIGTERM to train rank 1"]
    assert done.stderr == wish("SIGTERM to train rank 1")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_jobs_signal_that_a_worker_tells_first_is_one_signal(name: str) -> None:
    done = child(f"""
        with stopping.graceful():
            try:
                with stopping.abandoning(), stopping.watching(told("{name} to train rank 0")):
                    threading.Event().wait(50)
            except StopRequested as stop:
                print("stopped by", stop.reason)
            send({name!r})
            work()
            send({name!r})
            work()
    """)
    first, second, code, asked = said(done)
    assert (first, second, asked) == (
        f"stopped by {name} to train rank 0",
        "worked",
        f"asked: {name} to train rank 0",
    )
    assert int(code) == {"SIGINT": 130, "SIGTERM": 143, "SIGUSR1": 138}[name]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_jobs_signal_that_the_driver_gets_first_is_one_signal(name: str) -> None:
    done = child(f"""
        with stopping.graceful():
            send({name!r})
            with stopping.watching(told("{name} to train rank 0")):
                work(seconds=2.5)
    """)
    assert said(done) == ["worked", f"asked: {name}"]
    assert done.stderr == wish(name)


def test_nobody_is_asked_once_the_block_is_left() -> None:
    done = child("""
        asked = []
        def signals():
            asked.append(None)
            return "SIGTERM to train rank 0"
        with stopping.graceful():
            for _ in range(20):
                with stopping.watching(signals):
                    pass
            print("threads:", threading.active_count(), "asked:", len(asked))
            work(seconds=1.5)
    """)
    assert said(done) == ["threads: 1 asked: 0", "worked", "asked: None"]


def test_workers_without_a_signal_stop_nothing() -> None:
    done = child("""
        with stopping.graceful(), stopping.watching(told(None)):
            work(seconds=1.5)
    """)
    assert said(done) == ["worked", "asked: None"]
    assert done.stderr == ""


def test_where_nobody_can_be_told_a_run_stops_all_the_same() -> None:
    done = child(
        """
        with stopping.graceful():
            send("SIGTERM")
            work()
        """,
        before="import os\nos.close(2)\n",
    )
    assert said(done) == ["worked", "asked: SIGTERM"]
