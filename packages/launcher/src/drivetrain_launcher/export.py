"""`drivetrain export`: the newest checkpoint of a run as a Hugging Face model folder."""

import json
from pathlib import Path
from typing import Any

from drivetrain_backend_api import TRAIN_BACKENDS, ConfigError, DataError, load_spec
from drivetrain_infra.run_folder import RunFolder, resolve_checkpoint
from drivetrain_launcher.preflight.checkpoint import checkpoint_findings

DTYPES = ("float32", "bfloat16", "float16")
"""What a model can be exported in."""


def export_run(run: Path, out: Path, dtype: str | None = None) -> None:
    """Write `out` from the latest checkpoint of a run (or from the checkpoint that `run` is).

    Args:
        run: folder of the run, or of one of its checkpoints.
        out: new or empty folder.
        dtype: one of `DTYPES`; None takes that of the model the run started from.

    Raises:
        ConfigError: there is no such run, `out` is there already and not empty, or the backend cannot export.
        DataError: the run or its checkpoint is damaged.
    """
    if _in_use(out):
        raise ConfigError(f"--out {out}: is there already and not empty; choose a new folder")
    try:
        checkpoint = resolve_checkpoint(run, what="RUN")
    except DataError as error:
        raise ConfigError(str(error)) from error
    config = _saved_config(RunFolder(checkpoint.parent).config)
    spec = load_spec(TRAIN_BACKENDS, config["train-backend"])
    if findings := checkpoint_findings(spec, checkpoint, what="RUN", world_size=None):
        raise DataError("\n".join(findings))
    import torch
    from safetensors import SafetensorError

    chosen = None if dtype is None else getattr(torch, dtype)
    try:
        spec.load_export_checkpoint()(checkpoint, Path(config["hf-checkpoint"]), out, chosen)
    except (OSError, SafetensorError) as error:
        raise DataError(f"--out {out}: cannot be written ({error}); choose another folder, or make room") from error
    print(f"exported {checkpoint} to {out}")


def _in_use(out: Path) -> bool:
    try:
        return out.exists() and (not out.is_dir() or any(out.iterdir()))
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be read ({error.strerror}); choose another folder") from error


def _saved_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"{path}: {'is no file' if path.exists() else 'is missing'}; give the folder of a whole run")
    try:
        config: Any = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); give the folder of a whole run") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: is not JSON ({error}); give the folder of a whole run") from error
    if not isinstance(config, dict):
        raise DataError(f"{path}: must be a table of options, found {type(config).__name__}")
    if missing := {"train-backend", "hf-checkpoint"} - set(config):
        raise DataError(f"{path}: lacks {', '.join(sorted(missing))}; give the folder of a whole run")
    for key in ("train-backend", "hf-checkpoint"):
        if not isinstance(config[key], str) or "\0" in config[key]:
            raise DataError(f"{path}: {key} {config[key]!r:.60} is no text; give the folder of a whole run")
    return dict(config)
