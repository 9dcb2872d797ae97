"""GRPO against closed forms and a sample-by-sample float64 reference, under any split of the work.

Run as a program, this file is one of two gloo ranks that share the tokens of the same sequences.
"""

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain_backend_api.algorithm import ModelOutput
from drivetrain_backend_api.batch import MicroBatch, RolloutBatch, from_samples
from drivetrain_backend_api.config import TrainConfig
from drivetrain_backend_api.discovery import ALGORITHMS, load_spec
from drivetrain_backend_api.errors import ConfigError, DataError
from drivetrain_backend_api.log_probs import Head, LabelLogProbs, label_log_probs
from drivetrain_backend_api.packing import Batching, pack, shard_rollout
from drivetrain_backend_api.parallel import ProcessGroups
from drivetrain_backend_api.training import count_denominators
from drivetrain_launcher.algorithms.advantages import STD_EPSILON, group_advantages
from drivetrain_launcher.algorithms.grpo import Grpo
from drivetrain_launcher.algorithms.grpo_spec import GrpoConfig
from drivetrain_launcher.algorithms.kl import kl_estimate
from drivetrain_launcher.algorithms.policy_loss import clipped_policy_loss
from drivetrain_launcher.config import RolloutConfig

torch.set_num_threads(1)  # the tensors are tiny: more threads would only wait for each other

VOCABULARY, HIDDEN = 11, 5

# Everything below runs in float64, so sums in another order differ by less than this.
ROUNDING = {"rtol": 1e-10, "atol": 1e-12}
# Advantages and masks are float32 columns of the batch.
FLOAT32 = {"rtol": 1e-6, "atol": 1e-7}


class Bigram(ModelOutput):
    """A real model, the smallest: the next token's distribution depends on the token before it."""

    def __init__(self, table: Tensor, head: Tensor, batch: MicroBatch) -> None:
        self.hidden, self.head, self.batch = table[batch.input_ids], head, batch

    def label_log_probs(self, *, with_entropy: bool = False) -> LabelLogProbs:
        return label_log_probs(self.hidden, Head(weight=self.head), self.batch.labels, with_entropy=with_entropy)


def parameters() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64).requires_grad_()
    head = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64).requires_grad_()
    return table, head


