"""Export plans, buckets and tagged weights. Exports over two ranks are in test_training.py.

Run as a program with a folder, this file forks ranks that share the host copies of a model.
"""

import contextlib
import io
import math
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drivetrain_backend_api.errors import DataError, IllegalStateError
from drivetrain_backend_api.weights import (
    ALIGNMENT,
    ReplicaGroup,
    WeightExport,
    WeightManager,
    flatten,
    plan_buckets,
    unflatten,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64, torch.bool]

TENSORS = st.lists(
    st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(DTYPES), st.integers(0, 1)), max_size=12
)


@given(tensors=TENSORS, bucket_bytes=st.integers(1, 300))
def test_a_plan_keeps_order_bounds_alignment_and_stages(
    tensors: list[tuple[list[int], torch.dtype, int]], bucket_bytes: int
) -> None:
    plan = plan_buckets(((f"t{n}", *one) for n, one in enumerate(tensors)), bucket_bytes)
    assert [(one.name, list(one.shape), one.torch_dtype, one.stage) for one in plan.entries] == [
        (f"t{n}", *one) for n, one in enumerate(tensors)
    ]
    assert plan.total_bytes == sum(math.prod(shape) * dtype.itemsize for shape, dtype, _ in tensors)
    buckets = [plan.bucket(one) for one in range(plan.num_buckets)]
    assert [entry for bucket in buckets for entry in bucket] == list(plan.entries)
    for index, bucket in enumerate(buckets):
        assert len({entry.stage for entry in bucket}) == 1
        assert plan.bucket_bytes(index) <= bucket_bytes or len(bucket) == 1
        end = 0
        for entry in bucket:
            assert entry.offset % ALIGNMENT == 0
            assert entry.offset >= end
            end = entry.offset + entry.nbytes


@given(tensors=TENSORS, bucket_bytes=st.integers(1, 300))
def test_unflatten_inverts_flatten_bit_for_bit(
    tensors: list[tuple[list[int], torch.dtype, int]], bucket_bytes: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    real = {
        f"t{n}": torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=generator).to(dtype)
        for n, (shape, dtype, _) in enumerate(tensors)
    }
    plan = plan_buckets(((f"t{n}", *one) for n, one in enumerate(tensors)), bucket_bytes)
    found = {}
    for index in range(plan.num_buckets):
        entries = plan.bucket(index)
        data = flatten([real[one.name] for one in entries], entries, device="cpu")
        assert data.numel() == plan.bucket_bytes(index)
        for name, tensor in unflatten(data, entries):
            found[name] = tensor
            if tensor.numel():
                assert tensor.untyped_storage().data_ptr() == data.untyped_storage().data_ptr()  # a view
    assert found.keys() == real.keys()
    for name, tensor in real.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_an_export_yields_its_plan_and_then_has_ended() -> None:
    weights = {"a": torch.arange(3.0), "b": torch.arange(5.0)}
    plan = plan_buckets(((name, one.shape, one.dtype, 0) for name, one in weights.items()), 16)

    def gather(index: int) -> Tensor:
        entries = plan.bucket(index)
        return flatten([weights[one.name] for one in entries], entries, device="cpu")

    with WeightExport(plan, gather, agree=lambda mine: mine) as export:
        buckets = list(export)
    assert [one.index for one in buckets] == [0, 1]
    for bucket in buckets:
        assert bucket.data is not None
        for name, tensor in unflatten(bucket.data, bucket.entries):
            assert torch.equal(tensor, weights[name])
    with pytest.raises(IllegalStateError, match="has ended; it needs a new export_weights"):
        next(iter(export))


# -- tags -------------------------------------------------------------------------------------------------------------


def test_switching_away_and_back_is_bitwise_even_after_training_on() -> None:
    live = {"w": torch.nn.Parameter(torch.randn(5, generator=torch.Generator().manual_seed(0)))}
    manager = WeightManager(lambda: live)
    reference = live["w"].detach().clone()
    manager.backup("ref")
    with torch.no_grad():
        live["w"].mul_(1.1)  # training moved on
    trained = live["w"].detach().clone()
    manager.switch("ref")
    assert torch.equal(live["w"], reference)
    assert manager.live_tag == "ref"
    with pytest.raises(IllegalStateError, match=r"train\(\) is illegal while the weights are tag 'ref'"):
        manager.require_policy("train")
    manager.switch("policy")
    assert torch.equal(live["w"], trained)
    manager.require_policy("train")
    assert set(manager.tags) == {"ref", "policy"}


def test_a_backup_is_a_copy() -> None:
    live = {"w": torch.ones(3)}
    manager = WeightManager(lambda: live)
    manager.backup("before")
    live["w"].fill_(7.0)
    manager.restore("before")
    assert live["w"].tolist() == [1.0] * 3


