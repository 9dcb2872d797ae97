"""Megatron's parameters against the files that transformers writes: names, shapes, values, over ranks and stages."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from drivetrain_backend_api.errors import DataError, UnsupportedModelError
from drivetrain_backend_megatron.architectures import ExpertShape, ModelShape, read_shape
from drivetrain_backend_megatron.hf_model import StoredModel, find_hf, load_hf
from drivetrain_backend_megatron.name_map import (
    Place,
    expert_rank,
    global_name,
    padded_vocab_size,
    place_of,
    places,
    stage_of,
    to_hf,
    to_local,
)

SIZES: dict[str, Any] = {
    "vocab_size": 67,  # no multiple of any number of ranks
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
}
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 10, "head_dim": 6}

MODELS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(head_dim=10, **SIZES),
    "llama-bias": LlamaConfig(attention_bias=True, **SIZES),
    "qwen2-tied": Qwen2Config(tie_word_embeddings=True, **SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(head_dim=6, **SIZES),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS),
    "qwen3_moe-mixed": Qwen3MoeConfig(**SIZES, **EXPERTS, mlp_only_layers=[1], tie_word_embeddings=True),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()  # biases and norms too, which start as zeros and ones
        model.save_pretrained(root / name)
    return {name: root / name for name in MODELS}


def local_shape(place: Place, tp_size: int, padded_vocab: int) -> tuple[int, ...]:
    """Return what Megatron's parallel layers allocate on a rank; experts are not cut."""
    sizes = [list(size) for _, size in place.hf]
    whole = [sum(size[0] for size in sizes), *sizes[0][1:]]
    if place.rule.vocab:
        whole[0] = padded_vocab
    if place.rule.tp_dim is not None and place.expert is None:
        whole[place.rule.tp_dim] //= tp_size
    return tuple(whole)


def shards_of(folder: Path, shape: ModelShape, tp_size: int, divisible_by: int = 1) -> list[dict[str, Tensor]]:
    """Load a folder into the parameters of every tensor-parallel rank."""
    padded = padded_vocab_size(shape.vocab_size, tp_size=tp_size, divisible_by=divisible_by)
    stored = find_hf(folder, shape)
    ranks = []
    for rank in range(tp_size):
        mine = {one.name: torch.full(local_shape(one, tp_size, padded), torch.nan) for one in places(shape)}
        load_hf(stored, mine.items(), shape, tp_size=tp_size, tp_rank=rank, padded_vocab=padded)
        ranks.append(mine)
    return ranks


def restored(ranks: list[dict[str, Tensor]], shape: ModelShape) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for one in places(shape):
        parts = to_hf([mine[one.name] for mine in ranks], one.rule, shape)
        found |= {name: part for (name, _), part in zip(one.hf, parts, strict=True)}
    return found


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


# -- against transformers' files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_every_stored_tensor_is_in_exactly_one_place_with_its_shape(model: str, folders: dict[str, Path]) -> None:
    shape = read_shape(folders[model])
    stored = load_file(folders[model] / "model.safetensors")
    placed = [entry for one in places(shape) for entry in one.hf]
    assert Counter(name for name, _ in placed) == Counter(stored.keys())
    assert dict(placed) == {name: tuple(tensor.shape) for name, tensor in stored.items()}


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_a_folder_cut_over_ranks_and_put_together_again_is_the_same(
    model: str, tp_size: int, folders: dict[str, Path]
) -> None:
    shape = read_shape(folders[model])
    ranks = shards_of(folders[model], shape, tp_size)
    assert_equal(restored(ranks, shape), load_file(folders[model] / "model.safetensors"))


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("model", ["llama-bias", "qwen3_moe-mixed"])
def test_reading_parts_of_files_equals_cutting_whole_tensors(
    model: str, tp_size: int, folders: dict[str, Path]
) -> None:
    shape = read_shape(folders[model])
    padded = padded_vocab_size(67, tp_size=tp_size)
    stored = load_file(folders[model] / "model.safetensors")
    for rank, mine in enumerate(shards_of(folders[model], shape, tp_size)):
        for one in places(shape):
            parts = [stored[name] for name, _ in one.hf]
            cut = to_local(parts, one.rule, shape, tp_size=tp_size, tp_rank=rank, padded_vocab=padded)
            assert torch.equal(cut, mine[one.name]), (rank, one.name)


