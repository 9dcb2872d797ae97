"""The rollout batch: what it refuses, and that no operation mixes samples up."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_backend_api.batch import MicroBatch, RolloutBatch, SampleStatus, concat, from_samples
from drivetrain_backend_api.errors import DataError
from drivetrain_backend_api.packing import pack

PROMPTS, RESPONSES = [[1, 2, 3], [4], [5, 6]], [[7], [8, 9, 10], []]


def batch() -> RolloutBatch:
    return from_samples(
        PROMPTS,
        RESPONSES,
        per_token={"rollout_log_probs": [[-1.0], [-2.0, -3.0, -4.0], []]},
        per_sample={"reward": [0.5, 1.0, 0.0], "index": [10, 11, 12], "status": [SampleStatus.COMPLETED] * 3},
    )


def assert_same(one: RolloutBatch, other: RolloutBatch) -> None:
    mine, theirs = one.to_plain(), other.to_plain()
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        columns = value if isinstance(value, dict) else {name: value}
        others = theirs[name] if isinstance(value, dict) else {name: theirs[name]}
        assert columns.keys() == others.keys()
        for column, tensor in columns.items():
            assert tensor.dtype == others[column].dtype, column
            assert torch.equal(tensor, others[column]), column


def test_samples_keep_their_tokens_and_columns() -> None:
    found = batch()
    assert len(found) == 3
    for sample, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES)):
        assert found.sample_tokens(sample).tolist() == prompt + response
        assert found.sample_column("loss_mask", sample).tolist() == [1.0] * len(response)
    assert found.sample_column("rollout_log_probs", 1).tolist() == [-2.0, -3.0, -4.0]
    assert found.per_sample["index"].dtype == torch.int64
    assert found.per_sample["reward"].dtype == torch.float32


@given(st.lists(st.integers(0, 2), max_size=6))
def test_select_takes_whole_samples_in_the_order_asked(samples: list[int]) -> None:
    chosen = batch().select(samples)
    assert len(chosen) == len(samples)
    for row, sample in enumerate(samples):
        assert chosen.sample_tokens(row).tolist() == PROMPTS[sample] + RESPONSES[sample]
        assert torch.equal(
            chosen.sample_column("rollout_log_probs", row), batch().sample_column("rollout_log_probs", sample)
        )
        assert int(chosen.per_sample["index"][row]) == 10 + sample


def test_concat_undoes_select() -> None:
    assert_same(concat([batch().select([0]), batch().select([1, 2])]), batch())
    with pytest.raises(DataError, match="different columns"):
        concat([batch(), from_samples([[1]], [[2]])])


def test_a_batch_survives_a_file_of_tensors_and_plain_types(tmp_path: Path) -> None:
    torch.save(batch().to_plain(), tmp_path / "rollout.pt")
    assert_same(RolloutBatch.from_plain(torch.load(tmp_path / "rollout.pt", weights_only=True)), batch())
    plain = batch().to_plain()
    del plain["tokens"]
    with pytest.raises(DataError, match=r"not a rollout batch: .*'tokens'"):
        RolloutBatch.from_plain(plain)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": torch.arange(3)}, "total_lengths sum to 10, tokens hold 3"),
        ({"response_lengths": torch.tensor([1, 3])}, "3 total_lengths and 2 response_lengths"),
        ({"response_lengths": torch.tensor([4, 0, 0])}, "leaves no prompt token"),
        ({"response_lengths": torch.tensor([-1, 3, 2])}, "a response is negative"),
        ({"per_token": {}}, "per_token lacks 'loss_mask'"),
        ({"per_token": {"loss_mask": torch.ones(5)}}, r"per_token\['loss_mask'\] has shape \(5,\), needs \(4,\)"),
        ({"per_token": {"loss_mask": torch.ones(4, 1)}}, r"has shape \(4, 1\), needs \(4,\)"),
        ({"per_sample": {"reward": torch.ones(2)}}, r"per_sample\['reward'\] has 2 rows, needs 3"),
    ],
)
def test_a_malformed_batch_says_what_is_wrong(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        RolloutBatch(**{**batch().to_plain(), **change})


def test_rows_whose_lengths_only_sum_up_are_refused_by_sample() -> None:
    wrong = [[0.0, 0.0], [0.0, 0.0], []]  # 4 values in all, as there should be
    with pytest.raises(DataError, match=r"'rollout_log_probs'\] of sample 0 has 2 values, its response 1 tokens"):
        from_samples(PROMPTS, RESPONSES, per_token={"rollout_log_probs": wrong})
    with pytest.raises(DataError, match=r"'log_probs'\] of sample 0 has 2 values"):
        batch().with_per_token("log_probs", [torch.tensor(row) for row in wrong])
    with pytest.raises(DataError, match=r"'log_probs'\] has 2 rows, needs 3"):
        batch().with_per_token("log_probs", [torch.zeros(1), torch.zeros(3)])


def test_new_columns_leave_the_old_batch_alone() -> None:
    before = batch()
    after = before.with_per_token("log_probs", [torch.tensor([1.0]), torch.tensor([2.0, 3.0, 4.0]), torch.tensor([])])
    assert after.per_token["log_probs"].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert torch.equal(after.with_per_sample("weight", torch.arange(3)).per_sample["weight"], torch.arange(3))
    assert_same(before, batch())


def test_losses_outside_training_are_refused() -> None:
    micro_batch: MicroBatch = pack(batch(), [0])
    with pytest.raises(DataError, match="only inside train"):
        micro_batch.require_denominators()
