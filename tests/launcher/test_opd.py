"""On-policy distillation against closed forms: advantages, loss and metrics, and what is refused."""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain_backend_api.algorithm import ModelOutput
from drivetrain_backend_api.batch import MicroBatch, RolloutBatch, from_samples
from drivetrain_backend_api.config import TrainConfig
from drivetrain_backend_api.discovery import ALGORITHMS, load_spec
from drivetrain_backend_api.errors import ConfigError, DataError
from drivetrain_backend_api.log_probs import Head, LabelLogProbs, label_log_probs
from drivetrain_backend_api.packing import Batching, RolloutShard, pack, shard_rollout
from drivetrain_backend_api.parallel import ProcessGroups
from drivetrain_backend_api.training import count_denominators
from drivetrain_launcher.algorithms.advantages import group_advantages
from drivetrain_launcher.algorithms.grpo import Grpo
from drivetrain_launcher.algorithms.opd import Opd
from drivetrain_launcher.algorithms.opd_spec import OpdConfig
from drivetrain_launcher.config import RolloutConfig

torch.set_num_threads(1)  # the tensors are tiny: more threads would only wait for each other

# Advantages, masks and weights are float32 columns of the batch.
FLOAT32: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-7, "check_dtype": False}

VOCABULARY = 7


class Bigram(ModelOutput):
    """A real model, the smallest: the next token's distribution depends on the token before it."""

    def __init__(self, table: Tensor, batch: MicroBatch) -> None:
        self.hidden, self.labels = table[batch.input_ids], batch.labels

    def label_log_probs(self, *, with_entropy: bool = False) -> LabelLogProbs:
        head = Head(weight=torch.eye(VOCABULARY, dtype=self.hidden.dtype))
        return label_log_probs(self.hidden, head, self.labels, with_entropy=with_entropy)


def logits(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64)


def response_log_probs(table: Tensor, batch: RolloutBatch) -> Tensor:
    """Log-probs of all response tokens, end to end, sample by sample."""
    found = []
    for sample in range(len(batch)):
        tokens = batch.sample_tokens(sample)
        every = torch.log_softmax(table, -1)[tokens[:-1], tokens[1:]]
        found.append(every[-int(batch.response_lengths[sample]) :])
    return torch.cat(found)


POLICY, TEACHER = logits(1), logits(2)


def rollout(**more: Tensor) -> RolloutBatch:
    """Six samples of two groups, with holes in their masks; log-probs are those of POLICY and TEACHER."""
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in (2, 1, 3, 1, 2, 4)]
    responses = [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in (4, 2, 6, 3, 1, 5)]
    batch = from_samples(
        prompts,
        responses,
        per_token={"loss_mask": [[float(place % 3 != 1) for place in range(len(one))] for one in responses]},
        per_sample={"reward": [1.0, 0.0, 0.0, 1.0, 0.5, 0.0], "group_id": [0, 0, 0, 1, 1, 1]},
    )
    columns = {
        "rollout_log_probs": response_log_probs(POLICY, batch),
        "teacher_log_probs": response_log_probs(TEACHER, batch),
        **more,
    }
    for name, column in columns.items():
        batch = batch.with_per_token(name, column)
    return batch


def whole(batch: RolloutBatch) -> RolloutShard:
    [shard] = shard_rollout(batch, dp_size=1, batching=Batching(micro_batch_size=len(batch)))
    return shard


def without(batch: RolloutBatch, column: str) -> RolloutBatch:
    kept = {name: one for name, one in batch.per_token.items() if name != column}
    return dataclasses.replace(batch, per_token=kept)


# -- advantages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coef", [1.0, 0.25])
def test_the_advantage_of_a_token_is_how_much_likelier_the_teacher_finds_it(coef: float) -> None:
    batch = rollout()
    ready = Opd(OpdConfig(opd_kl_coef=coef)).compute_advantages(whole(batch))
    difference = response_log_probs(TEACHER, batch) - response_log_probs(POLICY, batch)
    expected = coef * difference * batch.per_token["loss_mask"]
    torch.testing.assert_close(ready.per_token["advantages"], expected, **FLOAT32)
    assert (expected > 0).any()
    assert (expected < 0).any()


def test_rewards_are_not_read_unless_they_have_a_factor() -> None:
    batch = rollout()
    plain = Opd(OpdConfig()).compute_advantages(whole(dataclasses.replace(batch, per_sample={})))
    assert torch.equal(
        plain.per_token["advantages"], Opd(OpdConfig()).compute_advantages(whole(batch)).per_token["advantages"]
    )


