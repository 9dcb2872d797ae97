"""Groups that are destroyed and rebuilt under their handles, on four gloo ranks; torch's own groups are the reference.

Run as a program with a scenario and a folder, this file forks the four ranks.
"""

import contextlib
import datetime
import gc
import importlib
import io
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

from drivetrain_backend_api.errors import DrivetrainError, IllegalStateError
from drivetrain_backend_api.process_groups import GroupHandle, RebuildableGroups

RANKS = 4
TIMEOUT = datetime.timedelta(seconds=30)
Group = Any  # a handle, or None for WORLD


# -- one call of everything that torch.distributed exports and that moves data ----------------------------------------


def mine(group: Group, *shape: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape) * (1 + dist.get_rank(group)) ** 2


def empty(group: Group, *shape: int) -> list[Tensor]:
    return [torch.zeros(shape) for _ in range(dist.get_world_size(group))]


def in_place(call: Callable[[Tensor], Any], tensor: Tensor) -> Tensor:
    call(tensor)
    return tensor


def into(call: Callable[[Any], Any], out: Any) -> Any:
    call(out)
    return out


def first(group: Group) -> bool:
    return dist.get_rank(group) == 0


def objects(group: Group) -> list[Any]:
    return [{"rank": dist.get_rank(group), "of": one} for one in range(dist.get_world_size(group))]


