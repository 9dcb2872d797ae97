"""Metrics to Weights & Biases; the only module that drives wandb."""

import configparser
import netrc
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from drivetrain_backend_api import DrivetrainError
from drivetrain_backend_api.errors import in_one_line
from drivetrain_infra.config import TrackingConfig
from drivetrain_infra.tracking.base import row_of
from drivetrain_infra.tracking.wandb_files import cut_torn_ends, id_of, run_folders, steps_of

_PUBLIC = ("api.wandb.ai", "api.forge.coreweave.com", "forge.coreweave.com")
"""Names of the public server: a login under one of them is one under all."""

_LOGIN_VARIABLES = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "SM_TRAINING_ENV")
"""Environment variables of which each may be a login by itself; the last is there where SageMaker may bring one."""

_TEARDOWN_SECONDS = 10.0

_SAGEMAKER = "/opt/ml/input/config/hyperparameters.json"
"""A file that is there where SageMaker may bring a login."""


class WandbTracker:
    """One W&B run over all starts of a run, whose step is the index of the line in metrics.jsonl.

    metrics.jsonl is the truth, and this catches up with it: what W&B does not have yet is sent when the run is opened,
    and what it has is never sent again. So a line that was sent, and cut off by a resume since, stands as it was sent
    first. The run makes it again, with the same values where its computation is deterministic.
    """

    def __init__(
        self,
        config: TrackingConfig,
        folder: Path,
        run_config: Mapping[str, Any],
        *,
        run_id: str | None = None,
        rows: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Open the run, and send what it lacks; works without a network in offline mode.

        Offline, what W&B has is what its files in `folder` hold, those of online starts too.

        Args:
            config: project, group, mode, and the id to go on with.
            folder: where W&B keeps its files; its name becomes the run's.
            run_config: what the run was asked for, shown with it.
            run_id: the W&B run that this run had, from `RunState.wandb_run_id`; `--wandb-resume-id` overrides it. None
                for the newest that has files in `folder`, or else a new one.
            rows: the lines of metrics.jsonl, cut to what the run goes on from.

        Raises:
            DrivetrainError: W&B does not start: nobody is logged in, or there is no network.
        """
        import wandb

        files = folder / "wandb"
        known = [id_of(one) for one in run_folders(files)] + [run_id] * (run_id is not None)
        resumed = config.wandb_resume_id or (known[-1] if known else None)
        offline = config.wandb_mode == "offline"
        if offline and resumed:
            cut_torn_ends(files, resumed)
        try:
            self._run = wandb.init(
                project=config.wandb_project,
                group=config.wandb_group,
                mode="offline" if offline else "online",
                dir=str(folder),
                name=folder.name,
                config=dict(run_config),
                id=resumed,
                resume="allow",  # offline it acts when the files are synced
            )
        except wandb.Error as error:
            other = f", or --wandb-resume-id with another id than {resumed}" if resumed else ""
            raise DrivetrainError(
                f"--use-wandb: W&B did not start ({in_one_line(error)}); log in with `wandb login`, or give "
                f"--wandb-mode offline{other}"
            ) from error
        self._run.define_metric("rollout_id")
        self._run.define_metric("*", step_metric="rollout_id")
        self._first = _first_step(files, self.run_id, 0 if self.run_id in known else self._run.starting_step)
        self._had = steps_of(files, self.run_id) if offline else set(range(self._run.starting_step))
        self._lines = 0
        for row in rows:
            self._send(row)

    @property
    def run_id(self) -> str:
        """The id of the W&B run, for `RunState.wandb_run_id`."""
        return str(self._run.id)

    def log(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """Send metrics against the rollout id, unless W&B has this line already."""
        self._send(row_of(rollout_id, metrics))

    def close(self) -> None:
        """End the run."""
        self._run.finish()

    def _send(self, row: Mapping[str, Any]) -> None:
        step = self._first + self._lines
        self._lines += 1
        if step not in self._had:
            # without `commit` a row with a step waits for the next one
            self._run.log(dict(row), step=step, commit=True)


def _first_step(files: Path, run_id: str, default: int) -> int:
    """Return the step of the first line: not 0 where a run of this id had other rows before it got any of these."""
    note = files / f"{run_id}.first_step"
    if note.exists():
        return int(note.read_text())
    if default:
        note.write_text(f"{default}\n")
    return default


def tear_down() -> None:
    """End W&B's own process, if this one has started it; whoever kills it instead makes W&B print a traceback."""
    module = sys.modules.get("wandb")
    if module is not None:
        thread = threading.Thread(target=module.teardown, name="W&B teardown", daemon=True)
        thread.start()
        thread.join(_TEARDOWN_SECONDS)


def login_finding(config: TrackingConfig, environ: Mapping[str, str]) -> str | None:
    """Say that W&B would start online with nobody logged in; asks no server, so that a wrong key is found later.

    Whoever may be logged in counts as such: W&B has kept its logins in several ways.

    Args:
        environ: the environment variables, of which W&B reads its key and where its files are.
    """
    if not config.use_wandb or config.wandb_mode == "offline":
        return None
    if any(map(environ.get, _LOGIN_VARIABLES)) or Path(_SAGEMAKER).exists():
        return None
    home = Path(environ.get("HOME", "~")).expanduser()
    settings = _settings(environ, home)
    if settings is None or "api_key" in settings:
        return None
    server = environ.get("WANDB_BASE_URL") or settings.get("base_url") or f"https://{_PUBLIC[0]}"
    try:
        address = urlsplit(server)
    except ValueError:  # W&B says better what is wrong with it
        return None
    machines = {address.netloc, address.hostname or ""}
    if machines & set(_PUBLIC):
        machines.update(_PUBLIC)
    files = [Path(environ["NETRC"]).expanduser()] if environ.get("NETRC") else [home / ".netrc", home / "_netrc"]
    if any(_knows(file, machines) for file in files):
        return None
    login = "wandb login" if machines & set(_PUBLIC) else f"wandb login --host {server}"
    return (
        f"--use-wandb: nobody is logged in to {address.netloc}; run `{login}`, set WANDB_API_KEY, or give "
        "--wandb-mode offline"
    )


def _settings(environ: Mapping[str, str], home: Path) -> dict[str, str] | None:
    """Read W&B's settings, the working folder's over the user's; None where a file is there and cannot be read."""
    folder = Path(environ.get("WANDB_CONFIG_DIR") or home / ".config" / "wandb").expanduser()
    here = Path(environ.get("WANDB_DIR") or ".").expanduser()
    found: dict[str, str] = {}
    for file in (folder / "settings", here / "wandb" / "settings", here / ".wandb" / "settings"):
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read_string(file.read_text("utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, configparser.Error, ValueError):
            return None
        if parser.has_section("default"):
            found.update(parser["default"])
    return found


def _knows(file: Path, machines: Iterable[str]) -> bool:
    try:
        logins = netrc.netrc(file)
    except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
        return False  # as W&B takes it
    return any(logins.authenticators(one) for one in machines)
