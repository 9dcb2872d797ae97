"""The contract at work: a complete backend in plain torch, trained alone and on two gloo ranks.

The backend is real and the smallest possible: a bigram model, so that sequences can be cut anywhere between ranks. Run
as a program, this file is one of the two ranks.
"""

import inspect
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain_backend_api.algorithm import Algorithm, ModelOutput
from drivetrain_backend_api.backend import SaveHandle, StepFn, StepOutcome, TrainBackend
from drivetrain_backend_api.batch import MicroBatch, RolloutBatch, from_samples
from drivetrain_backend_api.config import TrainConfig
from drivetrain_backend_api.errors import DataError, DrivetrainError, IllegalStateError, WeightExportAbortedError
from drivetrain_backend_api.lifecycle import State
from drivetrain_backend_api.log_probs import Head, LabelLogProbs, label_log_probs
from drivetrain_backend_api.offload import HostCopies
from drivetrain_backend_api.packing import RolloutShard, pack
from drivetrain_backend_api.parallel import ParallelLayout, ProcessGroups, Role
from drivetrain_backend_api.reductions import gather_packed, per_sequence_sum, reduce_metrics, sum_scalars
from drivetrain_backend_api.spec import Capabilities
from drivetrain_backend_api.weights import Holders, WeightExport, WeightManager, flatten, plan_buckets, unflatten

VOCABULARY, HIDDEN = 11, 5

# float64 throughout; ranks and micro-batches add in another order.
ROUNDING = {"rtol": 1e-10, "atol": 1e-12}
# Masks and the columns that algorithms read are float32.
FLOAT32 = {"rtol": 1e-6, "atol": 1e-8}


class BigramOutput(ModelOutput):
    def __init__(self, weights: Mapping[str, Tensor], batch: MicroBatch) -> None:
        self.weights, self.batch = weights, batch

    def label_log_probs(self, *, with_entropy: bool = False) -> LabelLogProbs:
        hidden = self.weights["table"][self.batch.input_ids]
        return label_log_probs(
            hidden, Head(weight=self.weights["head"]), self.batch.labels, chunk_size=7, with_entropy=with_entropy
        )


