"""What is this backend's own, beside what the suite demands of all."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma2Config, PretrainedConfig, Qwen3MoeConfig

from drivetrain_backend_api import ConfigError, DataError, UnsupportedModelError
from drivetrain_backend_api.parallel import Role
from drivetrain_backend_api.testing.models import make_model
from plain_torch_backend.backend import PlainTorchBackend
from plain_torch_backend.checkpoint import export_checkpoint
from plain_torch_backend.checkpoint_files import STATE, check_checkpoint
from plain_torch_backend.config import PlainTorchConfig

HERE = Path(__file__).parents[1]

TINY = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def backend(folder: Path, *, world_size: int = 1, **options: Any) -> PlainTorchBackend:
    config = PlainTorchConfig(**{"hf_checkpoint": str(folder), "fp32": True, **options})
    return PlainTorchBackend(config, Role.POLICY, 0, world_size, "cpu")


def saved(model: Path, folder: Path, **options: Any) -> Path:
    folder.mkdir(parents=True)
    with backend(model, **options) as one:
        one.setup()
        with torch.no_grad():
            for weight in one.model.parameters():
                weight += 0.5
        one.next_rollout_id = 3
        one.save_checkpoint(folder).finalize()
    return folder


def test_two_ranks_are_refused_by_name(tmp_path: Path) -> None:
    one = backend(make_model(tmp_path / "model", "llama"), world_size=2)
    with pytest.raises(ConfigError, match="one process, not in 2; give --actor-num-nodes 1"):
        one.setup()


@pytest.mark.parametrize(
    "options", [{"bf16": True, "fp32": False}, {"attention_backend": "varlen"}, {"async_save": True}]
)
def test_options_that_it_cannot_honour_are_refused_by_name(options: dict[str, Any]) -> None:
    (name,) = (one for one in options if one != "fp32")
    with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')}"):
        backend(Path("model"), **options)


@pytest.mark.parametrize("damage", ["missing", "empty", "cut"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_bad_model_folder_is_refused_and_its_file_named(tmp_path: Path, name: str, damage: str) -> None:
    path = make_model(tmp_path / "model", "llama") / name
    content = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(b"" if damage == "empty" else content[: len(content) // 2])
    with pytest.raises(DataError, match=re.escape(str(path))):
        backend(path.parent).setup()


def test_a_tensor_that_transformers_would_make_up_is_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
    with pytest.raises(DataError, match=r"does not fit its config.json \(missing_keys: model.layers.4"):
        backend(folder).setup()


def test_tied_tensors_that_differ_are_refused(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model", "llama-tied") / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + 1}, path, metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"config.json ties lm_head.weight, but the stored tensors differ"):
        backend(path.parent).setup()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Gemma2Config(**TINY), "logits are more than hidden states times the head weight"),
        (Qwen3MoeConfig(**TINY, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16), "mixtures of experts"),
    ],
)
def test_models_that_would_come_out_wrong_are_refused(tmp_path: Path, config: PretrainedConfig, reason: str) -> None:
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=reason):
        backend(tmp_path).setup()


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "llama")
    weights = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(DataError, match=r"model\.safetensors is missing"):
        backend(folder).setup()


def test_every_single_changed_byte_of_the_scalars_is_found(tmp_path: Path) -> None:
    state = saved(make_model(tmp_path / "model", "llama"), tmp_path / "saved") / STATE
    content = state.read_bytes()
    assert check_checkpoint(state.parent) == []
    for place in range(len(content)):
        state.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert [STATE in one for one in check_checkpoint(state.parent)] == [True], place


def test_files_of_another_checkpoint_are_found_and_named(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama")
    mine, other = saved(model, tmp_path / "mine"), saved(model, tmp_path / "other", seed=7)
    (mine / "random.safetensors").write_bytes((other / "random.safetensors").read_bytes())
    with pytest.raises(DataError, match=r"mine/random.safetensors is damaged, or of another checkpoint"):
        backend(model, load=str(mine)).setup()


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = saved(make_model(tmp_path / "llama", "llama"), tmp_path / "saved")
    with pytest.raises(DataError, match=r"saved/weights.safetensors is of another model: tensor 'lm_head.weight'"):
        backend(make_model(tmp_path / "tied", "llama-tied"), load=str(folder)).setup()


@pytest.mark.parametrize("dtype", [None, torch.float16])
@pytest.mark.parametrize("model", ["qwen3", "llama-tied"])
def test_an_exported_checkpoint_is_what_was_trained(tmp_path: Path, model: str, dtype: torch.dtype | None) -> None:
    folder = make_model(tmp_path / "model", model, dtype="bfloat16")
    before = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    export_checkpoint(saved(folder, tmp_path / "saved"), folder, tmp_path / "out", dtype)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    assert set(found) == set(before)
    for name, weight in before.items():
        assert torch.equal(found[name], (weight + 0.5).to(dtype or torch.bfloat16)), name


def test_an_export_that_fails_leaves_nothing(tmp_path: Path) -> None:
    folder = saved(make_model(tmp_path / "llama", "llama"), tmp_path / "saved")
    with pytest.raises(DataError, match="another model"):
        export_checkpoint(folder, make_model(tmp_path / "qwen3", "qwen3"), tmp_path / "out")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["llama", "qwen3", "saved"]
