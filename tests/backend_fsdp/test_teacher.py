"""A teacher or reference takes device memory only while it is used, and gives the same bits whatever lies between."""

import logging
from pathlib import Path

import pytest
import torch
from fsdp_testing import assert_same, config_of, exported, one_rank, rollout_of, train
from torch import Tensor
from transformers import AutoModelForCausalLM

from drivetrain_backend_api import IllegalStateError
from drivetrain_backend_api.testing.models import make_model
from drivetrain_backend_api.testing.reference import response_log_probs
from drivetrain_backend_fsdp.backend import FsdpBackend


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("frozen") / "teacher", "llama", seed=6)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("frozen") / "reference", "qwen3", seed=5)


def resident_bytes(backend: FsdpBackend, tag: str) -> int:
    """Bytes of a frozen model's weights that are where they are used."""
    return sum(one.untyped_storage().nbytes() for one in backend._frozen[tag].model.locals().values())


def parameter_bytes(folder: Path) -> int:
    return sum(one.numel() * 4 for one in AutoModelForCausalLM.from_pretrained(folder).parameters())


def log_probs(backend: FsdpBackend, tag: str = "teacher") -> list[Tensor]:
    shard = backend.preprocess_rollout_data(rollout_of())
    compute = {"teacher": backend.maybe_compute_teacher_log_probs, "ref": backend.maybe_compute_ref_log_probs}
    found = compute[tag](shard)
    assert found is not None
    return found


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    """Bit for bit."""
    assert [torch.equal(one, other) for one, other in zip(found, expected, strict=True)] == [True] * len(expected)


def test_both_frozen_models_leave_the_device_between_their_uses(
    models: dict[str, Path], teacher: Path, reference: Path
) -> None:
    config = config_of(models["qwen3"], opd_teacher_load=str(teacher), ref_load=str(reference))
    with one_rank(config) as backend:
        backend.setup(with_ref=True, with_opd_teacher=True)
        for tag, other in (("ref", "teacher"), ("teacher", "ref")):
            assert resident_bytes(backend, tag) == 0
            seen: list[tuple[int, int]] = []

            def look(*_: object, tag: str = tag, other: str = other, seen: list[tuple[int, int]] = seen) -> None:
                seen.append((resident_bytes(backend, tag), resident_bytes(backend, other)))

            backend._frozen[tag].model.module.get_decoder().register_forward_pre_hook(look)
            log_probs(backend, tag)
            folder = {"ref": reference, "teacher": teacher}[tag]
            assert set(seen) == {(parameter_bytes(folder), 0)}
            assert resident_bytes(backend, tag) == 0


def test_a_teacher_gives_its_own_log_probs_to_the_bit_after_training_and_sleep(
    models: dict[str, Path], teacher: Path
) -> None:
    model, rollout = AutoModelForCausalLM.from_pretrained(teacher), rollout_of()
    with one_rank(config_of(models["qwen3"], opd_teacher_load=str(teacher), micro_batch_size=3)) as backend:
        backend.setup(with_opd_teacher=True)
        first = log_probs(backend)
        for sample, found in enumerate(first):
            with torch.no_grad():
                expected, _ = response_log_probs(model, rollout, sample, 1.0)
            # fp32 on both sides; what is left is the order of sums in attention and matmul
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert_equal(log_probs(backend), first)
        train(backend, rollout)
        assert_equal(log_probs(backend), first)
        backend.sleep(keep_weights=True)
        backend.sleep()
        assert resident_bytes(backend, "teacher") == 0
        backend.wake_up(weights_only=True)
        backend.wake_up()
        assert_equal(log_probs(backend), first)
        assert resident_bytes(backend, "teacher") == 0


def test_a_policy_beside_a_teacher_that_is_used_and_sleeps_trains_as_one_alone(
    models: dict[str, Path], teacher: Path
) -> None:
    with one_rank(config_of(models["qwen3"])) as backend:
        backend.setup()
        train(backend, rollout_of())
        train(backend, rollout_of(seed=2), 1)
        expected = exported(backend)
    with one_rank(config_of(models["qwen3"], opd_teacher_load=str(teacher))) as backend:
        backend.setup(with_opd_teacher=True)
        log_probs(backend)
        train(backend, rollout_of())
        backend.sleep()
        backend.wake_up()
        log_probs(backend)
        train(backend, rollout_of(seed=2), 1)
        assert_same(exported(backend), expected)


def test_a_teacher_is_sent_away_again_where_its_use_fails(models: dict[str, Path], teacher: Path) -> None:
    with one_rank(config_of(models["qwen3"], opd_teacher_load=str(teacher))) as backend:
        backend.setup(with_opd_teacher=True)
        first = log_probs(backend)
        shard = backend.preprocess_rollout_data(rollout_of())
        shard.batch.tokens[0] = -1
        with pytest.raises(IndexError):
            backend.maybe_compute_teacher_log_probs(shard)
        assert resident_bytes(backend, "teacher") == 0
        assert_equal(log_probs(backend), first)


def test_a_sleeping_backend_asks_no_teacher(models: dict[str, Path], teacher: Path) -> None:
    with one_rank(config_of(models["qwen3"], opd_teacher_load=str(teacher))) as backend:
        backend.setup(with_opd_teacher=True)
        shard = backend.preprocess_rollout_data(rollout_of())
        for keep_weights in (True, False):
            backend.sleep(keep_weights=keep_weights)
            with pytest.raises(IllegalStateError):
                backend.maybe_compute_teacher_log_probs(shard)
            assert resident_bytes(backend, "teacher") == 0


def test_the_host_memory_of_a_frozen_model_is_logged(
    models: dict[str, Path], teacher: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO, "drivetrain_backend_fsdp"),
        one_rank(config_of(models["qwen3"], opd_teacher_load=str(teacher))) as backend,
    ):
        backend.setup(with_opd_teacher=True)
    assert [one.getMessage() for one in caplog.records if "host memory" in one.getMessage()] == [
        f"teacher: {parameter_bytes(teacher) / 2**20:.1f} MiB of host memory on each rank"
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("offload", [False, True])
def test_on_a_gpu_a_teacher_costs_no_memory_between_its_uses(teacher: Path, tmp_path: Path, offload: bool) -> None:
    folder = make_model(tmp_path / "model", "qwen3")
    used = {}
    for with_teacher in (False, True):
        config = config_of(folder, opd_teacher_load=str(teacher), fsdp_cpu_offload=offload)
        with one_rank(config, "cuda:0") as backend:
            backend.setup(with_opd_teacher=with_teacher)
            if with_teacher:
                first = log_probs(backend)
                backend.sleep()
                backend.wake_up()
                assert_equal(log_probs(backend), first)
            torch.cuda.synchronize()
            used[with_teacher] = torch.cuda.memory_allocated()
    # what stays are buffers that no file stores, such as rotary frequencies
    assert used[True] - used[False] < parameter_bytes(teacher) / 4
