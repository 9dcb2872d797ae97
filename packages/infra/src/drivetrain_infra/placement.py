"""Which process runs where: what a run asks of the cluster, whether it is there, and the placement groups that hold it.

The same code places GPUs and, where the cluster has none, CPU ranks. Knows no backend and no engine.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from drivetrain_backend_api import DrivetrainError
from drivetrain_infra import daemons
from drivetrain_infra.config import PlacementConfig

_NODE_LABEL = "ray.io/node-id"
_SPARE_CPUS = 2
"""Logical CPUs beside those of ranks and engines, for tasks such as rewards and for finding out GPU indices."""

_POLL_SECONDS = 0.1


class PlacementError(DrivetrainError):
    """The cluster does not have what was asked for; the message shows both."""


@dataclass(frozen=True, kw_only=True)
class ResourceRequest:
    """What one role asks for.

    Attributes:
        role: "train" or "rollout".
        processes: how many.
        devices: GPUs, or CPUs without GPUs, of each process.
        per_node: processes that each of its nodes must take; None leaves it to the cluster.
    """

    role: str
    processes: int
    devices: int
    per_node: int | None = None

    @property
    def num_nodes(self) -> int | None:
        """Nodes it must have, or None."""
        return None if self.per_node is None else self.processes // self.per_node


@dataclass(frozen=True, kw_only=True)
class NodeResources:
    """What a node has: free, or in all."""

    node_id: str
    host: str
    cpus: int
    gpus: int


@dataclass(frozen=True, kw_only=True)
class PlacementPlan:
    """What was asked, what there is, and how one fits the other.

    Attributes:
        device: "GPU", or "CPU" when no node has a GPU.
        rows: a table for a person: asked, then there.
        errors: what does not fit; empty when everything does.
        nodes: role -> node id of each process, in order; incomplete when there are errors.
    """

    device: str
    rows: tuple[str, ...]
    errors: tuple[str, ...]
    nodes: dict[str, tuple[str, ...]]

    @property
    def table(self) -> str:
        """The rows as one text."""
        return "\n".join(self.rows)

    def require(self) -> None:
        """Refuse a plan that does not fit.

        Raises:
            PlacementError: shows what is asked for and what there is.
        """
        if self.errors:
            raise PlacementError("\n".join(["the cluster cannot place this run:", *self.errors, *self.rows]))


@dataclass(frozen=True, kw_only=True)
class Slot:
    """The place of one process.

    Attributes:
        index: rank of a train worker, or number of an engine.
        node_id: the node.
        gpu_ids: GPU indices on that node, or UUIDs where CUDA_VISIBLE_DEVICES lists those; empty on CPUs.
        actor_options: pass them to `.options(...)` of the actor that goes here.
    """

    index: int
    node_id: str
    gpu_ids: tuple[int | str, ...]
    actor_options: dict[str, Any] = field(repr=False)

    @property
    def device(self) -> str:
        """The torch device as the process in this slot sees it; Ray shows it its own GPUs only."""
        return "cuda:0" if self.gpu_ids else "cpu"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Reserved places of all processes; train slots by rank, nodes one after the other, GPUs in order within a node."""

    train: tuple[Slot, ...]
    engines: tuple[Slot, ...]
    groups: tuple[PlacementGroup, ...] = field(repr=False)

    def remove(self) -> None:
        """Give the places back; processes in them end."""
        if not daemons.have_died():
            for group in self.groups:
                remove_placement_group(group)


def resource_requests(config: PlacementConfig, *, num_engines: int | None = None) -> tuple[ResourceRequest, ...]:
    """List what a run asks for.

    Args:
        config: the flags.
        num_engines: overrides the flags' number of engines; 0 for a run that generates nothing.
    """
    engines = config.num_engines if num_engines is None else num_engines
    train = ResourceRequest(
        role="train", processes=config.train_world_size, devices=1, per_node=config.actor_num_gpus_per_node
    )
    rollout = ResourceRequest(role="rollout", processes=engines, devices=config.rollout_num_gpus_per_engine)
    return (train, rollout) if engines else (train,)


def logical_cpus(config: PlacementConfig, *, num_engines: int | None = None) -> int:
    """Count the CPUs that a Ray started for this run must claim to have."""
    requests = resource_requests(config, num_engines=num_engines)
    return sum(one.processes * one.devices for one in requests) + _SPARE_CPUS


def cluster_nodes(*, free: bool = True) -> list[NodeResources]:
    """List what each live node of the connected cluster has, by host and id.

    Args:
        free: only what no run holds now.
    """
    alive = [one for one in ray.nodes() if one["Alive"]]  # type: ignore[no-untyped-call]
    if free:
        have = available_resources_per_node()  # type: ignore[no-untyped-call]
    else:
        have = {one["NodeID"]: one["Resources"] for one in alive}
    nodes = [
        NodeResources(
            node_id=one["NodeID"],
            host=one["NodeManagerAddress"],
            cpus=int(have.get(one["NodeID"], {}).get("CPU", 0)),
            gpus=int(have.get(one["NodeID"], {}).get("GPU", 0)),
        )
        for one in alive
    ]
    return sorted(nodes, key=lambda one: (one.host, one.node_id))