@pytest.mark.parametrize("normalise", [True, False])
def test_beside_a_reward_grpos_advantages_are_added(normalise: bool) -> None:
    batch = rollout()
    config = OpdConfig(opd_kl_coef=0.5, opd_reward_coef=2.0, disable_grpo_std_normalization=not normalise)
    ready = Opd(config).compute_advantages(whole(batch))
    rewards = group_advantages(batch.per_sample["reward"], batch.per_sample["group_id"], normalise_std=normalise)
    difference = response_log_probs(TEACHER, batch) - response_log_probs(POLICY, batch)
    expected = 0.5 * difference * batch.per_token["loss_mask"]
    expected = expected + 2.0 * torch.repeat_interleave(rewards, batch.response_lengths)
    torch.testing.assert_close(ready.per_token["advantages"], expected, **FLOAT32)


def test_recomputed_log_probs_of_the_policy_go_before_the_engines() -> None:
    batch = rollout()
    recomputed = response_log_probs(logits(9), batch)
    ready = Opd(OpdConfig()).compute_advantages(whole(batch.with_per_token("log_probs", recomputed)))
    expected = (response_log_probs(TEACHER, batch) - recomputed) * batch.per_token["loss_mask"]
    torch.testing.assert_close(ready.per_token["advantages"], expected, **FLOAT32)


def test_a_teacher_equal_to_the_policy_gives_no_advantage() -> None:
    batch = rollout()
    batch = batch.with_per_token("teacher_log_probs", batch.per_token["rollout_log_probs"])
    assert not Opd(OpdConfig()).compute_advantages(whole(batch)).per_token["advantages"].any()


def test_the_expected_gradient_is_that_of_the_reverse_kl() -> None:
    """Weighted by how likely the policy samples each token, the loss's gradient is that of KL(policy || teacher)."""
    policy = POLICY.clone().requires_grad_()
    own, other = torch.log_softmax(policy, -1), torch.log_softmax(TEACHER, -1)
    (expected,) = torch.autograd.grad((own.exp() * (own - other)).sum(-1)[0], policy)

    batch = from_samples([[0]] * VOCABULARY, [[token] for token in range(VOCABULARY)])
    batch = batch.with_per_token("rollout_log_probs", response_log_probs(POLICY, batch))
    batch = batch.with_per_token("teacher_log_probs", response_log_probs(TEACHER, batch))
    algorithm = Opd(OpdConfig())
    ready = algorithm.compute_advantages(whole(batch))
    found = torch.zeros_like(POLICY)
    for token in range(VOCABULARY):
        table = POLICY.clone().requires_grad_()
        micro_batch = pack(ready, [token], denominators=count_denominators(ready.select([token]), ProcessGroups()))
        outputs = algorithm.extract_model_output(Bigram(table, micro_batch), micro_batch)
        loss, _ = algorithm.compute_loss(outputs, micro_batch, ProcessGroups())
        (gradient,) = torch.autograd.grad(loss, table)
        found += torch.softmax(POLICY, -1)[0, token] * gradient
    torch.testing.assert_close(found, expected, **FLOAT32)


# -- loss and metrics --------------------------------------------------------------------------------------------------


def step(algorithm: Opd | Grpo, batch: RolloutBatch, *, dp_size: int, batching: Batching) -> dict[str, Tensor]:
    """Sum loss gradient and metrics of all ranks and micro-batches of a one-step rollout."""
    table = (POLICY + 0.1 * logits(4)).requires_grad_()
    total: dict[str, Tensor] = {}
    for shard in shard_rollout(batch, dp_size=dp_size, batching=batching):
        ready = batch.select(shard.positions) if isinstance(algorithm, Grpo) else algorithm.compute_advantages(shard)
        for samples in shard.steps[0]:
            micro_batch = pack(ready, samples, denominators=count_denominators(batch, ProcessGroups()))
            outputs = algorithm.extract_model_output(Bigram(table, micro_batch), micro_batch)
            loss, metrics = algorithm.compute_loss(outputs, micro_batch, ProcessGroups())
            loss.backward()
            for name, value in metrics.items():
                assert not value.requires_grad
                total[name] = total.get(name, torch.zeros(())) + value
    assert table.grad is not None
    return {**total, "gradient": table.grad}


OPTIONS: dict[str, Any] = {"use_tis": True, "entropy_coef": 0.1, "eps_clip": 0.05, "calculate_per_token_loss": True}


def test_loss_gradient_and_metrics_are_grpos_on_those_advantages() -> None:
    batch = rollout(log_probs=response_log_probs(POLICY + 0.05 * logits(5), rollout()))
    algorithm = Opd(OpdConfig(**OPTIONS))
    ready = algorithm.compute_advantages(whole(batch))
    expected = step(Grpo(OpdConfig(**OPTIONS)), ready, dp_size=1, batching=Batching(micro_batch_size=6))
    found = step(algorithm, batch, dp_size=1, batching=Batching(micro_batch_size=6))
    assert {*found} - {*expected} == {"opd_reverse_kl"}
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, **FLOAT32, msg=lambda text, name=name: f"{name}: {text}")
    assert found["pg_clipfrac_low"] + found["pg_clipfrac_high"] > 0


