"""Optimizer steps, shards and micro-batches: nothing lost, nothing twice, nothing over the limit; and alignment."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_backend_api.batch import Denominators, RolloutBatch, from_samples
from drivetrain_backend_api.errors import DataError
from drivetrain_backend_api.packing import (
    Batching,
    balanced_parts,
    pack,
    shard_rollout,
    split_micro_batches,
    unpack,
)
from drivetrain_backend_api.parallel import ProcessGroups
from drivetrain_backend_api.training import count_denominators


def rollout(lengths: list[int]) -> RolloutBatch:
    """One prompt token each, distinct tokens throughout, index 100 + position."""
    start, responses = 0, []
    for length in lengths:
        responses.append(list(range(start + 1, start + length)))
        start += length
    return from_samples(
        [[1000]] * len(lengths), responses, per_sample={"index": [100 + one for one in range(len(lengths))]}
    )


@dataclass(frozen=True)
class Plan:
    lengths: list[int]
    dp_size: int
    batching: Batching


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    steps, size = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    lengths = draw(st.lists(st.integers(2, 20), min_size=steps * size, max_size=steps * size))
    batching = Batching(
        global_batch_size=draw(st.sampled_from([size, None])),
        micro_batch_size=draw(st.integers(1, 4)),
        max_tokens=draw(st.none() | st.integers(20, 60)),
        minimum=draw(st.integers(1, 3)),
        multiple=draw(st.integers(1, 3)),
    )
    return Plan(lengths=lengths, dp_size=draw(st.integers(1, 4)), batching=batching)


@given(plans())
def test_every_sample_is_in_exactly_one_micro_batch_of_its_own_step(plan: Plan) -> None:
    shards = shard_rollout(rollout(plan.lengths), dp_size=plan.dp_size, batching=plan.batching)
    size = plan.batching.global_batch_size or len(plan.lengths)
    for step in range(len(plan.lengths) // size):
        placed = [shard.positions[row] for shard in shards for samples in shard.steps[step] for row in samples]
        assert sorted(placed) == list(range(step * size, (step + 1) * size))
    for shard in shards:
        assert len(shard.steps) == len(plan.lengths) // size
        assert [int(one) for one in shard.batch.per_sample["index"]] == [100 + one for one in shard.positions]


@given(plans())
def test_micro_batches_keep_their_limits_and_their_count_is_equal_on_all_ranks(plan: Plan) -> None:
    shards = shard_rollout(rollout(plan.lengths), dp_size=plan.dp_size, batching=plan.batching)
    counts = {tuple(len(step) for step in shard.steps) for shard in shards}
    assert len(counts) == 1
    for count in counts.pop():
        assert count >= plan.batching.minimum
        assert count % plan.batching.multiple == 0
    for shard in shards:
        for samples in (samples for step in shard.steps for samples in step):
            if plan.batching.max_tokens is None:
                assert len(samples) <= plan.batching.micro_batch_size
            else:
                assert sum(shard.batch.lengths[one] for one in samples) <= plan.batching.max_tokens


@given(st.lists(st.integers(1, 100), max_size=30), st.integers(1, 6))
def test_token_counts_of_parts_differ_by_at_most_one_sample(lengths: list[int], parts: int) -> None:
    found = balanced_parts(lengths, parts)
    assert sorted(one for part in found for one in part) == list(range(len(lengths)))
    sums = [sum(lengths[one] for one in part) for part in found]
    # Each item goes to the part that has least, so no part is ahead of another by more than its last item.
    assert max(sums) - min(sums) <= max(lengths, default=0)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40))
def test_dynamic_micro_batches_are_at_most_about_twice_the_fewest_possible(lengths: list[int]) -> None:
    bins = split_micro_batches(lengths, Batching(max_tokens=50))
    # First fit leaves no two bins that would fit into one, so all but one are more than half full.
    assert len(bins) <= 2 * -(-sum(lengths) // 50)


def test_a_sample_longer_than_the_limit_is_named_by_its_index() -> None:
    with pytest.raises(DataError, match=r"sample 102 has 30 tokens, more than a micro-batch's 20 \(--max-tok"):
        shard_rollout(rollout([5, 5, 30, 5]), dp_size=2, batching=Batching(max_tokens=20))


@pytest.mark.parametrize(("count", "size"), [(6, 4), (0, None), (3, 6)])
def test_a_rollout_that_gives_no_whole_steps_is_refused(count: int, size: int | None) -> None:
    with pytest.raises(DataError, match=f"a rollout of {count} samples does not divide"):
        shard_rollout(rollout([3] * count), dp_size=1, batching=Batching(global_batch_size=size))


def test_every_rank_sees_the_whole_rollout_s_per_sample_columns() -> None:
    batch = rollout([4, 5, 6, 7])
    for shard in shard_rollout(batch, dp_size=2, batching=Batching()):
        assert torch.equal(shard.rollout_per_sample["index"], batch.per_sample["index"])


# -- packing ----------------------------------------------------------------------------------------------------------


def test_labels_masks_and_columns_stand_where_they_are_predicted() -> None:
    batch = from_samples(
        [[1, 2], [3]],
        [[4, 5], [6, 7, 8]],
        per_token={"loss_mask": [[1, 0], [1, 1, 0]], "advantages": [[0.1, 0.2], [0.3, 0.4, 0.5]]},
        per_sample={"reward": [1.0, 2.0]},
    )
    packed = pack(batch, [1, 0], denominators=Denominators(tokens=3, sequences=2))
    assert packed.input_ids.tolist() == [3, 6, 7, 8, 1, 2, 4, 5]
    assert packed.labels[:3].tolist() == [6, 7, 8]
    assert packed.labels[4:7].tolist() == [2, 4, 5]
    assert packed.loss_mask.tolist() == [1, 1, 0, 0, 0, 1, 0, 0]
    assert packed.per_token["advantages"].tolist() == pytest.approx([0.3, 0.4, 0.5, 0, 0, 0.1, 0.2, 0])
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert packed.sequence_ids.tolist() == [0] * 4 + [1] * 4
    assert packed.cu_seqlens.tolist() == [0, 4, 8]
    assert (packed.cu_seqlens.dtype, packed.max_seqlen, packed.num_sequences) == (torch.int32, 4, 2)
    assert packed.per_sample["reward"].tolist() == [2.0, 1.0]
    assert "loss_mask" not in packed.per_token


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=6), st.randoms())
def test_unpack_inverts_pack(shapes: list[tuple[int, int]], random: object) -> None:
    total = sum(response for _, response in shapes)
    values, start = torch.arange(1.0, total + 1), 0
    rows = []
    for _, response in shapes:
        rows.append(values[start : start + response].tolist())
        start += response
    batch = from_samples(
        [[9] * prompt for prompt, _ in shapes],
        [[7] * response for _, response in shapes],
        per_token={"log_probs": rows},
    )
    samples = list(range(len(shapes)))
    random.shuffle(samples)  # type: ignore[attr-defined]
    packed = pack(batch, samples)
    found = unpack(packed.per_token["log_probs"], packed)
    assert [one.tolist() for one in found] == [rows[sample] for sample in samples]
    assert float(packed.per_token["log_probs"].sum()) == float(values.sum())  # and zero everywhere else


def test_a_filler_is_one_masked_token_with_the_same_columns() -> None:
    batch = rollout([3, 4]).with_per_token("advantages", torch.ones(5)).with_per_sample("reward", torch.ones(2))
    filler, real = pack(batch, []), pack(batch, [0])
    assert filler.is_filler
    assert not real.is_filler
    assert filler.per_token.keys() == real.per_token.keys()
    assert filler.per_sample.keys() == real.per_sample.keys()
    assert filler.input_ids.shape == filler.loss_mask.shape == filler.per_token["advantages"].shape == (1,)
    assert filler.loss_mask.sum() == 0
    assert (filler.num_sequences, filler.cu_seqlens.tolist()) == (1, [0, 1])
    assert unpack(filler.loss_mask, filler) == []


def test_denominators_count_trained_tokens_and_sequences_that_have_any() -> None:
    batch = from_samples([[1]] * 4, [[2, 2], [3], [], [4, 4, 4]], per_token={"loss_mask": [[1, 0], [0], [], [1, 1, 1]]})
    assert count_denominators(batch, ProcessGroups()) == Denominators(tokens=4, sequences=2)
    assert count_denominators(batch.select([1, 2]), ProcessGroups()) == Denominators(tokens=1, sequences=1)
