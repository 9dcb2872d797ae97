"""What can be found wrong before anything starts: files, folders, sizes, functions, and what the plugins refuse.

Reads headers, first and last lines, and the sizes of files: quick, however large they are. Knows no plugin by name, and
nothing of Ray.
"""

import os
from pathlib import Path

from drivetrain_backend_api import ConfigError, OptionGroup, options
from drivetrain_infra.config import SurvivalConfig
from drivetrain_infra.tracking.wandb import login_finding
from drivetrain_infra.wall_clock import WallClock
from drivetrain_launcher.arguments import VARIABLE_PREFIX, unavailable
from drivetrain_launcher.config import DrivetrainConfig
from drivetrain_launcher.preflight.checkpoint import checkpoint_findings, find_load, resolve_load
from drivetrain_launcher.preflight.folders import folder_findings, folder_notes, unwritable
from drivetrain_launcher.preflight.machine import frozen_notes, machine_findings
from drivetrain_launcher.preflight.model_folder import check_model_folder, model_findings
from drivetrain_launcher.preflight.prompts import check_lengths, check_vocabulary, prompt_file_findings
from drivetrain_launcher.preflight.size import run_size
from drivetrain_launcher.rewards import load_reward

__all__ = [
    "check_lengths",
    "check_model_folder",
    "check_vocabulary",
    "checkpoint_findings",
    "preflight",
    "resolve_load",
    "unwritable",
    "wall_clock",
]


def preflight(config: DrivetrainConfig, *, resumes_at: int | None = None) -> list[str]:
    """Check everything that can be checked without starting anything.

    Args:
        resumes_at: rollouts of the run in `--save` that goes on, so that nobody reads `--load`; None for a new run.

    Returns: what the user should know before it starts, though nothing of it is wrong yet.

    Raises:
        ConfigError: one finding a line, all of them.
    """
    findings = unavailable(config.backend, config.engine, config.algorithm)
    findings += _plugin_findings(config)
    findings += _capability_findings(config)
    unusable = _path_findings(config)
    findings += unusable
    if not unusable:
        loaded, in_checkpoint = (None, []) if resumes_at is not None else find_load(config)
        findings += model_findings(config) + in_checkpoint + prompt_file_findings(config)
    findings += _batch_findings(config)
    findings += _function_findings(config)
    findings += _debug_findings(config)
    findings += _clock_findings(config)
    findings += _tracking_findings(config)
    if not unusable:
        size = run_size(config)
        start = resumes_at if resumes_at is not None else loaded.rollouts if loaded is not None else 0
        findings += folder_findings(config, size, loaded, start) + machine_findings(config, size)
    if findings:
        raise ConfigError("\n".join(dict.fromkeys(findings)))
    return frozen_notes(config, size) + folder_notes(config, size, start)


def _plugin_findings(config: DrivetrainConfig) -> list[str]:
    return [finding for spec in (config.backend, config.engine, config.algorithm) for finding in spec.validate(config)]


def _capability_findings(config: DrivetrainConfig) -> list[str]:
    """Hold what is asked for against what the train backend claims."""
    backend, train = config.backend, config.train
    claimed = backend.capabilities
    findings = []
    if train.precision not in claimed.precisions:
        findings.append(
            f"--train-backend {backend.name} does not compute in {train.precision}; "
            f"give {' or '.join('--' + one for one in claimed.precisions)}"
        )
    if train.async_save and not claimed.async_save:
        findings.append(f"--async-save: --train-backend {backend.name} does not save in the background; leave it out")
    if train.no_save_optim and config.survival.max_restarts:
        findings.append(
            f"--max-restarts {config.survival.max_restarts} needs the optimizer, which --no-save-optim leaves out of "
            "checkpoints; give one of them"
        )
    if train.ref_load is not None and not claimed.reference:
        findings.append(f"--ref-load: --train-backend {backend.name} keeps no reference; use another backend")
    if train.opd_teacher_load is not None and not claimed.teacher:
        findings.append(f"--opd-teacher-load: --train-backend {backend.name} keeps no teacher; use another backend")
    return findings


def wall_clock(config: DrivetrainConfig) -> WallClock:
    """Return the clock of this start of the command.

    Raises:
        ConfigError: the times that options and environment give cannot be read, or make no sense together.
    """
    # a file may be the config.json of a run, which holds every default
    explicit = [
        name
        for name in ("wall_time_limit", "wall_time_reserve")
        if config.sources[name] == "flag"
        or config.sources[name].startswith(VARIABLE_PREFIX)
        or getattr(config.survival, name) != getattr(SurvivalConfig(), name)
    ]
    return WallClock.of(config.survival, os.environ, explicit)


