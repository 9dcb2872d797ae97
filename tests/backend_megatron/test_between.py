"""What may happen between a backward pass and its optimizer step, and what may not."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drivetrain_backend_api.testing import comparing
from drivetrain_backend_api.testing.cases import BASE
from drivetrain_backend_api.testing.judge import act
from drivetrain_backend_api.testing.models import make_model
from drivetrain_backend_api.testing.ranks import Ranks

pytestmark = pytest.mark.slow

ROLLOUT = {"samples": 8}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks("megatron", {}) as ranks:
        yield ranks


@pytest.mark.parametrize("options", [{}, OVERLAP], ids=["gathered at once", "gathered by the next forward"])
def test_a_look_does_not_hide_the_step_from_the_next_one(ranks: Ranks, model: Path, options: dict[str, Any]) -> None:
    found = []
    for look_between in (False, True):
        actions = [
            act("setup"),
            act("split_step", rollout=ROLLOUT, look_between=look_between),
            act("train", rollout=ROLLOUT),
            act("export", dtype="float32"),
        ]
        everything = {**BASE, "hf_checkpoint": str(model), "fp32": True, **options}
        found.append(ranks.run(2, options=everything, actions=actions)[1])
    assert found[0]["split_step"]["grad_norm"] == found[1]["split_step"]["grad_norm"]
    assert comparing.different(found[0]["train"]["metrics"], found[1]["train"]["metrics"]) == []
    assert comparing.different(found[0]["export"]["tensors"], found[1]["export"]["tensors"]) == []


def test_other_weights_take_no_step(ranks: Ranks, model: Path) -> None:
    actions = [
        act("setup"),
        act("weights_tag", "kept", call="backup_weights", tag="spare"),
        act("pend", rollout=ROLLOUT),
        act("weights_tag", "switched", call="switch_weights", tag="spare"),
        act("refused", action=act("optimizer_step")),
    ]
    options = {**BASE, "hf_checkpoint": str(model), "fp32": True}
    refused = ranks.run(1, options=options, actions=actions)[0]["refused"]
    assert "optimizer_step() is illegal while the weights are tag 'spare'" in refused["message"]
