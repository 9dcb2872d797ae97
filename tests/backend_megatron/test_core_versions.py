"""The adapter on whichever Megatron-Core is installed: what the rest of the backend relies on, and what nobody is told.

One process imports Megatron once and forks two ranks for each layout; a rank leaves what it found in a file. Buckets
are kept so small that every model has several.
"""

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from drivetrain_backend_api.testing import comparing
from drivetrain_backend_api.testing.cases import BASE
from drivetrain_backend_api.testing.judge import act
from drivetrain_backend_api.testing.ranks import Ranks, free_port
from drivetrain_backend_api.testing.reference import reference_train
from drivetrain_backend_api.testing.rollouts import RolloutSpec, draw_rollout
from drivetrain_backend_megatron.architectures import read_shape
from drivetrain_backend_megatron.config import MegatronConfig
from drivetrain_backend_megatron.name_map import place_of, places

pytestmark = pytest.mark.slow

RANKS = 2
DEADLINE = 150.0
BUCKET = 3000
"""Elements; the tiny model has ten times as many."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "dp2-overlap": {"overlap_grad_reduce": True, "overlap_param_gather": True},
    "cp2": {"context_parallel_size": 2},
    "ep2": {"expert_model_parallel_size": 2},
}
SEVERAL_BUCKETS = {"dp2-overlap"}
"""Without overlap Megatron makes one bucket of each buffer."""


def make_experts(folder: Path) -> Path:
    """Save a random mixture of experts whose second block is dense."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=67,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=4,
        mlp_only_layers=[1],
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=6,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    generator = torch.Generator().manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_((1.0 if "norm" in name else 0.0) + 0.12 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


# -- what each rank does -----------------------------------------------------------------------------------------------


def look(model: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Build this rank's part and look at it; returns what was found, names sorted."""
    from drivetrain_backend_megatron.core import buffers
    from drivetrain_backend_megatron.core import model as adapter
    from drivetrain_backend_megatron.core.schedule import _sum_gradients

    config = MegatronConfig(hf_checkpoint=str(model), fp32=True, **options)
    shape = read_shape(model)
    bare = adapter.build_chunks(shape, config, dtype=torch.float32, device=torch.device("cpu"), padded_vocab=67)
    settings = adapter.DistributedDataParallelConfig
    adapter.DistributedDataParallelConfig = partial(settings, bucket_size=BUCKET)
    chunks = adapter.wrap(bare, config)
    adapter.DistributedDataParallelConfig = settings
    parameters = dict(adapter.named_parameters(bare))
    slices = buffers.own_slices(chunks)

    flat = {one.untyped_storage().data_ptr() for one in buffers.weight_buffers(chunks).values()}
    sums = {one.untyped_storage().data_ptr() for one in buffers.gradient_buffers(chunks).values()}
    outside = [
        name
        for name, one in parameters.items()
        if one.untyped_storage().data_ptr() not in flat or one.main_grad.untyped_storage().data_ptr() not in sums
    ]

    for one in chunks:
        one.zero_grad_buffer()
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    wanted = {}
    for name, one in parameters.items():
        one.main_grad.copy_(torch.randn(one.shape, generator=generator))
        wanted[name] = one.main_grad.clone()
        dist.all_reduce(wanted[name], group=buffers.replicas_of(one))
    _sum_gradients(chunks, torch.zeros((), dtype=torch.int))
    wrong_sums = [
        name
        for name, one in parameters.items()
        if one in slices
        and not torch.allclose(
            slices[one].gradient, wanted[name].flatten()[slices[one].start :][: len(slices[one].gradient)], atol=1e-6
        )
    ]

    owned = {}
    for place, (name, one) in enumerate(parameters.items()):
        counts = torch.zeros(one.numel(), dtype=torch.int)
        if one in slices:
            own = slices[one]
            counts[own.start : own.start + len(own.weight)] += 1
            own.weight.copy_(updated(place, one.numel())[own.start : own.start + len(own.weight)])
        dist.all_reduce(counts, group=buffers.replicas_of(one))
        owned[name] = bool((counts == 1).all())
    buffers.gather_weights(chunks)
    buffers.finish_gathering(chunks)
    stale = [
        name
        for place, (name, one) in enumerate(parameters.items())
        if not torch.equal(one.detach().flatten(), updated(place, one.numel()))
    ]
    return {
        "names": sorted(parameters),
        "shapes": {name: list(one.shape) for name, one in parameters.items()},
        "buckets": max(len(buffer.buckets) for one in chunks for buffer in one.buffers),
        "outside": outside,
        "wrong_sums": wrong_sums,
        "not_owned_once": sorted(name for name, once in owned.items() if not once),
        "stale": stale,
    }


def updated(place: int, count: int) -> torch.Tensor:
    """Values that differ everywhere and are exact in float32."""
    return torch.arange(count, dtype=torch.float32) + 10_000 * place


def run_rank(model: Path, options: Mapping[str, Any], rank: int, port: int) -> dict[str, Any]:
    from datetime import timedelta

    from drivetrain_backend_megatron.core.groups import destroy_groups, make_groups

    timeout = timedelta(seconds=60)
    config = MegatronConfig(hf_checkpoint=str(model), fp32=True, **options)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS, timeout=timeout)
    make_groups(config, chunks=1, timeout=timeout)
    found = look(model, options)
    destroy_groups()
    dist.destroy_process_group()
    return found


def main(folder: Path) -> None:
    import drivetrain_backend_megatron.core  # noqa: F401 - once, before the ranks are forked

    # as a user sees it who asks for warnings
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    jobs = json.loads((folder / "jobs.json").read_text())
    for name, options in jobs["layouts"].items():
        port = free_port()
        children = []
        for rank in range(RANKS):
            child = os.fork()
            if not child:
                found = run_rank(folder / "model", options, rank, port)
                (folder / f"{name}.rank{rank}.json").write_text(json.dumps(found))
                os._exit(0)
            children.append(child)
        end = time.monotonic() + 60
        while children and time.monotonic() < end:
            children = [one for one in children if os.waitpid(one, os.WNOHANG)[0] == 0]
            time.sleep(0.01)
        for one in children:
            os.kill(one, 9)
            os.waitpid(one, 0)


# -- the tests ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("core")
    make_experts(folder / "model")
    return folder


@pytest.fixture(scope="module")
def told(folder: Path) -> str:
    """What the process printed to its error stream; beside it lies what its ranks found."""
    (folder / "jobs.json").write_text(json.dumps({"layouts": LAYOUTS}))
    done = subprocess.run(
        [sys.executable, __file__, str(folder)],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


@pytest.fixture(params=LAYOUTS)
def found(request: pytest.FixtureRequest, folder: Path, told: str) -> tuple[str, list[dict[str, Any]]]:
    paths = [folder / f"{request.param}.rank{rank}.json" for rank in range(RANKS)]
    assert all(one.exists() for one in paths), told[-3000:]
    return request.param, [json.loads(one.read_text()) for one in paths]


def test_weights_and_gradients_are_views_of_the_flat_buffers(found: Any) -> None:
    layout, ranks = found
    assert [one["outside"] for one in ranks] == [[], []]
    assert all((one["buckets"] > 1) == (layout in SEVERAL_BUCKETS) for one in ranks)


def test_gradients_are_summed_to_where_they_are_owned(found: Any) -> None:
    _, ranks = found
    assert [one["wrong_sums"] for one in ranks] == [[], []]


def test_each_element_is_owned_by_one_of_its_replicas(found: Any) -> None:
    _, ranks = found
    assert [one["not_owned_once"] for one in ranks] == [[], []]


def test_updated_slices_reach_every_replica(found: Any) -> None:
    _, ranks = found
    assert [one["stale"] for one in ranks] == [[], []]


def test_the_ranks_hold_the_parameters_that_the_name_map_knows(found: Any, folder: Path) -> None:
    layout, ranks = found
    shape = read_shape(folder / "model")
    known = {place.name for place in places(shape)}
    experts = {name for name in known if ".local_experts." in name}
    assert {name for one in ranks for name in one["names"]} == known
    shared = set(ranks[0]["names"]) & set(ranks[1]["names"])
    assert shared == (known - experts if layout == "ep2" else known)
    for name, size in ranks[0]["shapes"].items():
        assert place_of(name, shape).rule.split_dim is None or size[0] > 0


def test_a_user_is_not_told_of_what_is_not_his_to_change(told: str) -> None:
    assert told == ""


@pytest.fixture(scope="module")
def play(folder: Path) -> Iterator[Ranks]:
    with Ranks("megatron", {}) as ranks:
        yield ranks


@pytest.mark.parametrize("layout", [{}, {"expert_model_parallel_size": 2}], ids=["dp2", "ep2"])
def test_experts_train_as_a_plain_model_does(play: Ranks, folder: Path, layout: dict[str, Any]) -> None:
    options = {**BASE, "hf_checkpoint": str(folder / "model"), "fp32": True, "global_batch_size": 4, **layout}
    config = MegatronConfig(**options)
    expected = reference_train(folder / "model", draw_rollout(RolloutSpec()), config, algorithm="TokenMean")
    results = play.run(RANKS, options=options, actions=[act("setup"), act("train", rollout={}, algorithm="TokenMean")])
    steps = results[0]["train"]["metrics"]
    # fp32 sums in another order, two optimizer steps on
    for name, values in (
        ("loss", expected.losses),
        ("entropy", expected.entropies),
        ("grad_norm", expected.grad_norms),
    ):
        assert comparing.scalars([one[name] for one in steps], values) < 1e-5, name


if __name__ == "__main__":
    main(Path(sys.argv[1]))
