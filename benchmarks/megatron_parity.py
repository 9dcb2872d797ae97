"""The Megatron backend in bf16 against plain transformers: how far from fp32 each is, and how fast each trains.

    python benchmarks/megatron_parity.py --out DIR

Everybody starts from one random model, stored in bf16, and trains on the same samples. The yardstick is transformers
itself: its bf16 is some way from its fp32, and a backend in bf16 may be `--factor` times as far, no more. Speed is told
as a ratio to a plain loop in the same process. Leaves megatron_parity.json and megatron_parity.md; exit code 1 says
that somebody was too far.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from drivetrain_backend_api.algorithm import Algorithm, ModelOutput
from drivetrain_backend_api.backend import TrainBackend
from drivetrain_backend_api.batch import MicroBatch, RolloutBatch, from_samples
from drivetrain_backend_api.discovery import TRAIN_BACKENDS, load_spec
from drivetrain_backend_api.parallel import ProcessGroups, Role
from drivetrain_backend_api.spec import BackendSpec
from drivetrain_backend_api.testing import comparing
from drivetrain_backend_api.testing.algorithms import ENTROPY_COEF, TokenMean
from drivetrain_backend_api.testing.ranks import free_port
from drivetrain_backend_api.weights import Holders, unflatten

STEPS = 4
"""Optimizer steps of the comparison of numbers, each on a quarter of the samples."""

HYPER = {"lr": 1e-4, "weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.98, "adam_eps": 1e-8, "grad_clip": 1.0}

FP32, OURS = "transformers fp32", ("megatron bf16", "fsdp bf16")

Weights = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What training came to.

    Attributes:
        log_probs: of all response tokens before the first step.
        losses, grad_norms: one value an optimizer step.
        updates: of the fp32 master weights over all steps, by Hugging Face name.
    """

    log_probs: Tensor
    losses: list[float]
    grad_norms: list[float]
    updates: Weights


# -- model and samples ------------------------------------------------------------------------------------------------


