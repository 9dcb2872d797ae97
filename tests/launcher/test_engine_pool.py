"""All engines as one: how requests are shared out, and when one that died is replaced. Engines are real Ray actors."""

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import ray

from drivetrain_backend_api import DrivetrainError
from drivetrain_infra.calls import LostProcessError
from drivetrain_infra.engines.actor import EngineHandle
from drivetrain_infra.engines.base import FinishReason, GenerateRequest, Generation, SamplingParams
from drivetrain_infra.ray_runtime import ray_session
from drivetrain_infra.weight_sync.errors import Phase, WeightSyncError
from drivetrain_launcher.engine_pool import EnginePool

SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=3)


class Echo:
    """Returns the prompt's first token, and its own process where that is 1."""

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        token = [os.getpid() if one.prompt_ids[0] == 1 else one.prompt_ids[0] for one in requests]
        return [
            Generation(token_ids=(one,), log_probs=(-0.5,), finish_reason=FinishReason.STOP, weight_version=7)
            for one in token
        ]

    def pid(self) -> int:
        return os.getpid()


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with ray_session(tmp_path_factory.mktemp("run"), num_cpus=3):
        yield


class Engines:
    """Starts engines, and knows which were started again."""

    def __init__(self) -> None:
        self.again: list[int] = []

    def start(self, number: int) -> EngineHandle:
        # Ray's own annotations give a handle, or the class itself
        return EngineHandle(name=f"engine-{number}", actor=ray.remote(Echo).options(num_cpus=1).remote())

    def start_again(self, number: int) -> EngineHandle:
        self.again.append(number)
        return self.start(number)

    def pool(self, count: int = 2, *, most_restarts: int = 3, seconds: float = 60.0) -> EnginePool:
        return EnginePool(
            [self.start(one) for one in range(count)],
            seconds=seconds,
            vocab_size=None,
            start_again=self.start_again,
            most_restarts=most_restarts,
        )


@pytest.fixture
def engines() -> Engines:
    return Engines()


def generate(pool: EnginePool, prompts: Sequence[int]) -> list[int]:
    requests = [GenerateRequest(prompt_ids=(one,), sampling=SAMPLING, seed=(0,)) for one in prompts]
    found = pool.generate(requests, samples=[f"sample {one}" for one in range(len(requests))], weight_version=7)
    return [one.token_ids[0] for one in found]


def end(pool: EnginePool) -> None:
    for one in pool.engines:
        ray.kill(one.actor)


def kill(handle: EngineHandle) -> None:
    os.kill(ray.get(handle.actor.pid.remote()), signal.SIGKILL)


def test_results_come_in_the_order_of_the_requests_from_all_engines(engines: Engines) -> None:
    pool = engines.pool()
    assert generate(pool, range(2, 9)) == list(range(2, 9))
    first, second = (ray.get(one.actor.pid.remote()) for one in pool.engines)
    # one run of the list each, whose lengths depend on the list alone
    assert generate(pool, [1] * 5) == [first] * 2 + [second] * 3
    assert generate(pool, [1]) == [second]
    assert generate(pool, []) == []
    end(pool)


def test_an_engine_that_died_is_replaced_under_its_name_and_takes_requests(engines: Engines) -> None:
    pool = engines.pool()
    kill(pool.engines[1])
    with pytest.raises(LostProcessError, match="engine-1 died") as caught:
        generate(pool, [2, 3, 4])
    before = pool.engines[0]
    assert pool.replace(caught.value)
    assert engines.again == [1]
    assert [one.name for one in pool.engines] == ["engine-0", "engine-1"]
    assert pool.engines[0] is before
    assert generate(pool, [2, 3, 4]) == [2, 3, 4]
    end(pool)


def test_no_more_are_replaced_than_may_be(engines: Engines) -> None:
    pool = engines.pool(1, most_restarts=2)
    died = LostProcessError("generating: engine-0 died", "engine-0", died=True)
    assert [pool.replace(died) for _ in range(4)] == [True, True, False, False]
    assert engines.again == [0, 0]
    end(pool)


@pytest.mark.parametrize(
    "error",
    [
        LostProcessError("no answer from engine-0", "engine-0", died=False),
        LostProcessError("training: train rank 0 died", "train rank 0", died=True),
        DrivetrainError("engine-0 returned text"),
        WeightSyncError("engine-0 is late", phase=Phase.STREAM, engine="engine-0", is_lost=True),
        WeightSyncError("rank 0 died", phase=Phase.STREAM, rank=0, is_lost=True, died=True),
    ],
    ids=["hangs", "a train worker", "a wrong answer", "a slow update", "a rank in an update"],
)
def test_only_an_engine_that_is_gone_is_replaced(engines: Engines, error: DrivetrainError) -> None:
    pool = EnginePool(
        [EngineHandle(name="engine-0", actor=None)],
        seconds=1.0,
        vocab_size=None,
        start_again=engines.start_again,
        most_restarts=3,
    )
    assert not pool.replace(error)
    assert engines.again == []


def test_an_engine_that_dies_in_a_weight_update_is_replaced(engines: Engines) -> None:
    pool = engines.pool(1)
    died = WeightSyncError("it died", phase=Phase.STREAM, engine="engine-0", is_lost=True, died=True)
    assert pool.replace(died)
    assert engines.again == [0]
    end(pool)


def test_a_deadline_names_its_flag(engines: Engines, tmp_path: Path) -> None:
    pool = engines.pool(1, seconds=1.0)
    os.kill(ray.get(pool.engines[0].actor.pid.remote()), signal.SIGSTOP)
    with pytest.raises(LostProcessError, match="no answer from engine-0 within --rollout-timeout 1 s") as caught:
        generate(pool, [2])
    assert not caught.value.died
    end(pool)
