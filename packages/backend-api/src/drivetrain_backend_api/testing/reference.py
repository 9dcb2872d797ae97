"""The independent reference: a plain transformers model and torch's AdamW in one process, fp32, one sample a forward.

Uses nothing of the contract but the rollout's columns, so that a mistake in shared code cannot agree with itself.
"""

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from drivetrain_backend_api.batch import RolloutBatch
from drivetrain_backend_api.config import TrainConfig
from drivetrain_backend_api.testing.algorithms import ENTROPY_COEF

TokenKey = tuple[int, int, int]
"""(optimizer step, sample index, position that predicts the token)."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What training on one rollout came to.

    Attributes:
        losses, entropies, grad_norms, lrs: one value an optimizer step.
        before: log-probs over each sample's response before the first step, by sample index.
        log_probs, entropy: of every loss token at its step.
        weights: after the last step, as `save_pretrained` writes them: by Hugging Face name, tied ones once.
        initial: the same before the first step.
        routing_gap: how clearly experts were chosen, over all tokens and blocks: the least distance between the
            router's values of the last expert that was taken and of the first one that was not; inf for a dense model.
    """

    losses: list[float]
    entropies: list[float]
    grad_norms: list[float]
    lrs: list[float]
    before: dict[int, Tensor]
    log_probs: dict[TokenKey, float]
    entropy: dict[TokenKey, float]
    weights: dict[str, Tensor]
    initial: dict[str, Tensor]
    routing_gap: float


def load_plain(folder: Path) -> Any:
    """Load a folder as transformers does, in fp32 with eager attention."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def saved_weights(model: Any) -> dict[str, Tensor]:
    """Return the tensors that a model saves."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return {name: one for file in Path(folder).glob("*.safetensors") for name, one in load_file(file).items()}


def response_log_probs(
    model: Any, rollout: RolloutBatch, sample: int, temperature: float, gaps: list[float] | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy over one sample's response, from the model's own logits.

    Args:
        model: plain transformers model.
        rollout: which has the sample.
        sample: its row.
        temperature: that the logits are divided by.
        gaps: collects, of a mixture of experts, how clearly each block chose; see `Trained.routing_gap`.
    """
    tokens = rollout.sample_tokens(sample)
    response = int(rollout.response_lengths[sample])
    chosen = getattr(model.config, "num_experts_per_tok", None)
    output = model(input_ids=tokens[None], use_cache=False, **({"output_router_logits": True} if chosen else {}))
    if chosen and gaps is not None:
        for block in output.router_logits:
            ordered = block.detach().sort(-1, descending=True).values
            gaps.append(float((ordered[:, chosen - 1] - ordered[:, chosen]).min()))
    logits = output.logits[0].float() / temperature
    log_p = F.log_softmax(logits, dim=-1)[-response - 1 : -1]
    return log_p.gather(1, tokens[-response:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def scheduled_lr(step: int, config: TrainConfig) -> float:
    """Rate of optimizer step `step`, from 0: linear warm-up from 0, then constant, linear or cosine to `min_lr`."""
    if step < config.lr_warmup_iters:
        return config.lr * step / config.lr_warmup_iters
    if config.lr_decay_style == "constant":
        return config.lr
    assert config.lr_decay_iters is not None
    done = min(1.0, (step - config.lr_warmup_iters) / (config.lr_decay_iters - config.lr_warmup_iters))
    left = 1 - done if config.lr_decay_style == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.min_lr + (config.lr - config.min_lr) * left


def reference_train(folder: Path, rollout: RolloutBatch, config: TrainConfig, *, algorithm: str) -> Trained:
    """Train on one rollout, in optimizer steps of consecutive samples.

    Args:
        folder: Hugging Face model folder.
        rollout: on the CPU.
        config: optimizer, schedule and batch settings.
        algorithm: "TokenMean" or "SequenceMean".
    """
    model = load_plain(folder)
    temperature = config.log_probs_temperature
    count = len(rollout)
    gaps: list[float] = []
    index = [int(one) for one in rollout.per_sample["index"].tolist()]
    with torch.no_grad():
        before = {index[one]: response_log_probs(model, rollout, one, temperature)[0] for one in range(count)}
    parameters = list(model.parameters())
    initial = saved_weights(model)
    adam = torch.optim.AdamW(
        [
            {"params": [one for one in parameters if one.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [one for one in parameters if one.ndim < 2], "weight_decay": 0.0},
        ],
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
    )
    losses, entropies, norms, lrs = [], [], [], []
    all_log_probs: dict[TokenKey, float] = {}
    all_entropy: dict[TokenKey, float] = {}
    size = config.global_batch_size or count
    for step in range(count // size):
        samples = list(range(step * size, (step + 1) * size))
        advantages = _advantages(rollout, samples, algorithm)
        masks = {one: rollout.sample_column("loss_mask", one) for one in samples}
        tokens = max(1.0, sum(float(one.sum()) for one in masks.values()))
        sequences = max(1.0, float(sum(bool(one.any()) for one in masks.values())))
        loss_sum, entropy_sum = 0.0, 0.0
        for one in samples:
            log_p, entropy = response_log_probs(model, rollout, one, temperature, gaps)
            mask = masks[one]
            if algorithm == "TokenMean":
                loss = -((advantages[one] * log_p + ENTROPY_COEF * entropy) * mask).sum() / tokens
            else:
                length = mask.sum().clamp(min=1)
                ratio = (((log_p - before[index[one]]) * mask).sum() / length).exp()
                loss = -((ratio * advantages[one] + ENTROPY_COEF * entropy) * mask / length).sum() / sequences
            loss.backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.item()
            log_p, entropy = log_p.detach(), entropy.detach()
            entropy_sum += float((entropy * mask).sum()) / tokens
            first = int(rollout.total_lengths[one]) - len(mask) - 1
            for place in torch.nonzero(mask)[:, 0].tolist():
                key = (step, index[one], first + place)
                all_log_probs[key], all_entropy[key] = float(log_p[place]), float(entropy[place])
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, config.grad_clip or float("inf"))))
        lr = scheduled_lr(step, config)
        for group in adam.param_groups:
            group["lr"] = lr
        adam.step()
        adam.zero_grad()
        losses.append(loss_sum)
        entropies.append(entropy_sum)
        lrs.append(lr)
    return Trained(
        losses=losses,
        entropies=entropies,
        grad_norms=norms,
        lrs=lrs,
        before=before,
        log_probs=all_log_probs,
        entropy=all_entropy,
        weights=saved_weights(model),
        initial=initial,
        routing_gap=min(gaps, default=math.inf),
    )


def _advantages(rollout: RolloutBatch, samples: Sequence[int], algorithm: str) -> dict[int, Tensor]:
    """Advantages over each sample's response for one step."""
    if algorithm == "TokenMean":
        return {one: rollout.sample_column("advantages", one) for one in samples}
    rewards, groups = rollout.per_sample["reward"].double(), rollout.per_sample["group_id"]
    centred = {one: float(rewards[one] - rewards[groups == groups[one]].mean()) for one in samples}
    masks = {one: rollout.sample_column("loss_mask", one).double() for one in samples}
    values = torch.tensor(
        [centred[one] for one in samples for _ in range(int(masks[one].sum()))], dtype=torch.float32
    ).double()
    mean = float(values.mean()) if len(values) else 0.0
    std = float(values.std(correction=0)) if len(values) else 0.0
    return {
        one: torch.full((len(masks[one]),), (centred[one] - mean) / (std + 1e-6), dtype=torch.float32)
        for one in samples
    }
