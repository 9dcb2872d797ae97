"""The backend on one GPU: the fused kernel, device memory, host offload. Results are kept under benchmarks/."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_testing import assert_same, config_of, exported, one_rank, rollout_of, train
from transformers import AutoModelForCausalLM, Qwen3Config

from drivetrain_backend_api.batch import RolloutBatch
from drivetrain_backend_api.lifecycle import State
from drivetrain_backend_api.testing import comparing
from drivetrain_backend_api.testing.models import make_model
from drivetrain_backend_api.testing.reference import Trained, reference_train

pytestmark = pytest.mark.gpu

PACKED = {"global_batch_size": 4, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 40}


def to_cpu(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: one.cpu() for name, one in weights.items()}


def expected_of(folder: Path, rollout: RolloutBatch) -> Trained:
    return reference_train(folder, rollout, config_of(folder, **PACKED), algorithm="TokenMean")


@pytest.mark.parametrize("offload", [{}, {"optimizer_cpu_offload": True}, {"fsdp_cpu_offload": True}])
def test_fp32_equals_the_reference(tmp_path: Path, offload: dict[str, Any]) -> None:
    folder, rollout = make_model(tmp_path / "model", "qwen3"), rollout_of()
    expected = expected_of(folder, rollout)
    with one_rank(config_of(folder, **PACKED, **offload), "cuda:0") as backend:
        backend.setup()
        metrics = train(backend, rollout)
        weights = to_cpu(exported(backend))
    # fp32 matmuls without TF32; sums in another order than the CPU's
    assert [one["loss"] for one in metrics] == pytest.approx(expected.losses, rel=1e-4, abs=1e-6)
    assert [one["grad_norm"] for one in metrics] == pytest.approx(expected.grad_norms, rel=1e-4)
    assert comparing.tensors(weights, expected.weights) < 1e-4


def bf16_model(folder: Path) -> Path:
    """A random model whose head size the fused kernel takes."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=67,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kernel", ["varlen", "per_sequence"])
def test_bf16_is_close_to_the_fp32_reference(tmp_path: Path, kernel: str) -> None:
    folder, rollout = bf16_model(tmp_path / "model"), rollout_of()
    expected = expected_of(folder, rollout)
    with one_rank(config_of(folder, bf16=True, attention_backend=kernel, **PACKED), "cuda:0") as backend:
        backend.setup()
        log_probs = backend.forward_only(backend.preprocess_rollout_data(rollout))
        metrics = train(backend, rollout)
    # bf16 keeps 8 bits; log-probs are of the order of 4
    for position, one in enumerate(log_probs):
        torch.testing.assert_close(one.cpu(), expected.before[position], atol=0.05, rtol=0)
    assert [one["grad_norm"] for one in metrics] == pytest.approx(expected.grad_norms, rel=0.03)


def test_sleep_gives_device_memory_back_and_wakes_bitwise(tmp_path: Path) -> None:
    folder, rollout = bf16_model(tmp_path / "model"), rollout_of()
    with one_rank(config_of(folder, bf16=True, **PACKED), "cuda:0") as backend:
        backend.setup()
        train(backend, rollout)
        before = exported(backend)
        awake = torch.cuda.memory_allocated()
        moments = {name: one.cpu().clone() for name, one in backend.optimizer.state().items()}
        backend.sleep(keep_weights=True)
        weights_only = torch.cuda.memory_allocated()
        assert_same(exported(backend), before)
        backend.sleep()
        asleep = torch.cuda.memory_allocated()
        assert backend.lifecycle.state is State.ASLEEP
        parameters = sum(one.numel() * 4 for one in before.values())
        # Adam's two moments go first, then the fp32 masters
        assert awake - weights_only >= 1.9 * parameters
        assert weights_only - asleep >= 0.9 * parameters
        backend.wake_up()
        assert_same(exported(backend), before)
        assert_same({name: one.cpu() for name, one in backend.optimizer.state().items()}, moments)
        train(backend, rollout, 1)


@pytest.mark.parametrize("in_background", [False, True], ids=["foreground", "background"])
def test_a_checkpoint_resumes_bitwise(tmp_path: Path, in_background: bool) -> None:
    folder, rollout = bf16_model(tmp_path / "model"), rollout_of()
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    with one_rank(config_of(folder, bf16=True, async_save=in_background, **PACKED), "cuda:0") as backend:
        backend.setup()
        train(backend, rollout)
        handle = backend.save_checkpoint(checkpoint)
        train(backend, rollout, 1)
        handle.finalize()
        straight = to_cpu(exported(backend))
        if in_background:
            assert backend._saver._buffer is not None
            assert all(one.tensor.is_pinned() for one in backend._saver._buffer._copies)
    with one_rank(config_of(folder, bf16=True, load=str(checkpoint), **PACKED), "cuda:0") as backend:
        assert backend.setup() == 1
        train(backend, rollout, 1)
        assert_same(to_cpu(exported(backend)), straight)
