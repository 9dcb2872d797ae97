"""Which sleep tier is picked and why, and what torch-memory-saver needs before a process starts.

Packages are laid out on the path of a process of their own, with the files that their wheels have; torch there cannot
be imported.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import drivetrain_backend_api
import drivetrain_backend_megatron
from drivetrain_backend_api import ConfigError
from drivetrain_backend_megatron.config import MegatronConfig
from drivetrain_backend_megatron.sleep import AUTO, SleepTier, memory_saver_preloaded, select_sleep_tier

MARKED = [
    f"torch_memory_saver_hook_mode_{mode}{mark}.abi3.so"
    for mode in ("preload", "torch")
    for mark in ("", "_cu12", "_cu13")
]
UNMARKED = [f"torch_memory_saver_hook_mode_{mode}.abi3.so" for mode in ("preload", "torch")]

PROGRAM = """
import json, os, sys
from drivetrain_backend_api import ConfigError
from drivetrain_backend_megatron import sleep
call = json.loads(sys.argv[1])
try:
    found = getattr(sleep, call["name"])(*call["args"], **call["kwargs"])
except ConfigError as error:
    found = f"ConfigError: {error}"
print(json.dumps({"found": found, "torch": [one for one in sys.modules if one.split(".")[0].startswith("torch")]}))
"""


def installed(folder: Path, *, torch: str | None, libraries: Sequence[str] | None) -> Path:
    """A folder as site-packages: torch for a version of CUDA (None: without), torch-memory-saver (None: not there)."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text("raise ImportError('torch must not be imported')\n")
    (folder / "torch" / "version.py").write_text(
        "from typing import Optional\n\n__all__ = ['__version__', 'debug', 'cuda']\n__version__ = '2.11.0'\n"
        f"debug = False\ncuda: Optional[str] = {torch!r}\nhip: Optional[str] = None\n"
    )
    if libraries is not None:
        (folder / "torch_memory_saver").mkdir()
        (folder / "torch_memory_saver" / "__init__.py").write_text("import torch\n")
        for one in libraries:
            (folder / one).touch()
    return folder


