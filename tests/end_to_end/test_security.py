"""One real run in hostile surroundings: nothing that lies there executes, ports face inwards, no secret leaks."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from drivetrain_infra.ray_runtime import ray_temp_dir

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SECRET = "5ecret" + "0123456789abcdef" * 2
LOOPBACK = {"127.0.0.1", "::1"}


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.canary),)


class Outcome(NamedTuple):
    code: int
    output: str
    run: Path
    canary: Path
    listeners: dict[str, set[str]]


def hostile_model(source: Path, folder: Path, canary: Path) -> None:
    """Copy a model folder and add everything that careless loaders execute."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"import os; os.mkdir({str(canary)!r})\n")
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "adapter_model.bin", "scheduler.pt"):
        (folder / name).write_bytes(pickle.dumps(Payload(canary)))


def members(temp_dir: Path) -> list[psutil.Process]:
    """List the processes that were started inside a run."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("RAY_TMPDIR") == str(temp_dir):
                found.append(process)
        except psutil.Error:
            continue
    return found


def listening(process: psutil.Process) -> set[str]:
    try:
        sockets = process.net_connections("inet")
    except psutil.Error:
        return set()
    return {one.laddr.ip.removeprefix("::ffff:") for one in sockets if one.status == psutil.CONN_LISTEN}


@pytest.fixture(scope="module")
def outcome(sums: Path, train_words: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("hostile")
    canary = folder / "executed"
    hostile_model(sums / "model", folder / "model", canary)
    words = train_words(
        *("--hf-checkpoint", "model", "--num-rollout", "8", "--save", "RUN", "--save-interval", "4"),
        *("--reward", "my_rewards:length", "--use-wandb", "--wandb-mode", "offline"),
    )
    given = words.index("--hf-checkpoint")
    del words[given : given + 2]
    (folder / "my_rewards.py").write_text("def length(sample):\n    return float(sample.index % 2)\n")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DRIVETRAIN_", "RAY_"))}
    secrets = dict.fromkeys(("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"), SECRET)
    seen: dict[str, set[str]] = {}
    with (folder / "output").open("w") as output:
        driver = psutil.Popen(
            [sys.executable, "-m", "drivetrain_launcher.cli", *words],
            cwd=folder,
            env=clean | secrets | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            deadline = time.monotonic() + 300
            while driver.poll() is None and time.monotonic() < deadline:
                for process in [driver, *members(ray_temp_dir(folder / "RUN"))]:
                    if hosts := listening(process):
                        seen.setdefault(f"process {process.pid}", set()).update(hosts)
                time.sleep(0.5)
        finally:
            if driver.poll() is None:
                driver.kill()
            code = driver.wait()
    return Outcome(code=code, output=(folder / "output").read_text(), run=folder / "RUN", canary=canary, listeners=seen)


def test_nothing_in_the_model_folder_executes(outcome: Outcome) -> None:
    assert outcome.code == 0, outcome.output
    assert (outcome.run / "latest").is_file()
    assert not outcome.canary.exists()


def test_every_port_listens_on_the_loopback_interface(outcome: Outcome) -> None:
    # gcs_server, raylet, train worker and engine at the least
    assert len(outcome.listeners) >= 4, outcome.output
    assert {name: hosts for name, hosts in outcome.listeners.items() if hosts - LOOPBACK} == {}


def test_no_secret_of_the_environment_is_shown_or_saved(outcome: Outcome) -> None:
    assert SECRET not in outcome.output
    files = [path for path in outcome.run.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def test_a_checkpoint_full_of_pickles_executes_nothing_in_a_run(
    outcome: Outcome, sums: Path, train_words: Callable[..., list[str]], drivetrain: Callable[..., Any]
) -> None:
    checkpoint = outcome.run / "iter_0000004"
    canary = outcome.canary.with_name("executed_by_load")
    for path in checkpoint.rglob("*.distcp"):
        path.write_bytes(pickle.dumps(Payload(canary)).ljust(path.stat().st_size, b"\0"))
    words = train_words("--num-rollout", "9", "--save", "NEW", "--load", str(checkpoint), "--reward", "math")
    finished = drivetrain(*words, folder=outcome.run.parent)
    assert finished.code == 2, finished.output
    assert str(checkpoint) in finished.output
    assert not canary.exists()
