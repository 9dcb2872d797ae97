"""A user's code that stops everything: real processes with a real guard, without Ray."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain_backend_api import DataError
from drivetrain_infra.run_folder import RunFolder
from drivetrain_launcher.rewards import Reward, RewardInput
from drivetrain_launcher.user_code import call_within

SAMPLE = RewardInput(index=3, prompt="1+1=", response="2", response_length=1, status=None)  # type: ignore[arg-type]

# The match takes years and keeps the interpreter lock for all of them.
DRIVER = """
import re, sys
from pathlib import Path
from drivetrain_infra.ray_runtime import owned_temp_dir
from drivetrain_launcher import user_code

user_code._GRACE_SECONDS = 0.5
save = Path(sys.argv[1])

def hangs(say):
    say("sentence {one}")
    say("a longer sentence, of sample 2")
    say("sentence of sample 3")
    if sys.argv[2] == "removed":
        save.joinpath("iter_0000001").rename(save.with_name("kept"))
        save.joinpath("latest").unlink()
        save.rmdir()
    return re.match(r"(a+)+$", "a" * 40 + "b")

with owned_temp_dir(save):
    assert user_code.call_within(lambda say: 5, 20, name="quick", save=save) == 5
    user_code.call_within(hangs, 0.5, name="hangs", save=save)
"""


@pytest.mark.parametrize("save", ["kept", "removed"])
def test_code_that_never_lets_go_of_the_interpreter_is_named_and_logged(save: str, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "RUN")
    run.root.mkdir()
    with run.new_checkpoint(1) as checkpoint:
        (checkpoint / "weights").touch()
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(run.root), save], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (1, "")
    first, second, third = done.stderr.splitlines()
    assert first == "drivetrain: error: sentence of sample 3"
    log = Path(second.removeprefix("drivetrain: error: the full traceback is in "))
    assert re.fullmatch(r"error_\d{8}-\d{6}_\d+\.log", log.name)
    assert (log.parent == run.root) is (save == "kept")
    assert "in hangs" in log.read_text()
    assert third.startswith(f"drivetrain: the newest checkpoint is {run.root}/iter_0000001; to go on from it")
    if save == "removed":
        log.unlink()
        log.parent.rmdir()


def test_a_reward_with_a_signal_timeout_is_told_the_fix() -> None:
    def alarmed(sample: RewardInput) -> float:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
        except ValueError as error:  # as math-verify says it
            raise ValueError("no support for threads") from error
        return 0.0

    reward = Reward(name="mine:alarmed", function=alarmed)
    with pytest.raises(DataError, match=r"failed: ValueError: no support for threads; user code runs in a thread"):
        call_within(lambda say: reward(SAMPLE), 20, name="reward", save=None)
