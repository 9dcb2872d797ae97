"""What this machine has against what a run asks of it: GPUs for its ranks, memory for its processes.

Only for a run that starts Ray here; what a cluster has is known once it answers.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from drivetrain_backend_api.host_memory import available_memory
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
