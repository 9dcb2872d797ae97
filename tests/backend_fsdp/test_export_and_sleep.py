"""Weights leave under Hugging Face names; sleep and wake-up change no bit; illegal calls are refused by state."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_testing import (
    PolicyGradient,
    assert_same,
    config_of,
    exported,
    make_rollout,
    one_rank,
    train_here,
)
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from drivetrain_backend_api.algorithm import ModelOutput
from drivetrain_backend_api.batch import MicroBatch
from drivetrain_backend_api.errors import DrivetrainError, IllegalStateError
from drivetrain_backend_api.packing import pack
from drivetrain_backend_fsdp.backend import FsdpBackend


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-tied", "llama-tied", "qwen2"])
def test_an_untrained_model_is_exported_as_save_pretrained_wrote_it(models: dict[str, str], kind: str) -> None:
    with one_rank(config_of(models[kind])) as backend:
        backend.setup()
        assert_same(exported(backend, dtype=None), load_file(Path(models[kind]) / "model.safetensors"))


def test_a_trained_model_reloads_in_transformers_with_the_same_log_probs(
    models: dict[str, str], tmp_path: Path
) -> None:
    with one_rank(config_of(models["qwen3"], micro_batch_size=8)) as backend:
        weights = train_here(backend, make_rollout(8))["weights"]
        trained = backend.forward_only(backend.preprocess_rollout_data(make_rollout(8)))
    model = AutoModelForCausalLM.from_pretrained(models["qwen3"])
    assert model.load_state_dict(weights, strict=False).unexpected_keys == []
    model.save_pretrained(tmp_path / "trained")
    with one_rank(config_of(str(tmp_path / "trained"), micro_batch_size=8)) as backend:
        backend.setup()
        again = backend.forward_only(backend.preprocess_rollout_data(make_rollout(8)))
    for one, other in zip(trained, again, strict=True):
        assert torch.equal(one, other)


def test_every_holder_gets_the_whole_model_and_others_get_none(on_ranks: Callable[[int], Any]) -> None:
    first, second = (one["checkpoint"] for one in on_ranks(2)["results"])
    for held in first["holders"].values():
        assert_same(held, first["expected"])
    assert_same(second["holders"]["all"], first["expected"])
    assert second["holders"]["stage_lead"] == second["holders"]["rank0"] == {}


def test_a_rank_that_leaves_an_export_ends_it_for_the_others(on_ranks: Callable[[int], Any]) -> None:
    first, second = (one["checkpoint"] for one in on_ranks(2)["results"])
    assert (first["told_of_abandoned_export"], second["told_of_abandoned_export"]) == (True, False)


def test_a_folder_that_rank_0_refuses_is_refused_by_all_ranks_alike(on_ranks: Callable[[int], Any]) -> None:
    messages = {one["refusal"] for one in on_ranks(2)["results"]}
    assert len(messages) == 1
    assert "'model.norm.weight' is missing" in messages.pop()


def test_two_ranks_sleep_and_wake_bit_for_bit(on_ranks: Callable[[int], Any]) -> None:
    for one in (result["checkpoint"] for result in on_ranks(2)["results"]):
        assert_same(one["woken"], one["expected"])


def resident_bytes(backend: FsdpBackend) -> tuple[int, int]:
    """Bytes of weights and of optimizer state that are where they are used."""
    weights = [one.untyped_storage().nbytes() for one in backend.local_weights().values()]
    return sum(weights), sum(one.untyped_storage().nbytes() for one in backend.optimizer.state().values())


def test_sleeping_between_steps_changes_no_bit_and_frees_memory(models: dict[str, str]) -> None:
    config = config_of(models["qwen3-tied"], global_batch_size=4, ref_load=models["qwen3"])

    def two_rollouts(backend: FsdpBackend, nap: Callable[[], None]) -> dict[str, Tensor]:
        backend.setup(with_ref=True)
        for seed in (1, 2):
            shard = backend.preprocess_rollout_data(make_rollout(8, seed=seed))
            backend.train(seed, shard, PolicyGradient(None))
            reference = backend.maybe_compute_ref_log_probs(shard)
            nap()
        assert reference is not None
        return exported(backend) | backend.optimizer.state() | {"reference": torch.cat(reference)}

    with one_rank(config) as backend:
        awake = {name: one.clone() for name, one in two_rollouts(backend, lambda: None).items()}
    with one_rank(config) as backend:

        def nap() -> None:
            weights, state = resident_bytes(backend)
            whole = exported(backend)
            backend.sleep(keep_weights=True)
            assert resident_bytes(backend) == (weights, 0)
            assert_same(exported(backend), whole)
            backend.sleep()
            assert resident_bytes(backend) == (0, 0)
            backend.wake_up(weights_only=True)
            assert resident_bytes(backend) == (weights, 0)
            assert_same(exported(backend), whole)
            backend.wake_up()
            assert resident_bytes(backend) == (weights, state)

        assert_same(two_rollouts(backend, nap), awake)


def test_switching_weights_leaves_the_optimizer_alone_and_comes_back_bit_for_bit(models: dict[str, str]) -> None:
    with one_rank(config_of(models["qwen3"], global_batch_size=4)) as backend:
        backend.setup()
        backend.backup_weights("start")
        start = exported(backend)
        shard = backend.preprocess_rollout_data(make_rollout(8))
        before = backend.forward_only(shard)
        backend.train(0, shard, PolicyGradient(None))
        trained = exported(backend)
        backend.switch_weights("start")
        assert_same(exported(backend), start)
        assert all(torch.equal(one, other) for one, other in zip(backend.forward_only(shard), before, strict=True))
        with pytest.raises(IllegalStateError, match="start"):
            backend.forward_backward([], lambda output, batch: (torch.zeros(()), {}))
        backend.switch_weights("policy")
        assert_same(exported(backend), trained)


def calls(backend: FsdpBackend, tmp_path: Path) -> dict[str, Callable[[], Any]]:
    def step_fn(output: ModelOutput, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return output.label_log_probs().log_probs.sum(), {}

    micro_batch = pack(make_rollout(3), [0])
    return {
        "setup": backend.setup,
        "forward_backward": lambda: backend.forward_backward([micro_batch], step_fn),
        "optimizer_step": backend.optimizer_step,
        "forward_only": lambda: backend.forward_backward([micro_batch], step_fn, forward_only=True),
        "export_weights": lambda: backend.export_weights(1024),
        "save_checkpoint": lambda: backend.save_checkpoint(tmp_path / "checkpoint"),
        "sleep": backend.sleep,
        "wake_up": backend.wake_up,
    }


def test_calls_that_a_state_does_not_allow_are_refused_by_name(models: dict[str, str], tmp_path: Path) -> None:
    with one_rank(config_of(models["qwen3"])) as backend:
        every = calls(backend, tmp_path)

        def refused(state: str, *names: str) -> None:
            for name in names:
                with pytest.raises(IllegalStateError, match=rf"{name}\(\) is illegal.*{state}"):
                    every[name]()

        refused("NEW", *(name for name in every if name != "setup"))
        backend.setup()
        refused("AWAKE", "setup", "wake_up")
        refused("no gradients", "optimizer_step")
        every["forward_backward"]()
        refused("pending", "forward_backward", "sleep")
        every["optimizer_step"]()
        backend.sleep(keep_weights=True)
        refused("WEIGHTS_ONLY", "setup", "forward_backward", "optimizer_step", "save_checkpoint")
        every["forward_only"]()
        backend.sleep()
        refused("ASLEEP", *(name for name in every if name != "wake_up"))
        backend.wake_up()
        backend.close()
        refused("CLOSED", *every)
        backend.close()


def test_a_loss_that_does_not_come_from_the_model_is_refused(models: dict[str, str]) -> None:
    with one_rank(config_of(models["qwen3"])) as backend:
        backend.setup()
        with pytest.raises(DrivetrainError, match="must be a scalar computed from the model output"):
            backend.forward_backward([pack(make_rollout(3), [0])], lambda output, batch: (torch.zeros(()), {}))