def rollout() -> RolloutBatch:
    """Eight samples of two interleaved groups, with holes in their masks and every log-prob off by a little."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in (2, 3, 1, 4, 2, 2, 5, 1)]
    responses = [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in (5, 2, 7, 3, 1, 6, 4, 8)]
    batch = from_samples(
        prompts,
        responses,
        per_token={"loss_mask": [[float(place % 3 != 1) for place in range(len(one))] for one in responses]},
        per_sample={"reward": [1.0, 0.0, 0.0, 1.0, 0.5, 0.0, 1.0, 0.25], "group_id": [7, 3, 7, 3, 7, 3, 7, 3]},
    )
    table, head = parameters()
    whole = pack(batch, range(len(batch)))
    exact = Bigram(table, head, whole).label_log_probs().log_probs.detach()
    places = whole.labels.new_tensor(
        [
            one
            for start, n, r in zip(batch.token_starts, batch.lengths, batch.response_lengths.tolist())
            for one in range(start + n - r - 1, start + n - 1)
        ]
    )
    for name in ("log_probs", "rollout_log_probs", "ref_log_probs"):
        noise = torch.randn(len(places), generator=generator, dtype=torch.float64) * 0.3
        batch = batch.with_per_token(name, exact[places] + noise)
    return batch


def loss_over(algorithm: Grpo, batch: RolloutBatch, *, dp_size: int, batching: Batching) -> dict[str, Tensor]:
    """Sum the loss, gradients and metrics of all ranks and micro-batches of a one-step rollout."""
    table, head = parameters()
    groups = ProcessGroups()
    shards = shard_rollout(batch, dp_size=dp_size, batching=batching)
    denominators = count_denominators(batch, groups)
    total: dict[str, Tensor] = {}
    for shard in shards:
        ready = algorithm.compute_advantages(shard)
        for samples in shard.steps[0]:
            micro_batch = pack(ready, samples, denominators=denominators)
            outputs = algorithm.extract_model_output(Bigram(table, head, micro_batch), micro_batch)
            loss, metrics = algorithm.compute_loss(outputs, micro_batch, groups)
            loss.backward()
            for name, value in metrics.items():
                assert not value.requires_grad
                total[name] = total.get(name, torch.zeros((), dtype=torch.float64)) + value
    assert table.grad is not None
    assert head.grad is not None
    return {**total, "grad of table": table.grad, "grad of head": head.grad}


def reference(batch: RolloutBatch, config: GrpoConfig) -> dict[str, Tensor]:
    """Compute GRPO's objective one sample and one token at a time, from full logits."""
    table, head = parameters()
    rewards, groups = batch.per_sample["reward"].tolist(), batch.per_sample["group_id"].tolist()
    high = config.eps_clip_high or config.eps_clip
    sequences, tokens = [], []
    for sample in range(len(batch)):
        mates = [reward for reward, group in zip(rewards, groups) if group == groups[sample]]
        mean = sum(mates) / len(mates)
        std = math.sqrt(sum((one - mean) ** 2 for one in mates) / (len(mates) - 1))
        advantage = rewards[sample] - mean
        if not config.disable_grpo_std_normalization:
            advantage /= std + STD_EPSILON
        ids = batch.sample_tokens(sample)
        logits = table[ids[:-1]] @ head.t()
        prompt = len(ids) - int(batch.response_lengths[sample])
        here = []
        for place in range(prompt, len(ids)):
            columns = {name: batch.sample_column(name, sample)[place - prompt] for name in batch.per_token}
            if columns["loss_mask"] == 0:
                continue
            distribution = torch.log_softmax(logits[place - 1], dim=0)
            log_prob = distribution[ids[place]]
            ratio = torch.exp(log_prob - columns["log_probs"])
            loss = -torch.min(ratio * advantage, ratio.clamp(1 - config.eps_clip, 1 + high) * advantage)
            if config.use_tis:
                weight = torch.exp(columns["log_probs"] - columns["rollout_log_probs"])
                loss = loss * min(max(float(weight), config.tis_clip_low), config.tis_clip)
            loss = loss + config.entropy_coef * (distribution.exp() * distribution).sum()
            if config.use_kl_loss:
                delta = log_prob - columns["ref_log_probs"]
                kl = {"k1": delta, "k2": delta**2 / 2, "k3": torch.exp(-delta) - 1 + delta}[config.kl_loss_type]
                loss = loss + config.kl_loss_coef * kl
            here.append(loss)
        tokens += here
        sequences.append(sum(here) / len(here))
    loss = sum(tokens) / len(tokens) if config.calculate_per_token_loss else sum(sequences) / len(sequences)
    loss.backward()
    assert table.grad is not None
    assert head.grad is not None
    return {"loss": loss.detach(), "grad of table": table.grad, "grad of head": head.grad}


CONFIGURATIONS = {
    "plain": GrpoConfig(),
    "clip-higher": GrpoConfig(eps_clip=0.1, eps_clip_high=0.3),
    "token mean, no std": GrpoConfig(calculate_per_token_loss=True, disable_grpo_std_normalization=True),
    "k1": GrpoConfig(use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="k1"),
    "k2, token mean": GrpoConfig(use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="k2", calculate_per_token_loss=True),
    "k3 and entropy": GrpoConfig(use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="k3", entropy_coef=0.2),
    "tis": GrpoConfig(use_tis=True, tis_clip=1.2, tis_clip_low=0.9),
}