@pytest.mark.parametrize(
    ("model", "kind", "head"), [("qwen3", "weight", 6), ("qwen2", "weight", 4), ("qwen2", "bias", 4)]
)
def test_a_rank_holds_whole_query_groups(model: str, kind: str, head: int, folders: dict[str, Path]) -> None:
    shape, stored = read_shape(folders[model]), load_file(folders[model] / "model.safetensors")
    mine = shards_of(folders[model], shape, 2)[1]  # of 8 heads and 4 groups: heads 4 to 7, groups 2 and 3
    query, key, value = (
        torch.split(stored[f"model.layers.2.self_attn.{one}_proj.{kind}"], head) for one in ("q", "k", "v")
    )
    rows = [query[4], query[5], key[2], value[2], query[6], query[7], key[3], value[3]]
    assert torch.equal(mine[f"decoder.layers.2.self_attention.linear_qkv.{kind}"], torch.cat(rows))


def test_a_rank_holds_its_part_of_gate_up_and_down(folders: dict[str, Path]) -> None:
    shape, stored = read_shape(folders["qwen3"]), load_file(folders["qwen3"] / "model.safetensors")
    mine = shards_of(folders["qwen3"], shape, 2)[1]
    gate, up = (stored[f"model.layers.2.mlp.{one}_proj.weight"] for one in ("gate", "up"))
    assert torch.equal(mine["decoder.layers.2.mlp.linear_fc1.weight"], torch.cat([gate[24:], up[24:]]))
    down = stored["model.layers.2.mlp.down_proj.weight"]
    assert torch.equal(mine["decoder.layers.2.mlp.linear_fc2.weight"], down[:, 24:])


def test_experts_are_whole_on_every_tensor_parallel_rank(folders: dict[str, Path]) -> None:
    shape, stored = read_shape(folders["qwen3_moe"]), load_file(folders["qwen3_moe"] / "model.safetensors")
    for mine in shards_of(folders["qwen3_moe"], shape, 2):
        gate, up, down = (stored[f"model.layers.1.mlp.experts.5.{one}_proj.weight"] for one in ("gate", "up", "down"))
        expert = "decoder.layers.1.mlp.experts.local_experts.5."
        assert torch.equal(mine[expert + "linear_fc1.weight"], torch.cat([gate, up]))
        assert torch.equal(mine[expert + "linear_fc2.weight"], down)
        assert torch.equal(mine["decoder.layers.1.mlp.router.weight"], stored["model.layers.1.mlp.gate.weight"])


def test_padded_rows_are_zero_even_on_ranks_that_hold_nothing_else(folders: dict[str, Path]) -> None:
    shape, stored = read_shape(folders["llama"]), load_file(folders["llama"] / "model.safetensors")
    ranks = shards_of(folders["llama"], shape, 4, divisible_by=64)  # 67 rows on ranks of 64
    whole = torch.cat([mine["output_layer.weight"] for mine in ranks])
    assert len(whole) == 256
    assert torch.equal(whole[:67], stored["lm_head.weight"])
    assert not whole[67:].any()
    assert_equal(restored(ranks, shape), stored)


def test_a_tied_output_layer_on_the_last_stage_is_the_embedding(folders: dict[str, Path]) -> None:
    folder = folders["qwen2-tied"]
    shape = read_shape(folder)
    mine = torch.full((68, 32), torch.nan)
    load_hf(find_hf(folder, shape), [("output_layer.weight", mine)], shape, tp_size=1, tp_rank=0, padded_vocab=68)
    assert torch.equal(mine[:67], load_file(folder / "model.safetensors")["model.embed_tokens.weight"])


