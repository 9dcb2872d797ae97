"""Rollouts on disk: durable before anything is trained on them, so that a start from a checkpoint makes none anew.

A rollout is used again only by a run whose numbers depend on the same options, data and model. Knows no engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain_backend_api import DataError, DrivetrainError
from drivetrain_backend_api.batch import RolloutBatch
from drivetrain_infra.rollout_files import REMAKE, load_rollout, rollout_file, save_rollout
from drivetrain_launcher.rollout import Rollout

_GIVE_WHOLE = "give --load-debug-rollout-data a folder that holds it, whole"


@dataclass(frozen=True, kw_only=True)
class RolloutStore:
    """Where the rollouts of a run lie.

    Attributes:
        folder: of the run's own rollout files.
        lineage: what their numbers depend on, in one word; files of another lineage are made anew.
        copy_to: a second folder for each rollout that is made, `--save-debug-rollout-data`.
        replay: folder to take every rollout from, whatever its lineage, `--load-debug-rollout-data`.
    """

    folder: Path
    lineage: str
    copy_to: Path | None = None
    replay: Path | None = None

    def find(self, rollout_id: int) -> Rollout | None:
        """Return a rollout that was made before, None where it has to be made.

        Raises:
            DataError: the folder to replay has no such file; or a file is damaged, which names it.
        """
        if self.replay is not None:
            return _read(self.replay, rollout_id, fix=_GIVE_WHOLE)
        if not rollout_file(self.folder, rollout_id).exists():
            return None
        return _read(self.folder, rollout_id, fix=REMAKE, lineage=self.lineage)

    def save(self, rollout_id: int, rollout: Rollout) -> None:
        """Write a rollout that was made now; durable when it returns.

        Raises:
            DrivetrainError: the file system failed; names the folder.
        """
        plain = {"batch": rollout.batch.to_plain(), "metrics": dict(rollout.metrics)}
        save_rollout(self.folder, rollout_id, plain, lineage=self.lineage)
        if self.copy_to is not None:
            flag = "--save-debug-rollout-data"
            try:
                self.copy_to.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise DrivetrainError(
                    f"{flag} {self.copy_to}: cannot be made ({error.strerror}); choose another folder"
                ) from error
            save_rollout(self.copy_to, rollout_id, plain, lineage=self.lineage, flag=flag)


def _read(folder: Path, rollout_id: int, *, fix: str, lineage: str | None = None) -> Rollout | None:
    """Read a rollout; None where it is of another lineage than the one that is wanted."""
    path = rollout_file(folder, rollout_id)
    found = load_rollout(path, rollout_id=rollout_id, fix=fix)
    if lineage is not None and found.lineage != lineage:
        return None
    plain: Mapping[str, Any] = found.content
    try:
        return Rollout(
            batch=RolloutBatch.from_plain(plain["batch"]),
            metrics={str(name): float(value) for name, value in plain["metrics"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError, DataError) as error:
        raise DataError(f"{path}: is no rollout ({error}); {fix}") from error
