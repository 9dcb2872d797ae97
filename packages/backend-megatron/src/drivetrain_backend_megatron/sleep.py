"""How the accelerator's memory is given back during generation: which of three tiers, and what the first one needs.

What is asked before a worker starts is answered here, so this file never imports torch or Megatron.
"""

import os
import re
from collections.abc import Mapping
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path

from drivetrain_backend_api import ConfigError

AUTO = "auto"
"""The value of --sleep-tier that leaves the choice to `select_sleep_tier`."""

_FLAG = "--sleep-tier"
_PACKAGE = "torch_memory_saver"
_LIBRARY = "torch_memory_saver_hook_mode_preload"
_INSTALL = "pip install 'drivetrain-backend-megatron[memory-saver]'"
_OTHERS = f"or take {_FLAG} offload"


class SleepTier(StrEnum):
    """What `sleep` does; each of the first two also destroys process groups.

    MEMORY_SAVER: torch-memory-saver unmaps all device memory and keeps the addresses.
    OFFLOAD: weights and optimizer state go to the host, gradient buffers are dropped.
    PROCESS_GROUPS: only the communicators' buffers are given back.
    """

    MEMORY_SAVER = "memory_saver"
    OFFLOAD = "offload"
    PROCESS_GROUPS = "process_groups"


def select_sleep_tier(
    requested: str, *, device: str, preload: bool, environment: Mapping[str, str] = os.environ
) -> tuple[SleepTier, str]:
    """Pick the tier of this process and say why, in one line.

    Args:
        requested: the value of --sleep-tier.
        device: the torch device type that it trains on.
        preload: torch-memory-saver's library was asked for before this process started.
        environment: of this process.

    Raises:
        ConfigError: the tier that was asked for by name cannot work here.
    """
    if requested not in (AUTO, *SleepTier):
        raise ConfigError(f"{_FLAG} {requested} is not a tier; give {', '.join((AUTO, *SleepTier))}")
    if requested == SleepTier.MEMORY_SAVER:
        problem = _memory_saver_problem(device, preload, environment)
        if problem is not None:
            raise ConfigError(f"{_FLAG} {requested}: {problem}, {_OTHERS}")
        return SleepTier.MEMORY_SAVER, f"{_FLAG} asks for it and its library is preloaded"
    if requested != AUTO:
        return SleepTier(requested), f"{_FLAG} asks for it"
    if not preload:
        return SleepTier.OFFLOAD, "the default; torch-memory-saver's preload was not asked for"
    problem = _memory_saver_problem(device, preload, environment)
    if problem is not None:
        return SleepTier.OFFLOAD, f"the default, since torch-memory-saver cannot be used: {problem}"
    return SleepTier.MEMORY_SAVER, "its library is preloaded"


def memory_saver_preloaded(environment: Mapping[str, str] = os.environ) -> bool:
    """Tell whether a process was started with torch-memory-saver's library."""
    return len(_preloaded(environment)) == 1


def memory_saver_env(environment: Mapping[str, str] = os.environ) -> Mapping[str, str]:
    """Return what must be in the environment before a process starts that sleeps by torch-memory-saver.

    All device memory of that process, its communicators' too, can then be unmapped and has a copy on the host.

    Args:
        environment: of the process that starts it; other preloaded libraries are kept.

    Raises:
        ConfigError: torch-memory-saver is not installed or does not fit torch.
    """
    others = [one for one in _libraries(environment) if one not in _preloaded(environment)]
    return {
        "LD_PRELOAD": ":".join([str(_memory_saver_library()), *others]),
        "TMS_INIT_ENABLE": "1",
        "TMS_INIT_ENABLE_CPU_BACKUP": "1",
    }


def _memory_saver_problem(device: str, preload: bool, environment: Mapping[str, str]) -> str | None:
    """Say why torch-memory-saver cannot be used in this process, and the fix; None when it can."""
    if device != "cuda":
        return f"it works on CUDA devices only, and this run trains on {device}; train on GPUs"
    if find_spec(_PACKAGE) is None:
        return f"torch-memory-saver is not installed; {_INSTALL}"
    found = _preloaded(environment)
    if len(found) > 1:
        return f"LD_PRELOAD has more than one of its libraries ({', '.join(found)}); keep one"
    if not preload or not found:
        return (
            "LD_PRELOAD of this process has not its library; start it by `drivetrain train` with this flag, or set "
            f"LD_PRELOAD={_memory_saver_library()} before it starts"
        )
    if not Path(found[0]).is_file():
        return f"LD_PRELOAD names {found[0]}, which is no file on this machine; install it there ({_INSTALL})"
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:True" in environment.get(name, ""):
            return f"it cannot work with expandable_segments:True in {name}; drop that setting"
    return None


def _libraries(environment: Mapping[str, str]) -> list[str]:
    """Split LD_PRELOAD as the dynamic linker does."""
    return [one for one in environment.get("LD_PRELOAD", "").replace(" ", ":").split(":") if one]


def _preloaded(environment: Mapping[str, str]) -> list[str]:
    """List torch-memory-saver's libraries in LD_PRELOAD."""
    return [one for one in _libraries(environment) if _PACKAGE in Path(one).name]


def _memory_saver_library() -> Path:
    """Find the library that fits the installed torch, which is not imported.

    Wheels for CUDA carry one library a major version of CUDA; those for ROCm, and older ones, a single one.
    """
    package = _folder_of(_PACKAGE)
    if package is None:
        raise ConfigError(f"{_FLAG} memory_saver needs torch-memory-saver; {_INSTALL}, {_OTHERS}")
    major = _cuda_major()
    names = [_LIBRARY] if major is None else [f"{_LIBRARY}_cu{major}", _LIBRARY]
    for name in names:
        # Built for another CUDA, an unmarked library beside marked ones would load and fail later.
        if name == _LIBRARY and major is not None and _built(package, f"{_LIBRARY}_cu*"):
            break
        found = _built(package, name)
        if len(found) == 1:
            return found[0]
    built_for = f"CUDA {major}" if major is not None else "no CUDA"
    there = ", ".join(one.name for one in _built(package, f"{_PACKAGE}*")) or "none"
    raise ConfigError(
        f"{_FLAG} memory_saver: torch is built for {built_for} and torch-memory-saver in {package.parent} has no "
        f"library {names[0]} for it (there: {there}); install the version that fits torch, {_OTHERS}"
    )


def _built(package: Path, stem: str) -> list[Path]:
    return sorted(one for folder in (package, package.parent) for one in folder.glob(f"{stem}.*so"))


def _folder_of(package: str) -> Path | None:
    spec = find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def _cuda_major() -> int | None:
    """Read off torch's files the major version of CUDA that it is built for; None for a build without CUDA."""
    folder = _folder_of("torch")
    if folder is None:
        raise ConfigError("torch is not installed; pip install drivetrain-backend-megatron")
    for line in (folder / "version.py").read_text().splitlines():
        found = re.fullmatch(r"cuda\b[^=]*=\s*(?:'(\d+)[\d.]*'|\"(\d+)[\d.]*\")\s*", line)
        if found:
            return int(found[1] or found[2])
    return None
