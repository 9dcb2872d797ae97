"""Both backends from one Hugging Face checkpoint on one rollout: the same numbers, under layouts of their own."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from drivetrain_backend_api.testing import comparing
from drivetrain_backend_api.testing.cases import BASE
from drivetrain_backend_api.testing.judge import act
from drivetrain_backend_api.testing.models import make_model
from drivetrain_backend_api.testing.ranks import Ranks

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
def play(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    model = make_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")
    options = {**BASE, "hf_checkpoint": str(model), "fp32": True, "global_batch_size": 4}
    with Ranks("fsdp", {}) as fsdp, Ranks("megatron", {}) as megatron:

        def run(backend: str, ranks: int, layout: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
            found = fsdp if backend == "fsdp" else megatron
            return found.run(ranks, options=options | dict(layout or {}), actions=ACTIONS)

        yield run


@pytest.mark.slow
def test_both_backends_train_alike(play: Any, tmp_path: Path) -> None:
    first = play("fsdp", 2)
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 2}
    second = play("megatron", 4, layout)
    before = [comparing.merged_log_probs([one["log_probs"] for one in results])[0] for results in (first, second)]
    assert comparing.values(before[0], before[1]) < BOUND
    steps = [results[0]["train"]["metrics"] for results in (first, second)]
    assert len(steps[0]) == len(steps[1]) == 2
    for name in ("loss", "entropy", "grad_norm", "lr"):
        assert comparing.scalars([one[name] for one in steps[0]], [one[name] for one in steps[1]]) < BOUND, name
    exported = [results[0]["export"]["tensors"] for results in (first, second)]
    assert exported[0].keys() == exported[1].keys()
    assert comparing.tensors(exported[0], exported[1]) < BOUND
