"""Fixtures: tiny models on disk, and one launch of two ranks that several tests read."""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

# Ranks run as scripts of this folder and share its helpers with the tests.
sys.path.insert(0, str(Path(__file__).parent))

from fsdp_testing import launch

from drivetrain_backend_api.testing.models import make_model


@dataclass(frozen=True, kw_only=True)
class TwoRanks:
    """What two ranks left.

    Attributes:
        checkpoint: a folder that they saved, untrained.
        run: the folder of the launch.
        refusals: what each said of a model folder without its last norm.
        unshared: what each said of a save into a folder that the last of them does not see.
    """

    checkpoint: Path
    run: Path
    refusals: list[str]
    unshared: list[str]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model folders by kind; a "-tied" one ties its embeddings."""
    root = tmp_path_factory.mktemp("models")
    return {kind: make_model(root / kind, kind) for kind in ("qwen3", "qwen3-tied")}


@pytest.fixture(scope="session")
def two_ranks(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> TwoRanks:
    root = tmp_path_factory.mktemp("ranks")
    broken = Path(shutil.copytree(models["qwen3"], root / "broken"))
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    checkpoint, run = root / "checkpoint", root / "run"
    checkpoint.mkdir()
    arguments = {"model": str(models["qwen3"]), "checkpoint": str(checkpoint), "broken_model": str(broken)}
    results = launch(2, arguments, run, deadline=280)
    return TwoRanks(
        checkpoint=checkpoint,
        run=run,
        refusals=[one["refusal"] for one in results],
        unshared=[one["unshared_save"] for one in results],
    )