SPLITS = {
    "one micro-batch": (1, Batching(micro_batch_size=8)),
    "one sample each": (1, Batching(micro_batch_size=1)),
    "by tokens": (1, Batching(max_tokens=12)),
    "two ranks with fillers": (2, Batching(max_tokens=12, multiple=4)),
    "four ranks": (4, Batching(micro_batch_size=2)),
}


@pytest.mark.parametrize("config", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_loss_and_gradient_equal_the_sample_by_sample_reference(config: GrpoConfig) -> None:
    expected = reference(rollout(), config)
    found = loss_over(Grpo(config), rollout(), dp_size=1, batching=Batching(micro_batch_size=8))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, **FLOAT32, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("dp_size", "batching"), SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("per_token", [False, True], ids=["sequence mean", "token mean"])
def test_loss_metrics_and_gradient_do_not_depend_on_the_split(
    per_token: bool, dp_size: int, batching: Batching
) -> None:
    config = GrpoConfig(
        calculate_per_token_loss=per_token, use_kl_loss=True, entropy_coef=0.1, use_tis=True, kl_loss_coef=0.1
    )
    whole = loss_over(Grpo(config), rollout(), dp_size=1, batching=Batching(micro_batch_size=8))
    split = loss_over(Grpo(config), rollout(), dp_size=dp_size, batching=batching)
    assert split.keys() == whole.keys()
    for name, value in whole.items():
        # Weights are float32, one rounding a token.
        torch.testing.assert_close(split[name], value, **FLOAT32, msg=lambda text, name=name: f"{name}: {text}")


def test_metrics_are_the_step_means_of_what_they_name() -> None:
    batch = rollout()
    config = GrpoConfig(calculate_per_token_loss=True, use_tis=True, tis_clip=1.1, tis_clip_low=0.9)
    found = loss_over(Grpo(config), batch, dp_size=2, batching=Batching(micro_batch_size=1))
    on = batch.per_token["loss_mask"] > 0
    gap = (batch.per_token["log_probs"] - batch.per_token["rollout_log_probs"])[on]
    torch.testing.assert_close(found["train_rollout_logprob_abs_diff"], gap.abs().mean(), **FLOAT32)
    torch.testing.assert_close(found["tis"], gap.exp().mean(), **FLOAT32)
    outside = ((gap.exp() > 1.1) | (gap.exp() < 0.9)).double().mean()
    torch.testing.assert_close(found["tis_clipfrac"], outside, **FLOAT32)

    table, head = parameters()
    whole = pack(batch, range(len(batch)))
    everything = torch.log_softmax((table[whole.input_ids] @ head.t()).detach(), -1)
    new = everything.gather(1, whole.labels[:, None]).squeeze(1)
    advantages = group_advantages(batch.per_sample["reward"], batch.per_sample["group_id"], normalise_std=True)
    on = whole.loss_mask > 0
    moved, advantage = (new - whole.per_token["log_probs"])[on], advantages[whole.sequence_ids][on]
    torch.testing.assert_close(found["ppo_kl"], (moved.exp() - 1 - moved).mean(), **FLOAT32)
    torch.testing.assert_close(found["entropy"], -(everything.exp() * everything).sum(-1)[on].mean(), **FLOAT32)
    low, high = (advantage < 0) & (moved.exp() < 0.8), (advantage > 0) & (moved.exp() > 1.2)
    assert low.any()
    assert high.any()
    assert float(found["pg_clipfrac_low"]) == pytest.approx(float(low.double().mean()))
    assert float(found["pg_clipfrac_high"]) == pytest.approx(float(high.double().mean()))


def test_a_single_step_without_old_log_probs_is_the_policy_gradient() -> None:
    batch = rollout()
    config = GrpoConfig(calculate_per_token_loss=True)
    columns = {name: column for name, column in batch.per_token.items() if name != "log_probs"}
    found = loss_over(Grpo(config), replace(batch, per_token=columns), dp_size=1, batching=Batching(micro_batch_size=8))
    table, head = parameters()
    whole = pack(batch, range(len(batch)))
    log_probs = torch.log_softmax(table[whole.input_ids] @ head.t(), -1).gather(1, whole.labels[:, None]).squeeze(1)
    advantages = group_advantages(batch.per_sample["reward"], batch.per_sample["group_id"], normalise_std=True)[
        whole.sequence_ids
    ]
    (-(log_probs * advantages * whole.loss_mask).sum() / whole.loss_mask.sum()).backward()
    torch.testing.assert_close(found["grad of head"], head.grad, **FLOAT32)
    assert found["ppo_kl"] == 0
    assert found["pg_clipfrac_low"] == found["pg_clipfrac_high"] == 0
    gap = ((log_probs.detach() - whole.per_token["rollout_log_probs"]) * whole.loss_mask).abs().sum()
    torch.testing.assert_close(
        found["train_rollout_logprob_abs_diff"], gap / whole.loss_mask.sum(), **FLOAT32, check_dtype=False
    )


def test_values_under_a_zero_mask_never_reach_the_loss() -> None:
    batch = rollout()
    off = batch.per_token["loss_mask"] == 0
    poisoned = batch
    for name, poison in (("log_probs", -math.inf), ("rollout_log_probs", math.nan), ("ref_log_probs", 1e9)):
        poisoned = poisoned.with_per_token(name, torch.where(off, poison, batch.per_token[name]))
    config = GrpoConfig(use_kl_loss=True, use_tis=True, kl_loss_type="k3")
    clean = loss_over(Grpo(config), batch, dp_size=1, batching=Batching(micro_batch_size=2))
    found = loss_over(Grpo(config), poisoned, dp_size=1, batching=Batching(micro_batch_size=2))
    for name, value in clean.items():
        assert torch.equal(found[name], value), name


def test_a_filler_gives_a_zero_loss_that_backward_accepts() -> None:
    algorithm = Grpo(GrpoConfig(use_kl_loss=True, use_tis=True, entropy_coef=0.1))
    [shard] = shard_rollout(rollout(), dp_size=1, batching=Batching())
    batch = algorithm.compute_advantages(shard)
    filler = pack(batch, [], denominators=count_denominators(batch, ProcessGroups()))
    table, head = parameters()
    outputs = algorithm.extract_model_output(Bigram(table, head, filler), filler)
    loss, metrics = algorithm.compute_loss(outputs, filler, ProcessGroups())
    loss.backward()
    assert loss == 0
    assert table.grad is not None
    assert not table.grad.any()
    assert all(value == 0 for value in metrics.values())


# -- advantages -------------------------------------------------------------------------------------------------------


def test_advantages_are_the_same_bits_under_any_layout() -> None:
    batch = rollout()
    by_position: dict[int, list[Tensor]] = {}
    for dp_size in (1, 2, 4):
        for shard in shard_rollout(batch, dp_size=dp_size, batching=Batching()):
            ready = Grpo(GrpoConfig()).compute_advantages(shard)
            for row, position in enumerate(shard.positions):
                by_position.setdefault(position, []).append(ready.sample_column("advantages", row))
    for position, found in by_position.items():
        assert len(found) == 3
        assert all(torch.equal(one, found[0]) for one in found), f"sample {position}"
        assert len(found[0]) == int(batch.response_lengths[position])


def test_a_group_of_equal_rewards_has_advantage_exactly_zero() -> None:
    rewards = torch.tensor([0.1] * 3 + [0.7] * 7 + [1.0])
    groups = torch.tensor([0] * 3 + [5] * 7 + [9])
    for normalise in (True, False):
        assert not group_advantages(rewards, groups, normalise_std=normalise).any()


def test_advantages_of_a_hand_computed_group() -> None:
    rewards, groups = torch.tensor([1.0, 10.0, 0.0, 20.0]), torch.tensor([4, 8, 4, 8])
    centred = torch.tensor([0.5, -5.0, -0.5, 5.0])
    assert torch.equal(group_advantages(rewards, groups, normalise_std=False), centred)
    std = torch.tensor([math.sqrt(0.5), math.sqrt(50), math.sqrt(0.5), math.sqrt(50)])
    torch.testing.assert_close(
        group_advantages(rewards, groups, normalise_std=True), centred / (std + STD_EPSILON), rtol=1e-6, atol=0
    )


def test_missing_columns_are_named() -> None:
    [shard] = shard_rollout(from_samples([[1]], [[2]]), dp_size=1, batching=Batching())
    with pytest.raises(DataError, match="reward, group_id, rollout_log_probs"):
        Grpo(GrpoConfig()).compute_advantages(shard)


# -- single tokens ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_average_to_the_true_divergence(kind: str) -> None:
    generator = torch.Generator().manual_seed(3)
    policy = torch.log_softmax(torch.randn(VOCABULARY, generator=generator, dtype=torch.float64), 0)
    other = torch.log_softmax(torch.randn(VOCABULARY, generator=generator, dtype=torch.float64), 0)
    exact = (policy.exp() * (policy - other)).sum()
    torch.testing.assert_close((policy.exp() * kl_estimate(policy - other, kind)).sum(), exact, **ROUNDING)


def test_the_gradient_of_k2_averages_to_that_of_the_true_divergence() -> None:
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(4), dtype=torch.float64).requires_grad_()
    other = torch.log_softmax(torch.arange(VOCABULARY, dtype=torch.float64) / 4, 0)
    policy = torch.log_softmax(logits, 0)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - other)).sum(), logits, retain_graph=True)
    sampled = (policy.exp().detach() * kl_estimate(policy - other, "k2")).sum()
    torch.testing.assert_close(torch.autograd.grad(sampled, logits)[0], exact, **ROUNDING)


