"""Tiny models, a rollout, an algorithm, an independent reference trainer, and a launcher of real ranks.

The reference is a plain transformers model with torch's AdamW in one process, one sample a forward, eager attention.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from drivetrain_backend_api.algorithm import Algorithm, ModelOutput
from drivetrain_backend_api.batch import MicroBatch, RolloutBatch, from_samples
from drivetrain_backend_api.parallel import ProcessGroups, Role
from drivetrain_backend_api.weights import Holders, unflatten
from drivetrain_backend_fsdp.backend import FsdpBackend
from drivetrain_backend_fsdp.config import FsdpConfig

# Models this small gain nothing from threads, and lose much where other processes want the same cores.
torch.set_num_threads(1)

VOCABULARY = 67  # odd, so that shards are uneven
ENTROPY_COEF = 0.01
RANK_WORKER = Path(__file__).with_name("rank_worker.py")


def tiny_config(kind: str, *, tied: bool = False) -> PretrainedConfig:
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if kind == "qwen3":
        return Qwen3Config(head_dim=6, **sizes)  # over 4 ranks the last one holds no row of q_norm
    return {"llama": LlamaConfig, "qwen2": Qwen2Config}[kind](**sizes)


def make_model(folder: Path, kind: str, *, tied: bool = False, seed: int = 0, dtype: str = "float32") -> str:
    """Save a random model whose weights are large enough for its log-probs to differ from uniform."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(kind, tied=tied))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return str(folder)


