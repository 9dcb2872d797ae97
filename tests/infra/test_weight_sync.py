"""Weight updates between real Ray actors: two FSDP ranks, two engines, both transports, and every way to fail.

The engines start from other weights than the trainer's, so what they hold after an update came through it; the
reference is the trainer's model file, read by safetensors.
"""

import gc
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from drivetrain_backend_api import ConfigError
from drivetrain_backend_fsdp.config import FsdpConfig
from drivetrain_infra.config import PlacementConfig, WeightSyncConfig
from drivetrain_infra.engines.actor import EngineHandle, launch_engines
from drivetrain_infra.engines.base import EngineSettings, FinishReason, GenerateRequest, PauseMode, SamplingParams
from drivetrain_infra.engines.transformers_spec import TransformersEngineConfig
from drivetrain_infra.placement import Placement, create_placement_groups, logical_cpus
from drivetrain_infra.ray_runtime import ray_session
from drivetrain_infra.weight_sync.errors import Phase, WeightSyncError
from drivetrain_infra.weight_sync.session import WeightSession

# Ray's workers import the parties by name, and so does this module.
sys.path.insert(0, str(Path(__file__).parent))

from sync_parties import SyncWorker

BUCKET_BYTES = 16 * 1024
LONGEST = 4096
PLACEMENT = PlacementConfig(actor_num_gpus_per_node=2, rollout_num_gpus=2)


def make_model(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=67,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=LONGEST,
            tie_word_embeddings=True,
            eos_token_id=None,
            bos_token_id=None,
            pad_token_id=None,
        )
    )
    model.save_pretrained(folder)
    vocabulary = {f"t{one}": one for one in range(67)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(folder)
    return folder


def install_plugin(folder: Path) -> str:
    """Make a distribution that provides the faulty engine, and return the path that workers need to find it."""
    info = folder / "faulty_engine-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[drivetrain.rollout_engines]\nfaulty = sync_parties:SPEC\n")
    return f"{folder}{os.pathsep}{Path(__file__).parent}"


@dataclass
class Parties:
    """Two train ranks and two engines, for all tests of this module."""

    folder: Path
    trained: Path
    placement: Placement
    workers: list[Any]
    engines: list[EngineHandle]
    environment: dict[str, str]
    next_version: int = 1

    def session(self, engines: list[EngineHandle] | None = None, **options: Any) -> WeightSession:
        settings: dict[str, Any] = {"update_weight_buffer_size": BUCKET_BYTES, "update_weight_timeout": 60.0}
        config = WeightSyncConfig(**(settings | options))
        return WeightSession(
            self.workers, engines or self.engines, config, folder=self.folder / "sync", dtype="float32"
        )

    def version(self) -> int:
        self.next_version += 1
        return self.next_version - 1

    def launch(self, *places: int) -> list[EngineHandle]:
        settings = EngineSettings(
            model=str(self.folder / "untrained"),
            device="cpu",
            dtype="float32",
            trust_remote_code=False,
            options=TransformersEngineConfig(),
        )
        slots = [self.placement.engines[one] for one in places]
        return launch_engines("faulty", settings, slots, environment=self.environment, num_threads=1, seconds=200)

    def health(self, engine: EngineHandle) -> Any:
        return ray.get(engine.actor.health.remote(), timeout=30)

    def order(self, engine: EngineHandle, fault: str) -> None:
        (self.folder / "faults" / str(self.health(engine).pid)).write_text(fault)

    def held(self, engine: EngineHandle, version: int) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "faults" / f"{self.health(engine).pid}-{version}.safetensors")

    def assert_serves(self, engine: EngineHandle, version: int) -> None:
        (made,) = ray.get(engine.actor.generate.remote([request(4)]), timeout=60)
        assert made.weight_version == version
        assert self.health(engine).weight_version == version

    def assert_refuses(self, engine: EngineHandle, version: int) -> None:
        with pytest.raises(Exception, match=r"generate\(\) is illegal while engine .* is paused"):
            ray.get(engine.actor.generate.remote([request(4)]), timeout=60)
        assert self.health(engine).weight_version == version

    def assert_trainer_is_free(self) -> None:
        assert ray.get([one.collective_sum.remote() for one in self.workers], timeout=30) == [2, 2]