@pytest.mark.parametrize("kind", ["k3", "low_var_kl"])
def test_kl_and_its_gradient_stay_finite_however_far_the_policies_are(kind: str) -> None:
    far = torch.tensor([-1e4, -100.0, 0.0, 100.0], requires_grad=True)
    estimate = kl_estimate(far, kind)
    estimate.sum().backward()
    assert far.grad is not None
    assert estimate.isfinite().all()
    assert far.grad.isfinite().all()
    if kind == "low_var_kl":
        assert estimate.max() <= 10
    near = torch.linspace(-1, 1, 9)
    assert torch.equal(kl_estimate(near, "k3"), kl_estimate(near, "low_var_kl"))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, ""),
        (1.2, 2.0, -2.4, -2.0, ""),
        (1.4, 2.0, -2.6, 0.0, "high"),
        (1.4, -2.0, 2.8, 2.0, ""),
        (0.5, 2.0, -1.0, -2.0, ""),
        (0.5, -2.0, 1.6, 0.0, "low"),
    ],
)
def test_clipping_of_a_single_token(ratio: float, advantage: float, loss: float, slope: float, clipped: str) -> None:
    log_ratio = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    found = clipped_policy_loss(
        log_ratio, torch.tensor([advantage], dtype=torch.float64), eps_clip=0.2, eps_clip_high=0.3
    )
    found.loss.backward()
    assert log_ratio.grad is not None
    assert float(found.loss.detach()) == pytest.approx(loss)
    assert float(log_ratio.grad) == pytest.approx(slope * ratio)  # d ratio / d log ratio = ratio
    assert (float(found.clipped_low), float(found.clipped_high)) == (clipped == "low", clipped == "high")