def save_model(folder: Path, arguments: argparse.Namespace, *, layers: int) -> int:
    """Save a random model of Qwen3's shape in bf16; returns its number of parameters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.hidden,
        intermediate_size=3 * arguments.hidden,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    with torch.device(arguments.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.mul_(4)  # log-probs far from uniform
    model.to(torch.bfloat16).save_pretrained(folder)
    return sum(one.numel() for one in model.parameters())


def draw(lengths: Sequence[int], vocabulary: int, *, seed: int) -> RolloutBatch:
    """Samples of these lengths, an eighth of each prompt; masks have holes."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(vocabulary, (one,), generator=generator).tolist() for one in lengths]
    prompts = [max(1, one // 8) for one in lengths]
    masks = [
        (torch.rand(length - prompt, generator=generator) > 0.1).float().tolist()
        for length, prompt in zip(lengths, prompts)
    ]
    advantages = torch.randn(len(lengths), generator=generator).tolist()
    return from_samples(
        [one[:prompt] for one, prompt in zip(ids, prompts)],
        [one[prompt:] for one, prompt in zip(ids, prompts)],
        per_token={"loss_mask": masks, "advantages": [[a] * len(mask) for a, mask in zip(advantages, masks)]},
        per_sample={"index": list(range(len(lengths)))},
    )


def uneven(count: int, longest: int, *, seed: int) -> list[int]:
    """Lengths between a sixteenth of the longest and the longest, most of them short."""
    shares = torch.rand(count, generator=torch.Generator().manual_seed(seed)).square()
    return [int(longest / 16 + share * longest * 15 / 16) for share in shares.tolist()]


# -- plain transformers -----------------------------------------------------------------------------------------------


def log_probs_of(model: Any, tokens: Tensor, response: int) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy over the response of one sample, from the model's own logits."""
    logits = model(input_ids=tokens[None], use_cache=False).logits[0, -response - 1 : -1].float()
    log_p = F.log_softmax(logits, dim=-1)
    return log_p.gather(1, tokens[-response:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def adam_of(weights: Mapping[str, Tensor], **kind: Any) -> torch.optim.AdamW:
    matrices = [one for one in weights.values() if one.ndim >= 2]
    others = [one for one in weights.values() if one.ndim < 2]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": HYPER["weight_decay"]}, {"params": others, "weight_decay": 0.0}],
        lr=HYPER["lr"],
        betas=(HYPER["adam_beta1"], HYPER["adam_beta2"]),
        eps=HYPER["adam_eps"],
        **kind,
    )


def train_plain(
    folder: Path, rollout: RolloutBatch, device: torch.device, *, dtype: torch.dtype, attention: str
) -> Run:
    """One sample a forward; gradients are added up in fp32 and masters are fp32 whatever `dtype` computes in."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention).to(device)
    live = dict(model.named_parameters())
    masters = {name: one.detach().float().clone() for name, one in live.items()}
    before = {name: one.cpu().clone() for name, one in masters.items()}
    adam = adam_of(masters)
    columns = rollout.to(device)
    responses = [int(one) for one in rollout.response_lengths]
    with torch.no_grad():
        log_probs = [log_probs_of(model, columns.sample_tokens(n), size)[0].cpu() for n, size in enumerate(responses)]
    losses, norms = [], []
    size = len(rollout) // STEPS
    for step in range(STEPS):
        samples = range(step * size, (step + 1) * size)
        tokens = sum(float(columns.sample_column("loss_mask", one).sum()) for one in samples)
        total = 0.0
        for one in samples:
            log_p, entropy = log_probs_of(model, columns.sample_tokens(one), responses[one])
            gain = columns.sample_column("advantages", one) * log_p + ENTROPY_COEF * entropy
            loss = -(gain * columns.sample_column("loss_mask", one)).sum() / tokens
            loss.backward()
            total += loss.item()
            for name, weight in live.items():
                assert weight.grad is not None
                wide = weight.grad.float()
                masters[name].grad = wide if masters[name].grad is None else masters[name].grad + wide
                weight.grad = None
        norms.append(float(torch.nn.utils.clip_grad_norm_(list(masters.values()), HYPER["grad_clip"])))
        adam.step()
        adam.zero_grad()
        with torch.no_grad():
            for name, weight in live.items():
                weight.copy_(masters[name])
        losses.append(total)
    updates = {name: one.cpu() - before[name] for name, one in masters.items()}
    return Run(log_probs=torch.cat(log_probs), losses=losses, grad_norms=norms, updates=updates)


# -- backends ---------------------------------------------------------------------------------------------------------


@contextmanager
def backend_of(name: str, folder: Path, device: torch.device, **options: Any) -> Iterator[TrainBackend]:
    """A backend of one rank, in bf16, set up."""
    spec = load_spec(TRAIN_BACKENDS, name)
    assert isinstance(spec, BackendSpec)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    config = spec.config_class(hf_checkpoint=str(folder), bf16=True, **HYPER, **options)
    with spec.load()(config, Role.POLICY, 0, 1, str(device)) as backend:
        backend.setup()
        yield backend


def masters_of(backend: Any) -> Weights:
    """The fp32 master weights by Hugging Face name."""
    if not hasattr(backend, "_model") or not hasattr(backend.optimizer, "slice_state"):
        with backend.export_weights(1 << 30, Holders.ALL, torch.float32) as export:  # FSDP's parameters are masters
            return {
                name: one.cpu().clone()
                for bucket in export
                if bucket.data is not None
                for name, one in unflatten(bucket.data, bucket.entries)
            }
    from drivetrain_backend_megatron.name_map import places, to_hf

    found = {}
    for place in places(backend._model.shape):
        whole = backend.optimizer.slice_state(place.name)["main"].view_as(backend._model.parameters[place.name])
        for (name, _), one in zip(place.hf, to_hf([whole], place.rule, backend._model.shape)):
            found[name] = one.detach().cpu().clone()
    return found


def train_backend(name: str, folder: Path, rollout: RolloutBatch, device: torch.device, *, tokens: int) -> Run:
    """Packed micro-batches of up to so many tokens."""
    size = len(rollout) // STEPS
    packed = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": tokens, "global_batch_size": size}
    with backend_of(name, folder, device, **packed) as backend:
        before = masters_of(backend)
        shard = backend.preprocess_rollout_data(rollout)
        index = shard.batch.per_sample["index"].tolist()
        found = dict(zip(index, backend.forward_only(shard), strict=True))
        metrics = backend.train(0, shard, TokenMean())
        after = masters_of(backend)
    return Run(
        log_probs=torch.cat([found[one].cpu() for one in sorted(found)]),
        losses=[one["loss"] for one in metrics],
        grad_norms=[one["grad_norm"] for one in metrics],
        updates={one: after[one] - before[one] for one in before},
    )


# -- how far ----------------------------------------------------------------------------------------------------------


def distances(found: Run, reference: Run) -> dict[str, float]:
    """Every way in which a run is away from the reference."""
    off = (found.log_probs - reference.log_probs).abs()
    zeros = {name: torch.zeros_like(one) for name, one in reference.updates.items()}
    scale = max(abs(one) for one in reference.losses)
    return {
        "log-prob, mean": float(off.mean()),
        "log-prob, largest": float(off.max()),
        "loss, relative": max(abs(a - b) for a, b in zip(found.losses, reference.losses)) / scale,
        "grad norm, relative": comparing.relative(found.grad_norms, reference.grad_norms, 1e-12),
        "update of the weights, relative": comparing.updates(found.updates, reference.updates, zeros),
    }


def compare_numbers(folder: Path, arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    rollout = draw(uneven(8 * STEPS, arguments.longest, seed=1), arguments.vocabulary, seed=2)
    tokens = 2 * arguments.longest
    runs: dict[str, Callable[[], Run]] = {
        FP32: lambda: train_plain(folder, rollout, device, dtype=torch.float32, attention="eager"),
        "transformers bf16 eager": lambda: train_plain(
            folder, rollout, device, dtype=torch.bfloat16, attention="eager"
        ),
        "transformers bf16 sdpa": lambda: train_plain(folder, rollout, device, dtype=torch.bfloat16, attention="sdpa"),
        **{one: lambda one=one: train_backend(one.split()[0], folder, rollout, device, tokens=tokens) for one in OURS},
    }
    found: dict[str, Run] = {}
    for name, run in runs.items():
        begin = time.monotonic()
        found[name] = run()
        free()
        print(f"{name}: {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)
    reference = found.pop(FP32)
    away = {name: distances(one, reference) for name, one in found.items()}
    plain = [one for name, one in away.items() if name not in OURS]
    yardstick = {what: max(one[what] for one in plain) for what in plain[0]}
    return {
        "samples": len(rollout),
        "tokens": int(rollout.total_lengths.sum()),
        "reference": {
            "log-prob, mean": float(reference.log_probs.mean()),
            "losses": reference.losses,
            "grad norms": reference.grad_norms,
        },
        "distance": away,
        "ratio": {name: {what: away[name][what] / yardstick[what] for what in yardstick} for name in OURS},
    }


# -- how fast ---------------------------------------------------------------------------------------------------------


class NegativeLogLikelihood(Algorithm):
    """The mean over the loss tokens of a step."""

    def extract_model_output(self, output: ModelOutput, batch: MicroBatch) -> Mapping[str, Tensor]:
        """See `Algorithm`."""
        return {"log_probs": output.label_log_probs().log_probs}

    def compute_loss(
        self, outputs: Mapping[str, Tensor], batch: MicroBatch, groups: ProcessGroups
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Algorithm`."""
        loss = -(outputs["log_probs"] * batch.loss_mask).sum() / batch.require_denominators().tokens
        return loss, {"loss": loss.detach()}


def plain_step(folder: Path, rollout: RolloutBatch, device: torch.device, *, tokens: int, masters: bool) -> Any:
    """A step of a plain loop: samples of similar length side by side, padded; sdpa; fused AdamW.

    Args:
        masters: fp32 weights that autocast rounds, else weights and moments in bf16.
    """
    dtype = torch.float32 if masters else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(device)
    adam = adam_of(dict(model.named_parameters()), fused=True)
    order = sorted(range(len(rollout)), key=lambda one: rollout.lengths[one])
    rows: list[list[int]] = [[]]
    for one in order:
        if rows[-1] and (len(rows[-1]) + 1) * rollout.lengths[one] > tokens:
            rows.append([])
        rows[-1].append(one)
    batches = [padded(rollout, one, device) for one in rows]
    total = float(rollout.per_token["loss_mask"].sum())

    def step() -> float:
        loss_sum = torch.zeros((), device=device)
        for ids, attention, mask in batches:
            with torch.autocast(device.type, torch.bfloat16, enabled=masters):
                logits = model(input_ids=ids, attention_mask=attention, use_cache=False).logits
            nll = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
            loss = (nll * mask[:, 1:].flatten()).sum() / total
            loss.backward()
            loss_sum += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), HYPER["grad_clip"])
        adam.step()
        adam.zero_grad()
        return float(loss_sum)

    return step


def padded(rollout: RolloutBatch, samples: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor | None, Tensor]:
    """Ids, attention mask (None where nothing is padded) and loss mask, [B, L] each."""
    longest = max(rollout.lengths[one] for one in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.int64)
    attention, mask = torch.zeros_like(ids), torch.zeros(ids.shape)
    for row, one in enumerate(samples):
        length, column = rollout.lengths[one], rollout.sample_column("loss_mask", one)
        ids[row, :length], attention[row, :length] = rollout.sample_tokens(one), 1
        mask[row, length - len(column) : length] = column
    whole = bool(attention.all())
    return ids.to(device), None if whole else attention.to(device), mask.to(device)


def timed(step: Callable[[], Any], device: torch.device, *, repeats: int) -> dict[str, float]:
    """Seconds a step, the median after two more, and the most memory that was live, in GiB."""
    seconds = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(repeats + 2):
        begin = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return {"seconds": statistics.median(seconds[2:]), "spread": max(seconds[2:]) - min(seconds[2:]), "GiB": peak}


def compare_speed(
    folder: Path, arguments: argparse.Namespace, device: torch.device, lengths: Sequence[int]
) -> dict[str, Any]:
    rollout = draw(lengths, arguments.vocabulary, seed=3)
    tokens = 4 * arguments.longest
    packed = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": tokens}
    found: dict[str, dict[str, float]] = {}
    for name, masters in (("transformers, autocast", True), ("transformers, bf16 weights", False)):
        step = plain_step(folder, rollout, device, tokens=tokens, masters=masters)
        found[name] = timed(step, device, repeats=arguments.repeats)
        del step
        free()
    variants: dict[str, tuple[str, dict[str, Any]]] = {
        "megatron": ("megatron", {}),
        "megatron, full recompute": ("megatron", {"recompute_granularity": "full"}),
        "megatron, optimizer on the host": ("megatron", {"optimizer_cpu_offload": True}),
        "fsdp": ("fsdp", {}),
    }
    for name, (backend_name, options) in variants.items():
        with backend_of(backend_name, folder, device, **packed, **options) as backend:
            step = partial(backend.train, 0, backend.preprocess_rollout_data(rollout), NegativeLogLikelihood(None))
            found[name] = timed(step, device, repeats=arguments.repeats)
        del backend, step
        free()
    for name, one in found.items():
        one["tokens/s"] = sum(lengths) / one["seconds"]
        print(f"{name}: {one}", file=sys.stderr, flush=True)
    base = found["transformers, autocast"]["tokens/s"]
    return {
        "samples": len(lengths),
        "tokens": sum(lengths),
        "shortest": min(lengths),
        "longest": max(lengths),
        "found": found,
        "ratio": {name: one["tokens/s"] / base for name, one in found.items()},
    }


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# -- report -----------------------------------------------------------------------------------------------------------


def facts(arguments: argparse.Namespace, command: str) -> dict[str, str]:
    card = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.processor() or "CPU"
    packages = ", ".join(f"{one} {version(one)}" for one in ("torch", "transformers", "megatron-core"))
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "card": card,
        "versions": f"{packages}, Python {platform.python_version()}",
        "command": command,
    }


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(one)} |" for one in (header, ["---"] * len(header), *rows))


