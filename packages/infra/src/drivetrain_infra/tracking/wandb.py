"""Metrics to Weights & Biases; the only module that imports wandb."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
