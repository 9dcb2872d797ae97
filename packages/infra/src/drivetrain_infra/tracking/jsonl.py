"""Metrics as JSON lines: one object a line, each with `rollout_id`."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class JsonlTracker:
    """Appends to a file and flushes each line, so that a reader never waits for the end of the run."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def log(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """Append one line; a value that is not finite becomes null, since JSON has no other word for it."""
        row = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"rollout_id": rollout_id, **row}, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read a metrics file back, one dict a line."""
    with path.open() as file:
        return [json.loads(line) for line in file]