def request(tokens: int) -> GenerateRequest:
    return GenerateRequest(prompt_ids=(1, 2, 3), sampling=SamplingParams(max_new_tokens=tokens), seed=(1, 2))


@pytest.fixture(scope="module")
def all_parties(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parties]:
    folder = tmp_path_factory.mktemp("weight_sync")
    trained = make_model(folder / "trained", seed=1)
    make_model(folder / "untrained", seed=2)
    (folder / "faults").mkdir()
    environment = {
        "PYTHONPATH": install_plugin(folder / "plugin"),
        "FAULTS": str(folder / "faults"),
        "OMP_NUM_THREADS": "1",
    }
    with ray_session(folder, num_cpus=logical_cpus(PLACEMENT), object_store_bytes=80 * 1024**2):
        placement = create_placement_groups(PLACEMENT)
        config = FsdpConfig(hf_checkpoint=str(trained), fp32=True, distributed_timeout_minutes=1.0)
        remote = ray.remote(SyncWorker)
        workers = [
            remote.options(**slot.actor_options, runtime_env={"env_vars": environment}).remote(slot.index, 2, config)
            for slot in placement.train
        ]
        parties = Parties(folder, trained, placement, workers, [], environment)
        rendezvous = workers[0].open_rendezvous.remote()
        parties.engines = parties.launch(0, 1)
        port = ray.get(rendezvous, timeout=120)
        ray.get([one.setup.remote(port) for one in workers], timeout=120)
        yield parties
        placement.remove()
    # Ray's handles close their sockets when they are collected, which pytest would blame on a later test
    gc.collect()


@pytest.fixture
def parties(all_parties: Parties) -> Parties:
    """Both engines alive; a test before may have ended one."""
    for place, engine in enumerate(all_parties.engines):
        try:
            all_parties.health(engine)
        except ray.exceptions.RayActorError:
            (all_parties.engines[place],) = all_parties.launch(place)
    return all_parties


@pytest.mark.parametrize("transport", ["distributed", "disk"])
def test_both_engines_hold_the_trainers_weights_bit_for_bit(parties: Parties, transport: str) -> None:
    session = parties.session(update_weight_transport=transport)
    expected = load_file(parties.trained / "model.safetensors")
    # the second update goes through groups that exist already
    for _ in range(2):
        version = parties.version()
        report = session.sync(version)
        assert report.version == session.version == version
        assert report.buckets > 3
        assert report.nbytes >= sum(one.numel() * 4 for one in expected.values())
        assert list(report.seconds) == [phase.value for phase in Phase]
        assert report.engines == ("engine-0", "engine-1")
        for engine in parties.engines:
            held = parties.held(engine, version)
            for name, tensor in expected.items():
                assert torch.equal(held[name].view(torch.uint8), tensor.view(torch.uint8)), name
            parties.assert_serves(engine, version)
    assert not list((parties.folder / "sync").glob("*"))


def test_a_drained_generation_ends_by_itself_and_an_aborted_one_early(parties: Parties) -> None:
    for mode, tokens in (("drain", 200), ("abort", LONGEST - 10)):
        running = start_generation(parties, tokens)
        # nothing to connect, so that the pause comes at once
        parties.session(update_weight_pause=mode, update_weight_transport="disk").sync(parties.version())
        (made,) = ray.get(running, timeout=60)
        if mode == "drain":
            assert (made.finish_reason, len(made.token_ids)) == (FinishReason.LENGTH, tokens)
        else:
            assert made.finish_reason is FinishReason.ABORT
            assert len(made.token_ids) < tokens


