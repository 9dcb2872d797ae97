"""How long a run may still go on: the limit of the command, its Slurm job's end, and what is kept for the last save.

Measures and judges; it knows nothing of steps or saves beyond how long they take, and stops nothing itself.
"""

import math
import os
import re
import time
from collections.abc import Collection, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain_backend_api import ConfigError

if TYPE_CHECKING:
    from drivetrain_infra.config import SurvivalConfig

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}

_SLURM_END = "SLURM_JOB_END_TIME"

_VARIABLES = {"wall_time_limit": "WALL_TIME_LIMIT", "wall_time_reserve": "WALL_TIME_RESERVE"}
"""What a cluster's job script may set for all programs: weaker than any option of ours, stronger than its default."""


def parse_duration(text: str) -> float:
    """Read seconds from "600", "90s", "10m", "1.5h" or "7d".

    Raises:
        ValueError: it is none of these; the message continues a sentence that begins with what was given.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)", text.strip(), re.ASCII)
    if match is None:
        raise ValueError("must be seconds, or a number with s, m, h or d behind it, as in 90s, 10m, 36h or 7d")
    seconds = float(match[1]) * _UNITS[match[2]]
    if not math.isfinite(seconds):
        raise ValueError("is longer than can be counted")
    return seconds


def in_words(seconds: float) -> str:
    """Write seconds as people say them: 90s, 10m, 1h 30m, 7d."""
    left = round(max(seconds, 0.0))
    parts = []
    for unit in ("d", "h", "m", "s"):
        count, left = divmod(left, _UNITS[unit])
        if count:
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2]) or "0s"


class WallClock:
    """The time that this start of the command has, counted from the start of the process.

    Each start of the command, which is one job of a cluster, has the whole limit; time that earlier starts took does
    not count. Where Slurm says when the job ends, the earlier of both holds.

    Attributes:
        reserve: seconds kept for the last save.
    """

    def __init__(self, limit: float, reserve: float, *, job_end: float | None = None) -> None:
        """Begin at the start of this process.

        Args:
            limit: seconds.
            reserve: seconds.
            job_end: when the job ends, in seconds since the epoch; None where nothing says so.
        """
        self.reserve = reserve
        self._limit = limit
        self._job_end = job_end
        self._started = time.monotonic() - _process_age()

    @classmethod
    def of(cls, config: "SurvivalConfig", environ: Mapping[str, str], explicit: Collection[str] = ()) -> "WallClock":
        """Make the clock of a run.

        Args:
            config: `--wall-time-limit` and `--wall-time-reserve`.
            environ: environment variables, of which WALL_TIME_LIMIT and WALL_TIME_RESERVE act for options that nobody
                set, and SLURM_JOB_END_TIME tells when the job ends.
            explicit: names of the options that the user set by flag, DRIVETRAIN_ variable or file, as in
                "wall_time_limit"; others do not matter.

        Raises:
            ConfigError: a value cannot be read, the reserve leaves nothing of the limit, or the job has ended already.
        """
        values = {"wall_time_limit": config.wall_time_limit, "wall_time_reserve": config.wall_time_reserve}
        names = {option: "--" + option.replace("_", "-") for option in values}
        for option, variable in _VARIABLES.items():
            if option not in explicit and environ.get(variable):
                values[option], names[option] = environ[variable], variable
        seconds = {option: _duration(names[option], value) for option, value in values.items()}
        limit, reserve = seconds["wall_time_limit"], seconds["wall_time_reserve"]
        if reserve >= limit:
            raise ConfigError(
                f"{names['wall_time_reserve']} {values['wall_time_reserve']} leaves nothing of "
                f"{names['wall_time_limit']} {values['wall_time_limit']}; give --wall-time-reserve less than the limit"
            )
        return cls(limit, reserve, job_end=_job_end(environ.get(_SLURM_END)))

    @property
    def elapsed(self) -> float:
        """Seconds since the process started."""
        return time.monotonic() - self._started

    @property
    def left(self) -> float:
        """Seconds until the limit or the end of the job, whichever is earlier; below zero behind it."""
        left = self._limit - self.elapsed
        return left if self._job_end is None else min(left, self._job_end - time.time())

    def must_stop(self, step_seconds: float, save_seconds: float) -> bool:
        """Say that another step and a save would eat into the reserve.

        Args:
            step_seconds: the slowest of the recent steps, rollout and all.
            save_seconds: the slowest save so far.
        """
        return self.left < self.reserve + step_seconds + save_seconds

    def may_evaluate(self) -> bool:
        """Say that more than twice the reserve is left."""
        return self.left > 2 * self.reserve

    def __str__(self) -> str:
        """Say for the log when the run stops, and why then."""
        left = self.left
        ends = datetime.fromtimestamp(time.time() + left).astimezone().isoformat(" ", "seconds")
        job = self._job_end is not None and self._job_end - time.time() <= left
        why = f"the job's end ({_SLURM_END})" if job else f"the limit of {in_words(self._limit)} from its start"
        return f"{in_words(left)} left until {ends}, {why}; {in_words(self.reserve)} of it kept for the last save"


def _duration(name: str, value: str) -> float:
    try:
        return parse_duration(value)
    except ValueError as error:
        raise ConfigError(f"{name} {value}: {error}") from None


def _job_end(text: str | None) -> float | None:
    if not text:
        return None
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{_SLURM_END} {text}: must be seconds since the epoch, as Slurm sets it; unset it")
    end = float(text)
    if end <= time.time():
        raise ConfigError(f"{_SLURM_END} {text} is in the past; unset it, or start inside a job that still runs")
    return end


def _process_age() -> float:
    """Return for how many seconds this process has been there; 0 where the system does not say."""
    try:
        stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(stat[19]) / os.sysconf("SC_CLK_TCK")
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - started, 0.0)
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0
