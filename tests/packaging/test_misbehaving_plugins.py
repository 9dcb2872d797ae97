import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

START = ["train", "--train-backend", "jax", "--hf-checkpoint", "M", "--prompt-data", "P", "--save", "S"]


def install(site: Any, probe: str) -> None:
    code = (
        "import pathlib, time\n"
        "from drivetrain_backend_api import BackendSpec, ProbeResult, TrainConfig\n"
        f"def probe():\n    {probe}\n"
        "SPEC = BackendSpec(\n"
        "    name='jax', api_version=1, target='nowhere:Backend', config_class=TrainConfig, probe=probe\n"
        ")\n"
    )
    site.install("backend-jax", module="jax_spec", name="jax", code=code)


def test_an_unexpected_error_leaves_its_traceback_in_a_file_and_none_on_the_screen(site: Any) -> None:
    install(site, "raise RuntimeError('no luck\\n at all')")
    done = site.drivetrain(*START, "--num-rollout", "1")
    assert done.returncode == 1
    first, second = done.stderr.splitlines()
    assert first == "drivetrain: error: unexpected RuntimeError: no luck"
    log = Path(second.removeprefix("drivetrain: error: the full traceback is in "))
    text = log.read_text()
    assert text.startswith("Traceback (most recent call last):")
    assert "RuntimeError: no luck\n at all" in text


def test_an_unavailable_backend_is_refused_with_its_own_reason(site: Any) -> None:
    install(site, "return ProbeResult(available=False, detail='needs a TPU; pip install jax-tpu')")
    done = site.drivetrain(*START, "--num-rollout", "1")
    assert done.returncode == 2
    assert done.stderr == "drivetrain: error: --train-backend jax: needs a TPU; pip install jax-tpu\n"


def test_an_interrupt_ends_the_command_with_130_and_no_traceback(site: Any) -> None:
    install(site, "pathlib.Path('started').touch(); time.sleep(60)")
    words = [sys.executable, "-m", "drivetrain_launcher.cli", *START, "--num-rollout", "1"]
    with subprocess.Popen(words, cwd=site.folder, env=site.environ, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 30
        while not (site.folder / "started").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, shown = process.communicate(timeout=30)
    assert (process.returncode, shown) == (130, "drivetrain: interrupted\n")
