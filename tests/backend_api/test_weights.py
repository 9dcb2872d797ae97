"""Export plans, buckets and tagged weights, on one rank. Two ranks are in test_training.py."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drivetrain_backend_api.errors import IllegalStateError
from drivetrain_backend_api.weights import (
    ALIGNMENT,
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
