"""How a model folder's `config.json` becomes a shape, what is refused, and what cannot be cut."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from drivetrain_backend_api.errors import DataError, UnsupportedModelError
from drivetrain_backend_megatron.architectures import ModelShape, differences, read_shape
from drivetrain_backend_megatron.checks import layout_findings, model_findings, validate
from drivetrain_backend_megatron.config import MegatronConfig
from drivetrain_infra.config import PlacementConfig

SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "head_dim": 10,
    "norm_topk_prob": True,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def table_of(config: PretrainedConfig, folder: Path, **changes: Any) -> dict[str, Any]:
    """Return what transformers writes, with changes; a change to None takes the key away."""
    config.save_pretrained(folder)
    table: dict[str, Any] = json.loads((folder / "config.json").read_text()) | changes
    return {key: value for key, value in table.items() if key not in changes or value is not None}


def shape_with(folder: Path, config: PretrainedConfig | None = None, **changes: Any) -> ModelShape:
    table = table_of(config or LlamaConfig(**SIZES), folder, **changes)
    (folder / "config.json").write_text(json.dumps(table))
    return read_shape(folder)


# -- reading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES),
        LlamaConfig(head_dim=10, rms_norm_eps=1e-5, tie_word_embeddings=True, **SIZES),
        Qwen2Config(tie_word_embeddings=True, **SIZES),
        Qwen3Config(head_dim=10, rope_parameters={"rope_type": "default", "rope_theta": 1e6}, **SIZES),
        Qwen3Config(**SIZES),
        Qwen3MoeConfig(**SIZES, **EXPERTS),
    ],
    ids=["llama", "llama-tied", "qwen2", "qwen3", "qwen3-default-head", "qwen3_moe"],
)
def test_what_transformers_writes_is_read_back(config: PretrainedConfig, tmp_path: Path) -> None:
    shape = shape_with(tmp_path, config)
    assert shape.model_type == config.model_type
    assert (shape.num_layers, shape.hidden_size, shape.ffn_hidden_size) == (4, 48, 96)
    assert (shape.num_attention_heads, shape.num_query_groups, shape.vocab_size) == (8, 4, 67)
    assert shape.head_dim == (getattr(config, "head_dim", None) or 6)
    assert (shape.rms_norm_eps, shape.tied) == (config.rms_norm_eps, config.tie_word_embeddings)
    assert shape.rope == config.rope_parameters
    assert shape.qk_norm == config.model_type.startswith("qwen3")
    assert (shape.qkv_bias, shape.output_bias) == (config.model_type == "qwen2", False)


def test_attention_bias_is_of_all_four_projections_except_in_qwen2(tmp_path: Path) -> None:
    llama = shape_with(tmp_path, LlamaConfig(attention_bias=True, **SIZES))
    assert (llama.qkv_bias, llama.output_bias) == (True, True)
    qwen2 = shape_with(tmp_path, Qwen2Config(**SIZES), attention_bias=True)
    assert (qwen2.qkv_bias, qwen2.output_bias) == (True, False)


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({}, (0, 1, 2, 3)),
        ({"mlp_only_layers": [0, 3]}, (1, 2)),
        ({"decoder_sparse_step": 2}, (1, 3)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, (3,)),
    ],
)
def test_sparse_blocks_follow_step_and_exceptions(
    changes: dict[str, Any], sparse: tuple[int, ...], tmp_path: Path
) -> None:
    experts = shape_with(tmp_path, Qwen3MoeConfig(**SIZES, **EXPERTS), **changes).experts
    assert experts is not None
    assert experts.sparse_layers == sparse
    assert (experts.num_experts, experts.top_k, experts.moe_ffn_hidden_size, experts.norm_topk_prob) == (6, 2, 16, True)


def test_both_spellings_of_the_number_of_experts_are_read(tmp_path: Path) -> None:
    written = shape_with(tmp_path, Qwen3MoeConfig(**SIZES, **EXPERTS))
    old = shape_with(tmp_path, Qwen3MoeConfig(**SIZES, **EXPERTS), num_local_experts=None, num_experts=6)
    assert written == old


def test_a_model_whose_blocks_are_all_dense_has_no_experts(tmp_path: Path) -> None:
    assert shape_with(tmp_path, Qwen3MoeConfig(**SIZES, **EXPERTS), mlp_only_layers=[0, 1, 2, 3]).experts is None


@pytest.mark.parametrize(
    "old",
    [
        {"rope_theta": 500000.0, "rope_scaling": None},
        {"rope_theta": 20000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 500000.0, "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    ],
    ids=["theta", "linear", "llama3", "yarn"],
)
def test_the_old_spelling_of_rope_means_what_it_means_to_transformers(old: dict[str, Any], tmp_path: Path) -> None:
    table = table_of(LlamaConfig(**SIZES), tmp_path, rope_parameters=None, **old)
    (tmp_path / "config.json").write_text(json.dumps(table))
    meant: dict[str, Any] = LlamaConfig.from_pretrained(tmp_path).to_dict()["rope_parameters"]
    meant.pop("type", None)  # transformers keeps the old key beside the new one
    assert read_shape(tmp_path).rope == meant


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"model_type": "gemma2"}, "model_type 'gemma2'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"use_sliding_window": True, "sliding_window": 32}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "sliding-window"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_type 'longrope'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters for each type of layer"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "num_attention_heads 8 that is no multiple of num_key_value_heads 3"),
        ({"head_dim": 7}, "odd head_dim 7"),
    ],
)
def test_what_is_not_computed_is_refused_with_the_list_of_what_is(
    changes: dict[str, Any], what: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        shape_with(tmp_path, **changes)
    message = str(caught.value)
    assert what in message
    assert str(tmp_path / "config.json") in message
    assert "llama, qwen2, qwen3, qwen3_moe" in message


def test_a_sliding_window_that_is_switched_off_is_taken(tmp_path: Path) -> None:
    shape_with(tmp_path, Qwen2Config(**SIZES), use_sliding_window=False, sliding_window=32)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"model_type": None}, "names no model_type"),
        ({"hidden_size": None}, "hidden_size must be a whole number of 1 or more, and is None"),
        ({"num_hidden_layers": "four"}, "num_hidden_layers must be a whole number of 1 or more, and is 'four'"),
        ({"vocab_size": True}, "vocab_size must be a whole number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a number above 0"),
        ({"rope_parameters": "llama3"}, "rope_parameters 'llama3' is no table"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor must be a number above 0, and is None"),
    ],
)
def test_a_damaged_configuration_is_refused_with_file_and_key(
    changes: dict[str, Any], what: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as caught:
        shape_with(tmp_path, **changes)
    assert what in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_a_folder_without_configuration_or_with_a_broken_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no config\.json"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"')
    with pytest.raises(DataError, match=r"cannot be read.*copy the model again"):
        read_shape(tmp_path)


def test_more_experts_a_token_than_there_are_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="num_experts_per_tok 9 exceeds num_local_experts 6"):
        shape_with(tmp_path, Qwen3MoeConfig(**SIZES, **EXPERTS), num_experts_per_tok=9)


# -- layouts -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return shape_with(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return shape_with(tmp_path_factory.mktemp("moe"), Qwen3MoeConfig(**SIZES, **EXPERTS))


def layout(tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, **more: Any) -> MegatronConfig:
    return MegatronConfig(
        hf_checkpoint="model",
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        **more,
    )


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (layout(tp=8), "--tensor-model-parallel-size 8 does not divide the model's 4 key-value heads; give 1, 2 or 4"),
        (layout(tp=3), "8 attention heads and 4 key-value heads; give 1, 2 or 4"),
        (layout(cp=3), "--context-parallel-size 3 cannot share out the 8 attention heads and 4 key-value heads"),
        (layout(tp=2, cp=8), "the 4 attention heads and 2 key-value heads of a tensor-parallel rank; give 1, 2 or 4"),
        (layout(pp=3), "--pipeline-model-parallel-size 3 does not divide the model's 4 layers; give 1, 2 or 4"),
        (
            layout(pp=2, num_layers_per_virtual_pipeline_stage=3),
            "--num-layers-per-virtual-pipeline-stage 3 does not divide the 2 layers of a pipeline stage; give 1 or 2",
        ),
        (
            layout(pp=2, recompute_granularity="full", recompute_num_layers=3),
            "--recompute-num-layers 3 exceeds the 2 layers of a pipeline stage",
        ),
        (layout(ep=2), "--expert-model-parallel-size 2 needs a mixture-of-experts model, and llama here is dense"),
    ],
)
def test_a_layout_that_a_dense_model_does_not_allow_is_refused_with_what_works(
    config: MegatronConfig, sentence: str, llama: ModelShape
) -> None:
    (finding,) = layout_findings(llama, config)
    assert sentence in finding


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (layout(ep=4), "--expert-model-parallel-size 4 does not divide the model's 6 experts; give 1, 2, 3 or 6"),
        (layout(tp=2), "with --tensor-model-parallel-size above 1 needs --sequence-parallel"),
    ],
)
def test_a_layout_that_experts_do_not_allow_is_refused(config: MegatronConfig, sentence: str, moe: ModelShape) -> None:
    (finding,) = layout_findings(moe, config)
    assert sentence in finding


@pytest.mark.parametrize(
    "config",
    [
        layout(),
        layout(tp=4, pp=4, cp=2),
        layout(cp=8),
        layout(tp=2, cp=4, sequence_parallel=True),
        layout(pp=2, num_layers_per_virtual_pipeline_stage=1),
    ],
)
def test_a_layout_that_fits_has_no_findings(config: MegatronConfig, llama: ModelShape) -> None:
    assert layout_findings(llama, config, world_size=config.model_parallel_size * 2) == []


def test_key_value_heads_must_be_shared_out_or_repeated_evenly(llama: ModelShape) -> None:
    three_groups = replace(llama, num_attention_heads=12, num_query_groups=3)
    (finding,) = layout_findings(three_groups, layout(cp=2))
    assert "give 1, 3, 6 or 12" in finding
    assert layout_findings(three_groups, layout(cp=6)) == []


def test_experts_fit_beside_tensor_parallel_ranks(moe: ModelShape) -> None:
    assert layout_findings(moe, layout(tp=2, ep=2, sequence_parallel=True), world_size=2) == []


def test_the_rows_of_a_dense_mlp_count_only_where_there_is_one(llama: ModelShape, moe: ModelShape) -> None:
    config = layout(tp=4, sequence_parallel=True)
    assert "97 rows of each MLP" in layout_findings(replace(llama, ffn_hidden_size=97), config)[0]
    assert layout_findings(replace(moe, ffn_hidden_size=97), config) == []


def test_ranks_that_fill_no_whole_replicas_are_refused(llama: ModelShape) -> None:
    (finding,) = layout_findings(llama, layout(tp=2, pp=2), world_size=6)
    assert "6 train workers" in finding
    assert "no multiple of 4" in finding


def test_experts_that_do_not_fit_the_ranks_of_a_stage_are_refused(moe: ModelShape) -> None:
    (finding,) = layout_findings(moe, layout(pp=2, ep=6), world_size=6)
    assert "--expert-model-parallel-size 6 does not divide the 3 train workers of a pipeline stage" in finding


# -- whole configurations ----------------------------------------------------------------------------------------------


def model_folder(folder: Path, config: PretrainedConfig) -> str:
    config.save_pretrained(folder)
    (folder / "model.safetensors").touch()
    return str(folder)


def test_a_teacher_of_another_shape_is_refused_with_the_way_out(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", LlamaConfig(**SIZES))
    larger = model_folder(tmp_path / "larger", LlamaConfig(**SIZES | {"num_hidden_layers": 6}))
    (finding,) = model_findings(MegatronConfig(hf_checkpoint=model, opd_teacher_load=larger))
    assert f"--opd-teacher-load {larger}: another model than --hf-checkpoint (num_layers 6, not 4)" in finding
    assert "--train-backend fsdp, which keeps it as a separate model" in finding
    assert model_findings(MegatronConfig(hf_checkpoint=larger, opd_teacher_load=larger)) == []
    assert "--ref-load" in model_findings(MegatronConfig(hf_checkpoint=model, ref_load=larger))[0]
    assert "give one of this model" in model_findings(MegatronConfig(hf_checkpoint=model, load=larger))[0]


def test_a_longer_context_alone_makes_no_other_model(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", LlamaConfig(**SIZES))
    longer = model_folder(tmp_path / "longer", LlamaConfig(**SIZES | {"max_position_embeddings": 4096}))
    assert model_findings(MegatronConfig(hf_checkpoint=model, ref_load=longer)) == []


def test_another_rotary_base_makes_another_model(llama: ModelShape) -> None:
    other = replace(llama, rope={"rope_type": "default", "rope_theta": 5e5})
    assert [one.split()[0] for one in differences(other, llama)] == ["rope"]


def test_a_reference_that_is_no_hugging_face_folder_is_passed_over(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", LlamaConfig(**SIZES))
    (tmp_path / "iter_0000001").mkdir()
    assert model_findings(MegatronConfig(hf_checkpoint=model, ref_load=str(tmp_path / "iter_0000001"))) == []


def test_a_refused_model_is_named_with_its_flag(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", LlamaConfig(mlp_bias=True, **SIZES))
    (finding,) = model_findings(MegatronConfig(hf_checkpoint=model))
    assert finding.startswith(f"--hf-checkpoint {model}/config.json: mlp_bias is not supported")


def test_layout_and_ranks_are_checked_against_the_model_folder(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", LlamaConfig(**SIZES))
    config = MegatronConfig(hf_checkpoint=model, pipeline_model_parallel_size=3)
    # the numbers of workers that would fit are not listed for sizes that do not work
    assert model_findings(config) == model_findings(config, world_size=4)
    assert len(model_findings(config)) == 1
    works = MegatronConfig(hf_checkpoint=model, pipeline_model_parallel_size=2)
    assert model_findings(works, world_size=4) == []
    (finding,) = model_findings(works, world_size=3)
    assert "3 train workers" in finding


def test_a_whole_configuration_is_checked_with_the_workers_that_it_places(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", LlamaConfig(**SIZES))
    train = MegatronConfig(hf_checkpoint=model, tensor_model_parallel_size=2)
    placement = PlacementConfig(actor_num_nodes=2, actor_num_gpus_per_node=3)
    assert validate(SimpleNamespace(train=train, placement=placement)) == []
    placement = PlacementConfig(actor_num_nodes=1, actor_num_gpus_per_node=3)
    assert "3 train workers" in validate(SimpleNamespace(train=train, placement=placement))[0]


def test_the_ranks_are_checked_even_where_the_model_cannot_be_read(tmp_path: Path) -> None:
    config = MegatronConfig(hf_checkpoint=str(tmp_path), pipeline_model_parallel_size=3)
    assert model_findings(config) == []
    assert len(model_findings(config, world_size=4)) == 1
