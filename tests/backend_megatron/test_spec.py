"""What discovery and the preflight see of the backend, without torch, transformers or Megatron."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drivetrain_backend_api import TRAIN_BACKENDS, ConfigError, load_spec, options, select_backend
from drivetrain_backend_megatron.config import MegatronConfig

SPEC = load_spec(TRAIN_BACKENDS, "megatron")

DENSE = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder without weights, which nothing here reads."""
    return write_model(tmp_path / "model", DENSE)


def write_model(folder: Path, table: Mapping[str, object]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(table))
    (folder / "model.safetensors").touch()
    return folder


def findings(model: Path, *, ranks: int = 1, **changes: Any) -> list[str]:
    """What `validate` says about a whole configuration."""
    config = MegatronConfig(hf_checkpoint=str(model), **changes)
    return SPEC.validate(SimpleNamespace(train=config, placement=SimpleNamespace(train_world_size=ranks)))


def test_spec_options_and_checks_import_no_heavy_library(model: Path) -> None:
    code = (
        "import sys; from drivetrain_backend_megatron.spec import SPEC; assert SPEC.probe().available; "
        "from drivetrain_backend_megatron import checks, load_kind;"
        f"checks.model_findings(SPEC.config_class(hf_checkpoint={str(model)!r}));"
        "print(sorted({'torch', 'transformers', 'safetensors', 'megatron', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_the_probe_names_versions_and_layers() -> None:
    probe = SPEC.probe()
    assert probe.available
    assert "torch " in probe.detail
    assert "megatron-core " in probe.detail
    assert "layers: local" in probe.detail


def test_it_is_the_default_where_fsdp_is_installed_too() -> None:
    assert SPEC.preference > load_spec(TRAIN_BACKENDS, "fsdp").preference
    assert select_backend(None) is SPEC


def test_it_claims_every_parallelism_and_keeps_frozen_models_as_tags() -> None:
    assert SPEC.capabilities.parallelism == ("dp", "tp", "sp", "pp", "cp", "ep")
    assert (SPEC.capabilities.reference, SPEC.capabilities.teacher) == ("tag", "tag")
    assert SPEC.capabilities.resharding


def test_each_set_of_neutral_options_makes_a_configuration_that_is_not_the_default() -> None:
    known = {one.name: one for one in options(MegatronConfig)}
    # what an option of a pipeline needs beside it
    stages = {"num_layers_per_virtual_pipeline_stage": {"pipeline_model_parallel_size": 2}}
    assert SPEC.neutral_options
    for chosen in SPEC.neutral_options:
        beside = {name: value for one in chosen for name, value in stages.get(one, {}).items()}
        config = MegatronConfig(hf_checkpoint="x", **beside, **chosen)
        assert all(getattr(config, name) == value != known[name].default for name, value in chosen.items())


@pytest.mark.parametrize(
    ("changes", "ranks", "finding"),
    [
        ({}, 1, None),
        ({"tensor_model_parallel_size": 4, "sequence_parallel": True}, 4, None),
        ({"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}, 2, None),
        ({"context_parallel_size": 2, "tensor_model_parallel_size": 2}, 8, None),
        (
            {"tensor_model_parallel_size": 3},
            3,
            "--tensor-model-parallel-size 3 does not divide the model's 8 attention heads and 4 key-value heads; "
            "give 1, 2 or 4",
        ),
        (
            {"pipeline_model_parallel_size": 3},
            3,
            "--pipeline-model-parallel-size 3 does not divide the model's 4 layers; give 1, 2 or 4",
        ),
        (
            {"expert_model_parallel_size": 2},
            2,
            "--expert-model-parallel-size 2 needs a mixture-of-experts model, and qwen3 here is dense; drop it",
        ),
        (
            {"tensor_model_parallel_size": 2},
            3,
            "3 train workers (--actor-num-nodes x --actor-num-gpus-per-node) are no multiple of 2 "
            "(--tensor-model-parallel-size 2 x --pipeline-model-parallel-size 1 x --context-parallel-size 1); give "
            "such a number of them",
        ),
    ],
)
def test_the_whole_configuration_is_held_against_the_model(
    model: Path, changes: dict[str, Any], ranks: int, finding: str | None
) -> None:
    assert findings(model, ranks=ranks, **changes) == ([] if finding is None else [finding])


def test_a_model_that_it_does_not_build_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", {**DENSE, "model_type": "gemma2"})
    (found,) = findings(other)
    assert found.startswith(f"--hf-checkpoint {other / 'config.json'}: ")
    assert "gemma2" in found


def test_a_teacher_of_another_size_is_refused_with_what_takes_one(model: Path, tmp_path: Path) -> None:
    larger = write_model(tmp_path / "larger", {**DENSE, "num_hidden_layers": 8})
    assert findings(model, opd_teacher_load=str(model)) == []
    (found,) = findings(model, opd_teacher_load=str(larger))
    assert found.startswith(f"--opd-teacher-load {larger}: another model than --hf-checkpoint (")
    assert found.endswith("or --train-backend fsdp, which keeps it as a separate model")


def test_layers_of_transformer_engine_are_refused_where_it_is_not_installed(model: Path) -> None:
    if find_spec("transformer_engine") is not None:
        assert findings(model, transformer_impl="transformer_engine") == []
        return
    assert findings(model, transformer_impl="transformer_engine") == [
        "--transformer-impl transformer_engine: TransformerEngine is not installed; "
        "pip install 'transformer-engine[pytorch]' (never run with it so far), or take --transformer-impl local"
    ]


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        ({"experimental_diffusion": True}, "--experimental-diffusion: experimental, not built; drop it"),
        (
            {"sequence_parallel": True},
            "--sequence-parallel needs --tensor-model-parallel-size of 2 or more; give both or neither",
        ),
        ({"overlap_param_gather": True}, "--overlap-param-gather needs --overlap-grad-reduce; give both"),
    ],
)
def test_options_that_cannot_work_by_themselves_are_refused(changes: dict[str, Any], finding: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MegatronConfig(hf_checkpoint="x", **changes)
    assert str(caught.value) == finding


def test_a_worker_gets_its_memory_saver_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = MegatronConfig(hf_checkpoint="x", sleep_tier="memory_saver")
    for other in ("auto", "offload", "process_groups"):
        assert SPEC.worker_env(replace(config, sleep_tier=other)) == {}
    package = tmp_path / "torch_memory_saver"
    package.mkdir()
    (package / "__init__.py").touch()
    for name in ("", "_cu12", "_cu13"):
        (tmp_path / f"torch_memory_saver_hook_mode_preload{name}.abi3.so").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("LD_PRELOAD", "libother.so")
    asked = SPEC.worker_env(config)
    library, other = asked["LD_PRELOAD"].split(":")
    assert Path(library).parent == tmp_path
    assert other == "libother.so"
    assert asked["TMS_INIT_ENABLE"] == "1"


@pytest.mark.parametrize(
    ("files", "taken"),
    [
        (("config.json", "model.safetensors"), True),
        (("config.json", "model.safetensors.index.json"), True),
        ((".metadata", "common.pt", "metadata.json"), True),
        (("latest_checkpointed_iteration.txt",), True),
        (("trainer_state.json", "manifest.json", ".metadata", "metadata.json"), False),
        # transformers' trainer writes a file of that name too
        (("trainer_state.json", "config.json", "model.safetensors"), True),
        (("config.json", "latest"), False),
        ((), False),
    ],
)
def test_folders_of_weights_alone_are_told_from_checkpoints(
    tmp_path: Path, files: tuple[str, ...], taken: bool
) -> None:
    for name in files:
        (tmp_path / name).touch()
    assert SPEC.load_takes_weights_of()(tmp_path) is taken
    assert not load_spec(TRAIN_BACKENDS, "fsdp").load_takes_weights_of()(tmp_path)