def test_parameters_of_another_dtype_are_filled_and_the_stored_dtype_is_known(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    shape, stored = read_shape(folders["qwen3"]), load_file(folders["qwen3"] / "model.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in stored.items()}, tmp_path / "model.safetensors")
    found = find_hf(tmp_path, shape)
    assert set(found.dtypes.values()) == {torch.bfloat16}
    norm = torch.zeros(32)
    load_hf(found, [("decoder.final_layernorm.weight", norm)], shape, tp_size=1, tp_rank=0, padded_vocab=67)
    assert torch.equal(norm, stored["model.norm.weight"].bfloat16().float())


def test_a_model_of_several_files_is_read_through_its_index(folders: dict[str, Path], tmp_path: Path) -> None:
    shape, stored = read_shape(folders["qwen3_moe"]), load_file(folders["qwen3_moe"] / "model.safetensors")
    halves = [dict(list(stored.items())[part::2]) for part in (0, 1)]
    for part, half in enumerate(halves):
        save_file(half, tmp_path / f"part-{part}.safetensors")
    index = {name: f"part-{part}.safetensors" for part, half in enumerate(halves) for name in half}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert_equal(restored(shards_of(tmp_path, shape, 2), shape), stored)


# -- folders that do not fit -------------------------------------------------------------------------------------------


def changed(folder: Path, out: Path, **changes: Tensor | None) -> Path:
    """Write the folder's tensors with changes; None takes one away. Dots are spelled "__"."""
    tensors = load_file(folder / "model.safetensors")
    for name, value in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if value is not None:
            tensors[name.replace("__", ".")] = value
    save_file(tensors, out / "model.safetensors")
    return out


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model__norm__weight": None}, "tensor 'model.norm.weight' is missing"),
        (
            {"model__norm__weight": torch.ones(31)},
            "tensor 'model.norm.weight' in model.safetensors has shape [31], config.json needs [32]",
        ),
        ({"score__weight": torch.ones(2)}, "tensor 'score.weight' in model.safetensors belongs to nothing"),
        (
            {"model__norm__weight": torch.ones(32, dtype=torch.int8)},
            "'model.norm.weight' in model.safetensors has dtype",
        ),
    ],
    ids=["missing", "shape", "unexpected", "dtype"],
)
def test_a_folder_that_does_not_fit_is_refused_with_file_and_tensor(
    changes: dict[str, Tensor | None], sentence: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(DataError) as caught:
        find_hf(changed(folders["llama"], tmp_path, **changes), read_shape(folders["llama"]))
    assert str(caught.value).startswith(f"{tmp_path} does not fit its config.json: ")
    assert sentence in str(caught.value)


def test_computed_buffers_of_old_folders_are_passed_over(folders: dict[str, Path], tmp_path: Path) -> None:
    buffer = {"model__layers__0__self_attn__rotary_emb__inv_freq": torch.ones(5)}
    folder = changed(folders["llama"], tmp_path, **buffer)
    assert len(find_hf(folder, read_shape(folders["llama"])).names) == len(load_file(folder / "model.safetensors")) - 1


def test_a_tied_weight_may_be_stored_twice_if_equal_or_under_its_other_name(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    shape = read_shape(folders["qwen2-tied"])
    weight = load_file(folders["qwen2-tied"] / "model.safetensors")["model.embed_tokens.weight"]
    for changes in (
        {"lm_head__weight": weight.clone()},
        {"lm_head__weight": weight, "model__embed_tokens__weight": None},
    ):
        folder = changed(folders["qwen2-tied"], tmp_path, **changes)
        assert torch.equal(restored(shards_of(folder, shape, 1), shape)["model.embed_tokens.weight"], weight)
    with pytest.raises(DataError, match="the stored tensors differ"):
        find_hf(changed(folders["qwen2-tied"], tmp_path, lm_head__weight=weight + 1), shape)


def test_a_parameter_of_another_shape_is_refused_by_name(folders: dict[str, Path]) -> None:
    shape = read_shape(folders["llama"])
    with pytest.raises(
        DataError, match=r"model\.norm\.weight give Megatron's .* the shape \[32\] here, and it has \[16\]"
    ):
        load_hf(
            find_hf(folders["llama"], shape),
            [("decoder.final_layernorm.weight", torch.zeros(16))],
            shape,
            tp_size=1,
            tp_rank=0,
            padded_vocab=67,
        )


def test_a_file_that_is_gone_when_it_is_read_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    found = find_hf(folders["llama"], shape := read_shape(folders["llama"]))
    gone = StoredModel(folder=tmp_path, headers=found.headers, names=found.names)
    with pytest.raises(DataError, match=r"model\.safetensors cannot be read"):
        load_hf(
            gone, [("decoder.final_layernorm.weight", torch.zeros(32))], shape, tp_size=1, tp_rank=0, padded_vocab=67
        )


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_each_place_is_found_by_its_name(model: str, folders: dict[str, Path]) -> None:
    shape = read_shape(folders[model])
    assert [place_of(one.name, shape) for one in places(shape)] == list(places(shape))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("decoder.layers.1.self_attention.linear_qkv.layer_norm_weight", "decoder.layers.1.input_layernorm.weight"),
        ("decoder.layers.1.mlp.linear_fc1.layer_norm_weight", "decoder.layers.1.pre_mlp_layernorm.weight"),
        (
            "decoder.layers.2.mlp.experts.linear_fc2.weight4",
            "decoder.layers.2.mlp.experts.local_experts.4.linear_fc2.weight",
        ),
    ],
)
def test_names_of_transformer_engine_layers_mean_the_same(theirs: str, ours: str, folders: dict[str, Path]) -> None:
    shape = read_shape(folders["qwen3_moe"])
    assert place_of(theirs, shape) == place_of(ours, shape)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("llama", "decoder.layers.0.self_attention.q_layernorm.weight"),
        ("llama", "decoder.layers.0.self_attention.linear_qkv.bias"),
        ("llama", "decoder.layers.3.input_layernorm.weight"),
        ("llama", "decoder.layers.0.mlp.router.weight"),
        ("qwen3_moe-mixed", "decoder.layers.1.mlp.router.weight"),
        ("qwen3_moe-mixed", "decoder.layers.0.mlp.linear_fc1.weight"),
        ("qwen3_moe", "decoder.layers.0.mlp.experts.local_experts.6.linear_fc1.weight"),
        ("qwen3", "embedding.position_embeddings.weight"),
    ],
)
def test_a_parameter_that_the_model_does_not_have_is_refused(model: str, name: str, folders: dict[str, Path]) -> None:
    with pytest.raises(UnsupportedModelError, match=name):
        place_of(name, read_shape(folders[model]))


