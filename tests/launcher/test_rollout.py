"""Rollouts with the real engine in this process: seeds, alignment of columns, rewards and metrics."""

import math
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from drivetrain_backend_api import TRAIN_BACKENDS, DataError, DrivetrainError, load_implementation, load_spec
from drivetrain_backend_api.backend import TrainBackend
from drivetrain_backend_api.batch import SampleStatus, from_samples
from drivetrain_backend_api.parallel import Role
from drivetrain_infra.engines.base import (
    ROLLOUT_ENGINES,
    EngineSettings,
    FinishReason,
    GenerateRequest,
    Generation,
    SamplingParams,
)
from drivetrain_launcher.algorithms.grpo import Grpo
from drivetrain_launcher.algorithms.grpo_spec import GrpoConfig
from drivetrain_launcher.config import DataConfig
from drivetrain_launcher.data import Prompt, PromptDataset
from drivetrain_launcher.recipes import arithmetic
from drivetrain_launcher.response_checks import ResponseLimits, check_generations
from drivetrain_launcher.rewards import Reward, RewardInput, load_reward
from drivetrain_launcher.rollout import Generator, labelled_rollout

SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=5)


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sums")
    arithmetic.make(folder, seed=7)
    return folder


@pytest.fixture(scope="module")
def generator(sums: Path) -> Generator:
    spec = load_spec(ROLLOUT_ENGINES, "transformers")
    engine = load_implementation(ROLLOUT_ENGINES, spec)(
        EngineSettings(
            model=str(sums / "model"),
            device="cpu",
            dtype="float32",
            trust_remote_code=False,
            options=spec.config_class(),
        )
    )
    engine.start()

    def call(requests: Sequence[GenerateRequest], *, samples: Sequence[str], weight_version: int) -> list[Generation]:
        engine.weight_version = weight_version  # the loop has synced it
        return check_generations(
            "engine-0",
            requests,
            engine.generate(requests),
            samples=samples,
            weight_version=weight_version,
            vocab_size=None,
        )

    return Generator(
        call=call,
        tokenizer=AutoTokenizer.from_pretrained(sums / "model"),
        reward=load_reward("math"),
        custom_generate=None,
        limits=ResponseLimits(),
        seed=7,
        seconds=60,
    )


@pytest.fixture(scope="module")
def prompts(sums: Path, generator: Generator) -> Sequence[Prompt]:
    config = DataConfig(prompt_data=str(sums / "train.jsonl"), input_key="question", label_key="answer")
    return PromptDataset.load(config.prompt_data, config, generator.tokenizer).prompts[:6]


def test_a_rollout_is_the_same_whenever_it_is_made(generator: Generator, prompts: Sequence[Prompt]) -> None:
    first = generator.generate(3, prompts, samples_per_prompt=4, sampling=SAMPLING).batch
    again = generator.generate(3, prompts, samples_per_prompt=4, sampling=SAMPLING).batch
    other = generator.generate(4, prompts, samples_per_prompt=4, sampling=SAMPLING).batch
    assert torch.equal(first.tokens, again.tokens)
    assert torch.equal(first.per_token["rollout_log_probs"], again.per_token["rollout_log_probs"])
    assert not torch.equal(first.tokens[: len(other.tokens)], other.tokens[: len(first.tokens)])


def test_evaluations_draw_other_streams_than_rollouts(generator: Generator, prompts: Sequence[Prompt]) -> None:
    rollout = generator.generate(3, prompts, samples_per_prompt=4, sampling=SAMPLING).batch
    evaluation = generator.generate(3, prompts, samples_per_prompt=4, sampling=SAMPLING, evaluation=True).batch
    assert rollout.tokens.tolist() != evaluation.tokens.tolist()


def test_log_probs_stand_at_their_own_tokens(generator: Generator, prompts: Sequence[Prompt], sums: Path) -> None:
    batch = generator.generate(0, prompts, samples_per_prompt=2, sampling=SAMPLING).batch
    model = AutoModelForCausalLM.from_pretrained(sums / "model")
    for sample in range(len(batch)):
        tokens = batch.sample_tokens(sample)
        with torch.no_grad():
            log_probs = torch.log_softmax(model(tokens[None]).logits[0].float(), -1)
        response = int(batch.response_lengths[sample])
        expected = log_probs[-response - 1 : -1].gather(1, tokens[-response:, None]).squeeze(1)
        # fp32 both: cached decoding in a padded batch against one forward
        torch.testing.assert_close(batch.sample_column("rollout_log_probs", sample), expected, atol=1e-4, rtol=0)


