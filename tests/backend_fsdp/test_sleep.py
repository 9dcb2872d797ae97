"""Sleep gives memory back: the optimizer's first, then the weights'."""

from pathlib import Path

from fsdp_testing import config_of, one_rank, rollout_of, train

from drivetrain_backend_fsdp.backend import FsdpBackend


def resident_bytes(backend: FsdpBackend) -> tuple[int, int]:
    """Bytes of weights and of optimizer state that are where they are used."""
    weights = [one.untyped_storage().nbytes() for one in backend.local_weights().values()]
    return sum(weights), sum(one.untyped_storage().nbytes() for one in backend.optimizer.state().values())


def test_sleep_and_wake_up_move_the_optimizer_and_the_weights_apart(models: dict[str, Path]) -> None:
    with one_rank(config_of(models["qwen3-tied"], micro_batch_size=8)) as backend:
        backend.setup()
        train(backend, rollout_of())
        weights, state = resident_bytes(backend)
        assert state >= 2 * weights > 0
        backend.sleep(keep_weights=True)
        assert resident_bytes(backend) == (weights, 0)
        backend.sleep()
        assert resident_bytes(backend) == (0, 0)
        backend.wake_up(weights_only=True)
        assert resident_bytes(backend) == (weights, 0)
        backend.wake_up()
        assert resident_bytes(backend) == (weights, state)
