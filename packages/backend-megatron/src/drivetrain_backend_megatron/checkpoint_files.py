"""Is what `--load` names whole? Apart from `checkpoint`: who only looks needs neither transformers nor Megatron."""

from pathlib import Path

from drivetrain_backend_api import checkpoint_files
from drivetrain_backend_api.checkpoint_files import read_metadata, shard_findings
from drivetrain_backend_api.errors import DataError, UnsupportedModelError
from drivetrain_backend_api.hf_folder import read_headers
from drivetrain_backend_api.manifest import MANIFEST
from drivetrain_backend_megatron.load_kind import LoadKind, find_source

BACKEND = "megatron"
"""What the files say of who wrote them."""


def check_checkpoint(folder: Path, *, world_size: int | None = None, full: bool = False) -> list[str]:
    """Look for everything that would keep a folder from being loaded: files missing, cut short or unreadable.

    Args:
        folder: of any of the kinds that `--load` takes; without `world_size` a checkpoint of this backend.
        world_size: of the run that will load it, None to export it.
        full: read every byte, where there are checksums: in a checkpoint of this backend. Else of the tensors only the
            sizes and the first bytes are looked at.

    Returns: one sentence for each thing wrong, empty when all is whole.
    """
    if world_size is None or (folder / MANIFEST).exists():
        return checkpoint_files.check_checkpoint(folder, BACKEND, world_size=world_size, full=full)
    try:
        source = find_source(folder)
        if source.kind is LoadKind.MEGATRON:
            return [one for _, one in shard_findings(source.folder, read_metadata(source.folder, ""), "")]
        if source.kind is LoadKind.HUGGING_FACE:
            read_headers(source.folder)
            return []
    except (DataError, UnsupportedModelError) as error:
        return [str(error)]
    return checkpoint_files.check_checkpoint(folder, BACKEND, world_size=world_size, full=full)
