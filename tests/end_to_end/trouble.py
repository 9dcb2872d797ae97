"""A user's own code that brings trouble over its run: kills and signals at moments that a plan names.

`drivetrain` imports it as the module of the reward function, and every other Python process of the run at its start, by
`sitecustomize`. Environment variables say what to do: TROUBLE, a JSON list of `Blow`, one after the other, and
TROUBLE_FOLDER, where what hit is written down just before it does. Needs nothing but the standard library until then.
"""

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PHASES = ("make_rollout", "train_on", "evaluate", "generate", "sync")
"""Three functions of the train loop, and two that happen inside them: of all engines, and of their weights."""

DRIVER, WORKER, ENGINE = "driver", "worker", "engine"

_IN_COMMAND = {WORKER: "ray::TrainWorker", ENGINE: "ray::EngineActor"}

_USUAL_SECONDS = 0.2
"""Of a phase, before the first has passed."""


@dataclass(frozen=True, kw_only=True)
class Blow:
    """One thing that happens to the run, once. It counts from when the one before it has happened.

    Attributes:
        victim: DRIVER, WORKER or ENGINE.
        signal: name of what is sent.
        rank: which of the train workers, in the order of their process ids.
        phase: happens in this phase of the loop, at its `nth` time from here on.
        after: share of the phase's last duration that passes before; None for the first reward inside the phase.
        file: in place of a phase, pattern of the audit event with its paths ("open PATH", "os.rename OLD NEW"), at the
            `nth` of which in one process it happens, before the event.
        by: which process's events count: DRIVER or WORKER.
        nth: from 1.
        pause: seconds that the run is held up behind it, so that whoever is told has time to act.
        until: age of the driver's process in seconds until which it is held up.
    """

    victim: str
    signal: str = "SIGKILL"
    rank: int = 0
    phase: str | None = None
    after: float | None = None
    file: str | None = None
    by: str = DRIVER
    nth: int = 1
    pause: float = 0.0
    until: float = 0.0


def odd_digits(sample: Any) -> float:
    """Reward with variance even while the model knows nothing: how many of the response's characters are odd digits."""
    if _DRIVER is not None:
        _DRIVER.rewarded()
    return sum(one in "13579" for one in sample.response) / 5


# -- in every process --------------------------------------------------------------------------------------------------


