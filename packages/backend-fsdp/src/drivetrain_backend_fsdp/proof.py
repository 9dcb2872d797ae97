"""Prove, on a shrunken random model, that an architecture survives packing and that its head is understood.

Architectures differ in what they hand to attention and in what they do to logits; a flag in transformers is no proof.
Takes well under a second on a CPU and never touches the real weights.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from drivetrain_backend_api.attention import Kernel, packed_sequences
from drivetrain_backend_api.errors import UnsupportedModelError
from drivetrain_backend_api.log_probs import label_log_probs
from drivetrain_backend_fsdp.attention import PACKED_ATTENTION
from drivetrain_backend_fsdp.causal_lm import build, head_of, hidden_states, model_name

_VOCABULARY = 96
_WINDOW = 4
_LENGTHS = [5, 11, 1, 8]
# fp32 through two small layers agrees to 1e-5; a forgotten softcap, scale, window or sink is off by far more.
_TOLERANCE = 1e-3


def prove_packing(config: PretrainedConfig, *, trust_remote_code: bool) -> None:
    """Compare packed log-probs with those of the model's own forward, sequence by sequence, eager attention.

    Raises:
        UnsupportedModelError: names the architecture and what disagreed.
    """
    name = model_name(config)
    small = shrunken(config)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(0)
        eager = build(small, attention="eager", dtype=torch.float32, trust_remote_code=trust_remote_code)
        eager.train(False)
        _roughen(eager)
        packed = build(small, attention=PACKED_ATTENTION, dtype=torch.float32, trust_remote_code=trust_remote_code)
        packed.load_state_dict(eager.state_dict())
        packed.train(False)
        tokens = torch.randint(_VOCABULARY, (sum(_LENGTHS),))
        labels = torch.randint(_VOCABULARY, (sum(_LENGTHS),))
        try:
            expected, through_head = _one_by_one(eager, tokens, labels)
            found = _packed(packed, tokens, labels)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{name} is not supported by the fsdp backend: {error}") from error
        except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
            raise UnsupportedModelError(
                f"{name} is not supported by the fsdp backend: a shrunken model of it does not run packed: {error}"
            ) from error
    _compare(through_head, expected, f"{name} is not supported by the fsdp backend: its logits are not those of")
    _compare(found, expected, f"{name} is not supported by the fsdp backend: packed sequences give other results than")


def shrunken(config: PretrainedConfig) -> PretrainedConfig:
    """Reduce heads, hidden size, layers and vocabulary, and keep what makes the architecture special.

    Head size stays, since rotary settings depend on it; one layer of each kind stays; windows shrink, so that a short
    sequence already feels them.

    Raises:
        UnsupportedModelError: the configuration cannot be reduced.
    """
    values = config.to_dict()
    for volatile in ("dtype", "torch_dtype", "transformers_version"):
        values.pop(volatile, None)
    # Ids that may lie beyond the reduced vocabulary.
    values |= {name: None for name in ("pad_token_id", "bos_token_id", "eos_token_id") if name in values}

    def put(name: str, value: Any) -> None:
        stored = config.attribute_map.get(name, name)
        if values.get(stored) is not None:
            values[stored] = value

    try:
        heads, hidden = config.num_attention_heads, config.hidden_size
        head_size = getattr(config, "head_dim", None) or hidden // heads
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        layers = config.num_hidden_layers
        lists = {name: one for name, one in values.items() if isinstance(one, list) and len(one) == layers}
        kinds: dict[tuple[str, ...], int] = {}
        for layer in range(layers):
            kinds.setdefault(tuple(repr(one[layer]) for one in lists.values()), layer)
        kept = sorted(kinds.values()) if len(kinds) > 1 else list(range(min(2, layers)))
        for name, one in lists.items():
            values[name] = [one[layer] for layer in kept]
        put("num_hidden_layers", len(kept))
        put("num_attention_heads", 2)
        put("num_key_value_heads", 2 if key_heads == heads else 1)
        put("hidden_size", 2 * head_size)
        put("intermediate_size", 4 * head_size)
        put("vocab_size", _VOCABULARY)
        put("sliding_window", _WINDOW)
        put("attention_chunk_size", _WINDOW)
        small: PretrainedConfig = type(config).from_dict(values)
    except (AttributeError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"{model_name(config)} cannot be proven on a shrunken model: {error}; the fsdp backend does not support it"
        ) from error
    small._name_or_path = config._name_or_path
    return small


def _roughen(model: PreTrainedModel) -> None:
    """Draw weights large enough that soft caps, scales and biases show."""
    for parameter in model.parameters():
        if parameter.ndim < 2:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        else:
            parameter.normal_(std=2.0 / parameter.shape[-1] ** 0.5)
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if isinstance(head, torch.nn.Linear):
        head.weight.normal_(std=10.0 / head.weight.shape[-1] ** 0.5)


def _one_by_one(model: PreTrainedModel, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the labels' log-probs [T] by the model's own logits, and by its hidden states and our head."""
    own, ours = [], []
    for ids, wanted in zip(torch.split(tokens, _LENGTHS), torch.split(labels, _LENGTHS)):
        positions = torch.arange(len(ids))
        logits = model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0]
        own.append(F.log_softmax(logits.float(), dim=-1).gather(1, wanted[:, None])[:, 0])
        hidden = hidden_states(model, ids, positions, None)
        ours.append(label_log_probs(hidden, head_of(model), wanted).log_probs)
    return torch.cat(own), torch.cat(ours)


def _packed(model: PreTrainedModel, tokens: Tensor, labels: Tensor) -> Tensor:
    boundaries = torch.tensor([0, *_LENGTHS]).cumsum(0).to(torch.int32)
    packed = packed_sequences(boundaries, max(_LENGTHS), Kernel.PER_SEQUENCE)
    positions = torch.cat([torch.arange(one) for one in _LENGTHS])
    hidden = hidden_states(model, tokens, positions, packed)
    return label_log_probs(hidden, head_of(model), labels).log_probs


def _compare(found: Tensor, expected: Tensor, what: str) -> None:
    difference = (found - expected).abs().max().item()
    # Written so that nan is refused too.
    if not difference <= _TOLERANCE * (1 + expected.abs().max().item()):
        raise UnsupportedModelError(
            f"{what} its own forward (log-probs of a shrunken random model differ by {difference:.2g})"
        )
