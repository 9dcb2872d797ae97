"""Is a checkpoint of this backend whole? Apart from `checkpoint`: who only looks needs no transformers."""

from pathlib import Path

from drivetrain_backend_api import checkpoint_files

BACKEND = "fsdp"
"""What the files say of who wrote them."""


def check_checkpoint(folder: Path, *, world_size: int | None = None, full: bool = False) -> list[str]:
    """Look for everything that would keep a checkpoint from being read; see `checkpoint_files` of backend-api."""
    return checkpoint_files.check_checkpoint(folder, BACKEND, world_size=world_size, full=full)