def cluster_device() -> str:
    """Return "GPU" when the connected cluster has any, busy or free, and "CPU" otherwise."""
    resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return "GPU" if resources.get("GPU", 0) >= 1 else "CPU"


def preflight(requests: Sequence[ResourceRequest], nodes: Sequence[NodeResources], device: str) -> PlacementPlan:
    """Fit requests to nodes, without touching the cluster.

    A request with `per_node` takes the nodes with the least room that is enough, so that larger processes keep theirs.
    Every process also takes one CPU for each of its devices.

    Args:
        requests: in the order of their claim.
        nodes: what they have.
        device: "GPU" or "CPU".
    """
    room = {one.node_id: (one.gpus if device == "GPU" else one.cpus, one.cpus) for one in nodes}
    chosen: dict[str, tuple[str, ...]] = {}
    errors = []
    for request in requests:
        size = request.devices * (request.per_node or 1)
        spots = request.num_nodes or request.processes
        taken: list[str] = []
        for _ in range(spots):
            fits = [
                one.node_id
                for one in nodes
                if min(room[one.node_id]) >= size and not (request.per_node and one.node_id in taken)
            ]
            if not fits:
                errors.append(_shortage(requests, request, size, spots, len(taken), device))
                break
            # engines stay on as few nodes as they can too: the least room that is enough, first of equals
            best = min(fits, key=lambda one: room[one][0])
            room[best] = (room[best][0] - size, room[best][1] - size)
            taken.append(best)
        if request.per_node:
            in_order = [one.node_id for one in nodes if one.node_id in taken]
            taken = [one for one in in_order for _ in range(request.per_node)]
        chosen[request.role] = tuple(taken)
    return PlacementPlan(device=device, rows=_table(requests, nodes, device), errors=tuple(errors), nodes=chosen)


def _shortage(
    requests: Sequence[ResourceRequest], request: ResourceRequest, size: int, spots: int, found: int, device: str
) -> str:
    what = f"nodes with {size} {device}s each" if request.per_node else f"processes of {size} {device}s each"
    # what claimed its places before is as much in the way
    fix = _can_be_lowered(request) or [flag for one in requests for flag in _can_be_lowered(one)]
    if fix:
        advice = f"lower {' or '.join(fix)}, or add nodes"
    elif device == "GPU":
        roles = "trainer and engine need a GPU each" if len(requests) > 1 else "the trainer needs a GPU"
        advice = (
            f"{roles}, and a CPU beside it: add GPUs, or put CUDA_VISIBLE_DEVICES= (empty) before the command to run "
            "on CPU ranks"
        )
    else:
        roles = "trainer and engine need a CPU each" if len(requests) > 1 else "the trainer needs a CPU"
        advice = f"{roles}: add nodes, or leave --ray-address out to start Ray on this machine"
    return f"{request.role}: {spots} {what} are asked for, {found} can be had; {advice}"


def _can_be_lowered(request: ResourceRequest) -> list[str]:
    """The flags that this request comes from, as far as they are above 1."""
    if request.per_node:
        values = {"--actor-num-nodes": request.processes // request.per_node}
        values["--actor-num-gpus-per-node"] = request.per_node
    else:
        values = {"--rollout-num-gpus": request.processes * request.devices}
        values["--rollout-num-gpus-per-engine"] = request.devices
    return [flag for flag, value in values.items() if value > 1]


def _table(requests: Sequence[ResourceRequest], nodes: Sequence[NodeResources], device: str) -> tuple[str, ...]:
    lines = [("", "processes", device, "nodes")]
    for one in requests:
        spread = "any" if one.per_node is None else f"{one.num_nodes} with {one.per_node} processes each"
        lines.append((f"asked: {one.role}", str(one.processes), str(one.processes * one.devices), spread))
    lines.append(
        (
            "asked: total",
            str(sum(one.processes for one in requests)),
            str(sum(one.processes * one.devices for one in requests)),
            "",
        )
    )
    for node in nodes:
        free = node.gpus if device == "GPU" else node.cpus
        cpus = f"{node.host}, {node.cpus} CPUs" if device == "GPU" else node.host
        lines.append((f"there: node {node.node_id[:8]}", "", str(free), cpus))
    total = sum(one.gpus if device == "GPU" else one.cpus for one in nodes)
    lines.append(("there: total", "", str(total), str(len(nodes))))
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    return tuple(
        f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}  {d:<{widths[3]}}".rstrip() for a, b, c, d in lines
    )


