"""Fixtures: tiny models on disk, and one launch of two ranks that many tests read."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

# Ranks run as scripts of this folder and share its helpers with the tests.
sys.path.insert(0, str(Path(__file__).parent))

from fsdp_testing import launch, make_model

CASES: list[dict[str, Any]] = [
    # packed by token count, several sequences a micro-batch
    {
        "kind": "qwen3",
        "samples": 8,
        "config": {"global_batch_size": 4, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 40},
    },
    # tied, one sequence a micro-batch
    {"kind": "llama-tied", "samples": 8, "config": {"global_batch_size": 4}},
    # one sample a step: all ranks but one have fillers only, and the third step has no loss token at all
    {"kind": "qwen3", "samples": 3, "config": {"global_batch_size": 1}},
    {
        "kind": "qwen2",
        "samples": 8,
        "config": {
            "global_batch_size": 4,
            "micro_batch_size": 3,
            "gradient_checkpointing": True,
            "optimizer_cpu_offload": True,
        },
    },
    {
        "kind": "qwen3",
        "samples": 8,
        "config": {"global_batch_size": 4, "fsdp_cpu_offload": True, "fsdp_reshard_after_forward": "never"},
    },
]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Model folders by kind; a "-tied" one ties its embeddings."""
    root = tmp_path_factory.mktemp("models")
    return {
        kind: make_model(root / kind, kind.removesuffix("-tied"), tied=kind.endswith("-tied"), seed=seed)
        for seed, kind in enumerate(("qwen3", "qwen3-tied", "llama-tied", "qwen2"))
    }


@pytest.fixture(scope="session")
def on_ranks(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Any]:
    """Launch the whole program on a number of ranks, once."""
    launched: dict[int, Any] = {}

    def run(ranks: int) -> Any:
        if ranks not in launched:
            root = tmp_path_factory.mktemp(f"ranks{ranks}")
            broken = Path(shutil.copytree(models["qwen3"], root / "broken"))
            tensors = load_file(broken / "model.safetensors")
            del tensors["model.norm.weight"]
            save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
            (root / "checkpoint").mkdir()
            arguments = {
                "cases": [one | {"model": models[one["kind"]]} for one in CASES],
                "model": models["qwen3"],
                "checkpoint": str(root / "checkpoint"),
                "broken_model": str(broken),
            }
            results = launch(ranks, "everything", arguments, root / "run", deadline=280)
            launched[ranks] = {"results": results, "checkpoint": root / "checkpoint", "run": root / "run"}
        return launched[ranks]

    return run