def make_rollout(samples: int = 8, seed: int = 1) -> RolloutBatch:
    """Samples of very different lengths; the mask has holes, and the third sample has no loss token at all."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    prompts = [[draw(0, VOCABULARY) for _ in range(draw(1, 9))] for _ in range(samples)]
    responses = [[draw(0, VOCABULARY) for _ in range(draw(1, 14))] for _ in range(samples)]
    masks = [[float(draw(0, 5) > 0) for _ in one] for one in responses]
    masks[2] = [0.0] * len(masks[2])
    advantages = [[torch.randn((), generator=generator).item()] * len(one) for one in responses]
    return from_samples(
        prompts,
        responses,
        per_token={"loss_mask": masks, "advantages": advantages},
        per_sample={"index": list(range(samples))},
    )


class PolicyGradient(Algorithm):
    """Token-mean policy gradient with an entropy bonus."""

    def extract_model_output(self, output: ModelOutput, batch: MicroBatch) -> Mapping[str, Tensor]:
        found = output.label_log_probs(with_entropy=True)
        assert found.entropy is not None
        return {"log_probs": found.log_probs, "entropy": found.entropy}

    def compute_loss(
        self, outputs: Mapping[str, Tensor], batch: MicroBatch, groups: ProcessGroups
    ) -> tuple[Tensor, dict[str, Tensor]]:
        tokens = batch.require_denominators().tokens
        gain = batch.per_token["advantages"] * outputs["log_probs"] + ENTROPY_COEF * outputs["entropy"]
        loss = -(gain * batch.loss_mask).sum() / tokens
        return loss, {"loss": loss.detach()}


@dataclass(frozen=True, kw_only=True)
class Trained:
    losses: list[float]
    grad_norms: list[float]
    log_probs: list[Tensor]
    weights: dict[str, Tensor]


def reference_log_probs(model: Any, rollout: RolloutBatch, sample: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy over one sample's response by the model's own logits."""
    tokens = rollout.sample_tokens(sample)
    response = int(rollout.response_lengths[sample])
    logits = model(input_ids=tokens[None], use_cache=False).logits[0].float() / temperature
    log_p = F.log_softmax(logits, dim=-1)[-response - 1 : -1]
    return log_p.gather(1, tokens[-response:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def reference_train(
    folder: str,
    rollout: RolloutBatch,
    *,
    steps: int,
    lrs: Sequence[float],
    clip: float,
    weight_decay: float,
    eps: float,
    temperature: float = 1.0,
) -> Trained:
    """Take `steps` optimizer steps over equal consecutive parts of the rollout."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    before = [reference_log_probs(model, rollout, one, temperature)[0].detach() for one in range(len(rollout))]
    parameters = list(model.parameters())
    adam = torch.optim.AdamW(
        [
            {"params": [one for one in parameters if one.ndim >= 2], "weight_decay": weight_decay},
            {"params": [one for one in parameters if one.ndim < 2], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.98),
        eps=eps,
    )
    losses, norms = [], []
    size = len(rollout) // steps
    for step, lr in zip(range(steps), lrs, strict=True):
        samples = range(step * size, (step + 1) * size)
        tokens = max(1.0, sum(float(rollout.sample_column("loss_mask", one).sum()) for one in samples))
        total = 0.0
        for one in samples:
            log_p, entropy = reference_log_probs(model, rollout, one, temperature)
            gain = rollout.sample_column("advantages", one) * log_p + ENTROPY_COEF * entropy
            loss = -(gain * rollout.sample_column("loss_mask", one)).sum() / tokens
            loss.backward()
            total += loss.item()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, clip or float("inf")).item())
        for group in adam.param_groups:
            group["lr"] = lr
        adam.step()
        adam.zero_grad()
        losses.append(total)
    return Trained(losses=losses, grad_norms=norms, log_probs=before, weights=model_weights(model))


def model_weights(model: Any) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in model.named_parameters()}


def worst_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Largest relative error of any weight, in norm."""
    assert set(found) == set(expected)
    return max(((found[name] - one).norm() / one.norm()).item() for name, one in expected.items())


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Bit for bit."""
    assert set(found) == set(expected)
    different = [name for name, one in expected.items() if not torch.equal(found[name], one)]
    assert different == []


def config_of(folder: str, **overrides: Any) -> FsdpConfig:
    """fp32, and an Adam epsilon large enough that rounding of tiny gradients cannot flip an update's sign."""
    settings: dict[str, Any] = {
        "hf_checkpoint": folder,
        "lr": 1e-2,
        "adam_eps": 1e-5,
        "log_probs_chunk_size": 16,
        "distributed_timeout_minutes": 1.0,
    }
    if not any(name in overrides for name in ("bf16", "fp16")):
        settings["fp32"] = True
    return FsdpConfig(**(settings | overrides))


def exported(
    backend: FsdpBackend, *, dtype: torch.dtype | None = torch.float32, bucket: int = 4096
) -> dict[str, Tensor]:
    """All weights as this rank gets them."""
    found: dict[str, Tensor] = {}
    with backend.export_weights(bucket, Holders.ALL, dtype) as export:
        for one in export:
            assert one.data is not None
            found |= {name: tensor.clone() for name, tensor in unflatten(one.data, one.entries)}
    return found


def train_here(backend: FsdpBackend, rollout: RolloutBatch) -> dict[str, Any]:
    """Set up, take log-probs, train on one rollout, export; the results of a `Trained`, on any number of ranks."""
    backend.setup()
    shard = backend.preprocess_rollout_data(rollout)
    before = backend.forward_only(shard)
    metrics = backend.train(0, shard, PolicyGradient(None))
    return {
        "losses": [one["loss"] for one in metrics],
        "grad_norms": [one["grad_norm"] for one in metrics],
        "lrs": [one["lr"] for one in metrics],
        "positions": list(shard.positions),
        "log_probs": before,
        "fillers": sum(not samples for step in shard.steps for samples in step),
        "weights": exported(backend),
    }


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@contextlib.contextmanager
def one_rank(config: FsdpConfig, device: str = "cpu") -> Iterator[FsdpBackend]:
    """A backend of one rank in this process, not set up yet."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_ports(1)[0]))
    with FsdpBackend(config, Role.POLICY, 0, 1, device) as backend:
        yield backend


def launch(ranks: int, program: str, arguments: Mapping[str, Any], folder: Path, *, deadline: float) -> list[Any]:
    """Run one function of rank_worker.py on real processes; returns what each rank's call returned.

    Raises AssertionError with the ranks' stderr when one fails or the deadline passes; kills only its own children.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "arguments.json").write_text(json.dumps(dict(arguments)))
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "DRIVETRAIN_TEST_PORTS": ",".join(map(str, free_ports(24))),
    }
    children = []
    with contextlib.ExitStack() as stack:
        for rank in range(ranks):
            log = stack.enter_context((folder / f"rank{rank}.log").open("w"))
            command = [sys.executable, str(RANK_WORKER), program, str(folder), str(rank), str(ranks)]
            children.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        end = time.monotonic() + deadline
        try:
            while any(one.poll() is None for one in children) and time.monotonic() < end:
                if any(one.poll() for one in children):
                    break
                time.sleep(0.05)
            codes = [one.poll() for one in children]
        finally:
            for one in children:
                if one.poll() is None:
                    one.kill()
                one.wait()
    if codes != [0] * ranks:
        logs = "\n".join(
            f"--- rank {rank}\n{(folder / f'rank{rank}.log').read_text()[-3000:]}" for rank in range(ranks)
        )
        raise AssertionError(f"{program} on {ranks} ranks: exit codes {codes} within {deadline} s\n{logs}")
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(ranks)]
