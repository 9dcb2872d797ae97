"""What `--load` names: a checkpoint of Drivetrain's, one of Megatron-LM's, or a Hugging Face model folder.

Looks at file names alone, so that it can be said before anything starts; never imports torch or Megatron.
"""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from drivetrain_backend_api.errors import DataError
from drivetrain_backend_api.manifest import MANIFEST
from drivetrain_backend_megatron.checks import is_hf_folder

_LATEST = "latest_checkpointed_iteration.txt"


class LoadKind(StrEnum):
    """A folder's kind, in words for people."""

    DRIVETRAIN = "a checkpoint of Drivetrain's: weights, optimizer and random states"
    MEGATRON = "a torch_dist checkpoint of Megatron-LM's: weights only"
    HUGGING_FACE = "a Hugging Face model folder: weights only"


@dataclass(frozen=True, kw_only=True)
class LoadSource:
    """What was found.

    Attributes:
        folder: with the files themselves, where the folder given only names it.
    """

    kind: LoadKind
    folder: Path


def takes_weights_of(folder: Path) -> bool:
    """Say whether a folder means one of Megatron-LM's or of Hugging Face's; it may turn out to be damaged."""
    if _is_own(folder):
        return False
    return (folder / _LATEST).is_file() or _is_torch_dist(folder) or is_hf_folder(folder)


def find_source(folder: Path, flag: str = "--load") -> LoadSource:
    """Look for something to load in a folder.

    Raises:
        DataError: it holds none of the three kinds.
    """
    if _is_own(folder):
        return LoadSource(kind=LoadKind.DRIVETRAIN, folder=folder)
    if (megatron := _megatron_folder(folder)) is not None:
        return LoadSource(kind=LoadKind.MEGATRON, folder=megatron)
    if is_hf_folder(folder):
        return LoadSource(kind=LoadKind.HUGGING_FACE, folder=folder)
    raise DataError(
        f"{flag} {folder} holds nothing to load; give a checkpoint of a run of the megatron backend (with "
        "trainer_state.json), a torch_dist checkpoint of Megatron-LM (with .metadata, or with "
        f"{_LATEST}), or a Hugging Face model folder (with config.json and safetensors files)"
    )


def _is_own(folder: Path) -> bool:
    # others write a trainer_state.json too
    return (folder / "trainer_state.json").is_file() and any((folder / one).exists() for one in (MANIFEST, "dcp"))


def _megatron_folder(folder: Path) -> Path | None:
    """Return where Megatron-LM's files lie: here, or where its note of the newest iteration points."""
    latest = folder / _LATEST
    if latest.is_file():
        try:
            said = latest.read_text("utf-8").strip()
            name = said if said == "release" else f"iter_{int(said):07d}"
        except (OSError, ValueError) as error:
            raise DataError(f"{latest} names no iteration: {error}; name the iteration's folder yourself") from error
        if not _is_torch_dist(folder / name):
            raise DataError(f"{latest} names {name}, which is no torch_dist checkpoint; give the folder of another one")
        return folder / name
    return folder if _is_torch_dist(folder) else None


def _is_torch_dist(folder: Path) -> bool:
    beside = any((folder / name).is_file() for name in ("metadata.json", "common.pt"))
    return beside and (folder / ".metadata").is_file()
