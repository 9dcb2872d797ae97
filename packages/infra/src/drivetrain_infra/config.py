"""Options of the runtime: placement, weight sync, run folder, tracking."""

import re
from dataclasses import dataclass

from drivetrain_backend_api import OptionGroup, option
from drivetrain_backend_api.errors import printable
from drivetrain_infra.wall_clock import parse_duration

LONGEST_SECONDS = 1e7
"""Upper bound of deadlines, about four months: what the system's own waits still take."""


@dataclass(frozen=True, kw_only=True)
class PlacementConfig(OptionGroup):
    """Which processes run, on how many devices; on a machine without GPUs a "GPU" is one CPU rank."""

    actor_num_nodes: int = option(1, help="nodes that train", minimum=1)
    actor_num_gpus_per_node: int = option(
        1, help="train ranks on each node: GPUs, or CPU ranks without GPUs", minimum=1
    )
    rollout_num_gpus: int = option(1, help="GPUs (or CPU ranks) of all rollout engines together", minimum=1)
    rollout_num_gpus_per_engine: int = option(1, help="GPUs (or CPU ranks) of one rollout engine", minimum=1)
    cpu_threads_per_rank: int = option(1, help="torch threads of each process on a machine without GPUs", minimum=1)
    ray_address: str | None = option(None, help="address of a running Ray cluster (default: start one here)", free=True)
    placement_timeout: float = option(
        120.0,
        help="seconds to wait for the cluster to place all processes",
        above=0,
        maximum=LONGEST_SECONDS,
        free=True,
    )

    start_timeout: float = option(
        600.0,
        help="seconds for train workers and rollout engines to start",
        above=0,
        maximum=LONGEST_SECONDS,
        free=True,
    )

    @property
    def train_world_size(self) -> int:
        """Train ranks in all."""
        return self.actor_num_nodes * self.actor_num_gpus_per_node

    @property
    def num_engines(self) -> int:
        """Rollout engines in all."""
        return self.rollout_num_gpus // self.rollout_num_gpus_per_engine

    def findings(self) -> list[str]:
        """Return what cannot work together."""
        if self.ray_address is not None and not _is_address(self.ray_address):
            return [f"--ray-address {self.ray_address}: must be host:port of a Ray head, with a port up to 65535"]
        if self.rollout_num_gpus % self.rollout_num_gpus_per_engine:
            return [
                f"--rollout-num-gpus {self.rollout_num_gpus} is no multiple of "
                f"--rollout-num-gpus-per-engine {self.rollout_num_gpus_per_engine}"
            ]
        return []


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and 0 < int(port) < 65536


@dataclass(frozen=True, kw_only=True)
class WeightSyncConfig(OptionGroup):
    """How new weights reach the rollout engines."""

    update_weight_transport: str = option(
        "distributed", help="how weights reach the engines", choices=("distributed", "disk"), free=True
    )
    update_weight_buffer_size: int = option(512 * 1024**2, help="bytes of one bucket of weights", minimum=1, free=True)
    update_weight_pause: str = option(
        "drain", help="what a weight update does to requests in flight", choices=("drain", "abort"), free=True
    )
    update_weight_timeout: float = option(
        600.0, help="deadline of each phase of a weight update, in seconds", above=0, maximum=LONGEST_SECONDS, free=True
    )
    update_weight_disk_dir: str | None = option(
        None,
        help="folder that trainer and engines share, for the disk transport (default: inside the run)",
        metavar="DIR",
        free=True,
    )

    def findings(self) -> list[str]:
        """Return what cannot work together."""
        if self.update_weight_disk_dir is not None and self.update_weight_transport != "disk":
            return ["--update-weight-disk-dir acts only with --update-weight-transport disk; give both or neither"]
        return []


@dataclass(frozen=True, kw_only=True)
class RunFolderConfig(OptionGroup):
    """Where a run keeps its files."""

    save: str = option(
        help="folder of the run: checkpoints, metrics, configuration; one that holds the run already resumes it",
        metavar="DIR",
        free=True,
    )
    save_interval: int | None = option(
        None, help="rollouts between checkpoints (default: only at the end)", minimum=1, free=True
    )
    save_max_to_keep: int | None = option(
        None, help="newest checkpoints to keep; older ones are removed once a newer is durable", minimum=1, free=True
    )
    ckpt_step: int | None = option(
        None, help="resume from this checkpoint, by its rollouts, and not from the newest", minimum=0, free=True
    )
    load_fallback: bool = option(
        False, help="where the newest checkpoint is damaged, resume from the newest good one", free=True
    )
    accept_change: tuple[str, ...] = option(
        (), help="what may differ from the run that is resumed: options, versions, model, data, or all", free=True
    )


@dataclass(frozen=True, kw_only=True)
class TrackingConfig(OptionGroup):
    """Where metrics go beside metrics.jsonl."""

    use_wandb: bool = option(False, help="log to Weights & Biases too", free=True)
    wandb_project: str = option("drivetrain", help="W&B project", acts_with="use_wandb", free=True)
    wandb_group: str | None = option(None, help="W&B group", acts_with="use_wandb", free=True)
    wandb_mode: str = option("online", help="W&B mode", choices=("online", "offline"), acts_with="use_wandb", free=True)
    wandb_resume_id: str | None = option(
        None,
        help="id of the W&B run to go on with (default: the one that the run had)",
        acts_with="use_wandb",
        free=True,
    )

    def findings(self) -> list[str]:
        """Return what W&B would refuse once everything has started."""
        name = self.wandb_resume_id
        if name is not None and not re.fullmatch(r"[^/\\#?%:\s]+", name):
            return [f"--wandb-resume-id {printable(name)}: must be without spaces and any of / \\ # ? % :"]
        return []


@dataclass(frozen=True, kw_only=True)
class SurvivalConfig(OptionGroup):
    """When a run stops by itself, and what it does about processes that die."""

    wall_time_limit: str = option(
        "7d",
        help="time from the start of the command after which it saves and ends: seconds, or 90s, 10m, 36h, 7d",
        free=True,
    )
    wall_time_reserve: str = option(
        "10m",
        help="part of the limit kept for the last save; no evaluation starts with less than twice that left",
        free=True,
    )
    max_restarts: int = option(
        0,
        help="times that train workers and engines are started anew from the last checkpoint after a failure",
        minimum=0,
        free=True,
    )
    train_timeout: float = option(
        14400.0,
        help="deadline of the train workers for setting up, for one rollout, and for one save, in seconds",
        above=0,
        maximum=LONGEST_SECONDS,
        free=True,
    )
    max_engine_restarts: int = option(
        3, help="times that a rollout engine that died is replaced while the run goes on", minimum=0, free=True
    )

    def findings(self) -> list[str]:
        """Return what cannot be read, and what cannot work together."""
        findings = []
        seconds = []
        for flag, value in (
            ("--wall-time-limit", self.wall_time_limit),
            ("--wall-time-reserve", self.wall_time_reserve),
        ):
            try:
                seconds.append(parse_duration(value))
            except ValueError as error:
                findings.append(f"{flag} {value}: {error}")
        # one at its default may still come from the environment, which WallClock reads and judges
        chosen = self.wall_time_limit != SurvivalConfig.wall_time_limit
        chosen = chosen and self.wall_time_reserve != SurvivalConfig.wall_time_reserve
        if chosen and not findings and seconds[1] >= seconds[0]:
            findings.append(
                f"--wall-time-reserve {self.wall_time_reserve} leaves nothing of "
                f"--wall-time-limit {self.wall_time_limit}; give --wall-time-reserve less than the limit"
            )
        return findings