def test_local_names_become_global_ones() -> None:
    assert global_name("embedding.word_embeddings.weight", first_layer=4) == "embedding.word_embeddings.weight"
    assert (
        global_name("decoder.layers.1.mlp.linear_fc2.weight", first_layer=4) == "decoder.layers.5.mlp.linear_fc2.weight"
    )
    expert = "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight"
    grouped = "decoder.layers.0.mlp.experts.linear_fc1.weight1"
    expected = "decoder.layers.2.mlp.experts.local_experts.4.linear_fc1.weight"
    assert global_name(expert, first_layer=2, first_expert=3) == expected
    assert global_name(grouped, first_layer=2, first_expert=3) == expected


# -- who holds what ----------------------------------------------------------------------------------------------------


def shape_of_layers(layers: int, experts: int = 0) -> ModelShape:
    return ModelShape(
        model_type="qwen3_moe" if experts else "llama",
        num_layers=layers,
        hidden_size=8,
        ffn_hidden_size=8,
        num_attention_heads=2,
        num_query_groups=1,
        head_dim=4,
        vocab_size=5,
        max_position_embeddings=16,
        rms_norm_eps=1e-6,
        tied=False,
        qk_norm=False,
        qkv_bias=False,
        output_bias=False,
        rope={"rope_type": "default", "rope_theta": 1e4},
        experts=ExpertShape(
            num_experts=experts,
            top_k=1,
            moe_ffn_hidden_size=4,
            norm_topk_prob=False,
            sparse_layers=tuple(range(layers)),
        )
        if experts
        else None,
    )


def layer_places(shape: ModelShape) -> list[Place]:
    return [one for one in places(shape) if one.name.endswith("input_layernorm.weight")]


@pytest.mark.parametrize(
    ("pp_size", "chunks", "stages"),
    [
        (1, 1, [0, 0, 0, 0, 0, 0, 0, 0]),
        (2, 1, [0, 0, 0, 0, 1, 1, 1, 1]),
        (2, 2, [0, 0, 1, 1, 0, 0, 1, 1]),
        (2, 4, [0, 1, 0, 1, 0, 1, 0, 1]),
        (4, 2, [0, 1, 2, 3, 0, 1, 2, 3]),
    ],
)
def test_layers_go_to_the_stages_of_plain_and_interleaved_pipelines(
    pp_size: int, chunks: int, stages: list[int]
) -> None:
    shape = shape_of_layers(8)
    assert [stage_of(one, shape, pp_size=pp_size, chunks=chunks) for one in layer_places(shape)] == stages


def test_the_embedding_is_on_the_first_stage_and_the_head_on_the_last() -> None:
    shape = shape_of_layers(4)
    by_name = {one.name: stage_of(one, shape, pp_size=2, chunks=2) for one in places(shape) if one.layer is None}
    assert by_name == {
        "embedding.word_embeddings.weight": 0,
        "decoder.final_layernorm.weight": 1,
        "output_layer.weight": 1,
    }


def test_consecutive_experts_share_a_rank() -> None:
    shape = shape_of_layers(1, experts=6)
    held = {one.expert: expert_rank(one, shape, ep_size=3) for one in places(shape)}
    assert held == {None: None, 0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2}