def test_samples_of_a_prompt_form_a_group(generator: Generator, prompts: Sequence[Prompt]) -> None:
    batch = generator.generate(0, prompts, samples_per_prompt=2, sampling=SAMPLING).batch
    assert batch.per_sample["group_id"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    for sample in range(len(batch)):
        prompt_length = batch.lengths[sample] - int(batch.response_lengths[sample])
        assert tuple(batch.sample_tokens(sample)[:prompt_length].tolist()) == prompts[sample // 2].prompt_ids


def test_reward_sees_the_response_and_metrics_add_up(generator: Generator, prompts: Sequence[Prompt]) -> None:
    seen = []

    def record(sample: object) -> float:
        seen.append(sample)
        return float(len(seen) % 2)

    recording = replace(generator, reward=Reward(name="record", function=record))
    rollout = recording.generate(0, prompts, samples_per_prompt=2, sampling=SAMPLING)
    assert [one.label for one in seen] == [prompt.label for prompt in prompts for _ in range(2)]
    assert [one.response_length for one in seen] == rollout.batch.response_lengths.tolist()
    assert rollout.batch.per_sample["reward"].tolist() == [1.0, 0.0] * 6
    assert rollout.metrics["reward"] == 0.5
    assert rollout.metrics["reward_std"] == 0.5
    assert rollout.metrics["groups_with_one_reward"] == 0.0
    statuses = rollout.batch.per_sample["status"]
    truncated = rollout.batch.response_lengths == SAMPLING.max_new_tokens
    # a response that reaches the limit may still end with the stop token
    assert (~truncated <= (statuses == int(SampleStatus.COMPLETED))).all()
    assert rollout.metrics["truncated"] == float((statuses == int(SampleStatus.TRUNCATED)).double().mean())


def test_the_engines_serve_the_weights_that_the_rollout_before_made(
    generator: Generator, prompts: Sequence[Prompt]
) -> None:
    batch = generator.generate(3, prompts, samples_per_prompt=2, sampling=SAMPLING).batch
    assert batch.per_sample["weight_version"].tolist() == [4] * 12


@pytest.fixture
def trainer(sums: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainBackend]:
    """A real train backend of one rank, in this process."""
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    spec = load_spec(TRAIN_BACKENDS, "fsdp")
    config = spec.config_class(hf_checkpoint=str(sums / "model"), fp32=True, lr=1e-3, global_batch_size=2)
    with load_implementation(TRAIN_BACKENDS, spec)(config, Role.POLICY, 0, 1, "cpu") as backend:
        backend.setup()
        yield backend


@pytest.mark.parametrize("calculate_per_token_loss", [False, True])
def test_responses_without_tokens_are_trained_on(
    calculate_per_token_loss: bool, generator: Generator, prompts: Sequence[Prompt], trainer: TrainBackend
) -> None:
    def silent(requests: Sequence[GenerateRequest], *, samples: Sequence[str], weight_version: int) -> list[Generation]:
        return [
            Generation(token_ids=(), log_probs=(), finish_reason=FinishReason.STOP, weight_version=weight_version)
            for _ in requests
        ]

    rollout = replace(generator, call=silent).generate(0, prompts[:2], samples_per_prompt=2, sampling=SAMPLING)
    assert rollout.batch.response_lengths.tolist() == [0] * 4
    assert all(math.isfinite(value) for value in rollout.metrics.values())
    algorithm = Grpo(GrpoConfig(calculate_per_token_loss=calculate_per_token_loss, entropy_coef=0.1))
    steps = trainer.train(0, trainer.preprocess_rollout_data(rollout.batch), algorithm)
    assert [(step["loss"], step["grad_norm"], step["skipped_steps"]) for step in steps] == [(0.0, 0.0, 0.0)] * 2
    masked = from_samples(
        [(1, 2)] * 4,
        [(3,), (), (4, 5), ()],
        per_token={"loss_mask": [[0.0], [], [1.0, 1.0], []], "rollout_log_probs": [[0.0], [], [-0.5, -0.5], []]},
        per_sample={"reward": [0.0, 1.0, 0.0, 1.0], "group_id": [0, 0, 1, 1]},
    )
    first, second = trainer.train(1, trainer.preprocess_rollout_data(masked), algorithm)
    assert (first["loss"], first["grad_norm"]) == (0.0, 0.0)
    assert math.isfinite(second["loss"])
    assert second["grad_norm"] > 0


def test_labelled_rollouts_count_every_response_token() -> None:
    batch = labelled_rollout([((1, 2), (3,)), ((4,), (5, 6, 7))]).batch
    assert batch.response_lengths.tolist() == [1, 3]
    assert batch.per_token["loss_mask"].tolist() == [1.0] * 4


def test_a_reward_that_never_returns_is_named_at_the_deadline(generator: Generator, prompts: Sequence[Prompt]) -> None:
    def hangs(sample: RewardInput) -> float:
        if sample.index == 3:
            threading.Event().wait()
        return 0.0

    hanging = replace(generator, reward=Reward(name="my:hangs", function=hangs), seconds=5.0)
    with pytest.raises(DrivetrainError, match="--reward my:hangs did not return for sample 3") as caught:
        hanging.generate(0, prompts, samples_per_prompt=2, sampling=SAMPLING)
    # the log shows the line that hangs
    assert "threading.Event().wait()" in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("value", [1e300, -1e31, math.nan, "0.5", None])
def test_a_reward_that_is_no_number_to_train_on_is_refused_by_sample(
    generator: Generator, prompts: Sequence[Prompt], value: object
) -> None:
    def broken(sample: RewardInput) -> float:
        return value if sample.index == 3 else 0.0  # type: ignore[return-value]

    rewarded = replace(generator, reward=Reward(name="my:broken", function=broken))
    with pytest.raises(DataError, match=r"--reward my:broken on sample 3 .* returned "):
        rewarded.generate(0, prompts, samples_per_prompt=2, sampling=SAMPLING)