def test_unknown_tags_change_nothing() -> None:
    live = {"w": torch.ones(3)}
    manager = WeightManager(lambda: live)
    manager.backup("ref")
    for call in (manager.restore, manager.switch):
        with pytest.raises(IllegalStateError, match=r"no weights are kept under tag 'teacher' \(kept: ref\)"):
            call("teacher")
    assert manager.live_tag == "policy"
    assert manager.tags == ("ref",)


def test_other_weights_are_never_kept_as_the_policy() -> None:
    live = {"w": torch.ones(3)}
    manager = WeightManager(lambda: live)
    manager.backup("ref")
    live["w"].fill_(2.0)
    manager.switch("ref")
    with pytest.raises(IllegalStateError, match=r"backup_weights\(\) is illegal while the weights are tag 'ref'"):
        manager.backup("policy")
    manager.switch("policy")
    assert live["w"].tolist() == [2.0] * 3


def test_given_weights_are_kept_one_at_a_time_and_cast() -> None:
    live = {"w": torch.zeros(3), "b": torch.zeros(2, dtype=torch.bfloat16), "t": torch.zeros(2, 3).t()}
    manager = WeightManager(lambda: live)
    given = {"t": torch.arange(6.0).view(3, 2), "b": torch.tensor([1.5, -0.0]), "w": torch.tensor([1.0, 2.0, 3.0])}

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in given.items():
            copy = tensor.clone()
            yield name, copy
            copy.fill_(float("nan"))  # the caller may reuse its memory

    manager.add("ref", stream())
    assert manager.tags == ("ref",)
    assert all(not one.any() for one in live.values())
    manager.switch("ref")
    for name, tensor in given.items():
        assert torch.equal(live[name], tensor.to(live[name].dtype)), name
    with pytest.raises(IllegalStateError, match=r"add\('ref'\) would change weights that are live"):
        manager.add("ref", stream())
    manager.switch("policy")
    with pytest.raises(IllegalStateError, match=r"add\('policy'\) would change weights that are live"):
        manager.add("policy", stream())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([("w", torch.ones(3))], "weights for tag 'ref' lack 1 of the model's tensors, the first 'b'"),
        ([("w", torch.ones(3)), ("w", torch.ones(3))], "weights for tag 'ref' have 'w' twice"),
        ([("v", torch.ones(3))], "weights for tag 'ref' have 'v', which the model has not"),
        ([("w", torch.ones(4))], r"have 'w' in shape \[4\], the model in \[3\]; a tag needs"),
    ],
    ids=["missing", "twice", "unknown", "shape"],
)
def test_weights_that_do_not_fit_are_refused_and_the_tag_is_gone(given: list[tuple[str, Tensor]], message: str) -> None:
    manager = WeightManager(lambda: {"w": torch.zeros(3), "b": torch.zeros(2)})
    manager.backup("ref")
    with pytest.raises(DataError, match=message):
        manager.add("ref", iter(given))
    assert manager.tags == ()
    assert manager.host_bytes("ref") == 0


def test_host_bytes_are_those_of_the_weights_and_their_padding() -> None:
    live = {"w": torch.zeros(1000), "b": torch.zeros(3, dtype=torch.bfloat16), "none": torch.zeros(0)}
    manager = WeightManager(lambda: live)
    assert manager.host_bytes("ref") == 0
    manager.backup("ref")
    manager.backup("ref")
    assert 4006 <= manager.host_bytes("ref") < 4006 + 2 * ALIGNMENT


# -- tags whose copies are shared between ranks ------------------------------------------------------------------------

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "embedding": ((257, 31), torch.bfloat16),
    "expert.0": ((129, 7), torch.bfloat16),
    "norm": ((31,), torch.float32),
    "scalar": ((), torch.float32),
    "expert.1": ((3, 5), torch.float32),
    "steps": ((5,), torch.int64),
    "alone": ((101,), torch.float16),
    "mask": ((13,), torch.bool),
    "empty": ((0, 4), torch.float32),
    "transposed": ((64, 33), torch.float32),
}
STAGING = 4096
SIZES = (1, 2, 4)


def weights_of(seed: int, rank: int, expert_rank: int) -> dict[str, Tensor]:
    """Dense tensors are the same on all ranks, experts on those of one expert rank, "alone" on none."""
    found = {}
    for number, (name, (shape, dtype)) in enumerate(SHAPES.items()):
        offset = expert_rank if name.startswith("expert") else rank if name == "alone" else 0
        generator = torch.Generator().manual_seed(1000 * seed + 10 * number + offset)
        count = torch.Size(shape).numel()
        raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
        if dtype is torch.bool:
            raw %= 2
        whole = raw.view(dtype).view(shape)  # any bits: NaNs with payloads among them
        found[name] = whole.t().contiguous().t() if name == "transposed" else whole
    return found


def bits(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: one.contiguous().view(-1).view(torch.uint8).clone() for name, one in tensors.items()}


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    first, second = bits(one), bits(other)
    return [name for name in first if not torch.equal(first[name], second[name])]


