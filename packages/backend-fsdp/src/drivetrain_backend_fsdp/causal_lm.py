"""A transformers causal language model seen as three things: packed hidden states, a head, and its blocks.

Builds models and says which are refused; knows nothing of sharding, files or optimizers.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from drivetrain_backend_api.attention import PackedSequences
from drivetrain_backend_api.errors import UnsupportedModelError
from drivetrain_backend_api.log_probs import Head

_LOGITS_MULTIPLIERS = ("logit_scale", "lm_head_multiplier")
_LOGITS_DIVISORS = ("logits_scaling",)
_LOGITS_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap")
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def model_name(config: PretrainedConfig) -> str:
    """Name an architecture for messages, for example "qwen3 (Qwen3ForCausalLM)"."""
    architectures = getattr(config, "architectures", None) or ["no architecture given"]
    return f"{config.model_type} ({architectures[0]})"


def refuse_by_config(config: PretrainedConfig) -> None:
    """Refuse what can be told from the configuration alone.

    Raises:
        UnsupportedModelError: quantised, mixture of experts, or dropout.
    """
    name = model_name(config)
    if getattr(config, "quantization_config", None):
        raise UnsupportedModelError(f"{name} is quantised; train from unquantised weights")
    for attribute in _EXPERT_COUNTS:
        if (getattr(config, attribute, None) or 0) > 1:
            raise UnsupportedModelError(f"{name} is a mixture of experts ({attribute}); only dense models are trained")
    for attribute, rate in config.to_dict().items():
        if attribute.startswith(("classifier_", "summary_")):
            continue  # of heads that are not built here
        if ("dropout" in attribute or attribute.endswith("_pdrop")) and isinstance(rate, float) and rate > 0:
            raise UnsupportedModelError(
                f"{name} sets {attribute} to {rate}, which makes log-probs random; set it to 0 in config.json"
            )


def build(config: PretrainedConfig, *, attention: str, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    """Make a randomly initialised model, on the default device; the config stays as it is.

    Raises:
        UnsupportedModelError: transformers has no causal language model for it.
    """
    try:
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            copy.deepcopy(config), attn_implementation=attention, dtype=dtype, trust_remote_code=trust_remote_code
        )
    except (ValueError, ImportError, AttributeError, TypeError) as error:
        raise UnsupportedModelError(
            f"{model_name(config)} cannot be built as a causal language model: {error}"
        ) from error
    assert isinstance(model, PreTrainedModel)
    return model


def tied_names(model: PreTrainedModel) -> Mapping[str, str]:
    """Return name -> source of the parameters that share another one's storage, checked to be the same object."""
    tied: dict[str, str] = dict(model.all_tied_weights_keys)
    for alias, source in tied.items():
        if model.get_parameter(alias) is not model.get_parameter(source):
            raise UnsupportedModelError(f"{type(model).__name__} declares {alias!r} tied to {source!r}, but it is not")
    return tied


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """List parameters and persistent buffers by Hugging Face name, tied ones once, as `save_pretrained` does."""
    tied = tied_names(model)
    return {name: value for name, value in model.state_dict(keep_vars=True).items() if name not in tied}


def blocks_of(model: PreTrainedModel) -> list[nn.Module]:
    """Return the transformer blocks in order.

    Raises:
        UnsupportedModelError: the model does not say which they are.
    """
    classes = set(model._no_split_modules or ())
    blocks = [module for module in model.modules() if type(module).__name__ in classes]
    if not blocks:
        raise UnsupportedModelError(f"{type(model).__name__} does not name its blocks (_no_split_modules)")
    return blocks


def hidden_states(
    model: PreTrainedModel, input_ids: Tensor, position_ids: Tensor, packed: PackedSequences | None
) -> Tensor:
    """Run everything before the head.

    Args:
        model: the causal language model.
        input_ids: int64 [T].
        position_ids: int64 [T].
        packed: where the sequences lie; None for one sequence under another attention implementation.

    Returns: [T, H].
    """
    extra: dict[str, Any] = {} if packed is None else {"packed": packed}
    output = model.base_model(
        input_ids=input_ids[None], position_ids=position_ids[None], attention_mask=None, use_cache=False, **extra
    )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


def head_of(model: PreTrainedModel) -> Head:
    """Describe how hidden states become logits. Under FSDP legal only inside a forward, where weights are whole.

    Raises:
        UnsupportedModelError: the head is not one linear layer.
    """
    linear = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(linear, nn.Linear):
        raise UnsupportedModelError(f"{type(model).__name__} has no linear head")
    scale, softcap = 1.0, None
    for name in _LOGITS_MULTIPLIERS:
        scale *= _number(model.config, name) or 1.0
    for name in _LOGITS_DIVISORS:
        scale /= _number(model.config, name) or 1.0
    for name in _LOGITS_SOFTCAPS:
        softcap = _number(model.config, name) or softcap
    return Head(weight=linear.weight, bias=linear.bias, scale=scale, softcap=softcap)


def _number(config: PretrainedConfig, name: str) -> float | None:
    value = getattr(config, name, None)
    return float(value) if isinstance(value, int | float) else None
