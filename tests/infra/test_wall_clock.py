"""A run knows how long it may still go on, and stops while a save still fits."""

import subprocess
import sys
import time

import pytest

from drivetrain_backend_api import ConfigError
from drivetrain_infra.config import SurvivalConfig
from drivetrain_infra.wall_clock import WallClock, in_words, parse_duration

HOUR, DAY = 3600.0, 86400.0
NOTHING: dict[str, str] = {}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("600", 600.0), ("90s", 90.0), ("10m", 600.0), ("36h", 36 * HOUR), ("7d", 7 * DAY)),
        *(("1.5h", 1.5 * HOUR), ("0", 0.0), (" 10m ", 600.0), ("007", 7.0)),
    ],
)
def test_durations_are_seconds_or_have_a_unit(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "m", "-5m", "5 m", "1h30m", "5M", "1e3", "inf", "nan", "1:00:00", "5w", "٣", "1." * 2]
)
def test_other_durations_are_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="must be seconds, or a number with s, m, h or d behind it, as in 90s, 10m"):
        parse_duration(text)
    with pytest.raises(ConfigError, match=r"^--wall-time-limit .*: must be seconds") as refused:
        SurvivalConfig(wall_time_limit=text)
    assert len(str(refused.value).splitlines()) == 1


def test_a_duration_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match="is longer than can be counted"):
        parse_duration("9" * 400 + "d")


def test_both_values_that_cannot_be_read_are_named() -> None:
    with pytest.raises(ConfigError) as refused:
        SurvivalConfig(wall_time_limit="soon", wall_time_reserve="later")
    limit, reserve = str(refused.value).splitlines()
    assert limit.startswith("--wall-time-limit soon: ")
    assert reserve.startswith("--wall-time-reserve later: ")


@pytest.mark.parametrize(("seconds", "words"), [(0, "0s"), (-3, "0s"), (59.6, "1m"), (5400, "1h 30m"), (7 * DAY, "7d")])
def test_seconds_are_said_as_people_do(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


def test_the_defaults_are_a_week_and_ten_minutes() -> None:
    clock = WallClock.of(SurvivalConfig(), NOTHING)
    assert (clock.left + clock.elapsed, clock.reserve) == (pytest.approx(7 * DAY, abs=1), 600)


def test_time_counts_from_the_start_of_the_process() -> None:
    code = "import time; time.sleep(1.5); from drivetrain_infra.wall_clock import *; print(WallClock(60, 1).elapsed)"
    before = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    # the system counts a process's start in hundredths of a second
    assert 1.5 - 0.02 <= float(done.stdout) <= time.monotonic() - before + 0.02


def test_the_environment_acts_where_the_user_set_nothing() -> None:
    config = SurvivalConfig(wall_time_limit="2h", wall_time_reserve="5m")
    environ = {"WALL_TIME_LIMIT": "36h", "WALL_TIME_RESERVE": "20m"}

    def limit_and_reserve(*explicit: str) -> tuple[float, float]:
        clock = WallClock.of(config, environ, explicit)
        return round(clock.left + clock.elapsed), clock.reserve

    assert limit_and_reserve() == (36 * HOUR, 1200)
    assert limit_and_reserve("wall_time_limit", "save") == (2 * HOUR, 1200)
    assert limit_and_reserve("wall_time_reserve") == (36 * HOUR, 300)
    assert limit_and_reserve("wall_time_limit", "wall_time_reserve") == (2 * HOUR, 300)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"WALL_TIME_LIMIT": "soon"}, "WALL_TIME_LIMIT soon: must be seconds, or a number"),
        ({"WALL_TIME_RESERVE": "-1"}, "WALL_TIME_RESERVE -1: must be seconds, or a number"),
        ({"WALL_TIME_LIMIT": "5m"}, "--wall-time-reserve 10m leaves nothing of WALL_TIME_LIMIT 5m; give --wall-time-"),
        ({"WALL_TIME_RESERVE": "8d"}, "WALL_TIME_RESERVE 8d leaves nothing of --wall-time-limit 7d; give --wall-time-"),
        ({"SLURM_JOB_END_TIME": "noon"}, "SLURM_JOB_END_TIME noon: must be seconds since the epoch"),
        ({"SLURM_JOB_END_TIME": "-5"}, "SLURM_JOB_END_TIME -5: must be seconds since the epoch"),
        ({"SLURM_JOB_END_TIME": "1000000000"}, "SLURM_JOB_END_TIME 1000000000 is in the past"),
    ],
)
def test_what_the_environment_says_wrongly_is_named(environ: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        WallClock.of(SurvivalConfig(), environ)
    assert str(refused.value).startswith(said)


def test_a_value_of_the_environment_that_does_not_act_is_not_read() -> None:
    WallClock.of(SurvivalConfig(), {"WALL_TIME_LIMIT": "soon"}, ["wall_time_limit"])
    WallClock.of(SurvivalConfig(), {"WALL_TIME_LIMIT": "", "SLURM_JOB_END_TIME": ""})


def test_a_reserve_that_leaves_nothing_is_refused_where_both_are_set() -> None:
    with pytest.raises(ConfigError, match="--wall-time-reserve 1h leaves nothing of --wall-time-limit 60m; give"):
        SurvivalConfig(wall_time_limit="60m", wall_time_reserve="1h")
    # one alone may be made good by the environment
    config = SurvivalConfig(wall_time_limit="60s")
    assert WallClock.of(config, {"WALL_TIME_RESERVE": "5s"}, ["wall_time_limit"]).reserve == 5
    with pytest.raises(ConfigError, match="--wall-time-reserve 10m leaves nothing of --wall-time-limit 60s"):
        WallClock.of(config, NOTHING, ["wall_time_limit"])


@pytest.mark.parametrize(("job_seconds", "reason"), [(1800, "the job's end"), (7200, "the limit of 1h from its start")])
def test_the_earlier_of_limit_and_job_end_holds(job_seconds: int, reason: str) -> None:
    config = SurvivalConfig(wall_time_limit="1h")
    clock = WallClock.of(config, {"SLURM_JOB_END_TIME": str(int(time.time()) + job_seconds)})
    expected = min(job_seconds, HOUR - clock.elapsed)
    assert clock.left == pytest.approx(expected, abs=2)
    assert reason in str(clock)
    assert "10m of it kept for the last save" in str(clock)


def test_it_stops_while_a_step_and_a_save_fit_before_the_reserve() -> None:
    clock = WallClock(WallClock(0, 0).elapsed + 1000, 100)  # 1000 seconds left
    assert not clock.must_stop(500, 390)
    assert clock.must_stop(500, 401)
    assert clock.must_stop(901, 0)
    assert not clock.must_stop(0, 0)


def test_evaluation_needs_more_than_twice_the_reserve() -> None:
    elapsed = WallClock(0, 0).elapsed
    assert WallClock(elapsed + 210, 100).may_evaluate()
    assert not WallClock(elapsed + 200, 100).may_evaluate()


def test_a_clock_that_ran_out_stops_at_once() -> None:
    clock = WallClock(0.5, 0.25, job_end=time.time() + DAY)
    assert clock.left < 0.5
    time.sleep(0.5)
    assert clock.left < 0
    assert clock.must_stop(0, 0)
    assert not clock.may_evaluate()
    assert str(clock).startswith("0s left until ")