def shared_copies(rank: int, size: int, folder: Path) -> Any:
    """Policy 1, reference 2 (backed up), teacher 3 (added); experts are replicated on every second rank."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    halves = [dist.new_group(list(range(start, size, 2))) for start in range(min(2, size))]
    world, experts = dist.group.WORLD, halves[rank % len(halves)]
    asked: list[str] = []

    def replicas(name: str) -> ReplicaGroup | None:
        asked.append(name)
        if name == "alone":
            return None
        group = experts if name.startswith("expert") else world
        return ReplicaGroup(group=group, rank=dist.get_rank(group), size=dist.get_world_size(group))

    def weights(seed: int) -> dict[str, Tensor]:
        return weights_of(seed, rank, rank % 2)

    live = weights(2)
    strides = {name: one.stride() for name, one in live.items()}
    manager = WeightManager(lambda: live, replicas=replicas, staging_bytes=STAGING)
    manager.backup("ref")
    for name, tensor in weights(1).items():
        live[name].copy_(tensor)
    manager.add("teacher", reversed(list(weights(3).items())))
    gathered: list[int] = []
    original = dist.all_gather_into_tensor

    def counted(output: Tensor, *args: Any, **kwargs: Any) -> Any:
        gathered.append(output.nbytes)
        return original(output, *args, **kwargs)

    dist.all_gather_into_tensor = counted
    wrong = {}
    manager.switch("ref")
    report: dict[str, Any] = {"gathers": len(gathered), "largest": max(gathered, default=0)}
    wrong["ref"] = same_bits(live, weights(2))
    manager.switch("teacher")
    wrong["teacher"] = same_bits(live, weights(3))
    manager.switch("policy")
    wrong["policy"] = same_bits(live, weights(1))
    for name, tensor in weights(4).items():
        live[name].copy_(tensor)  # training moved on
    manager.switch("teacher")
    manager.switch("policy")
    wrong["policy, trained"] = same_bits(live, weights(4))
    report |= {
        "wrong": wrong,
        "host": {tag: manager.host_bytes(tag) for tag in manager.tags},
        "asked": len(asked),
        "strides": strides == {name: one.stride() for name, one in live.items()},
    }
    dist.destroy_process_group()
    return report


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    for size in SIZES:
        place = folder / str(size)
        place.mkdir()
        for child in [fork(rank, size, place) for rank in range(size)]:
            os.waitpid(child, 0)


def fork(rank: int, size: int, folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    try:
        found = shared_copies(rank, size, folder)
    except BaseException:
        found = traceback.format_exc()
    buffer = io.BytesIO()
    torch.save(found, buffer)
    (folder / f"{rank}.pt").write_bytes(buffer.getvalue())
    os._exit(0)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    """What each rank of each size found; one launch, and a hang ends at the deadline."""
    folder = tmp_path_factory.mktemp("shared")
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, __file__, str(folder)], stdout=out, stderr=out, start_new_session=True
        )
        try:
            assert process.wait(timeout=90) == 0, log.read_text()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()
    found = {
        size: [torch.load(folder / str(size) / f"{rank}.pt", weights_only=True) for rank in range(size)]
        for size in SIZES
    }
    for report in (one for ranks in found.values() for one in ranks):
        assert not isinstance(report, str), report
    return found


def sharers(name: str, size: int) -> int:
    return 1 if name == "alone" else max(1, size // 2) if name.startswith("expert") else size


@pytest.mark.parametrize("size", SIZES)
def test_every_bit_comes_back_from_copies_that_ranks_share(reports: dict[int, list[Any]], size: int) -> None:
    for report in reports[size]:
        assert report["wrong"] == {"ref": [], "teacher": [], "policy": [], "policy, trained": []}
        assert report["strides"]
        assert report["asked"] == len(SHAPES)  # one layout for all tags


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_holds_its_part_of_every_tag_and_no_more(reports: dict[int, list[Any]], size: int) -> None:
    part = sum(
        torch.Size(shape).numel() * dtype.itemsize / sharers(name, size) for name, (shape, dtype) in SHAPES.items()
    )
    for report in reports[size]:
        assert set(report["host"]) == {"ref", "teacher", "policy"}
        for tag, nbytes in report["host"].items():
            assert part <= nbytes < part + len(SHAPES) * ALIGNMENT, tag


@pytest.mark.parametrize("size", SIZES)
def test_weights_are_gathered_in_buckets_of_bounded_size(reports: dict[int, list[Any]], size: int) -> None:
    shares: dict[bool, int] = {}
    for name, (shape, dtype) in SHAPES.items():
        count = sharers(name, size)
        if count > 1:
            share = math.ceil(torch.Size(shape).numel() * dtype.itemsize / count / ALIGNMENT) * ALIGNMENT
            shares[name.startswith("expert")] = shares.get(name.startswith("expert"), 0) + share
    buckets = sum(
        math.ceil(share / (STAGING // (max(1, size // 2) if experts else size))) for experts, share in shares.items()
    )
    for report in reports[size]:
        assert report["largest"] <= STAGING
        assert report["gathers"] == buckets


if __name__ == "__main__":
    main(Path(sys.argv[1]))
