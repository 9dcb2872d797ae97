"""Both backends from one Hugging Face checkpoint on one rollout: the same numbers, under layouts of their own."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from drivetrain_backend_api.testing import comparing
from drivetrain_backend_api.testing.cases import BASE
from drivetrain_backend_api.testing.judge import act
from drivetrain_backend_api.testing.models import make_model
from drivetrain_backend_api.testing.ranks import Ranks
from drivetrain_backend_api.testing.rollouts import RolloutSpec, draw_rollout

BOUND = 1e-5
"""fp32 sums in another order; weights relative to their norm, the rest relative where above 1."""

ROLLOUT = {"samples": 8}
ACTIONS = [
    act("setup"),
    act("log_probs", rollout=ROLLOUT),
    act("train", rollout=ROLLOUT, algorithm="SequenceMean"),
    act("export", dtype="float32"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A plain model, and one whose padding token, which has an embedding of its own, is among those that are read."""
    folder = tmp_path_factory.mktemp("models")
    found = {name: make_model(folder / name, "qwen3") for name in ("plain", "padding")}
    path = found["padding"] / "config.json"
    padding = int(draw_rollout(RolloutSpec(samples=8)).tokens[0])
    path.write_text(json.dumps({**json.loads(path.read_text()), "pad_token_id": padding}))
    return found


@pytest.fixture(scope="module")
def play() -> Iterator[Any]:
    with Ranks("fsdp", {}) as fsdp, Ranks("megatron", {}) as megatron:

        def run(backend: str, model: Path, ranks: int, layout: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
            found = fsdp if backend == "fsdp" else megatron
            options = {**BASE, "hf_checkpoint": str(model), "fp32": True, "global_batch_size": 4, **(layout or {})}
            return found.run(ranks, options=options, actions=ACTIONS)

        yield run


@pytest.mark.slow
@pytest.mark.parametrize("model", ["plain", "padding"])
def test_both_backends_train_alike(model: str, models: dict[str, Path], play: Any) -> None:
    first = play("fsdp", models[model], 2)
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 2}
    second = play("megatron", models[model], 4, layout)
    before = [comparing.merged_log_probs([one["log_probs"] for one in results])[0] for results in (first, second)]
    assert comparing.values(before[0], before[1]) < BOUND
    steps = [results[0]["train"]["metrics"] for results in (first, second)]
    assert len(steps[0]) == len(steps[1]) == 2
    for name in ("loss", "entropy", "grad_norm", "lr"):
        assert comparing.scalars([one[name] for one in steps[0]], [one[name] for one in steps[1]]) < BOUND, name
    exported = [results[0]["export"]["tensors"] for results in (first, second)]
    assert exported[0].keys() == exported[1].keys()
    assert comparing.tensors(exported[0], exported[1]) < BOUND