def test_an_abort_gets_through_a_drain_that_takes_too_long(parties: Parties) -> None:
    engine = parties.engines[0]
    running = start_generation(parties, LONGEST - 10)
    with pytest.raises(WeightSyncError) as failure:
        parties.session(update_weight_timeout=1.0, update_weight_transport="disk").sync(parties.version())
    assert (failure.value.phase, failure.value.engine) == (Phase.PAUSE, "engine-0")
    assert "--update-weight-timeout" in str(failure.value)
    ray.get(engine.actor.pause.remote(PauseMode.ABORT), timeout=30)
    (made,) = ray.get(running, timeout=30)
    assert made.finish_reason is FinishReason.ABORT
    parties.assert_refuses(engine, parties.health(engine).weight_version)


@pytest.mark.parametrize("transport", ["distributed", "disk"])
def test_a_flipped_bit_is_caught_before_any_engine_commits(parties: Parties, transport: str) -> None:
    session, before = served(parties, transport)
    parties.order(parties.engines[1], "flip")
    with pytest.raises(WeightSyncError, match="differ from what was sent") as failure:
        session.sync(parties.version())
    assert (failure.value.phase, failure.value.engine, failure.value.bucket) == (Phase.VERIFY, "engine-1", 1)
    for engine in parties.engines:
        parties.assert_refuses(engine, before)
    parties.assert_trainer_is_free()
    after = parties.version()
    session.sync(after)
    for engine in parties.engines:
        parties.assert_serves(engine, after)


def test_an_engine_that_raises_ends_the_stream_at_once_for_all(parties: Parties) -> None:
    session, before = served(parties, "distributed")
    parties.order(parties.engines[0], "refuse")
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match="the engine's memory is full") as failure:
        session.sync(parties.version())
    assert time.monotonic() - began < 30  # of a deadline of 60
    assert (failure.value.phase, failure.value.engine) == (Phase.STREAM, "engine-0")
    parties.assert_refuses(parties.engines[1], before)
    parties.assert_trainer_is_free()


def test_an_engine_that_hangs_is_named_at_the_deadline(parties: Parties) -> None:
    served(parties, "distributed")
    before = parties.health(parties.engines[0]).weight_version
    parties.order(parties.engines[1], "hang 8")
    session = parties.session(update_weight_timeout=4.0)
    began = time.monotonic()
    with pytest.raises(WeightSyncError) as failure:
        session.sync(parties.version())
    assert time.monotonic() - began < 20
    assert (failure.value.phase, failure.value.engine) == (Phase.STREAM, "engine-1")
    parties.assert_trainer_is_free()
    for engine in parties.engines:
        parties.assert_refuses(engine, before)
    until(lambda: not parties.health(parties.engines[1]).busy)


def test_versions_only_rise(parties: Parties) -> None:
    session, version = served(parties, "disk")
    with pytest.raises(ConfigError, match="must be above"):
        session.sync(version)


def test_a_killed_engine_is_named_and_the_other_one_serves_only_after_a_whole_update(parties: Parties) -> None:
    session, before = served(parties, "distributed")
    survivor, victim = parties.engines
    parties.order(victim, "die")
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"engine engine-1 died \(process \d+: [^\n]*$") as failure:
        session.sync(parties.version())
    assert time.monotonic() - began < 30  # of a deadline of 60
    assert (failure.value.phase, failure.value.engine) == (Phase.STREAM, "engine-1")
    parties.assert_trainer_is_free()
    parties.assert_refuses(survivor, before)
    with pytest.raises(ray.exceptions.RayTaskError, match=r"resume\(\) is illegal"):
        ray.get(survivor.actor.resume.remote(), timeout=30)
    session.engines.remove(victim)
    after = parties.version()
    session.sync(after)
    parties.assert_serves(survivor, after)


def start_generation(parties: Parties, tokens: int) -> Any:
    """Let the first engine generate, after an update in case it is paused; return once it has begun."""
    served(parties, "disk")
    running = parties.engines[0].actor.generate.remote([request(tokens)])
    until(lambda: parties.health(parties.engines[0]).busy)
    return running


def served(parties: Parties, transport: str) -> tuple[WeightSession, int]:
    """Update both engines, so that they serve a known version."""
    session, version = parties.session(update_weight_transport=transport), parties.version()
    session.sync(version)
    return session, version


def until(condition: Any, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.02)