def _clock_findings(config: DrivetrainConfig) -> list[str]:
    try:
        clock = wall_clock(config)
    except ConfigError as error:
        return str(error).splitlines()
    if clock.left <= clock.reserve:
        return [f"no time for a single rollout: {clock}; lower --wall-time-reserve, or ask for a longer job"]
    return []


def _tracking_findings(config: DrivetrainConfig) -> list[str]:
    finding = login_finding(config.tracking, os.environ)
    return [finding] if finding else []


def _path_findings(config: DrivetrainConfig) -> list[str]:
    """Find paths that the system cannot even look up, so that no other check meets one."""
    groups = [value for value in vars(config).values() if isinstance(value, OptionGroup)]
    paths = {
        one.flag: getattr(group, one.name)
        for group in groups
        for one in options(type(group))
        if one.metavar in ("DIR", "FILE")
    }
    return [
        f"{flag} {path!r}: is no usable path ({problem}); choose another"
        for flag, path in paths.items()
        if path is not None and (problem := _lookup_problem(path))
    ]


def _lookup_problem(path: str) -> str | None:
    try:
        Path(path).stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:  # a name too long, a loop of links, a folder that may not be entered
        return error.strerror
    except ValueError as error:  # a NUL byte, a lone surrogate
        return str(error)
    return None


def _batch_findings(config: DrivetrainConfig) -> list[str]:
    rollout, step = config.rollout, config.train.global_batch_size
    samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    if step is None or samples % step == 0:
        return []
    return [
        f"--global-batch-size {step} does not divide the {samples} samples of a rollout (--rollout-batch-size "
        f"{rollout.rollout_batch_size} x --n-samples-per-prompt {rollout.n_samples_per_prompt}); choose a divisor"
    ]


def _debug_findings(config: DrivetrainConfig) -> list[str]:
    """Return what runs without engines, or without train workers, cannot do."""
    rollout, findings = config.rollout, []
    replay, copies = rollout.load_debug_rollout_data, rollout.save_debug_rollout_data
    if replay is not None and not Path(replay).is_dir():
        findings.append(f"--load-debug-rollout-data {replay}: no such folder; give one with rollout_N.pt files")
    elif replay is not None and config.loop.num_rollout is not None:
        from drivetrain_infra.rollout_files import rollout_file  # needs torch

        files = [rollout_file(Path(replay), one) for one in range(config.loop.num_rollout)]
        if missing := [one.name for one in files if not one.exists()]:
            findings.append(
                f"--load-debug-rollout-data {replay}: holds {len(files) - len(missing)} of the {len(files)} rollouts "
                f"of --num-rollout, and not {missing[0]}; make the rest (--debug-rollout-only), or give another folder"
            )
    if copies is not None and (problem := unwritable("--save-debug-rollout-data", Path(copies))):
        findings.append(problem)
    if rollout.debug_train_only and config.evaluation.eval_prompt_data is not None:
        findings.append("--debug-train-only starts no engines to evaluate with; leave --eval-prompt-data out")
    if rollout.debug_rollout_only and config.evaluation.eval_prompt_data is not None:
        findings.append("--debug-rollout-only trains nothing to evaluate; leave --eval-prompt-data out")
    if (rollout.debug_rollout_only or replay is not None) and not config.algorithm.generates:
        findings.append(
            f"--algorithm {config.algorithm.name} makes no rollouts; leave --debug-rollout-only and "
            "--load-debug-rollout-data out"
        )
    return findings


def _function_findings(config: DrivetrainConfig) -> list[str]:
    rollout, findings = config.rollout, []
    if rollout.custom_generate is not None:
        from drivetrain_launcher.custom_generate import load_custom_generate  # needs torch

        try:
            load_custom_generate(rollout.custom_generate)
        except ConfigError as error:
            findings.append(str(error))
    if not config.algorithm.generates and config.evaluation.eval_prompt_data is None:
        return findings  # nothing is rewarded
    try:
        reward = load_reward(rollout.reward, key=rollout.reward_key)
    except ConfigError as error:
        return [*findings, str(error)]
    if config.data.label_key is None and (problem := reward.label_problem(None)):
        findings.append(f"--reward {reward.name}: {problem}")
    return findings