class TinyBackend(TrainBackend):
    """Replicated weights, gradients summed over all ranks; ranks share samples, or with `cp` every sequence."""

    capabilities = Capabilities(reference="tag")
    cp = False

    def setup(self, with_ref: bool = False, with_opd_teacher: bool = False) -> int:
        self.lifecycle.move("setup", State.AWAKE)
        world = dist.group.WORLD if self.world_size > 1 else None
        place, size = ("cp_rank", "cp_size") if self.cp else ("dp_rank", "dp_size")
        self.parallel = ParallelLayout(
            rank=self.rank, world_size=self.world_size, device="cpu", **{place: self.rank, size: self.world_size}
        )
        self.groups = ProcessGroups(
            world=world, dp=None if self.cp else world, cp=world if self.cp else None, dp_cp=world, control=world
        )
        generator = torch.Generator().manual_seed(self.config.seed)
        self.parameters = {
            name: torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64).requires_grad_()
            for name in ("table", "head")
        }
        self.weights = WeightManager(lambda: {name: one.detach() for name, one in self.parameters.items()})
        self.copies = HostCopies()
        if with_ref:
            with torch.no_grad():
                self.parameters["head"].mul_(0.5)
            self.weights.backup("ref")
            with torch.no_grad():
                self.parameters["head"].mul_(2.0)
        return self.next_rollout_id

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], step_fn: StepFn, forward_only: bool = False
    ) -> list[dict[str, Tensor]]:
        if not forward_only:
            self.lifecycle.begin_gradients()
        results = []
        with torch.set_grad_enabled(not forward_only):
            for micro_batch in micro_batches:
                mine = cut(micro_batch, self.rank) if self.cp and self.world_size > 1 else micro_batch
                loss, metrics = step_fn(BigramOutput(self.parameters, mine), mine)
                if not forward_only:
                    loss.backward()
                results.append(metrics)
        if not forward_only and self.groups.dp_cp is not None:
            for one in self.parameters.values():
                dist.all_reduce(one.grad, group=self.groups.dp_cp)
        return results

    def optimizer_step(self) -> StepOutcome:
        self.lifecycle.end_gradients()
        gradients = [one.grad for one in self.parameters.values() if one.grad is not None]
        norm = torch.stack([one.square().sum() for one in gradients]).sum().sqrt()
        with torch.no_grad():
            for one in self.parameters.values():
                one -= self.config.lr * one.grad
                one.grad = None
        return StepOutcome(grad_norm=float(norm), lr=self.config.lr)

    def export_weights(
        self, bucket_bytes: int, holders: Holders = Holders.ALL, dtype: torch.dtype | None = None
    ) -> WeightExport:
        self.lifecycle.require("export_weights")
        tensors = {name: one.detach().to(dtype or one.dtype) for name, one in self.parameters.items()}
        plan = plan_buckets(((name, one.shape, one.dtype, 0) for name, one in tensors.items()), bucket_bytes)

        def gather(index: int) -> Tensor | None:
            if self.groups.control is not None:
                dist.barrier(group=self.groups.control)
            if holders is not Holders.ALL and self.rank:
                return None
            entries = plan.bucket(index)
            return flatten([tensors[one.name] for one in entries], entries, device="cpu")

        def agree(mine: bool) -> bool:
            return sum_scalars([float(not mine)], group=self.groups.control, device="cpu") == [0.0]

        return WeightExport(plan, gather, agree)

    def save_checkpoint(self, folder: Path) -> SaveHandle:
        self.lifecycle.require("save_checkpoint")
        torch.save(dict(self.weights._live_weights()), folder / "weights.pt")
        return SaveHandle()

    def sleep(self, keep_weights: bool = False) -> None:
        self.lifecycle.move("sleep", State.WEIGHTS_ONLY if keep_weights else State.ASLEEP)
        if not keep_weights:
            self.copies.send_away(self.parameters)

    def wake_up(self, weights_only: bool = False) -> None:
        self.lifecycle.move("wake_up", State.WEIGHTS_ONLY if weights_only else State.AWAKE)
        self.copies.bring_back()


class ContextParallelBackend(TinyBackend):
    cp = True


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


class WeightedLikelihood(Algorithm):
    """Reward-weighted log-likelihood, so that every hook has something to do.

    Advantages are rewards less the mean of the whole rollout; a step's loss weighs sequences by one over their length.
    """

    def compute_advantages(self, shard: RolloutShard) -> RolloutBatch:
        rewards = shard.rollout_per_sample["reward"]
        mine = (rewards - rewards.mean())[list(shard.positions)]
        return shard.batch.with_per_token("advantages", mine.repeat_interleave(shard.batch.response_lengths))

    def extract_model_output(self, output: ModelOutput, batch: MicroBatch) -> Mapping[str, Tensor]:
        return {"log_probs": output.label_log_probs().log_probs}

    def compute_loss(
        self, outputs: Mapping[str, Tensor], batch: MicroBatch, groups: ProcessGroups
    ) -> tuple[Tensor, dict[str, Tensor]]:
        counts = per_sequence_sum(batch.loss_mask, batch, group=groups.cp).clamp(min=1)
        weights = batch.loss_mask * batch.per_token["advantages"] / counts[batch.sequence_ids]
        loss = -(weights * outputs["log_probs"]).sum() / batch.require_denominators().sequences
        metrics = {"loss": loss.detach(), "samples": torch.tensor(float(len(batch.samples)))}
        for name in ("log_probs", "ref_log_probs"):
            if name in batch.per_token:
                metrics[name] = (batch.per_token[name] * batch.loss_mask).sum()
        return loss, metrics


def rollout() -> RolloutBatch:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in (2, 3, 1, 4, 2, 2, 5, 1)]
    responses = [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in (5, 2, 7, 3, 1, 6, 4, 8)]
    return from_samples(
        prompts,
        responses,
        per_token={"loss_mask": [[float(place % 3 != 1) for place in range(len(one))] for one in responses]},
        per_sample={"reward": [1.0, 0.0, 0.0, 1.0, 0.5, 0.0, 1.0, 0.25], "index": list(range(8))},
    )


