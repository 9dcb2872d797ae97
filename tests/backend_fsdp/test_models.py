"""Which models are refused and by what name, and how a model folder is read."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TwoRanks
from fsdp_testing import assert_same, config_of, exported, model_weights, one_rank, rollout_of
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from drivetrain_backend_api.errors import ConfigError, DataError, DrivetrainError, UnsupportedModelError
from drivetrain_backend_api.testing.models import VOCABULARY, make_model, tiny_config
from drivetrain_backend_fsdp.causal_lm import refuse_by_config
from drivetrain_backend_fsdp.proof import prove_packing, shrunken

SIZES: dict[str, Any] = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def refuse_or_prove(config: PretrainedConfig) -> None:
    refuse_by_config(config)
    prove_packing(config, trust_remote_code=False)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Gemma2Config(head_dim=16, **SIZES), "gemma2.*sliding_window"),
        (Gemma2Config(head_dim=16, layer_types=["full_attention"] * 4, **SIZES), "gemma2.*softcap"),
        (MistralConfig(sliding_window=32, **SIZES), "mistral.*sliding_window"),
        (BloomConfig(**SIZES), "bloom"),
        (Qwen3MoeConfig(**SIZES), "qwen3_moe.*mixture of experts"),
        (GPT2Config(), "gpt2.*pdrop to 0.1"),
    ],
    ids=["window", "softcap", "mistral", "alibi", "experts", "dropout"],
)
def test_what_packed_attention_does_not_implement_is_refused_by_name(config: PretrainedConfig, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        refuse_or_prove(config)


@pytest.mark.parametrize(
    "config",
    [
        MistralConfig(sliding_window=None, **SIZES),
        CohereConfig(logit_scale=0.3, **SIZES),
        GraniteConfig(logits_scaling=8.0, attention_multiplier=0.2, **SIZES),
    ],
    ids=["mistral", "cohere-logit-scale", "granite-logits-scaling"],
)
def test_other_dense_models_pass_the_proof(config: PretrainedConfig) -> None:
    before = config.to_dict()
    refuse_or_prove(config)
    assert config.to_dict() == before


def test_a_head_that_is_not_understood_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # As if granite's divisor of the logits were unknown here.
    monkeypatch.setattr("drivetrain_backend_fsdp.causal_lm._LOGITS_DIVISORS", ())
    with pytest.raises(UnsupportedModelError, match=r"granite.*logits are not those"):
        refuse_or_prove(GraniteConfig(logits_scaling=8.0, **SIZES))


def test_shrinking_keeps_one_layer_of_each_kind_and_the_head_size() -> None:
    small = shrunken(Gemma2Config(head_dim=16, **SIZES))
    assert small.layer_types == ["sliding_attention", "full_attention"]
    assert (small.num_hidden_layers, small.head_dim, small.num_key_value_heads) == (2, 16, 1)


def test_a_refused_model_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    Gemma2Config(head_dim=16, architectures=["Gemma2ForCausalLM"], **SIZES).save_pretrained(tmp_path)
    with (
        one_rank(config_of(tmp_path)) as backend,
        pytest.raises(UnsupportedModelError, match=r"gemma2 \(Gemma2ForCausalLM\)"),
    ):
        backend.setup()


def refusal(folder: Path) -> str:
    with one_rank(config_of(folder)) as backend, pytest.raises(DrivetrainError) as caught:
        backend.setup()
    return str(caught.value)


@pytest.fixture
def copied(models: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(models["qwen3-tied"], tmp_path / "model"))


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors") | {name.replace("__", "."): one for name, one in changes.items()}
    kept = {name: one for name, one in tensors.items() if one is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def test_missing_unexpected_and_misshapen_tensors_are_all_named(copied: Path) -> None:
    rewrite(
        copied,
        model__norm__weight=None,
        model__stranger__weight=torch.zeros(2),
        model__layers__0__mlp__up_proj__weight=torch.zeros(3, 4),
    )
    message = refusal(copied)
    assert "'model.norm.weight' is missing" in message
    assert "'model.stranger.weight' in model.safetensors belongs to nothing" in message
    assert "'model.layers.0.mlp.up_proj.weight' in model.safetensors has shape [3, 4]" in message


def test_a_folder_that_rank_0_refuses_is_refused_by_all_ranks_alike(two_ranks: TwoRanks) -> None:
    messages = set(two_ranks.refusals)
    assert len(messages) == 1
    assert "'model.norm.weight' is missing" in messages.pop()


def test_a_truncated_file_is_named(copied: Path) -> None:
    whole = (copied / "model.safetensors").read_bytes()
    (copied / "model.safetensors").write_bytes(whole[:-100])
    assert "model.safetensors is damaged" in refusal(copied)


def test_a_folder_without_weights_or_without_config_is_named(copied: Path, tmp_path: Path) -> None:
    (copied / "model.safetensors").unlink()
    assert f"{copied / 'model.safetensors'} is missing" in refusal(copied)
    assert "has no config.json" in refusal(tmp_path / "nowhere")


def test_an_index_that_points_to_nothing_is_named(copied: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model.safetensors", "model.other": "model.safetensors"}}
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "'model.other' in model.safetensors, which lacks it" in refusal(copied)


def test_a_tied_weight_may_be_stored_under_either_name_or_both(models: dict[str, Path], copied: Path) -> None:
    expected = model_weights(AutoModelForCausalLM.from_pretrained(models["qwen3-tied"]))
    embedding = expected["model.embed_tokens.weight"]
    rewrite(copied, lm_head__weight=embedding.clone())
    for stored in ("both", "head only"):
        if stored == "head only":
            rewrite(copied, model__embed_tokens__weight=None)
        with one_rank(config_of(copied)) as backend:
            backend.setup()
            assert_same(exported(backend), expected)


def test_a_tied_weight_stored_twice_with_different_values_is_refused(copied: Path) -> None:
    rewrite(copied, lm_head__weight=torch.zeros(VOCABULARY, 32))
    assert "'lm_head.weight'" in refusal(copied)
    assert "stored tensors differ" in refusal(copied)


def test_a_reference_that_is_not_given_or_has_another_vocabulary_is_refused(
    models: dict[str, Path], tmp_path: Path
) -> None:
    with one_rank(config_of(models["qwen3"])) as backend, pytest.raises(ConfigError, match="--ref-load"):
        backend.setup(with_ref=True)
    other = tiny_config("qwen2")
    other.vocab_size = VOCABULARY - 1
    AutoModelForCausalLM.from_config(other).save_pretrained(tmp_path)
    with (
        one_rank(config_of(models["qwen3"], opd_teacher_load=str(tmp_path))) as backend,
        pytest.raises(DataError, match=r"--opd-teacher-load.*vocabulary of 66"),
    ):
        backend.setup(with_opd_teacher=True)


def test_a_teacher_whose_vocabulary_is_padded_further_is_taken(models: dict[str, Path], tmp_path: Path) -> None:
    other = tiny_config("qwen2")
    other.vocab_size = VOCABULARY + 1
    AutoModelForCausalLM.from_config(other).save_pretrained(tmp_path)
    with one_rank(config_of(models["qwen3"], opd_teacher_load=str(tmp_path))) as backend:
        backend.setup(with_opd_teacher=True)
        found = backend.maybe_compute_teacher_log_probs(backend.preprocess_rollout_data(rollout_of(3)))
        assert found is not None
        assert all(torch.isfinite(one).all() for one in found)


def test_buffers_that_no_file_stores_are_right_after_meta_initialisation(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "llama")
    expected = dict(AutoModelForCausalLM.from_pretrained(folder).named_buffers())
    with one_rank(config_of(folder)) as backend:
        backend.setup()
        assert_same(dict(backend.model.named_buffers()), expected)
        assert expected
