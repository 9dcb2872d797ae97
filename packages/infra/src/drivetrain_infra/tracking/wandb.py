"""Metrics to Weights & Biases; the only module that imports wandb."""

import netrc
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from drivetrain_backend_api import DrivetrainError
from drivetrain_infra.config import TrackingConfig


class WandbTracker:
    """One W&B run, whose step is the rollout id."""

    def __init__(self, config: TrackingConfig, folder: Path, run_config: Mapping[str, Any]) -> None:
        """Start the run; works without a network in offline mode.

        Args:
            config: project, group and mode.
            folder: where W&B keeps its files; its name becomes the run's.
            run_config: what the run was asked for, shown with it.

        Raises:
            DrivetrainError: W&B does not start: nobody is logged in, or there is no network.
        """
        import wandb

        try:
            self._run = wandb.init(
                project=config.wandb_project,
                group=config.wandb_group,
                mode="offline" if config.wandb_mode == "offline" else "online",
                dir=str(folder),
                name=folder.name,
                config=dict(run_config),
            )
        except wandb.Error as error:
            raise DrivetrainError(
                f"--use-wandb: W&B did not start ({' '.join(str(error).split())}); log in with `wandb login`, or give "
                "--wandb-mode offline"
            ) from error
        self._run.define_metric("rollout_id")
        self._run.define_metric("*", step_metric="rollout_id")

    def log(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """Record metrics against the rollout id."""
        self._run.log({"rollout_id": rollout_id, **metrics})

    def close(self) -> None:
        """End the run."""
        self._run.finish()


def login_finding(config: TrackingConfig, environ: Mapping[str, str]) -> str | None:
    """Say that W&B would start online with nobody logged in; asks no server, so that a wrong key is found later.

    Args:
        environ: the environment variables, of which W&B reads its key and its server's address.
    """
    if not config.use_wandb or config.wandb_mode == "offline":
        return None
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return None
    host = urlsplit(environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    home = Path(environ.get("HOME", "~")).expanduser()
    files = [Path(environ["NETRC"])] if environ.get("NETRC") else [home / ".netrc", home / "_netrc"]
    if any(_knows(file, host) for file in files):
        return None
    return (
        f"--use-wandb: nobody is logged in to {host}; run `wandb login`, set WANDB_API_KEY, or give "
        "--wandb-mode offline"
    )


def _knows(file: Path, host: str) -> bool:
    try:
        return host in netrc.netrc(file).hosts
    except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
        return False