def ask(
    folder: Path, name: str, *args: Any, ld_preload: str = "", settings: Mapping[str, str] = {}, **kwargs: Any
) -> Any:
    """Call a function of the module in a process that has only `folder` beside the two packages."""
    places = [
        folder,
        *(
            Path(one.__file__).parent.parent
            for one in (drivetrain_backend_api, drivetrain_backend_megatron)
            if one.__file__
        ),
    ]
    environment = {"PYTHONPATH": os.pathsep.join(map(str, places)), "PATH": os.environ["PATH"]}
    call = json.dumps(
        {"name": name, "args": args, "kwargs": kwargs | {"environment": {"LD_PRELOAD": ld_preload, **settings}}}
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", PROGRAM, call], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["torch"] == []
    return answer["found"]


@pytest.mark.parametrize(
    ("cuda", "libraries", "chosen"),
    [
        ("12.8", MARKED, "torch_memory_saver_hook_mode_preload_cu12.abi3.so"),
        ("13.2", MARKED, "torch_memory_saver_hook_mode_preload_cu13.abi3.so"),
        ("12.8", UNMARKED, "torch_memory_saver_hook_mode_preload.abi3.so"),
        (None, UNMARKED, "torch_memory_saver_hook_mode_preload.abi3.so"),
    ],
)
def test_the_preload_is_the_library_for_torchs_cuda_before_others(
    tmp_path: Path, cuda: str | None, libraries: list[str], chosen: str
) -> None:
    folder = installed(tmp_path / "site", torch=cuda, libraries=libraries)
    library = str(folder / chosen)
    switches = {"TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1"}
    assert ask(folder, "memory_saver_env") == {"LD_PRELOAD": library, **switches}
    assert ask(folder, "memory_saver_env", ld_preload="/a/libx.so") == {
        "LD_PRELOAD": f"{library}:/a/libx.so",
        **switches,
    }
    again = f"{library}:/a/libx.so"
    assert ask(folder, "memory_saver_env", ld_preload=again) == {"LD_PRELOAD": again, **switches}


@pytest.mark.parametrize(
    ("cuda", "libraries", "message"),
    [
        ("12.8", None, "--sleep-tier memory_saver needs torch-memory-saver; pip install "),
        ("11.8", MARKED, "torch is built for CUDA 11 and torch-memory-saver in "),
        ("12.8", [], "has no library torch_memory_saver_hook_mode_preload_cu12 for it (there: none)"),
    ],
    ids=["not installed", "other CUDA", "empty"],
)
def test_a_preload_that_cannot_be_is_refused_with_the_fix(
    tmp_path: Path, cuda: str, libraries: list[str] | None, message: str
) -> None:
    found = ask(installed(tmp_path / "site", torch=cuda, libraries=libraries), "memory_saver_env")
    assert found.startswith("ConfigError: --sleep-tier memory_saver")
    assert message in found
    assert found.endswith("or take --sleep-tier offload")
    assert "\n" not in found


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return installed(tmp_path / "site", torch="12.8", libraries=MARKED)


def test_memory_saver_is_picked_where_its_library_is_preloaded(site: Path) -> None:
    library = str(site / MARKED[1])
    for requested, reason in (
        ("auto", "its library is preloaded"),
        ("memory_saver", "--sleep-tier asks for it and its library is preloaded"),
    ):
        found = ask(site, "select_sleep_tier", requested, device="cuda", preload=True, ld_preload=f"/a/x.so:{library}")
        assert found == ["memory_saver", reason]


def test_a_preload_that_nobody_asked_for_is_not_used(site: Path) -> None:
    found = ask(site, "select_sleep_tier", "auto", device="cuda", preload=False, ld_preload=str(site / MARKED[1]))
    assert found == ["offload", "the default; torch-memory-saver's preload was not asked for"]


@pytest.mark.parametrize(
    ("device", "ld_preload", "settings", "problem"),
    [
        (
            "cpu",
            "{site}/{library}",
            {},
            "it works on CUDA devices only, and this run trains on cpu; train on GPUs",
        ),
        (
            "cuda",
            "",
            {},
            "LD_PRELOAD of this process has not its library; start it by `drivetrain train` with this flag",
        ),
        ("cuda", "{site}/{library}:/b/{library}", {}, "LD_PRELOAD has more than one of its libraries"),
        ("cuda", "/gone/{library}", {}, "LD_PRELOAD names /gone/{library}, which is no file on this machine"),
        (
            "cuda",
            "{site}/{library}",
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            "it cannot work with expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF; drop that setting",
        ),
    ],
    ids=["cpu", "not preloaded", "twice", "gone", "allocator"],
)
def test_auto_falls_back_with_the_reason_and_an_explicit_request_is_refused_with_the_fix(
    site: Path, device: str, ld_preload: str, settings: dict[str, str], problem: str
) -> None:
    names = {"site": site, "library": MARKED[1]}
    asked: dict[str, Any] = {
        "device": device,
        "preload": True,
        "ld_preload": ld_preload.format(**names),
        "settings": settings,
    }
    tier, reason = ask(site, "select_sleep_tier", "auto", **asked)
    assert tier == "offload"
    assert reason.startswith("the default, since torch-memory-saver cannot be used: " + problem.format(**names))
    error = ask(site, "select_sleep_tier", "memory_saver", **asked)
    assert error.startswith("ConfigError: --sleep-tier memory_saver: " + problem.format(**names))
    assert error.endswith(", or take --sleep-tier offload")


def test_without_the_package_the_fix_is_to_install_it(tmp_path: Path) -> None:
    site = installed(tmp_path / "site", torch="12.8", libraries=None)
    error = ask(site, "select_sleep_tier", "memory_saver", device="cuda", preload=False)
    assert "torch-memory-saver is not installed; pip install 'drivetrain-backend-megatron[memory-saver]'" in error


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_offload_is_the_default_and_the_others_come_by_name(device: str) -> None:
    picked = select_sleep_tier(AUTO, device=device, preload=False, environment={})
    assert picked == (SleepTier.OFFLOAD, "the default; torch-memory-saver's preload was not asked for")
    for tier in (SleepTier.OFFLOAD, SleepTier.PROCESS_GROUPS):
        picked = select_sleep_tier(tier.value, device=device, preload=True, environment={})
        assert picked == (tier, "--sleep-tier asks for it")


def test_an_unknown_tier_is_refused_with_the_list() -> None:
    with pytest.raises(
        ConfigError, match="--sleep-tier deep is not a tier; give auto, memory_saver, offload, process_groups"
    ):
        select_sleep_tier("deep", device="cpu", preload=False)


def test_the_flag_takes_every_tier() -> None:
    (field,) = (one for one in fields(MegatronConfig) if one.name == "sleep_tier")
    assert set(field.metadata["choices"]) == {AUTO, *SleepTier}


def test_a_preload_is_seen_by_the_librarys_name() -> None:
    assert memory_saver_preloaded({"LD_PRELOAD": f"/a/{MARKED[0]} /b/libx.so"})
    assert not memory_saver_preloaded({"LD_PRELOAD": "/torch_memory_saver/libx.so"})
    assert not memory_saver_preloaded({})