@pytest.mark.parametrize("of_tokens", [True, False], ids=["token mean", "sequence mean"])
def test_the_reverse_kl_is_a_mean_over_the_trained_tokens_under_any_split(of_tokens: bool) -> None:
    batch = rollout()
    on = batch.per_token["loss_mask"]
    values = (response_log_probs(POLICY, batch) - response_log_probs(TEACHER, batch)) * on
    if of_tokens:
        expected = values.sum() / on.sum()
    else:
        lengths = batch.response_lengths.tolist()
        sequences = zip(torch.split(values, lengths), torch.split(on, lengths), strict=True)
        expected = torch.stack([one.sum() / mask.sum() for one, mask in sequences]).mean()
    algorithm = Opd(OpdConfig(calculate_per_token_loss=of_tokens))
    for dp_size, batching in ((1, Batching(micro_batch_size=6)), (2, Batching(micro_batch_size=2))):
        found = step(algorithm, batch, dp_size=dp_size, batching=batching)["opd_reverse_kl"]
        torch.testing.assert_close(found, expected, **FLOAT32)


def test_values_under_a_zero_mask_never_reach_loss_or_metrics() -> None:
    batch = poisoned = rollout()
    off = batch.per_token["loss_mask"] == 0
    for name, poison in (("rollout_log_probs", math.nan), ("teacher_log_probs", -math.inf)):
        poisoned = poisoned.with_per_token(name, torch.where(off, poison, batch.per_token[name]))
    algorithm = Opd(OpdConfig(opd_reward_coef=1.0))
    clean = step(algorithm, batch, dp_size=1, batching=Batching(micro_batch_size=2))
    found = step(algorithm, poisoned, dp_size=1, batching=Batching(micro_batch_size=2))
    for name, value in clean.items():
        assert torch.equal(found[name], value), name


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["teacher_log_probs", "rollout_log_probs"])
def test_a_missing_column_is_named(column: str) -> None:
    with pytest.raises(DataError, match=f"opd needs {column} on its samples"):
        Opd(OpdConfig()).compute_advantages(whole(without(rollout(), column)))


def test_a_reward_that_counts_and_is_missing_is_named() -> None:
    batch = dataclasses.replace(rollout(), per_sample={})
    with pytest.raises(DataError, match="needs reward, group_id on its samples"):
        Opd(OpdConfig(opd_reward_coef=0.5)).compute_advantages(whole(batch))


def findings(options: OpdConfig, *, train: dict[str, Any] | None = None, **rollout_options: Any) -> list[str]:
    given: dict[str, Any] = {"hf_checkpoint": "model", "opd_teacher_load": "teacher", **(train or {})}
    config = SimpleNamespace(
        algorithm_options=options, train=TrainConfig(**given), rollout=RolloutConfig(**rollout_options)
    )
    return load_spec(ALGORITHMS, "opd").validate(config)


def test_combinations_that_cannot_work_are_refused_with_the_fix() -> None:
    assert findings(OpdConfig()) == []
    assert findings(OpdConfig(), n_samples_per_prompt=1, reward="none") == []
    assert findings(OpdConfig(), train={"opd_teacher_load": None}) == [
        "--algorithm opd needs a teacher; give --opd-teacher-load DIR"
    ]
    assert findings(OpdConfig(use_kl_loss=True)) == ["--use-kl-loss needs a reference; give --ref-load DIR"]
    assert findings(OpdConfig(), train={"ref_load": "r"}) == [
        "--ref-load acts only with --use-kl-loss; give both or neither"
    ]
    assert findings(OpdConfig(opd_reward_coef=0.5), n_samples_per_prompt=4) == []
    assert findings(OpdConfig(opd_reward_coef=0.5), n_samples_per_prompt=1, reward="none") == [
        "--opd-reward-coef 0.5 needs a reward; choose another than --reward none",
        "--n-samples-per-prompt 1: --opd-reward-coef compares the samples of a prompt with each other; give 2 or more, "
        "or leave --opd-reward-coef out",
    ]
    assert findings(OpdConfig(), train={"rollout_temperature": 0.0}) == [
        "--rollout-temperature 0 samples greedily, and the reverse KL is taken over what the policy samples; give a "
        "temperature above 0"
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"opd_kl_coef": 0.0}, "--opd-kl-coef 0.0: must be above 0"),
        ({"opd_kl_coef": math.nan}, "--opd-kl-coef nan: must be above 0"),
        ({"opd_reward_coef": -1.0}, "--opd-reward-coef -1.0: must be at least 0"),
    ],
)
def test_factors_out_of_range_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        OpdConfig(**options)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_it_asks_for_the_teacher_and_for_the_reference_only_with_a_kl_loss() -> None:
    assert load_spec(ALGORITHMS, "opd").load() is Opd
    assert Opd(OpdConfig()).needs_teacher_log_probs
    assert Opd(OpdConfig()).needs_old_log_probs_off_policy
    assert not Opd(OpdConfig()).needs_ref_log_probs
    assert Opd(OpdConfig(use_kl_loss=True)).needs_ref_log_probs
