"""Placement on a real two-node Ray cluster of this machine, and the preflight and the manager on plain data."""

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from drivetrain_backend_api import DrivetrainError
from drivetrain_backend_api.parallel import ParallelLayout
from drivetrain_infra.config import PlacementConfig
from drivetrain_infra.placement import (
    NodeResources,
    PlacementError,
    cluster_device,
    cluster_nodes,
    create_placement_groups,
    preflight,
    resource_requests,
)
from drivetrain_infra.process_groups import ProcessGroupManager, WorkerPlace
from drivetrain_infra.ray_runtime import ray_session, this_node
from drivetrain_infra.testing import local_cluster


@pytest.mark.slow
def test_gpus_that_are_named_by_uuid_keep_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Ray takes our word for the GPUs: none is opened
    names = ("GPU-b0b0b0b0", "MIG-a1a1a1a1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(names))
    with (
        local_cluster(tmp_path, cpus_per_node=(4,), gpus_per_node=2) as address,
        ray_session(tmp_path, address=address),
    ):
        placement = create_placement_groups(PlacementConfig())
        slots = [*placement.train, *placement.engines]
        placement.remove()
    assert {slot.gpu_ids for slot in slots} == {(name,) for name in names}
    assert {slot.device for slot in slots} == {"cuda:0"}


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("placement")
    with local_cluster(folder, cpus_per_node=(3, 2)) as address, ray_session(folder, address=address):
        yield


def test_each_node_takes_its_ranks_in_order_and_the_engine_takes_what_is_left(two_nodes: None) -> None:
    big, small = sorted(cluster_nodes(), key=lambda node: -node.cpus)
    placement = create_placement_groups(PlacementConfig(actor_num_nodes=2, actor_num_gpus_per_node=2))
    try:
        where = ray.remote(this_node)
        landed = ray.get([where.options(**slot.actor_options).remote() for slot in placement.train], timeout=60)
        (engine,) = ray.get([where.options(**slot.actor_options).remote() for slot in placement.engines], timeout=60)
    finally:
        placement.remove()
    nodes = [one.node_id for one in landed]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    assert set(nodes) == {big.node_id, small.node_id}
    assert engine.node_id == big.node_id
    assert nodes == [slot.node_id for slot in placement.train]
    assert [slot.index for slot in placement.train] == [0, 1, 2, 3]
    assert {slot.device for slot in placement.train} == {"cpu"}


def test_too_large_a_request_is_refused_at_once_with_both_sides_shown(two_nodes: None) -> None:
    began = time.monotonic()
    with pytest.raises(PlacementError) as failure:
        create_placement_groups(PlacementConfig(actor_num_nodes=2, actor_num_gpus_per_node=3, rollout_num_gpus=1))
    assert time.monotonic() - began < 10
    text = str(failure.value)
    assert "2 nodes with 3 CPUs each are asked for, 1 can be had" in text
    assert "lower --actor-num-nodes or --actor-num-gpus-per-node" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["asked:", "total", "7", "7"] in rows
    assert ["there:", "total", "5", "2"] in rows


def test_what_another_run_holds_is_waited_for_until_the_deadline(two_nodes: None) -> None:
    config = PlacementConfig(actor_num_nodes=2, actor_num_gpus_per_node=2, placement_timeout=30)
    placement = create_placement_groups(config)
    began = time.monotonic()
    with pytest.raises(PlacementError, match="other runs hold what this one needs") as failure:
        create_placement_groups(dataclasses.replace(config, placement_timeout=2))
    assert 2 <= time.monotonic() - began < 20
    assert ["there:", "total", "0", "2"] in [line.split() for line in str(failure.value).splitlines()]
    placement.remove()
    # the cluster takes them back a little later
    create_placement_groups(config).remove()


def test_engines_keep_the_nodes_that_ranks_can_do_without() -> None:
    nodes = [node("a", gpus=8), node("b", gpus=4), node("c", gpus=4)]
    config = PlacementConfig(
        actor_num_nodes=2, actor_num_gpus_per_node=4, rollout_num_gpus=8, rollout_num_gpus_per_engine=8
    )
    plan = preflight(resource_requests(config), nodes, "GPU")
    plan.require()
    assert plan.nodes == {"train": ("b",) * 4 + ("c",) * 4, "rollout": ("a",)}


def test_enough_gpus_on_the_wrong_nodes_are_not_enough() -> None:
    nodes = [node("a", gpus=4), node("b", gpus=4)]
    config = PlacementConfig(actor_num_gpus_per_node=2, rollout_num_gpus=4, rollout_num_gpus_per_engine=4)
    preflight(resource_requests(config), nodes, "GPU").require()
    config = PlacementConfig(actor_num_nodes=2, actor_num_gpus_per_node=2, rollout_num_gpus=4)
    preflight(resource_requests(config), nodes, "GPU").require()
    config = PlacementConfig(
        actor_num_nodes=2, actor_num_gpus_per_node=2, rollout_num_gpus=4, rollout_num_gpus_per_engine=4
    )
    with pytest.raises(PlacementError, match="rollout: 1 processes of 4 GPUs each are asked for, 0 can be had"):
        preflight(resource_requests(config), nodes, "GPU").require()


@pytest.mark.parametrize(
    ("asked", "gpus", "advice"),
    [
        ({}, 1, "trainer and engine need a GPU each"),
        ({"actor_num_gpus_per_node": 2}, 2, "lower --actor-num-gpus-per-node, or add nodes"),
        ({"rollout_num_gpus": 2}, 2, "lower --rollout-num-gpus, or add nodes"),
        ({"actor_num_nodes": 2}, 2, "lower --actor-num-nodes, or add nodes"),
    ],
)
def test_the_advice_names_only_flags_that_can_be_lowered(asked: dict[str, int], gpus: int, advice: str) -> None:
    (error,) = preflight(resource_requests(PlacementConfig(**asked)), [node("a", gpus=gpus)], "GPU").errors
    assert advice in error
    assert error.count("--") == (1 if asked else 0)
    assert ("CUDA_VISIBLE_DEVICES= (empty)" in error) == (not asked)


def test_a_gpu_without_a_cpu_beside_it_is_no_place() -> None:
    requests = resource_requests(PlacementConfig(), num_engines=0)
    with pytest.raises(PlacementError):
        preflight(requests, [node("a", gpus=1, cpus=0)], "GPU").require()


def test_the_cluster_of_this_test_counts_cpus(two_nodes: None) -> None:
    assert cluster_device() == ("GPU" if any(one.gpus for one in cluster_nodes()) else "CPU")


def test_the_manager_finds_shard_and_node_of_each_rank_of_a_tp_pp_dp_layout() -> None:
    # 8 ranks: tp fastest, then dp, then pp; four ranks a node
    places = [
        WorkerPlace(
            layout=ParallelLayout(
                rank=rank,
                world_size=8,
                device="cpu",
                tp_rank=rank % 2,
                tp_size=2,
                dp_rank=rank // 2 % 2,
                dp_size=2,
                pp_rank=rank // 4,
                pp_size=2,
            ),
            node_id=f"node{rank // 4}",
        )
        for rank in range(8)
    ]
    manager = ProcessGroupManager(list(reversed(places)))
    assert (manager.world_size, manager.dp_size, manager.pp_size) == (8, 2, 2)
    assert [manager.dp_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [manager.node(rank) for rank in range(8)] == ["node0"] * 4 + ["node1"] * 4
    with pytest.raises(DrivetrainError, match="not one whole group"):
        ProcessGroupManager(places[:-1])


def node(name: str, *, gpus: int, cpus: int = 32) -> NodeResources:
    return NodeResources(node_id=name, host=name, cpus=cpus, gpus=gpus)
