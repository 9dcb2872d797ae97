"""What a person sees of a run: a live line while it goes on, a table at the end; plain lines without a terminal.

Only shows; decides nothing, and is told everything.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from drivetrain_backend_api.errors import in_one_line

if TYPE_CHECKING:
    from drivetrain_infra.weight_sync.session import SyncReport

_LINE = (
    ("reward", "rollout/reward", "{:.3f}"),
    ("reverse KL", "train/opd_reverse_kl", "{:.3f}"),
    ("loss", "train/loss", "{:.4f}"),
    ("grad", "train/grad_norm", "{:.3f}"),
    ("tok/s", "perf/tokens_per_second", "{:.0f}"),
)

_SECONDS_BETWEEN_LINES = 2.0
"""Where there is no live line, a log is not flooded by short rollouts."""


class Display:
    """Shows one stage of a run; a context manager."""

    def __init__(self, console: Console, *, title: str, start: int, stop: int) -> None:
        """Show rollouts `start` to `stop` - 1.

        Args:
            console: where to.
            title: what is being trained.
        """
        self._console = console
        self._title = title
        self._warned = False
        self._start, self._stop, self._done = start, stop, start
        self._began = time.monotonic()
        self._last_line = 0.0
        self._evaluations: dict[int, float] = {}
        self._rewards: list[float] = []
        self._reverse_kls: list[float] = []
        self._tokens_per_second: list[float] = []
        self._last_loss: float | None = None
        self._checkpoint: Path | None = None
        self._sync_seconds: list[float] = []
        self._progress = Progress(
            TextColumn(f"[bold]{title}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[line]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(title, total=stop - start, line="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def trained(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """Show a rollout's metrics."""
        # adding 0.0 turns -0.0 into 0.0
        parts = [f"{name} {form.format(round(metrics[key], 6) + 0.0)}" for name, key, form in _LINE if key in metrics]
        if "rollout/reward" in metrics:
            self._rewards.append(metrics["rollout/reward"])
        if "train/opd_reverse_kl" in metrics:
            self._reverse_kls.append(metrics["train/opd_reverse_kl"])
        self._done = rollout_id + 1
        self._tokens_per_second.append(metrics["perf/tokens_per_second"])
        self._last_loss = metrics.get("train/loss")
        if skipped := int(metrics["train/skipped_steps"]):
            self._console.print(
                f"rollout {rollout_id + 1}: {skipped} optimizer steps skipped, their gradients were not finite; "
                "lower --lr if it goes on"
            )
        taught = "train/opd_reverse_kl" in metrics
        if metrics.get("rollout/groups_with_one_reward") == 1.0 and not taught and not self._warned:
            self._warned = True
            self._console.print(
                f"rollout {rollout_id + 1}: all samples of each prompt got one reward, so there is nothing to learn "
                "from; look at --reward, or give harder or easier prompts (said once)"
            )
        self._progress.update(self._task, advance=1, line="  ".join(parts))
        now, ended = time.monotonic(), rollout_id + 1 == self._stop
        if not self._console.is_terminal and (ended or now - self._last_line >= _SECONDS_BETWEEN_LINES):
            self._last_line = now
            words = [f"{self._title}: rollout {rollout_id + 1}/{self._stop}", *parts, self._time_left(rollout_id)]
            self._console.print("  ".join(words))

    def generated(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """Show a rollout that is made and not trained on."""
        self._done = rollout_id + 1
        self._rewards.append(metrics["reward"])
        self._progress.update(self._task, advance=1, line=f"reward {metrics['reward']:.3f}")
        if not self._console.is_terminal:
            self._console.print(
                f"{self._title}: rollout {rollout_id + 1}/{self._stop} made  reward {metrics['reward']:.3f}"
            )

    def replaced(self, error: Exception) -> None:
        """Say that an engine that died was replaced."""
        self._console.print(f"{in_one_line(error)}; it is replaced, and gets the weights again", markup=False)

    def skipped_evaluation(self, rollout_id: int, clock: object) -> None:
        """Say that there was no time for an evaluation."""
        self._console.print(
            f"no evaluation after {rollout_id} rollouts: less than twice --wall-time-reserve is left ({clock})"
        )

    def evaluated(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """Show an evaluation."""
        self._evaluations[rollout_id] = metrics["eval/reward"]
        self._console.print(f"evaluation after {rollout_id} rollouts: eval/reward {metrics['eval/reward']:.3f}")

    def saved(self, checkpoint: Path) -> None:
        """Note a checkpoint."""
        self._checkpoint = checkpoint

    def synced(self, report: "SyncReport") -> None:
        """Note a weight sync."""
        self._sync_seconds.append(sum(report.seconds.values()))

    def summary(self) -> Table:
        """Return the table shown at the end."""
        table = Table(title="Summary", show_header=False)
        table.add_column()
        table.add_column(overflow="fold")
        done = self._done - self._start
        table.add_row("rollouts", f"{done} ({self._start} to {self._done - 1})" if done else "0")
        table.add_row("time", f"{time.monotonic() - self._began:.0f} s")
        if self._rewards:
            table.add_row("rollout/reward, first -> last", f"{self._rewards[0]:.3f} -> {self._rewards[-1]:.3f}")
        if self._reverse_kls:
            table.add_row(
                "train/opd_reverse_kl, first -> last", f"{self._reverse_kls[0]:.3f} -> {self._reverse_kls[-1]:.3f}"
            )
        if self._evaluations:
            first, last = min(self._evaluations), max(self._evaluations)
            table.add_row(
                "eval/reward, first -> last", f"{self._evaluations[first]:.3f} -> {self._evaluations[last]:.3f}"
            )
        if self._last_loss is not None:
            table.add_row("train/loss, last", f"{self._last_loss:.4f}")
        if self._tokens_per_second:
            mean = sum(self._tokens_per_second) / len(self._tokens_per_second)
            table.add_row("perf/tokens_per_second, mean", f"{mean:.0f}")
        if self._sync_seconds:
            table.add_row("weight sync, mean", f"{sum(self._sync_seconds) / len(self._sync_seconds):.3f} s")
        if self._checkpoint is not None:
            table.add_row("checkpoint", str(self._checkpoint))
        return table

    def _time_left(self, rollout_id: int) -> str:
        done = rollout_id + 1 - self._start
        left = (time.monotonic() - self._began) / done * (self._stop - rollout_id - 1)
        return f"{left:.0f} s left"