# -- context parallelism ----------------------------------------------------------------------------------------------


def cut(batch: MicroBatch, rank: int) -> MicroBatch:
    """Give a rank every second token, an arbitrary cut that splits every sequence."""
    mine = batch.token_index % 2 == rank
    return replace(
        batch,
        input_ids=batch.input_ids[mine],
        position_ids=batch.position_ids[mine],
        labels=batch.labels[mine],
        loss_mask=batch.loss_mask[mine],
        sequence_ids=batch.sequence_ids[mine],
        token_index=batch.token_index[mine],
        per_token={name: column[mine] for name, column in batch.per_token.items()},
    )


def one_context_parallel_rank(rank: int, store: str, result: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    algorithm = Grpo(GrpoConfig(entropy_coef=0.1))
    [shard] = shard_rollout(rollout(), dp_size=1, batching=Batching())
    batch = algorithm.compute_advantages(shard)
    denominators = count_denominators(batch, ProcessGroups())
    micro_batch = cut(pack(batch, range(len(batch)), denominators=denominators), rank)
    table, head = parameters()
    groups = ProcessGroups(cp=dist.group.WORLD)
    outputs = algorithm.extract_model_output(Bigram(table, head, micro_batch), micro_batch)
    loss, metrics = algorithm.compute_loss(outputs, micro_batch, groups)
    loss.backward()
    torch.save({**metrics, "grad of table": table.grad, "grad of head": head.grad}, result)
    dist.destroy_process_group()


def test_sequence_mean_over_two_ranks_that_share_sequences_sums_to_the_whole(tmp_path: Path) -> None:
    processes = []
    for rank in range(2):
        with (tmp_path / f"{rank}.log").open("wb") as log:
            command = [sys.executable, __file__, str(rank), str(tmp_path / "store"), str(tmp_path / f"rank_{rank}.pt")]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
    try:
        for rank, process in enumerate(processes):
            assert process.wait(timeout=120) == 0, (tmp_path / f"{rank}.log").read_text()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    parts = [torch.load(tmp_path / f"rank_{rank}.pt") for rank in range(2)]
    whole = loss_over(Grpo(GrpoConfig(entropy_coef=0.1)), rollout(), dp_size=1, batching=Batching(micro_batch_size=8))
    for name, value in whole.items():
        torch.testing.assert_close((parts[0][name] + parts[1][name]).to(value.dtype), value, **FLOAT32)


# -- options ----------------------------------------------------------------------------------------------------------


def findings(options: GrpoConfig, *, ref_load: str | None = None, temperature: float = 1.0, samples: int = 4) -> str:
    config = SimpleNamespace(
        algorithm_options=options,
        train=TrainConfig(hf_checkpoint="model", ref_load=ref_load, rollout_temperature=temperature),
        rollout=RolloutConfig(n_samples_per_prompt=samples),
    )
    return "\n".join(load_spec(ALGORITHMS, "grpo").validate(config))


def test_combinations_that_cannot_work_are_refused_with_the_fix() -> None:
    assert findings(GrpoConfig()) == ""
    assert findings(GrpoConfig(use_kl_loss=True), ref_load="model") == ""
    assert "--ref-load DIR" in findings(GrpoConfig(use_kl_loss=True))
    assert "only with --use-kl-loss" in findings(GrpoConfig(), ref_load="model")
    assert "give 2 or more" in findings(GrpoConfig(), samples=1)
    assert "above 0" in findings(GrpoConfig(), temperature=0.0)
    with pytest.raises(ConfigError, match="--tis-clip-low 3 is above --tis-clip 2"):
        GrpoConfig(tis_clip_low=3.0)
    with pytest.raises(ConfigError, match="--kl-loss-type k4: not one of k1, k2, k3, low_var_kl"):
        GrpoConfig(kl_loss_type="k4")  # type: ignore[arg-type]


def test_the_reference_is_asked_for_only_with_a_kl_loss() -> None:
    implementation = load_spec(ALGORITHMS, "grpo").load()
    assert implementation is Grpo
    assert not Grpo(GrpoConfig()).needs_ref_log_probs
    assert Grpo(GrpoConfig(use_kl_loss=True)).needs_ref_log_probs


if __name__ == "__main__":
    one_context_parallel_rank(int(sys.argv[1]), sys.argv[2], sys.argv[3])