def to_next(group: Group, send: Callable[..., Any], receive: Callable[..., Any]) -> Tensor:
    """Even ranks send first, odd ones receive first."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    got = torch.zeros(3)
    calls = [
        lambda: send(mine(group, 3), group=group, group_dst=(rank + 1) % size),
        lambda: receive(got, group=group, group_src=(rank - 1) % size),
    ]
    for one in calls if rank % 2 == 0 else calls[::-1]:
        work = one()
        if isinstance(work, dist.Work):
            work.wait()
    return got


def batched(group: Group) -> Tensor:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    got = torch.zeros(3)
    operations = [
        dist.P2POp(dist.isend, mine(group, 3), group=group, group_peer=(rank + 1) % size),
        dist.P2POp(dist.irecv, got, group=group, group_peer=(rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return got


def object_lists(group: Group) -> list[Any]:
    if first(group):
        dist.send_object_list(objects(group), group=group, group_dst=1)
    received = [None] * dist.get_world_size(group)
    if dist.get_rank(group) == 1:
        dist.recv_object_list(received, group=group, group_src=0)
    return received


def coalesced(group: Group) -> list[Tensor]:
    tensors = [mine(group, 2), mine(group, 3)]
    with c10d._coalescing_manager(group=group, async_ops=True) as manager:
        for one in tensors:
            dist.all_reduce(one, group=group)
    manager.wait()
    return tensors


CALLS: dict[str, Callable[[Group], Any]] = {
    "all_gather": lambda g: into(lambda out: dist.all_gather(out, mine(g, 3), group=g), empty(g, 3)),
    "all_gather_coalesced": lambda g: into(
        lambda out: dist.all_gather_coalesced(out, [mine(g, 3)], group=g), [[one] for one in empty(g, 3)]
    ),
    "all_gather_into_tensor": lambda g: into(
        lambda out: dist.all_gather_into_tensor(out, mine(g, 3), group=g), torch.cat(empty(g, 3))
    ),
    "all_gather_single": lambda g: into(
        lambda out: dist.all_gather_single(out, mine(g, 3), group=g), torch.cat(empty(g, 3))
    ),
    "all_gather_object": lambda g: into(
        lambda out: dist.all_gather_object(out, objects(g), group=g), [None] * dist.get_world_size(g)
    ),
    "all_reduce": lambda g: in_place(lambda one: dist.all_reduce(one, dist.ReduceOp.MAX, group=g), mine(g, 3)),
    "all_reduce_coalesced": lambda g: into(
        lambda out: dist.all_reduce_coalesced(out, group=g), [mine(g, 3), mine(g, 2)]
    ),
    "all_to_all": lambda g: into(
        lambda out: dist.all_to_all(out, list(mine(g, dist.get_world_size(g), 2)), group=g), empty(g, 2)
    ),
    "all_to_all_single": lambda g: into(
        lambda out: dist.all_to_all_single(out, mine(g, 2 * dist.get_world_size(g)), group=g), torch.cat(empty(g, 2))
    ),
    "barrier": lambda g: dist.barrier(group=g),
    "batch_isend_irecv": batched,
    "broadcast": lambda g: in_place(lambda one: dist.broadcast(one, group_src=1, group=g), mine(g, 3)),
    "broadcast_object_list": lambda g: into(
        lambda out: dist.broadcast_object_list(out, group_src=1, group=g), objects(g)
    ),
    "gather": lambda g: into(
        lambda out: dist.gather(mine(g, 3), out if first(g) else None, group_dst=0, group=g), empty(g, 3)
    ),
    "gather_into_tensor": lambda g: into(
        lambda out: dist.gather_into_tensor(out if first(g) else None, mine(g, 3), group_dst=0, group=g),
        torch.cat(empty(g, 3)),
    ),
    "gather_single": lambda g: into(
        lambda out: dist.gather_single(out if first(g) else None, mine(g, 3), group_dst=0, group=g),
        torch.cat(empty(g, 3)),
    ),
    "gather_object": lambda g: into(
        lambda out: dist.gather_object(objects(g), out if first(g) else None, group_dst=0, group=g),
        [None] * dist.get_world_size(g),
    ),
    "isend": lambda g: to_next(g, dist.isend, dist.recv),
    "irecv": lambda g: to_next(g, dist.send, dist.irecv),
    "monitored_barrier": lambda g: dist.monitored_barrier(group=g, timeout=TIMEOUT),
    "recv": lambda g: to_next(g, dist.send, dist.recv),
    "recv_object_list": object_lists,
    "reduce": lambda g: (
        in_place(lambda one: dist.reduce(one, group_dst=1, group=g), mine(g, 3))
        if dist.get_rank(g) == 1
        else dist.reduce(mine(g, 3), group_dst=1, group=g)
    ),
    "reduce_scatter": lambda g: in_place(
        lambda one: dist.reduce_scatter(one, list(mine(g, dist.get_world_size(g), 2)), group=g), torch.zeros(2)
    ),
    "reduce_scatter_single": lambda g: in_place(
        lambda one: dist.reduce_scatter_single(one, mine(g, 2 * dist.get_world_size(g)), group=g), torch.zeros(2)
    ),
    "reduce_scatter_tensor": lambda g: in_place(
        lambda one: dist.reduce_scatter_tensor(one, mine(g, 2 * dist.get_world_size(g)), group=g), torch.zeros(2)
    ),
    "scatter": lambda g: in_place(
        lambda one: dist.scatter(
            one, list(mine(g, dist.get_world_size(g), 2)) if first(g) else None, group_src=0, group=g
        ),
        torch.zeros(2),
    ),
    "scatter_object_list": lambda g: into(
        lambda out: dist.scatter_object_list(out, objects(g) if first(g) else None, group_src=0, group=g), [None]
    ),
    "send": lambda g: to_next(g, dist.send, dist.recv),
    "send_object_list": object_lists,
    # Not exported, used by Megatron-Core and FSDP.
    "_coalescing_manager": coalesced,
    "_functional_collectives": lambda g: [
        functional.wait_tensor(functional.all_reduce(mine(g, 3), "sum", g or dist.group.WORLD)),
        functional.wait_tensor(functional.all_gather_tensor(mine(g, 3), 0, g or dist.group.WORLD)),
        functional.wait_tensor(
            functional.reduce_scatter_tensor(mine(g, 2 * dist.get_world_size(g)), "sum", 0, g or dist.group.WORLD)
        ),
        functional.wait_tensor(
            functional.all_to_all_single(mine(g, 2 * dist.get_world_size(g)), None, None, g or dist.group.WORLD)
        ),
        functional.wait_tensor(functional.broadcast(mine(g, 3), 0, g or dist.group.WORLD)),
    ],
    "_broadcast_coalesced": lambda g: into(
        lambda out: dist._broadcast_coalesced(g or dist.group.WORLD, out, 64, 0), [mine(g, 3), mine(g, 2)]
    ),
    "questions": lambda g: [
        dist.get_rank(g),
        dist.get_world_size(g),
        dist.get_backend(g),
        dist.get_backend_config(g),
        dist.get_process_group_ranks(g),
        dist.get_global_rank(g or dist.group.WORLD, 1),
        dist.get_group_rank(g or dist.group.WORLD, dist.get_rank()),
        (g or dist.group.WORLD).rank(),
        (g or dist.group.WORLD).size(),
        (g or dist.group.WORLD).name(),
        (g or dist.group.WORLD).group_name,
        (g or dist.group.WORLD).group_desc,
        (g or dist.group.WORLD)._get_backend(torch.device("cpu")).name(),
    ],
}

GLOO_LACKS = {"gather_into_tensor", "gather_single", "all_to_all"}  # the last in torch 2.11

# What torch.distributed exports beside collectives.
# fmt: off
OTHER_EXPORTS = {
    "Backend", "BackendConfig", "GroupMember", "P2POp", "destroy_process_group", "get_backend_config",
    "get_backend", "get_backend_impl", "get_default_backend_for_device", "get_rank", "get_world_size",
    "get_pg_count", "group", "init_process_group", "is_gloo_available", "is_initialized", "is_mpi_available",
    "is_backend_available", "is_nccl_available", "is_torchelastic_launched", "is_ucc_available",
    "is_xccl_available", "new_group", "new_subgroups", "new_subgroups_by_enumeration", "supports_complex",
    "AllreduceCoalescedOptions", "AllreduceOptions", "AllToAllOptions", "BarrierOptions", "BroadcastOptions",
    "GatherOptions", "GroupName", "PrefixStore", "ProcessGroup", "ReduceOp", "ReduceOptions",
    "ReduceScatterOptions", "ScatterOptions", "Store", "DebugLevel", "get_debug_level", "Work",
    "default_pg_timeout", "get_group_rank", "get_global_rank", "get_process_group_ranks", "reduce_op",
    "get_node_local_rank", "set_timeout", "split_group", "shrink_group", "record_comm", "ProcessGroupNCCL",
    "ProcessGroupNCCL2", "ProcessGroupNCCLLazy", "ProcessGroupGloo", "ProcessGroupMPI", "ProcessGroupUCC",
    "ProcessGroupXCCL",
}
# fmt: on


def results(group: Group) -> dict[str, Any]:
    """What every call gives, or the kind of error where gloo has no such collective."""
    found: dict[str, Any] = {}
    for name, call in CALLS.items():
        if not name.startswith("_") and name != "questions" and not hasattr(dist, name):
            continue  # newer than this torch
        try:
            found[name] = call(group)
        except (RuntimeError, ValueError, NotImplementedError, TypeError) as error:
            found[name] = f"{type(error).__name__}: {error}".splitlines()[0][:60]
    return found


def differences(found: Any, expected: Any) -> list[str]:
    return [
        f"{name}: {found.get(name)} is not {one}" for name, one in expected.items() if not same(found.get(name), one)
    ]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


# -- scenarios, each on every rank ------------------------------------------------------------------------------------


def make_groups(rank: int) -> dict[str, Any]:
    """Groups in every spelling that has a name in torch.distributed; each rank gets those that it is in."""
    made: dict[str, Any] = {"WORLD": None}
    for pair in ([0, 1], [2, 3]):
        group = dist.new_group(pair, timeout=TIMEOUT, group_desc=f"pair {pair}")
        if rank in pair:
            made["pair"] = group
        pair.clear()  # the caller's list is its own
    made["all, reversed"] = dist.new_group([3, 2, 1, 0], backend="gloo")
    made["all, by default"] = dist.new_group()
    local = [rank % 2, rank % 2 + 2]
    made["local"] = dist.new_group(local, use_local_synchronization=True, group_desc="local")
    made["enumerated"], _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    made["subgroups"], _ = dist.new_subgroups(group_size=2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    made["mesh a"], made["mesh b"] = mesh["a"].get_group(), mesh["b"].get_group()
    return made


WHOLE = ("WORLD", "pair")  # all calls; the other groups get some


def all_results(made: dict[str, Any]) -> dict[str, dict[str, Any]]:
    some = ("all_reduce", "all_gather_object", "_functional_collectives", "questions")
    return {
        name: results(group) if name in WHOLE else {one: CALLS[one](group) for one in some}
        for name, group in made.items()
    }


def collectives(rank: int, folder: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{folder}/reference", rank=rank, world_size=RANKS)
    expected = all_results(make_groups(rank))
    dist.destroy_process_group()

    report: dict[str, Any] = {"failed": {}, "errors": {k: v for k, v in expected["WORLD"].items() if is_error(v)}}
    with RebuildableGroups() as groups:
        groups.init("gloo", rank=rank, world_size=RANKS, timeout=TIMEOUT)
        made = make_groups(rank)
        report["all handles"] = all(isinstance(one, GroupHandle) for one in made.values() if one is not None)
        report["listed"] = [id(one) for one in made.values() if one not in (None, *groups.handles)]
        for when in ("before", "after one rebuild", "after two"):
            found = all_results(made)
            report["failed"][when] = {name: differences(found[name], expected[name]) for name in expected}
            names = [one.group_name for one in groups.handles]
            report["resolved " + when] = all(
                c10d._resolve_process_group(name) is one for name, one in zip(names, groups.handles)
            )
            # The Python objects are the only way in: once they are gone, no collective can get one.
            inner = [weakref.ref(one._inner) for one in groups.handles]
            alive = sum(one() is not None for one in inner)
            groups.destroy()
            gc.collect()
            report["old groups " + when] = (alive, sum(one() is not None for one in inner))
            report["asleep " + when] = [
                one.rank() == dist.get_rank(one) and len(dist.get_process_group_ranks(one)) == one.size()
                for one in groups.handles
            ]
            groups.rebuild()
    return report


def is_error(result: Any) -> bool:
    return isinstance(result, str)


def holders(rank: int, folder: Path) -> Any:
    """Objects that took a handle before the rebuild and use it after: autograd nodes, the reducer of DDP."""
    report = {}
    with RebuildableGroups() as groups:
        groups.init("gloo", rank=rank, world_size=RANKS, timeout=TIMEOUT)
        group = dist.new_group()
        leaf = torch.full((2,), float(rank + 1), requires_grad=True)
        total = torch.distributed.nn.functional.all_reduce(leaf * leaf, group=group)
        layer = torch.nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            layer.weight.fill_(float(rank))  # DDP takes rank 0's
        model = torch.nn.parallel.DistributedDataParallel(layer, process_group=group)
        for cycle in range(2):
            groups.destroy()
            groups.rebuild()
            layer.zero_grad()
            model(torch.full((1, 2), float(rank + cycle))).sum().backward()
            assert layer.weight.grad is not None
            report[f"ddp {cycle}"] = layer.weight.grad.tolist()
        total.sum().backward()
        assert leaf.grad is not None
        report["autograd"] = leaf.grad.tolist()
        report["weight"] = layer.weight.tolist()
        del model
    return report


def cycles(rank: int, folder: Path) -> Any:
    report = []
    hooks = set()
    with RebuildableGroups() as groups:
        groups.init("gloo", rank=rank, world_size=RANKS, timeout=TIMEOUT)
        made = make_groups(rank)
        for _ in range(12):
            groups.destroy()
            groups.rebuild()
            total = torch.ones(1)
            dist.all_reduce(total, group=made["local"])
            assert total.item() == 2
            gc.collect()
            dist.barrier()
            report.append(
                {
                    "threads": len(os.listdir("/proc/self/task")),
                    "files": len(os.listdir("/proc/self/fd")),
                    "keys": groups._store.num_keys() if rank == 0 else 0,
                    "python threads": threading.active_count(),
                }
            )
            dist.barrier()
            hooks.add(sys.excepthook)
    return {"counts": report, "hooks": len(hooks)}


def late(rank: int, folder: Path) -> Any:
    """Rank 3 comes to each call when the others have given up; then all come."""
    report: dict[str, Any] = {}
    with RebuildableGroups() as groups:
        groups.init("gloo", rank=rank, world_size=RANKS, timeout=TIMEOUT)
        group = dist.new_group()
        for name, call in (("destroy", groups.destroy), ("rebuild", groups.rebuild)):
            dist.barrier()
            if rank == 3:
                time.sleep(1.5)
            report[name] = outcome(call, datetime.timedelta(seconds=1))
            total = torch.ones(1)
            dist.all_reduce(total)  # WORLD, or its stand-in, is as it was
            report[f"{name}: WORLD"] = total.item()
            call()
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        report["in the end"] = total.item()
    return report


def outcome(call: Callable[..., Any], *args: Any) -> tuple[str, float]:
    start = time.monotonic()
    try:
        call(*args)
    except DrivetrainError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "nothing", time.monotonic() - start


def destroyed_alone(rank: int, folder: Path) -> Any:
    report: dict[str, Any] = {}
    with RebuildableGroups() as groups:
        groups.init("gloo", rank=rank, world_size=RANKS, timeout=TIMEOUT)
        kept = dist.new_group([0, 1, 2, 3])
        gone = dist.new_group([0, 1, 2])
        last = dist.new_group([1, 2, 3])
        names = [one.group_name for one in groups.handles if one is not gone]
        if rank < 3:
            dist.destroy_process_group(gone)
        for _ in range(2):
            groups.destroy()
            groups.rebuild()
            report["names"] = [one.group_name for one in groups.handles] == names
            total = torch.ones(1)
            dist.all_reduce(total, group=kept)
            if rank:
                dist.all_reduce(total, group=last)
            report["total"] = total.item()
            report["groups"] = len(c10d._world.pg_map)
    return report


def megatron(rank: int, folder: Path) -> Any:
    """Every group of a tp 2 x pp 2 Megatron layout, by its own parallel_state, over three cycles."""
    from megatron.core import parallel_state

    report: dict[str, Any] = {"cycles": []}
    with RebuildableGroups() as groups:
        groups.init("gloo", rank=rank, world_size=RANKS, timeout=TIMEOUT)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=2, pipeline_model_parallel_size=2, create_gloo_process_groups=True
        )
        held = {
            name: one for name, one in vars(parallel_state).items() if isinstance(one, dist.ProcessGroup)
        }  # the globals that Megatron keeps
        report["held"] = len(held)
        report["plain"] = [name for name, one in held.items() if one not in groups.handles]
        for _ in range(4):
            sums = {}
            for name, group in held.items():
                total = torch.tensor([2.0**rank])
                dist.all_reduce(total, group=group)
                members = dist.get_process_group_ranks(group)
                sums[name] = total.item() == sum(2.0**one for one in members) and group.size() == len(members)
            tp, pp = (
                parallel_state.get_tensor_model_parallel_group(),
                parallel_state.get_pipeline_model_parallel_group(),
            )
            received = torch.zeros(1)
            if parallel_state.is_pipeline_first_stage():
                dist.send(torch.tensor([float(rank)]), parallel_state.get_pipeline_model_parallel_next_rank(), group=pp)
            else:
                dist.recv(received, parallel_state.get_pipeline_model_parallel_prev_rank(), group=pp)
            report["cycles"].append(
                {
                    "wrong sums": [name for name, right in sums.items() if not right],
                    "layout": (tp.rank(), tp.size(), pp.rank(), pp.size()),
                    "received": received.item(),
                }
            )
            groups.destroy()
            groups.rebuild()
        parallel_state.destroy_model_parallel()
    return report


def nccl(rank: int, folder: Path) -> Any:
    """Communicators on one or two GPUs: same results, and their memory is given back."""
    size = torch.cuda.device_count()
    torch.cuda.set_device(rank)
    report: dict[str, Any] = {"results": [], "free": []}

    def results_of(groups: list[Group]) -> list[Any]:
        found = []
        for group in groups:
            tensor = torch.full((1 << 20,), float(rank + 1), device="cuda")
            dist.all_reduce(tensor, group=group)
            gathered = torch.empty(size * 4, device="cuda")
            dist.all_gather_into_tensor(gathered, tensor[:4] + rank, group=group)
            with c10d._coalescing_manager(group=group, device=torch.device("cuda", rank), async_ops=True) as manager:
                dist.all_reduce(tensor[:8], group=group)
            manager.wait()
            received = torch.zeros(4, device="cuda")
            if size > 1:
                operations = [
                    dist.P2POp(dist.isend, gathered[:4], (rank + 1) % size, group=group),
                    dist.P2POp(dist.irecv, received, (rank - 1) % size, group=group),
                ]
                for work in dist.batch_isend_irecv(operations):
                    work.wait()
            whole = functional.wait_tensor(functional.all_reduce(tensor[:4], "sum", group or dist.group.WORLD))
            found.append([one.tolist() for one in (tensor[:9], gathered, received, whole)])
        return found

    with RebuildableGroups() as groups:
        groups.init("cpu:gloo,cuda:nccl", rank=rank, world_size=size, timeout=TIMEOUT)
        made = [None, dist.new_group(), dist.new_group(list(range(size)), backend="nccl")]
        control = dist.new_group(backend="gloo")
        for _ in range(4):
            report["results"].append(results_of(made))
            total = torch.ones(1)
            dist.all_reduce(total, group=control)
            report["control"] = total.item()
            torch.cuda.synchronize()
            awake = torch.cuda.mem_get_info()[0]
            groups.destroy()
            report["free"].append((awake, torch.cuda.mem_get_info()[0]))
            groups.rebuild()
    return report


SCENARIOS = {one.__name__: one for one in (collectives, holders, cycles, late, destroyed_alone, megatron, nccl)}


# -- the program ------------------------------------------------------------------------------------------------------


def main(ranks: int, folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    # Imported once, not in each rank; DDP and functional collectives import dynamo.
    for module in ("torch._dynamo", *(["megatron.core.parallel_state"] if "megatron" in names else [])):
        importlib.import_module(module)
    warnings.simplefilter("ignore", FutureWarning)  # deprecated spellings are called too
    gc.freeze()  # what was imported need not be searched
    for name in names:
        place = folder / name
        place.mkdir()
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        children = [fork(name, rank, place) for rank in range(ranks)]
        for child in children:
            os.waitpid(child, 0)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def fork(name: str, rank: int, folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    try:
        found = SCENARIOS[name](rank, folder)
    except BaseException:
        found = traceback.format_exc()
    buffer = io.BytesIO()
    torch.save(found, buffer)
    (folder / f"{rank}.pt").write_bytes(buffer.getvalue())
    os._exit(0)


def run(names: list[str], folder: Path, *, deadline: float, ranks: int = RANKS) -> dict[str, list[Any]]:
    """What each rank reports of each scenario; a hang ends at the deadline, with all ranks of it."""
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, __file__, str(ranks), str(folder), *names], stdout=out, stderr=out, start_new_session=True
        )
        try:
            assert process.wait(timeout=deadline) == 0, log.read_text()
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{names} did not end within {deadline} s\n{log.read_text()}") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()
    found: dict[str, list[Any]] = {}
    for name in names:
        found[name] = [torch.load(folder / name / f"{rank}.pt", weights_only=True) for rank in range(ranks)]
        for rank, one in enumerate(found[name]):
            assert not isinstance(one, str), f"{name} on rank {rank}: {one}"
    return found


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    names = [one for one in SCENARIOS if one not in ("megatron", "nccl")]
    return run(names, tmp_path_factory.mktemp("groups"), deadline=120)


# -- four ranks -------------------------------------------------------------------------------------------------------


def test_every_collective_of_torch_has_its_call_here() -> None:
    assert sorted(set(c10d.__all__) - OTHER_EXPORTS - CALLS.keys()) == []


def test_every_collective_gives_what_torchs_own_groups_give_before_and_after_rebuilds(
    reports: dict[str, list[Any]],
) -> None:
    for rank in reports["collectives"]:
        for when, by_group in rank["failed"].items():
            for group, failed in by_group.items():
                assert failed == [], f"{group} {when}"
        assert set(rank["errors"]) <= GLOO_LACKS, rank["errors"]


def test_groups_in_every_spelling_are_handles_that_torch_resolves_by_name(reports: dict[str, list[Any]]) -> None:
    for rank in reports["collectives"]:
        assert rank["all handles"]
        assert rank["listed"] == []
        assert all(rank[f"resolved {when}"] for when in rank["failed"])


def test_no_inner_group_outlives_its_destruction(reports: dict[str, list[Any]]) -> None:
    for rank in reports["collectives"]:
        for when in rank["failed"]:
            before, after = rank[f"old groups {when}"]
            assert before == 9  # those of make_groups, WORLD among them
            assert after == 0


def test_who_is_where_can_be_asked_while_asleep(reports: dict[str, list[Any]]) -> None:
    for rank in reports["collectives"]:
        for when in rank["failed"]:
            assert all(rank[f"asleep {when}"])


def test_what_held_a_handle_in_python_or_cpp_works_after_rebuilds(reports: dict[str, list[Any]]) -> None:
    for number, rank in enumerate(reports["holders"]):
        assert rank["weight"] == [[0.0, 0.0]]
        for cycle in range(2):
            assert rank[f"ddp {cycle}"] == [[1.5 + cycle] * 2]  # mean of 0..3, plus the cycle
        assert rank["autograd"] == [RANKS * 2.0 * (number + 1)] * 2


def test_cycles_leave_no_threads_files_store_keys_or_hooks_behind(reports: dict[str, list[Any]]) -> None:
    for rank in reports["cycles"]:
        for what in ("threads", "files", "keys", "python threads"):
            counts = [one[what] for one in rank["counts"]]
            assert max(counts[2:]) <= counts[1], f"{what}: {counts}"
        assert rank["hooks"] == 1


@pytest.mark.parametrize("call", ["destroy", "rebuild"])
def test_a_rank_that_does_not_come_is_named_within_the_deadline(reports: dict[str, list[Any]], call: str) -> None:
    *others, last = reports["late"]
    for rank in others:
        message, seconds = rank[call]
        assert message == (
            f"DrivetrainError: rank 3 of 4 did not come to {call} the process groups within 0:00:01; "
            "see the log there for what ended or keeps it"
        )
        assert 1 <= seconds < 10
    assert last[call][0] == (
        f"DrivetrainError: rank 3 of 4 came too late to {call} the process groups: the others gave up"
    )


def test_a_call_that_missed_a_rank_did_nothing_and_can_be_made_again(reports: dict[str, list[Any]]) -> None:
    for rank in reports["late"]:
        assert rank["destroy: WORLD"] == rank["rebuild: WORLD"] == RANKS
        assert rank["in the end"] == RANKS


def test_a_group_destroyed_alone_stays_away_and_the_others_keep_their_names(reports: dict[str, list[Any]]) -> None:
    for number, rank in enumerate(reports["destroyed_alone"]):
        assert rank["names"]
        assert rank["total"] == (12.0 if number else 4.0)
        assert rank["groups"] == (3 if number else 2)  # WORLD, kept, and last where it is a member


@pytest.mark.slow
def test_megatrons_own_groups_work_over_three_cycles(tmp_path: Path) -> None:
    # not by importing it: the Megatron backend, which other tests import, has to patch before Megatron is imported
    if find_spec("megatron") is None:
        pytest.skip("needs megatron-core")
    for number, rank in enumerate(run(["megatron"], tmp_path, deadline=120)["megatron"]):
        assert rank["held"] > 10
        assert rank["plain"] == []
        for cycle in rank["cycles"]:
            assert cycle["wrong sums"] == []
            assert cycle["layout"] == (number % 2, 2, number // 2, 2)
            assert cycle["received"] == (number - 2 if number >= 2 else 0)


@pytest.mark.gpu
def test_nccl_groups_give_their_memory_back_and_work_again(tmp_path: Path) -> None:
    size = torch.cuda.device_count()
    if not size:
        pytest.skip("needs a GPU")
    for rank in run(["nccl"], tmp_path, deadline=300, ranks=size)["nccl"]:
        first, *later = rank["results"]
        assert first[0][0] == [sum(range(1, size + 1)) * (size if one < 8 else 1) for one in range(9)]
        assert later == [first] * 3
        assert rank["control"] == size
        if size > 1:  # a communicator of one rank has no buffers
            assert all(asleep > awake for awake, asleep in rank["free"])
        assert rank["free"][-1][1] >= rank["free"][1][1]  # nothing stays behind


# -- one rank ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def store() -> Iterator[dist.Store]:
    yield dist.HashStore()
    assert not dist.is_initialized()


def one_rank(groups: RebuildableGroups, store: dist.Store) -> None:
    groups.init("gloo", rank=0, world_size=1, timeout=TIMEOUT, store=store)


def test_patches_come_once_and_go_with_close(store: dist.Store) -> None:
    before = dict(vars(c10d)), dict(vars(dist)), sys.excepthook
    groups = RebuildableGroups()
    groups.install()
    patched = {name for name, one in vars(c10d).items() if one is not before[0].get(name)}
    assert patched == {"_new_process_group_helper", "_new_group_with_tag", "batch_isend_irecv"}
    functions = [vars(c10d)[name] for name in patched]
    groups.install()
    assert [vars(c10d)[name] for name in patched] == functions
    with pytest.raises(IllegalStateError, match=r"another RebuildableGroups is installed .* close\(\) it first"):
        RebuildableGroups().install()
    one_rank(groups, store)
    assert isinstance(dist.new_group(), GroupHandle)
    groups.close()
    groups.close()
    assert {name for name, one in vars(c10d).items() if one is not before[0].get(name)} <= {
        "_backend",  # torch notes how its default group was made
        "_default_pg_init_method",
    }
    assert dict(vars(dist)) == before[1]
    assert sys.excepthook is before[2]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert not isinstance(dist.group.WORLD, GroupHandle)
    with pytest.raises(IllegalStateError, match=r"install\(\) needs a process without process groups"):
        RebuildableGroups().install()
    dist.destroy_process_group()


def test_a_process_that_never_installs_has_torchs_own_functions() -> None:
    assert c10d._new_process_group_helper.__module__ == "torch.distributed.distributed_c10d"
    assert not hasattr(c10d._new_process_group_helper, "__wrapped__")
    assert not hasattr(c10d._new_group_with_tag, "__wrapped__")
    assert dist.batch_isend_irecv is c10d.batch_isend_irecv


def test_calls_out_of_turn_say_what_state_they_need(store: dist.Store) -> None:
    groups = RebuildableGroups()
    with pytest.raises(IllegalStateError, match=r"init\(\) needs install\(\) first"):
        one_rank(groups, store)
    with groups:
        with pytest.raises(IllegalStateError, match=r"destroy.* while the process groups are not initialised"):
            groups.destroy()
        one_rank(groups, store)
        with pytest.raises(IllegalStateError, match=r"rebuild.* while the process groups are awake"):
            groups.rebuild()
        group = dist.new_group(group_desc="mine")
        with pytest.raises(IllegalStateError, match=r"split_group\(\) makes a group that cannot be rebuilt"):
            group.split_group([0])
        groups.destroy()
        with pytest.raises(IllegalStateError, match=r"allreduce is illegal on process group '1' \(mine\) while"):
            dist.all_reduce(torch.ones(1), group=group)
        with pytest.raises(IllegalStateError, match=r"new_group\(\) is illegal while the process groups are asleep"):
            dist.new_group()
        dist.barrier()  # WORLD is the stand-in
        groups.rebuild()
        dist.all_reduce(torch.ones(1), group=group)
    with pytest.raises(IllegalStateError, match=r"destroy.* while the process groups are closed"):
        groups.destroy()


def test_ranks_that_cannot_meet_say_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with RebuildableGroups() as groups, pytest.raises(DrivetrainError, match=r"rank 1 of 2 could not meet .*127\.0\.0"):
        groups.init("gloo", rank=1, world_size=2, timeout=datetime.timedelta(seconds=1))
    assert not dist.is_initialized()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