def backend(kind: type[TinyBackend] = TinyBackend, rank: int = 0, world_size: int = 1, **options: Any) -> TinyBackend:
    settings = {"hf_checkpoint": "none", "lr": 0.5, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 20}
    config = TrainConfig(**{**settings, **options})
    return kind(config, role=Role.POLICY, rank=rank, world_size=world_size, device="cpu")


def trained(one: TinyBackend, rollouts: int = 2) -> dict[str, Any]:
    """Train on the same rollout a few times; return metrics, weights and the log-probs before and after."""
    one.setup()
    algorithm = WeightedLikelihood(None)
    shard = one.preprocess_rollout_data(rollout())
    before = one.forward_only(shard)
    metrics = [step for number in range(rollouts) for step in one.train(number, shard, algorithm)]
    return {
        "metrics": metrics,
        "weights": {name: tensor.detach().clone() for name, tensor in one.parameters.items()},
        "before": dict(zip(shard.positions, before)),
        "after": dict(zip(shard.positions, one.forward_only(shard))),
    }


# -- one rank ---------------------------------------------------------------------------------------------------------


def reference_log_probs(weights: Mapping[str, Tensor], sample: int) -> Tensor:
    batch = rollout()
    ids, response = batch.sample_tokens(sample), int(batch.response_lengths[sample])
    logits = weights["table"][ids[:-1]] @ weights["head"].t()
    return torch.log_softmax(logits, -1).gather(1, ids[1:, None]).squeeze(1)[-response:]


@pytest.mark.parametrize("global_batch_size", [8, 4, 2])
def test_training_equals_plain_torch_sample_by_sample(global_batch_size: int) -> None:
    batch = rollout()
    one = backend(global_batch_size=global_batch_size)
    one.setup()
    weights = {name: tensor.detach().clone().requires_grad_() for name, tensor in one.parameters.items()}
    advantages = batch.per_sample["reward"] - batch.per_sample["reward"].mean()
    losses, norms = [], []
    for start in range(0, 8, global_batch_size):
        terms = []
        for sample in range(start, start + global_batch_size):
            on = batch.sample_column("loss_mask", sample) > 0
            terms.append(-advantages[sample] * reference_log_probs(weights, sample)[on].mean())
        loss = torch.stack(terms).mean()
        gradients = torch.autograd.grad(loss, list(weights.values()))
        norms.append(float(torch.cat([gradient.flatten() for gradient in gradients]).norm()))
        losses.append(float(loss.detach()))
        with torch.no_grad():
            for tensor, gradient in zip(weights.values(), gradients):
                tensor -= 0.5 * gradient
    found = one.train(6, one.preprocess_rollout_data(batch), WeightedLikelihood(None))
    assert [step["loss"] for step in found] == pytest.approx(losses, rel=1e-6)
    assert [step["grad_norm"] for step in found] == pytest.approx(norms, rel=1e-6)
    assert [step["samples"] for step in found] == [global_batch_size] * len(losses)
    assert [step["loss_tokens"] for step in found] == [
        float(batch.select(range(start, start + global_batch_size)).per_token["loss_mask"].sum())
        for start in range(0, 8, global_batch_size)
    ]
    assert all(step["lr"] == 0.5 and step["skipped_steps"] == 0.0 for step in found)
    assert one.next_rollout_id == 7
    for name, tensor in weights.items():
        torch.testing.assert_close(one.parameters[name], tensor, **FLOAT32)


@pytest.mark.parametrize("options", [{}, {"max_tokens_per_gpu": 13, "global_batch_size": 4}], ids=["one", "several"])
def test_forward_only_gives_every_sample_its_log_probs_in_order(options: dict[str, Any]) -> None:
    one = backend(**options)
    one.setup()
    shard = one.preprocess_rollout_data(rollout())
    found = one.forward_only(shard)
    for position, values in zip(shard.positions, found, strict=True):
        assert not values.requires_grad
        torch.testing.assert_close(values, reference_log_probs(one.parameters, position).detach(), **ROUNDING)


