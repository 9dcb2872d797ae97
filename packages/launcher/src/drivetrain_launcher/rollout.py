"""One rollout: prompts in, a rollout batch with rewards out.

Each sample's random stream is seeded from (seed, rollout id, sample index), and which engine generates it depends on
the prompt list alone, so that a rollout on a CPU is the same bit for bit whenever it is made again.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from drivetrain_backend_api import DataError, DrivetrainError
from drivetrain_backend_api.batch import RolloutBatch, SampleStatus, from_samples
from drivetrain_infra.engines.base import FinishReason, GenerateRequest, SamplingParams
from drivetrain_launcher.custom_generate import CustomGenerate, CustomResponse, run_custom_generate
from drivetrain_launcher.data import Prompt
from drivetrain_launcher.engine_pool import EngineCall
from drivetrain_launcher.response_checks import ResponseLimits
from drivetrain_launcher.rewards import Reward, RewardInput
from drivetrain_launcher.user_code import call_within

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_STATUS = {
    FinishReason.STOP: SampleStatus.COMPLETED,
    FinishReason.LENGTH: SampleStatus.TRUNCATED,
    FinishReason.ABORT: SampleStatus.ABORTED,
}

_LARGEST_REWARD = 1e30
"""Rewards are kept in float32, whose largest number is 3.4e38."""

EVALUATION = 1
"""Third word of an evaluation's seeds, which keeps its random streams apart from those of rollouts."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """A finished rollout.

    Attributes:
        batch: all samples, those of one prompt next to each other.
        metrics: means over samples, without prefix.
    """

    batch: RolloutBatch
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Generator:
    """Makes rollouts with the engines.

    Attributes:
        call: generates for a list of requests on all engines, results in order.
        custom_generate: the user's function and its name, None for plain generation.
        limits: what a response must keep to.
        seconds: deadline of one rollout.
        is_synced: the engines serve the trainer's weights, as version `rollout_id` + 1; else their own, as version 0.
        save: folder of the run, for logs; None where there is no run.
    """

    call: EngineCall
    tokenizer: "PreTrainedTokenizerBase"
    reward: Reward
    custom_generate: tuple[str, CustomGenerate] | None
    limits: ResponseLimits
    seed: int
    seconds: float
    is_synced: bool = True
    save: Path | None = None

    def generate(
        self,
        rollout_id: int,
        prompts: Sequence[Prompt],
        *,
        samples_per_prompt: int,
        sampling: SamplingParams,
        evaluation: bool = False,
    ) -> Rollout:
        """Generate `samples_per_prompt` responses to each prompt and compute their rewards.

        Raises:
            DataError: a reward or a response cannot be used; names the sample.
            DrivetrainError: an engine failed, or the deadline passed.
        """
        began = time.monotonic()
        samples = [prompt for prompt in prompts for _ in range(samples_per_prompt)]
        purpose = (EVALUATION,) if evaluation else ()
        seeds = [(self.seed, rollout_id, index, *purpose) for index in range(len(samples))]
        weight_version = rollout_id + 1 if self.is_synced else 0
        responses = self._responses(samples, sampling, seeds, weight_version)
        seconds = time.monotonic() - began
        rewards = self._rewards(samples, responses, began)
        batch = from_samples(
            [prompt.prompt_ids for prompt in samples],
            [response.token_ids for response in responses],
            per_token={
                "loss_mask": [[float(one) for one in response.loss_mask] for response in responses],
                "rollout_log_probs": [response.log_probs for response in responses],
            },
            per_sample={
                "reward": rewards,
                "group_id": [index // samples_per_prompt for index in range(len(samples))],
                "index": list(range(len(samples))),
                "weight_version": [weight_version] * len(samples),
                "status": [int(response.status) for response in responses],
            },
        )
        return Rollout(batch=batch, metrics=_metrics(batch, samples_per_prompt, seconds))

    def _responses(
        self,
        samples: Sequence[Prompt],
        sampling: SamplingParams,
        seeds: Sequence[tuple[int, ...]],
        weight_version: int,
    ) -> list[CustomResponse]:
        if self.custom_generate is not None:
            name, function = self.custom_generate
            return run_custom_generate(
                function,
                samples,
                name=name,
                call=self.call,
                weight_version=weight_version,
                limits=self.limits,
                tokenizer=self.tokenizer,
                sampling=sampling,
                seeds=seeds,
                seconds=self.seconds,
                save=self.save,
            )
        generations = self.call(
            [
                GenerateRequest(prompt_ids=prompt.prompt_ids, sampling=sampling, seed=seed)
                for prompt, seed in zip(samples, seeds, strict=True)
            ],
            samples=[f"sample {index} ({prompt.source})" for index, prompt in enumerate(samples)],
            weight_version=weight_version,
        )
        return [
            CustomResponse(
                token_ids=one.token_ids,
                loss_mask=[1] * len(one.token_ids),
                log_probs=one.log_probs,
                status=_STATUS[one.finish_reason],
            )
            for one in generations
        ]

    def _rewards(self, samples: Sequence[Prompt], responses: Sequence[CustomResponse], began: float) -> list[float]:
        """Compute all rewards within what is left of the rollout's deadline."""
        rewards: list[float] = []

        def late(index: int) -> str:
            return (
                f"--reward {self.reward.name} did not return for sample {index} ({samples[index].source}) within "
                f"--rollout-timeout {self.seconds:g} s of the rollout's start; repair it, or raise the timeout"
            )

        def compute(say: Callable[[str], None]) -> None:
            for index, pair in enumerate(zip(samples, responses, strict=True)):
                say(late(index))
                rewards.append(self._reward(index, *pair))  # how many there are says which one hangs

        try:
            call_within(
                compute, began + self.seconds - time.monotonic(), name=f"--reward {self.reward.name}", save=self.save
            )
        except TimeoutError as error:
            # the last one may have come just now
            raise DrivetrainError(late(min(len(rewards), len(samples) - 1))) from error
        return rewards

    def _reward(self, index: int, prompt: Prompt, response: CustomResponse) -> float:
        text = self.tokenizer.decode(list(response.token_ids), skip_special_tokens=True)
        reward = self.reward(
            RewardInput(
                index=index,
                prompt=prompt.text,
                messages=prompt.messages,
                response=str(text),
                label=prompt.label,
                metadata=prompt.metadata,
                response_length=len(response.token_ids),
                status=response.status,
            )
        )
        if abs(reward) > _LARGEST_REWARD:
            raise DataError(
                f"--reward {self.reward.name} on sample {index} ({prompt.source}) returned {reward:g}; it must be at "
                f"most {_LARGEST_REWARD:g} in size"
            )
        return reward


def labelled_rollout(samples: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Rollout:
    """Make a rollout batch of (prompt ids, response ids) that are given, as supervised training has them."""
    batch = from_samples(
        [prompt for prompt, _ in samples],
        [response for _, response in samples],
        per_sample={"index": list(range(len(samples)))},
    )
    return Rollout(batch=batch, metrics={"response_length": float(batch.response_lengths.float().mean())})


def _metrics(batch: RolloutBatch, samples_per_prompt: int, seconds: float) -> dict[str, float]:
    rewards = batch.per_sample["reward"].double()
    responses = int(batch.response_lengths.sum())
    truncated = batch.per_sample["status"] == int(SampleStatus.TRUNCATED)
    metrics = {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std(correction=0)),
        "response_length": responses / len(batch),
        "truncated": float(truncated.double().mean()),
        "weight_version": float(torch.min(batch.per_sample["weight_version"])),
        "tokens_per_second": responses / seconds if seconds else 0.0,
    }
    if samples_per_prompt > 1:
        groups = rewards.view(-1, samples_per_prompt)
        metrics["groups_with_one_reward"] = float((groups.max(1).values == groups.min(1).values).double().mean())
    return metrics
