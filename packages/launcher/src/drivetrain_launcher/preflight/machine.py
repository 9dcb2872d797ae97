"""What this machine has against what a run asks of it: GPUs for its ranks, memory for its processes.

Only for a run that starts Ray here; what a cluster has is known once it answers.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from drivetrain_launcher.config import DrivetrainConfig
from drivetrain_launcher.preflight.size import RunSize, gib, parameters

PROCESS_BYTES = 256 * 1024**2
"""Memory that each process has for itself, at least: after `import torch, transformers` and a model class
/proc/self/smaps_rollup shows 411 MiB of Private_Dirty on Linux with torch 2.15; leaner builds need less."""

TRAINED_BYTES = 16
"""Of one parameter over all ranks together: fp32 weight, gradient and both of Adam's moments."""

OFFLOADED_BYTES = 12
"""Of one parameter on the host where the optimizer is kept there: fp32 weight and both moments."""

STAGED_BYTES = 12
"""Of one parameter in the copy that is written in the background: fp32 weight and both moments."""

STAGED_WEIGHT_BYTES = 4
"""The same without the optimizer."""

_CPU_INSTEAD = "put CUDA_VISIBLE_DEVICES= (empty) before the command to run on CPU ranks"


def machine_findings(config: DrivetrainConfig, size: RunSize) -> list[str]:
    """Return what the run asks for and this machine does not have."""
    if size.gpus is None:
        return []
    findings = []
    if config.placement.actor_num_nodes > 1:
        findings.append(
            f"--actor-num-nodes {config.placement.actor_num_nodes}: this machine is one node; give --ray-address of a "
            "cluster, or leave it at 1"
        )
        size = replace(size, ranks=config.placement.actor_num_gpus_per_node)
    findings += _device_findings(config, size)
    if config.train.attention_backend == "varlen" and not size.gpus:
        findings.append("--attention-backend varlen needs a GPU, and there is none here; give auto or per_sequence")
    findings += _gpu_findings(config, size)
    findings += _memory_findings(config, size)
    return findings


def _device_findings(config: DrivetrainConfig, size: RunSize) -> Iterator[str]:
    """Hold the devices that the plugins run on against those that the machine has."""
    device, there = ("cuda", "a GPU here") if size.gpus else ("cpu", "no GPU here")
    way_out = _CPU_INSTEAD if size.gpus else "use a machine that has one, give --ray-address of a cluster"
    if device not in config.backend.capabilities.devices:
        devices = ", ".join(config.backend.capabilities.devices)
        yield (
            f"--train-backend {config.backend.name}: runs on {devices}, and there is {there}; {way_out}, or choose "
            "another backend"
        )
    if size.engines and device not in config.engine.devices:
        devices = ", ".join(config.engine.devices)
        yield (
            f"--rollout-engine {config.engine.name}: runs on {devices}, and there is {there}; {way_out}, or choose "
            "another engine"
        )


def _gpu_findings(config: DrivetrainConfig, size: RunSize) -> Iterator[str]:
    ranks, rollout = size.ranks, config.placement.rollout_num_gpus if size.engines else 0
    if not size.gpus or ranks + rollout <= size.gpus:
        return
    asked = f"--actor-num-gpus-per-node {ranks}" + (f" and --rollout-num-gpus {rollout}" if rollout else "")
    lowered = ranks > 1 or rollout > 1
    advice = f"lower {'one of them' if rollout else 'it'}" if lowered else "trainer and engine need a GPU each: add one"
    yield (
        f"{asked} ask for {ranks + rollout} GPUs, and this machine has {size.gpus}; {advice}, give --ray-address of a "
        f"cluster, or {_CPU_INSTEAD}"
    )


# -- memory ------------------------------------------------------------------------------------------------------------


def host_memory_need(size: RunSize, *, offloads_optimizer: bool, staged_bytes: int = 0) -> int:
    """Return the bytes of host memory below which a run certainly cannot work; activations and buffers come on top.

    Args:
        offloads_optimizer: the optimizer is on the host though there are GPUs.
        staged_bytes: of one parameter in the copy that `--async-save` writes from, 0 without it.
    """
    processes = (size.ranks + size.engines) * PROCESS_BYTES + staged_bytes * size.parameters
    frozen = size.compute_bytes * size.frozen_parameters  # between uses, wherever they are used
    if size.gpus:
        return processes + frozen + (OFFLOADED_BYTES * size.parameters if offloads_optimizer else 0)
    trained = TRAINED_BYTES * size.parameters
    return processes + trained + frozen + size.compute_bytes * size.engines * size.parameters