def test_old_log_probs_are_those_before_the_rollout_and_computed_where_needed() -> None:
    def steps(*, always: bool = False, off_policy: bool = False, size: int) -> list[dict[str, float]]:
        one = backend(global_batch_size=size)
        one.setup()
        algorithm = WeightedLikelihood(None)
        algorithm.needs_old_log_probs = always
        algorithm.needs_old_log_probs_off_policy = off_policy
        return one.train(0, one.preprocess_rollout_data(rollout()), algorithm)

    fresh = backend()
    fresh.setup()
    batch = rollout()
    by_step = [
        sum(
            float(
                (reference_log_probs(fresh.parameters, sample) * batch.sample_column("loss_mask", sample))
                .detach()
                .sum()
            )
            for sample in range(start, start + 4)
        )
        for start in (0, 4)
    ]
    assert "log_probs" not in steps(size=4)[0]
    assert "log_probs" not in steps(size=8, off_policy=True)[0]
    assert steps(size=8, always=True)[0]["log_probs"] == pytest.approx(sum(by_step))
    for found in (steps(size=4, off_policy=True), steps(size=4, always=True)):
        assert [step["log_probs"] for step in found] == pytest.approx(by_step)  # the second step's are no newer


def test_reference_log_probs_come_from_the_reference_and_leave_the_policy_alone() -> None:
    one = backend()
    one.setup(with_ref=True)
    shard = one.preprocess_rollout_data(rollout())
    before = {name: tensor.detach().clone() for name, tensor in one.parameters.items()}
    found = one.maybe_compute_ref_log_probs(shard)
    assert found is not None
    reference = {"table": before["table"], "head": before["head"] * 0.5}
    for position, values in zip(shard.positions, found):
        torch.testing.assert_close(values, reference_log_probs(reference, position), **ROUNDING)
    for name, tensor in before.items():
        assert torch.equal(one.parameters[name], tensor)
    assert one.maybe_compute_teacher_log_probs(shard) is None


def test_an_algorithm_whose_reference_was_not_loaded_is_told_the_flag() -> None:
    one = backend()
    one.setup()
    algorithm = WeightedLikelihood(None)
    algorithm.needs_ref_log_probs = True
    with pytest.raises(DrivetrainError, match="needs ref_log_probs, but none was loaded; give --ref-load DIR"):
        one.train(0, one.preprocess_rollout_data(rollout()), algorithm)


def test_a_hook_that_drops_samples_is_refused() -> None:
    class Dropping(WeightedLikelihood):
        def prepare_batch(self, batch: RolloutBatch, groups: ProcessGroups) -> RolloutBatch:
            return batch.select(range(len(batch) - 1))

    one = backend()
    one.setup()
    with pytest.raises(DataError, match="7 of 8 samples; mask samples instead"):
        one.train(0, one.preprocess_rollout_data(rollout()), Dropping(None))


def test_illegal_calls_are_refused_by_name() -> None:
    one = backend()
    with pytest.raises(IllegalStateError, match=r"train\(\) is illegal while the backend is NEW"):
        one.train(0, None, WeightedLikelihood(None))  # type: ignore[arg-type]
    one.setup(with_ref=True)
    shard = one.preprocess_rollout_data(rollout())
    one.switch_weights("ref")
    with pytest.raises(IllegalStateError, match=r"train\(\) is illegal while the weights are tag 'ref'"):
        one.train(0, shard, WeightedLikelihood(None))
    one.switch_weights("policy")
    one.sleep()
    with pytest.raises(IllegalStateError, match=r"forward_only\(\) is illegal while the backend is ASLEEP"):
        one.forward_only(shard)
    with one:
        pass
    with pytest.raises(IllegalStateError, match="CLOSED"):
        one.export_weights(100)


def test_sleeping_between_rollouts_changes_no_bit() -> None:
    sleepy = backend()
    sleepy.setup()
    shard = sleepy.preprocess_rollout_data(rollout())
    for number in range(2):
        sleepy.train(number, shard, WeightedLikelihood(None))
        sleepy.sleep()
        assert all(one.untyped_storage().nbytes() == 0 for one in sleepy.parameters.values())
        sleepy.wake_up()
    awake = trained(backend())
    for name, tensor in awake["weights"].items():
        assert torch.equal(sleepy.parameters[name], tensor)