def markdown(report: Mapping[str, Any]) -> str:
    numbers = report["numbers"]
    names = list(numbers["distance"])
    whats = list(numbers["distance"][names[0]])
    parts = [
        "# The Megatron backend beside plain transformers",
        "\n".join(f"- {name}: {one if name != 'command' else f'`{one}`'}" for name, one in report["facts"].items()),
        f"## Distance from {FP32}",
        f"A random model of Qwen3's shape, {numbers['parameters'] / 1e6:.0f} million parameters in {numbers['layers']} "
        f"layers, stored in bf16. {numbers['samples']} samples of uneven length, {numbers['tokens']} tokens, {STEPS} "
        "optimizer steps of a policy gradient with an entropy bonus. transformers takes one sample a forward; the "
        "backends take packed micro-batches and torch's fused variable-length attention. Masters are fp32 everywhere.",
        table(["", *names], [[what, *(f"{numbers['distance'][name][what]:.2e}" for name in names)] for what in whats]),
        "As a share of the farther of transformers' two bf16 runs:",
        table(["", *OURS], [[what, *(f"{numbers['ratio'][name][what]:.2f}" for name in OURS)] for what in whats]),
        "## Speed of a training step",
        "Real tokens a second, as a ratio to a plain loop with fp32 weights under bf16 autocast, fused AdamW, sdpa and "
        "padded batches of samples of similar length, in the same process. Memory is the most that was live.",
    ]
    for one in report["speed"]:
        parts += [
            f"{one['parameters'] / 1e6:.0f} million parameters in {one['layers']} layers, {one['samples']} samples of "
            f"{one['shortest']} to {one['longest']} tokens, {one['tokens']} in all:",
            table(
                ["", "ratio", "tokens/s", "spread of a step", "GiB"],
                [
                    [
                        name,
                        f"{one['ratio'][name]:.2f}",
                        f"{found['tokens/s']:.0f}",
                        f"{found['spread'] / found['seconds']:.0%}",
                        f"{found['GiB']:.1f}",
                    ]
                    for name, found in one["found"].items()
                ],
            ),
        ]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")), help="folder of the report")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=int, default=8, help="of the model whose numbers are compared")
    parser.add_argument("--speed-layers", type=int, nargs="*", default=[8, 28], help="of the models that are timed")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=65536)
    parser.add_argument("--longest", type=int, default=2048, help="tokens of the longest sample")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps")
    parser.add_argument("--factor", type=float, default=2.0, help="how much farther than transformers bf16 is too far")
    arguments = parser.parse_args()
    device = torch.device("cuda:0" if arguments.device == "cuda" else "cpu")
    command = " ".join(["python", *sys.argv]).replace(str(arguments.out), "DIR")
    report: dict[str, Any] = {"facts": facts(arguments, command), "speed": []}
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "numbers"
        parameters = save_model(folder, arguments, layers=arguments.layers)
        free()
        report["numbers"] = compare_numbers(folder, arguments, device)
        report["numbers"] |= {"layers": arguments.layers, "parameters": parameters}
        for layers in arguments.speed_layers:
            folder = Path(root) / f"speed{layers}"
            parameters = save_model(folder, arguments, layers=layers)
            free()
            for lengths in ([arguments.longest] * 16, uneven(32, arguments.longest, seed=4)):
                one = compare_speed(folder, arguments, device, lengths)
                report["speed"].append(one | {"layers": layers, "parameters": parameters})
    (arguments.out / "megatron_parity.json").write_text(json.dumps(report, indent=1) + "\n")
    (arguments.out / "megatron_parity.md").write_text(markdown(report))
    print(markdown(report))
    far = [
        f"{name}: {what} is {ratio:.2f} times as far from fp32 as transformers bf16"
        for name, ratios in report["numbers"]["ratio"].items()
        for what, ratio in ratios.items()
        if not ratio <= arguments.factor
    ]
    print("\n".join(far), file=sys.stderr)
    return 1 if far else 0


if __name__ == "__main__":
    sys.exit(main())