class _Armed:
    """The blow that is due, known to every process of the run through a file that whoever strikes removes."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "armed.json"
        self._hits = folder / "hits.jsonl"

    def arm(self, number: int, blow: Blow) -> None:
        aside = self._path.with_suffix(".aside")
        aside.write_text(json.dumps({"number": number, "driver": os.getpid(), "blow": asdict(blow)}))
        aside.replace(self._path)

    def read(self) -> tuple[int, int, Blow] | None:
        """Return the blow's number, the driver's process id, and the blow."""
        try:
            table = json.loads(self._path.read_text())
        except FileNotFoundError:
            return None
        return table["number"], table["driver"], Blow(**table["blow"])

    def strike(self, where: str) -> None:
        """Do it, unless another process was first, or the victim is just being started."""
        if (armed := self.read()) is None:
            return
        number, driver, blow = armed
        pid = driver if blow.victim == DRIVER else _find(driver, blow)
        if pid is None:
            return
        try:
            self._path.unlink()
        except FileNotFoundError:
            return
        with self._hits.open("a") as file:
            hit = {"number": number, "where": where, "pid": pid, "at": time.time(), **asdict(blow)}
            file.write(json.dumps(hit) + "\n")
        os.kill(pid, signal.Signals[blow.signal])
        time.sleep(max(blow.pause, blow.until - _age() if blow.until else 0.0))


def _age() -> float:
    import psutil

    created: float = psutil.Process().create_time()
    return time.time() - created


def _find(driver: int, blow: Blow) -> int | None:
    import psutil

    found = []
    for one in psutil.Process(driver).children(recursive=True):
        with suppress(psutil.Error):  # gone meanwhile
            if _IN_COMMAND[blow.victim] in " ".join(one.cmdline()):
                found.append(one.pid)
    return sorted(found)[blow.rank] if len(found) > blow.rank else None


class _Files:
    """Watches what a process does to files, in the order in which it does it."""

    def __init__(self, armed: _Armed, by: str, where: Callable[[], str]) -> None:
        self._armed, self._by, self._where = armed, by, where
        self._busy = threading.local()
        self._counted: tuple[int, int] = (-1, 0)
        sys.addaudithook(self._saw)

    def _saw(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "os.rename", "os.mkdir", "os.remove", "shutil.rmtree"):
            return
        if getattr(self._busy, "now", False):
            return
        self._busy.now = True
        try:
            paths = [one for one in map(_text, arguments[:2]) if one is not None and not one.startswith("/proc")]
            if event == "open" and not _writes(arguments):
                return
            armed = self._armed.read()
            if armed is None or armed[2].file is None or armed[2].by != self._by:
                return
            seen = " ".join([event, *paths])
            if not re.search(armed[2].file, seen):
                return
            number, count = self._counted
            self._counted = armed[0], count + 1 if number == armed[0] else 1
            if self._counted[1] >= armed[2].nth:
                self._armed.strike(f"{self._where()}, {self._by} before: {seen}")
        finally:
            self._busy.now = False


def _writes(arguments: tuple[Any, ...]) -> bool:
    mode, flags = arguments[1], arguments[2]
    if isinstance(mode, str):
        return any(one in mode for one in "wax+")
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def _text(path: Any) -> str | None:
    try:
        return os.fsdecode(path)
    except TypeError:  # a descriptor, a mode
        return None


# -- in the driver -----------------------------------------------------------------------------------------------------


class _Driver:
    """Follows the loop through its phases, and strikes inside them."""

    def __init__(self, blows: list[Blow], armed: _Armed) -> None:
        self._blows, self._armed = blows, armed
        self._next = 0
        self._entered: dict[str, int] = {}
        self._phases: list[str] = []
        self._seconds: dict[str, float] = {}
        self._arm()

    def where(self) -> str:
        return self._phases[-1] if self._phases else "between phases"

    def _arm(self) -> None:
        if self._next < len(self._blows):
            self._armed.arm(self._next, self._blows[self._next])
            self._next += 1
            self._entered = {}

    def _arm_second_signal(self) -> None:
        """Arm what hits the save that a first signal asks for: no phase comes between them."""
        following = self._blows[self._next] if self._next < len(self._blows) else None
        if following and following.signal == "SIGTERM" and following.file and self._armed.read() is None:
            self._arm()

    def rewarded(self) -> None:
        if (blow := self._due()) and blow.after is None:
            self._armed.strike(f"{self.where()}, reward")

    def _due(self) -> Blow | None:
        """Return the blow that is due in the current phases, if there is one."""
        armed = self._armed.read()
        blow = armed[2] if armed else None
        return blow if blow and blow.phase in self._phases and self._entered[blow.phase] >= blow.nth else None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self._armed.read() is None:
            self._arm()
        self._entered[name] = self._entered.get(name, 0) + 1
        self._phases.append(name)
        blow = self._due()
        if blow and blow.phase == name and blow.after is not None:
            self._strike_after(blow.after * self._seconds.get(name, _USUAL_SECONDS))
        began = time.monotonic()
        try:
            yield
            self._seconds[name] = time.monotonic() - began
        finally:
            self._phases.pop()

    def _strike_after(self, seconds: float) -> None:
        def strike() -> None:
            time.sleep(seconds)
            self._armed.strike(self.where())
            self._arm_second_signal()

        threading.Thread(target=strike, daemon=True).start()

    def follow(self, owner: Any, name: str) -> None:
        """Make a function of the loop a phase."""
        function = getattr(owner, name)

        def followed(*arguments: Any, **more: Any) -> Any:
            with self.phase(name):
                return function(*arguments, **more)

        setattr(owner, name, followed)


def _begin() -> "_Driver | None":
    blows = [Blow(**one) for one in json.loads(os.environ.get("TROUBLE", "[]"))]
    if not blows:
        return None
    armed = _Armed(Path(os.environ["TROUBLE_FOLDER"]))
    if "drivetrain_launcher.cli" not in sys.orig_argv:
        _Files(armed, WORKER, lambda: "in a rank")
        return None
    from drivetrain_infra.weight_sync import session
    from drivetrain_launcher import engine_pool, loop

    driver = _Driver(blows, armed)
    for owner, name in zip((loop, loop, loop, engine_pool.EnginePool, session.WeightSession), PHASES, strict=True):
        driver.follow(owner, name)
    _Files(armed, DRIVER, driver.where)
    return driver


_DRIVER = _begin()