def test_the_contract_has_seven_abstract_methods_and_enforces_each() -> None:
    seven = {
        "setup", "forward_backward", "optimizer_step", "export_weights", "save_checkpoint", "sleep", "wake_up",
    }  # fmt: skip
    assert TrainBackend.__abstractmethods__ == seven
    assert not inspect.isabstract(TinyBackend)
    for name in seven:
        partial = type("Partial", (TinyBackend,), {name: getattr(TrainBackend, name)})
        with pytest.raises(TypeError, match=f"abstract method '?{name}"):
            partial(TrainConfig(hf_checkpoint="none"), Role.POLICY, 0, 1, "cpu")


# -- two ranks --------------------------------------------------------------------------------------------------------


def per_sequence_objective(sums: Tensor) -> Tensor:
    return (sums.square() * torch.arange(1, len(sums) + 1)).sum()


def packed_values() -> tuple[MicroBatch, Tensor]:
    whole = pack(rollout(), range(8))
    return whole, torch.randn(len(whole.input_ids), generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def reduced_metrics(rank: int) -> dict[str, Any]:
    world = dist.group.WORLD
    mine = [
        {"loss": torch.tensor(1.0 + rank), "tokens": torch.tensor(10.0)},
        {"tokens": torch.tensor(5.0), "loss": torch.tensor(0.5)},
    ]
    layout = ParallelLayout(rank=rank, world_size=2, device="cpu", dp_rank=rank, dp_size=2)
    staged = ParallelLayout(rank=rank, world_size=2, device="cpu", pp_rank=rank, pp_size=2)
    return {
        "over dp": reduce_metrics(mine, groups=ProcessGroups(dp_cp=world), layout=layout),
        "over pp": reduce_metrics(mine if rank == 1 else [], groups=ProcessGroups(pp=world), layout=staged),
        "scalars": sum_scalars([1.0 + rank, 0.1], group=world, device="cpu"),
    }


def exports(rank: int) -> dict[str, str]:
    """What becomes of exports that one rank abandons at different points; each ends on both ranks or hangs."""
    one = backend(rank=rank, world_size=2)
    one.setup()
    outcomes = {}

    def attempt(name: str, leave_at: int, leaver: int, error: bool) -> None:
        seen = 0
        try:
            with one.export_weights(bucket_bytes=1, holders=Holders.RANK0) as export:
                for bucket in export:
                    assert (bucket.data is None) == (rank != 0)
                    seen += 1
                    if rank == leaver and seen == leave_at:
                        if error:
                            raise OSError("disk full")
                        break
            outcomes[name] = f"ended after {seen}"
        except (OSError, WeightExportAbortedError) as failure:
            outcomes[name] = f"{type(failure).__name__} after {seen}"

    attempt("whole", leave_at=99, leaver=0, error=False)
    attempt("rank 0 breaks", leave_at=1, leaver=0, error=False)
    attempt("rank 1 fails", leave_at=1, leaver=1, error=True)
    attempt("rank 1 fails at the last", leave_at=2, leaver=1, error=True)
    attempt("whole again", leave_at=99, leaver=0, error=False)
    with one.export_weights(bucket_bytes=10**6, dtype=torch.bfloat16) as export:
        received = {
            name: tensor.clone() for bucket in export for name, tensor in unflatten(bucket.data, bucket.entries)
        }
    same = all(torch.equal(received[name], tensor.detach().bfloat16()) for name, tensor in one.parameters.items())
    outcomes["holders all"] = "equal" if same else "different"
    return outcomes


def one_of_two_ranks(rank: int, store: str, result: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    world = dist.group.WORLD
    whole, values = packed_values()
    part = cut(whole, rank)
    leaf = values[part.token_index].requires_grad_()
    sums = per_sequence_sum(leaf, part, group=world)
    per_sequence_objective(sums).backward()
    found = {
        "sums": sums.detach(),
        "gradient": leaf.grad,
        "token_index": part.token_index,
        "gathered": gather_packed(leaf.detach(), part, group=world),
        "metrics": reduced_metrics(rank),
        "exports": exports(rank),
        "data parallel": trained(backend(rank=rank, world_size=2)),
        "context parallel": trained(backend(ContextParallelBackend, rank=rank, world_size=2)),
    }
    torch.save(found, result)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both ranks found; they are launched once for all tests below, and a hang ends at the deadline."""
    folder = tmp_path_factory.mktemp("two_ranks")
    processes = []
    for rank in range(2):
        with (folder / f"{rank}.log").open("wb") as log:
            command = [sys.executable, __file__, str(rank), str(folder / "store"), str(folder / f"{rank}.pt")]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
    try:
        for rank, process in enumerate(processes):
            assert process.wait(timeout=120) == 0, (folder / f"{rank}.log").read_text()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def test_per_sequence_sums_over_ranks_are_whole_and_differentiable(ranks: list[dict[str, Any]]) -> None:
    whole, values = packed_values()
    values.requires_grad_()
    sums = per_sequence_sum(values, whole, group=None)
    (2 * per_sequence_objective(sums)).backward()  # both ranks add the same loss to the objective
    assert values.grad is not None
    for rank in ranks:
        torch.testing.assert_close(rank["sums"], sums.detach(), **ROUNDING)
        torch.testing.assert_close(rank["gradient"], values.grad[rank["token_index"]], **ROUNDING)
    assert torch.equal(ranks[0]["sums"], ranks[1]["sums"])


def test_gathered_tokens_are_the_packed_ones_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    _, values = packed_values()
    for rank in ranks:
        assert torch.equal(rank["gathered"], values)


def test_metrics_are_summed_over_micro_batches_and_ranks_and_reach_every_stage(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["metrics"]["over dp"] == {"loss": 1.0 + 2.0 + 2 * 0.5, "tokens": 30.0}
        assert rank["metrics"]["over pp"] == {"loss": 2.5, "tokens": 15.0}  # the last stage's, rank 1
        assert rank["metrics"]["scalars"] == pytest.approx([3.0, 0.2], rel=1e-15)


def test_an_export_that_one_rank_abandons_ends_on_both(ranks: list[dict[str, Any]]) -> None:
    assert [rank["exports"]["whole"] for rank in ranks] == ["ended after 2"] * 2
    assert [rank["exports"]["rank 0 breaks"] for rank in ranks] == [
        "ended after 1", "WeightExportAbortedError after 1",
    ]  # fmt: skip
    assert [rank["exports"]["rank 1 fails"] for rank in ranks] == [
        "WeightExportAbortedError after 1",
        "OSError after 1",
    ]
    assert [rank["exports"]["rank 1 fails at the last"] for rank in ranks] == [
        "WeightExportAbortedError after 2", "OSError after 2",
    ]  # fmt: skip
    assert [rank["exports"]["whole again"] for rank in ranks] == ["ended after 2"] * 2
    assert [rank["exports"]["holders all"] for rank in ranks] == ["equal"] * 2


@pytest.mark.parametrize("layout", ["data parallel", "context parallel"])
def test_two_ranks_train_as_one(ranks: list[dict[str, Any]], layout: str) -> None:
    alone = trained(backend())
    found = [rank[layout] for rank in ranks]
    assert found[0]["metrics"] == found[1]["metrics"]
    # Two ranks that share sequences hold each sample twice; micro-batch counts differ between layouts by design.
    shared = {"data parallel": 1, "context parallel": 2}[layout]
    for one, two in zip(alone["metrics"], found[0]["metrics"], strict=True):
        assert two["samples"] == shared * one["samples"]
        for name in ("loss", "grad_norm", "loss_tokens"):
            assert two[name] == pytest.approx(one[name], rel=1e-6)
    for rank in found:
        for name, tensor in alone["weights"].items():
            torch.testing.assert_close(rank["weights"][name], tensor, **FLOAT32)
        for when in ("before", "after"):
            for position, values in rank[when].items():
                torch.testing.assert_close(values, alone[when][position], **FLOAT32)
    positions = [set(rank["before"]) for rank in found]
    assert positions[0] | positions[1] == set(range(8))
    if layout == "context parallel":
        for position, values in found[0]["after"].items():
            assert torch.equal(values, found[1]["after"][position])


if __name__ == "__main__":
    one_of_two_ranks(int(sys.argv[1]), sys.argv[2], sys.argv[3])