def frozen_notes(config: DrivetrainConfig, size: RunSize) -> list[str]:
    """Return what reference and teacher take of the host's memory, in which they are kept between their uses."""
    train, claimed = config.train, config.backend.capabilities
    notes = []
    for flag, folder, how in (
        ("--ref-load", train.ref_load, claimed.reference),
        ("--opd-teacher-load", train.opd_teacher_load, claimed.teacher),
    ):
        if folder is None:
            continue
        # weights of another kind are as many as the policy's: a tag has the policy's shape
        whole = size.compute_bytes * (parameters(Path(folder)) or size.parameters)
        # a tag is kept as the policy is laid out, and only the backend knows over how many ranks that cuts it
        taken = gib(-(-whole // size.ranks)) if how == "model" else f"up to {gib(whole)}"
        notes.append(f"{flag} {folder}: takes {taken} of host memory on {_each(size.ranks)}")
    return notes


def _memory_findings(config: DrivetrainConfig, size: RunSize) -> Iterator[str]:
    available = available_memory()
    train = config.train
    staged = (STAGED_WEIGHT_BYTES if train.no_save_optim else STAGED_BYTES) if train.async_save else 0
    need = host_memory_need(size, offloads_optimizer=train.optimizer_cpu_offload, staged_bytes=staged)
    if available is None or need <= available:
        return
    flags = {
        "--actor-num-gpus-per-node": config.placement.actor_num_gpus_per_node,
        "--rollout-num-gpus": config.placement.rollout_num_gpus if size.engines else 1,
    }
    fixes = [f"lower {flag} {value}" for flag, value in flags.items() if value > 1]
    if staged:
        fixes.append("leave --async-save out")
    if size.gpus and train.optimizer_cpu_offload:
        fixes.append("leave --optimizer-cpu-offload out")
    if (size.ranks + size.engines) * PROCESS_BYTES <= available:
        fixes.append("give a smaller --hf-checkpoint")
    fixes.append("use a machine with more memory")
    processes = [_counted(size.ranks, "train worker")] + [_counted(size.engines, "rollout engine")] * (size.engines > 0)
    yield (
        f"{' and '.join(processes)} for a model of {size.parameters} parameters need at least {gib(need)} of memory, "
        f"and {gib(available)} are available; {', or '.join(fixes)}"
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _each(ranks: int) -> str:
    return f"each of {ranks} ranks" if ranks > 1 else "the only rank"


def available_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that new processes can have here: what is free, swap included, within every control group.

    Args:
        root: of the file system in which /proc and /sys/fs/cgroup are.

    Returns: None where the system does not say.
    """
    found = [one for one in (_free_memory(root), *_within_groups(root)) if one is not None]
    return min(found, default=None)


def _free_memory(root: Path) -> int | None:
    table = _numbers(root / "proc/meminfo")
    if "MemAvailable:" in table:
        return 1024 * (table["MemAvailable:"] + table.get("SwapFree:", 0))
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # not a name there
        return None


def _within_groups(root: Path) -> Iterator[int | None]:
    """Yield what each control group of this process leaves: version 2, and the memory controller of version 1."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            base, limit, usage, prefix = root / "sys/fs/cgroup", "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            base, limit, usage = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            prefix = "total_"
        else:
            continue
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            if base not in (folder, *folder.parents):
                break
            yield _left(folder / limit, folder / usage, _numbers(folder / "memory.stat"), prefix)


def _left(limit: Path, usage: Path, stat: dict[str, int], prefix: str) -> int | None:
    allowed, used = _text(limit).strip(), _text(usage).strip()
    if not (allowed.isdecimal() and used.isdecimal()):  # "max", or no such group here
        return None
    reclaimable = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
    return max(0, int(allowed) - max(0, int(used) - reclaimable))


def _numbers(path: Path) -> dict[str, int]:
    """Read lines of a name, a number and perhaps a unit."""
    words = [line.split() for line in _text(path).splitlines()]
    return {one[0]: int(one[1]) for one in words if len(one) > 1 and one[1].isdecimal()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
