"""Supervised fine-tuning against torch's own cross-entropy."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from drivetrain_backend_api.algorithm import ModelOutput
from drivetrain_backend_api.batch import MicroBatch, from_samples
from drivetrain_backend_api.config import TrainConfig
from drivetrain_backend_api.discovery import ALGORITHMS, load_spec
from drivetrain_backend_api.log_probs import Head, LabelLogProbs, label_log_probs
from drivetrain_backend_api.packing import Batching, pack, shard_rollout
from drivetrain_backend_api.parallel import ProcessGroups
from drivetrain_backend_api.training import count_denominators
from drivetrain_launcher.algorithms.sft import Sft
from drivetrain_launcher.algorithms.sft_spec import SftConfig
from drivetrain_launcher.config import DataConfig, RolloutConfig


class Bigram(ModelOutput):
    """A real model, the smallest: the next token's distribution depends on the token before it."""

    def __init__(self, table: Tensor, batch: MicroBatch) -> None:
        self.table, self.batch = table, batch

    def label_log_probs(self, *, with_entropy: bool = False) -> LabelLogProbs:
        head = Head(weight=torch.eye(len(self.table), dtype=self.table.dtype))
        return label_log_probs(self.table[self.batch.input_ids], head, self.batch.labels, with_entropy=with_entropy)


@pytest.mark.parametrize("dp_size", [1, 2])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 3])
def test_loss_is_the_mean_cross_entropy_of_the_trained_tokens(dp_size: int, micro_batch_size: int) -> None:
    prompts, responses = [[1, 2], [3], [4, 0, 1]], [[2, 0], [4, 4, 4, 1], [3]]
    masks = [[1.0, 1.0], [1.0, 0.0, 1.0, 1.0], [1.0]]
    batch = from_samples(prompts, responses, per_token={"loss_mask": masks})
    table = torch.randn(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()

    pairs = [
        (row[place - 1], row[place])
        for prompt, response, mask in zip(prompts, responses, masks)
        for row in [prompt + response]
        for place, on in enumerate(mask, start=len(prompt))
        if on
    ]
    before, after = (torch.tensor(one) for one in zip(*pairs))
    expected = torch.nn.functional.cross_entropy(table[before], after)
    (expected_gradient,) = torch.autograd.grad(expected, table)

    algorithm, groups = Sft(SftConfig()), ProcessGroups()
    total = torch.zeros((), dtype=torch.float64)
    for shard in shard_rollout(batch, dp_size=dp_size, batching=Batching(micro_batch_size=micro_batch_size)):
        ready = algorithm.compute_advantages(shard)
        for samples in shard.steps[0]:
            micro_batch = pack(ready, samples, denominators=count_denominators(batch, groups))
            outputs = algorithm.extract_model_output(Bigram(table, micro_batch), micro_batch)
            loss, metrics = algorithm.compute_loss(outputs, micro_batch, groups)
            loss.backward()
            total += metrics["loss"]
    assert table.grad is not None
    # The token weights are float32.
    torch.testing.assert_close(total, expected.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(table.grad, expected_gradient, rtol=1e-6, atol=1e-8)


def test_combinations_that_cannot_work_are_refused_with_the_fix() -> None:
    spec = load_spec(ALGORITHMS, "sft")
    assert not spec.generates
    assert spec.load() is Sft

    def findings(
        *, label: str | None = "answer", samples: int = 1, custom: str | None = None, **train: object
    ) -> list[str]:
        return spec.validate(
            SimpleNamespace(
                data=DataConfig(prompt_data="x.jsonl", label_key=label),
                rollout=RolloutConfig(n_samples_per_prompt=samples, custom_generate=custom),
                train=TrainConfig(hf_checkpoint="model", **train),  # type: ignore[arg-type]
            )
        )

    assert findings() == []
    assert findings(rollout_temperature=0.0) == []
    for wrong, flag in (
        (findings(label=None), "--label-key"),
        (findings(samples=4), "--n-samples-per-prompt 4"),
        (findings(custom="m:f"), "--custom-generate"),
        (findings(ref_load="model"), "--ref-load"),
        (findings(rollout_temperature=0.7), "--rollout-temperature 0.7"),
    ):
        assert len(wrong) == 1
        assert flag in wrong[0]