def create_placement_groups(config: PlacementConfig, *, num_engines: int | None = None) -> Placement:
    """Reserve places for all processes of a run on the connected cluster.

    What the cluster could never grant is refused at once; what others hold is waited for.

    Args:
        config: the flags; `placement_timeout` bounds the whole call.
        num_engines: as in `resource_requests`.

    Raises:
        PlacementError: the cluster does not have it, or did not grant it in time; nothing stays reserved.
    """
    deadline = time.monotonic() + config.placement_timeout
    requests = resource_requests(config, num_engines=num_engines)
    preflight(requests, cluster_nodes(free=False), cluster_device()).require()
    plan = _wait_for_room(requests, config.placement_timeout)
    groups: list[PlacementGroup] = []
    slots: dict[str, tuple[Slot, ...]] = {}
    try:
        for request in requests:
            nodes = plan.nodes[request.role]
            group = placement_group(
                [_resources(request.devices, plan.device) for _ in nodes],
                name=f"drivetrain-{request.role}",
                bundle_label_selector=[{_NODE_LABEL: one} for one in nodes],
            )
            groups.append(group)
            if not group.wait(max(deadline - time.monotonic(), 0.0)):
                raise PlacementError(
                    f"the cluster did not grant the places of {request.role} within --placement-timeout "
                    f"{config.placement_timeout:g} s, though they were free before; another run may have taken "
                    f"them: try again, or raise the timeout\n{plan.table}"
                )
            slots[request.role] = _slots(group, request, nodes, plan.device, deadline)
    except BaseException:
        for group in groups:
            remove_placement_group(group)
        raise
    return Placement(train=slots["train"], engines=slots.get("rollout", ()), groups=tuple(groups))


def _wait_for_room(requests: Sequence[ResourceRequest], seconds: float) -> PlacementPlan:
    """Plan with what is free, once there is enough of it: processes that ended give their places back with a delay."""
    end = time.monotonic() + seconds
    while (plan := preflight(requests, cluster_nodes(), cluster_device())).errors:
        if time.monotonic() > end:
            raise PlacementError(
                f"other runs hold what this one needs, still after --placement-timeout {seconds:g} s; wait for them "
                "to end, or raise the timeout. What is free:\n" + "\n".join([*plan.errors, *plan.rows])
            )
        time.sleep(_POLL_SECONDS)
    return plan


def _resources(devices: int, device: str) -> dict[str, float]:
    return {"CPU": float(devices), "GPU": float(devices)} if device == "GPU" else {"CPU": float(devices)}


def _slots(
    group: PlacementGroup, request: ResourceRequest, nodes: Sequence[str], device: str, deadline: float
) -> tuple[Slot, ...]:
    """Number the bundles: nodes as planned, GPUs by index within a node, or as Ray gave them where they have none."""
    options = [_options(group, bundle, request.devices, device) for bundle in range(len(nodes))]
    gpus = _gpu_ids(options, deadline) if device == "GPU" else [()] * len(nodes)
    first_seen = {node: place for place, node in reversed(list(enumerate(nodes)))}
    indices = [tuple(one for one in ids if isinstance(one, int)) for ids in gpus]
    order = sorted(range(len(nodes)), key=lambda bundle: (first_seen[nodes[bundle]], indices[bundle], bundle))
    return tuple(
        Slot(index=index, node_id=nodes[bundle], gpu_ids=gpus[bundle], actor_options=options[bundle])
        for index, bundle in enumerate(order)
    )


def _options(group: PlacementGroup, bundle: int, devices: int, device: str) -> dict[str, Any]:
    return {
        "num_cpus": devices,
        "num_gpus": devices if device == "GPU" else 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=bundle
        ),
    }


def _gpu_ids(options: Iterable[dict[str, Any]], deadline: float) -> list[tuple[int | str, ...]]:
    """Ask a short task in each bundle which GPUs it was given: Ray tells nobody else."""
    probe = ray.remote(_my_gpu_ids)
    references = [probe.options(**one).remote() for one in options]
    try:
        return list(ray.get(references, timeout=max(deadline - time.monotonic(), 0.0)))
    except ray.exceptions.GetTimeoutError as error:
        raise PlacementError(
            "the cluster granted all places, but its workers did not start within --placement-timeout; look at the "
            "Ray logs of its nodes, or raise the timeout"
        ) from error
    except ray.exceptions.RayError as error:
        raise PlacementError(
            "the cluster granted all places, but a worker there could not say which GPUs it was given "
            f"({type(error).__name__}); look at the Ray logs of its nodes"
        ) from error


def _my_gpu_ids() -> tuple[int | str, ...]:
    """Return this worker's GPUs: indices sorted, anything else (UUIDs, MIG slices) as Ray lists them."""
    ids = [str(one) for one in ray.get_gpu_ids()]
    return tuple(sorted(map(int, ids))) if all(one.isdigit() for one in ids) else tuple(ids)
