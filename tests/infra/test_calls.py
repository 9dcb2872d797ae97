"""Whom a failed call on actors is blamed on: real ones that die, raise, hang, and lose each other over gloo."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from drivetrain_backend_api import ConfigError, DrivetrainError
from drivetrain_infra.calls import GRACE_SECONDS, gather
from drivetrain_infra.daemons import as_raised
from drivetrain_infra.ray_runtime import ray_session


class Rank:
    """One process that may belong to a gloo group."""

    def __init__(self, refuse: bool = False) -> None:
        if refuse:
            raise ConfigError("--lr: must be above 0")
        torch.set_num_threads(1)

    def open_store(self) -> int:
        self.master = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return int(self.master.port)

    def join(self, rank: int, port: int) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        store = TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))

    def reduce(self) -> None:
        dist.all_reduce(torch.ones(1))

    def answer(self, value: int) -> int:
        return value

    def refuse(self) -> None:
        raise ConfigError("--lr: must be above 0")

    def break_down(self) -> None:
        raise ValueError("wrong shape\nand a stack")

    def die(self, after: float) -> None:
        time.sleep(after)
        os.kill(os.getpid(), signal.SIGKILL)

    def hang(self, seconds: float) -> None:
        time.sleep(seconds)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with ray_session(tmp_path_factory.mktemp("calls"), num_cpus=8, object_store_bytes=80 * 1024**2):
        yield


@pytest.fixture
def start(cluster: None) -> Iterator[Any]:
    started: list[Any] = []

    def one(*arguments: Any) -> Any:
        # Ray's own annotations give a handle, or the class itself
        actor: Any = ray.remote(Rank).remote(*arguments)
        started.append(actor)
        return actor

    yield one
    for actor in started:
        ray.kill(actor)


@pytest.fixture(scope="module")
def lasting(cluster: None) -> list[Any]:
    """Two processes for the tests that end none: starting one takes seconds."""
    return [ray.remote(Rank).remote() for _ in range(2)]


def failure(calls: dict[str, Any], **given: Any) -> str:
    with pytest.raises(DrivetrainError) as raised:
        gather(calls, **{"what": "training on rollout 3", "seconds": 60, **given})
    return str(raised.value)


def test_all_answers_come_back_by_name(lasting: list[Any]) -> None:
    calls = {name: actor.answer.remote(value) for value, (name, actor) in enumerate(zip("ab", lasting, strict=True))}
    assert gather(calls, what="asking", seconds=60) == {"a": 0, "b": 1}


def test_a_killed_rank_is_named_though_its_peer_noticed_first(start: Any) -> None:
    peer, victim = start(), start()
    port = ray.get(peer.open_store.remote(), timeout=60)
    ray.get([peer.join.remote(0, port), victim.join.remote(1, port)], timeout=60)
    lost = peer.reduce.remote()
    victim.die.remote(0.5)
    assert ray.wait([lost], timeout=30)[0], "the peer did not notice"
    # sent to a dead actor, this one is known only after the peer's error
    text = failure({"train rank 0": lost, "train rank 1": victim.answer.remote(1)}, seconds=None)
    assert text.startswith("training on rollout 3: train rank 1 died (")
    assert "\n" not in text


@pytest.mark.slow
def test_a_lost_connection_beside_a_silent_rank_names_the_silent_one(start: Any) -> None:
    peer, victim = start(), start()
    port = ray.get(peer.open_store.remote(), timeout=60)
    ray.get([peer.join.remote(0, port), victim.join.remote(1, port)], timeout=60)
    lost = peer.reduce.remote()
    victim.die.remote(0.5)
    began = time.monotonic()
    text = failure({"train rank 0": lost, "train rank 1": start().hang.remote(120)}, seconds=None)
    assert time.monotonic() - began < 30 + GRACE_SECONDS
    assert text.startswith("training on rollout 3: no answer from train rank 1, and train rank 0 failed: RuntimeError:")


def test_our_own_error_is_blamed_before_anothers_and_shows_its_message_alone(lasting: list[Any]) -> None:
    strange, ours = lasting
    broken = strange.break_down.remote()
    ray.wait([broken], timeout=30)
    text = failure({"train rank 0": broken, "train rank 1": ours.refuse.remote()})
    assert text == "training on rollout 3: train rank 1 failed: --lr: must be above 0"


def test_another_error_shows_its_type_and_first_line(lasting: list[Any]) -> None:
    text = failure({"train rank 0": lasting[0].break_down.remote()})
    assert text == "training on rollout 3: train rank 0 failed: ValueError: wrong shape"


def test_a_refusal_of_the_constructor_is_no_death(start: Any) -> None:
    text = failure({"engine-0": start(True).answer.remote(1)})
    assert text == "training on rollout 3: engine-0 failed: --lr: must be above 0"


def test_a_process_that_was_killed_is_told_in_one_sentence(start: Any) -> None:
    text = failure({"train rank 0": start().die.remote(0)})
    assert text.startswith("training on rollout 3: train rank 0 died (process ")
    assert "its worker process has died" in text
    assert "\n" not in text


def test_the_late_are_named_with_the_flag(lasting: list[Any]) -> None:
    calls = {"engine-0": lasting[0].answer.remote(1), "engine-1": lasting[1].hang.remote(10)}
    gather({"engine-0": calls["engine-0"]}, what="waiting", seconds=60)
    text = failure(calls, seconds=1, flag="--rollout-timeout")
    assert text == "training on rollout 3: no answer from engine-1 within --rollout-timeout 1 s"


def test_what_a_signal_handler_raises_comes_out_of_ray_as_it_was() -> None:
    with pytest.raises(KeyboardInterrupt), as_raised():
        raise SystemError("returned a result with an exception set") from KeyboardInterrupt()
    with pytest.raises(SystemError, match="something else"), as_raised():
        raise SystemError("something else")
