"""A transformers causal language model: loaded or refused, its weights by name, and its output on a micro-batch.

Knows nothing of optimizers, checkpoints or the contract's lifecycle.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from drivetrain_backend_api import DataError, UnsupportedModelError
from drivetrain_backend_api.algorithm import HiddenOutput
from drivetrain_backend_api.batch import MicroBatch
from drivetrain_backend_api.errors import in_one_line
from drivetrain_backend_api.log_probs import Head

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_LOAD_ERRORS = (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, ImportError, SafetensorError)
"""What transformers raises on a folder it cannot read; which one depends on the file and the architecture."""


def load_model(folder: Path, *, trust_remote_code: bool) -> PreTrainedModel:
    """Load a Hugging Face folder in fp32, on the host; never from pickles, and never half.

    Raises:
        DataError: a file is missing or damaged, or weights and `config.json` do not fit.
        UnsupportedModelError: the model's logits are not what hidden states and head weight say.
    """
    if not (folder / "config.json").is_file():
        raise DataError(f"{folder / 'config.json'} is missing; give a Hugging Face model folder")
    read_headers(folder)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
        )
    except _LOAD_ERRORS as error:
        raise DataError(f"{folder} is no causal language model that loads: {in_one_line(error)}") from error
    model, report = loaded
    # transformers makes up what is missing and only warns
    if wrong := [f"{kind}: {', '.join(sorted(map(str, names)))}" for kind, names in report.items() if names]:
        raise DataError(f"{folder} does not fit its config.json ({'; '.join(wrong)}); copy the model again")
    assert isinstance(model, PreTrainedModel)
    # where tied tensors are stored twice and differ, transformers goes on without the tie
    if model.config.tie_word_embeddings and model._tied_weights_keys and not model.all_tied_weights_keys:
        raise DataError(
            f"{folder}: config.json ties {', '.join(model._tied_weights_keys)}, but the stored tensors differ; "
            "set tie_word_embeddings to false in config.json"
        )
    # without dropout, also while training: log-probs must not be random
    model.eval()  # type: ignore[no-untyped-call]
    for one in weights_of(model).values():
        one.data = one.data.clone()  # memory that safetensors lent cannot be given back in sleep
    _prove_head(model)
    return model


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """List parameters and persistent buffers by Hugging Face name, tied ones once, as `save_pretrained` does."""
    tied = model.all_tied_weights_keys
    return {name: one for name, one in model.state_dict(keep_vars=True).items() if name not in tied}


def stored_dtypes(folder: Path, model: PreTrainedModel) -> dict[str, torch.dtype]:
    """Return the dtype in which a folder stores each of a model's weights, under whichever of its tied names.

    Raises:
        UnsupportedModelError: it stores one under another name, or quantised.
    """
    headers = read_headers(folder)
    aliases = {source: alias for alias, source in model.all_tied_weights_keys.items()}
    found = {}
    for name, weight in weights_of(model).items():
        stored = name if name in headers else aliases.get(name, name)
        if stored not in headers:
            raise UnsupportedModelError(
                f"{type(model).__name__} keeps {name!r} otherwise than {folder} stores it; only models that "
                "transformers loads as they are stored are trained here, which mixtures of experts are not"
            )
        if weight.is_floating_point() and headers[stored] not in _DTYPES:
            raise UnsupportedModelError(f"{folder}: tensor {stored!r} is {headers[stored]}; give unquantised weights")
        found[name] = _DTYPES.get(headers[stored], weight.dtype)
    return found


def read_headers(folder: Path) -> dict[str, str]:
    """Read the dtype of every tensor, as safetensors calls it, from one file or those that an index names.

    Raises:
        DataError: names the file that is missing or damaged.
    """
    index, files = folder / "model.safetensors.index.json", ["model.safetensors"]
    if index.is_file():
        try:
            files = sorted({str(one) for one in json.loads(index.read_bytes())["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{index} is no index of safetensors: {error!r}; copy the model again") from error
    headers: dict[str, str] = {}
    for path in (folder / name for name in files):
        if not path.is_file():
            raise DataError(f"{path} is missing; the model folder needs safetensors weights")
        try:
            with safe_open(path, framework="pt") as file:
                headers |= {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise DataError(f"{path} is damaged: {error}; copy the model again") from error
    return headers


def run_model(model: PreTrainedModel, batch: MicroBatch, *, temperature: float, chunk_size: int) -> HiddenOutput:
    """Run a micro-batch in groups of equally long sequences: no padding, and none sees another's tokens."""
    sequences = torch.split(batch.input_ids, batch.cu_seqlens.diff().tolist())
    hidden: dict[int, Tensor] = {}
    for length in {len(one) for one in sequences}:
        places = [place for place, one in enumerate(sequences) if len(one) == length]
        hidden |= zip(places, _hidden_states(model, torch.stack([sequences[place] for place in places])))
    return HiddenOutput(
        hidden=torch.cat([hidden[place] for place in range(len(sequences))]),
        head=_head_of(model),
        labels=batch.labels,
        temperature=temperature,
        chunk_size=chunk_size,
    )


def require_same_weights(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], *, what: str) -> None:
    """Compare names and shapes.

    Raises:
        DataError: they differ; begins with `what` and names the first tensor.
    """
    for name in sorted({*expected, *found}):
        mine, theirs = (tuple(one[name].shape) if name in one else "none" for one in (expected, found))
        if mine != theirs:
            raise DataError(f"{what} is of another model: tensor {name!r} has shape {theirs} there and {mine} here")


def _hidden_states(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """Run everything before the head: [S, T] -> [S, T, H]."""
    hidden: Tensor = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
    return hidden


def _head_of(model: PreTrainedModel) -> Head:
    linear = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(linear, nn.Linear):
        raise UnsupportedModelError(f"{type(model).__name__} has no linear head")
    return Head(weight=linear.weight, bias=linear.bias)


@torch.no_grad()
def _prove_head(model: PreTrainedModel) -> None:
    """Compare hidden states times head weight with the model's own logits, which may be scaled or capped."""
    ids, head = torch.arange(min(16, model.config.vocab_size))[None], _head_of(model)
    found = nn.functional.linear(_hidden_states(model, ids), head.weight, head.bias)
    if not torch.allclose(found, model(input_ids=ids, use_cache=False).logits, rtol=1e-5, atol=1e-6):
        raise UnsupportedModelError(f"{type(model).__name__}: logits are more than hidden states times the head weight")
