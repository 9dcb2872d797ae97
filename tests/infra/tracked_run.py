"""A run reduced to its metrics, for tests that kill and resume it: `tracked_run.py FOLDER JSON`.

JSON: `mode` of W&B, `keep` lines of what is there (null for a new run), `stop` after so many lines, `killed` for an end
by SIGKILL once W&B's files have more than so many lines, `resume_id`.
"""

import json
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from drivetrain_infra.config import TrackingConfig
from drivetrain_infra.tracking.base import Trackers
from drivetrain_infra.tracking.jsonl import JsonlTracker, read_metrics
from drivetrain_infra.tracking.wandb import WandbTracker
from drivetrain_infra.tracking.wandb_files import steps_of


def metrics_of(line: int) -> dict[str, float]:
    return {"train/loss": math.sin(line), "train/grad_norm": math.nan if line % 7 == 3 else line / 3}


def main(folder: Path, plan: dict[str, Any]) -> None:
    path = folder / "metrics.jsonl"
    keep = plan.get("keep")
    if keep is not None:
        keep = sum(map(len, path.read_bytes().splitlines(keepends=True)[:keep]))
    lines = JsonlTracker(path, keep)
    config = TrackingConfig(use_wandb=True, wandb_mode=plan["mode"], wandb_resume_id=plan.get("resume_id"))
    rows = read_metrics(path)
    online = WandbTracker(config, folder, {"lr": 0.5}, rows=rows)
    trackers = Trackers([lines, online])
    for line in range(len(rows), plan["stop"]):
        trackers.log(line // 2, metrics_of(line))
    if plan.get("killed"):
        deadline = time.monotonic() + 60
        while len(steps_of(folder / "wandb", online.run_id)) <= plan["killed"]:
            assert time.monotonic() < deadline, "W&B writes nothing"
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    print(online.run_id)
    trackers.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
