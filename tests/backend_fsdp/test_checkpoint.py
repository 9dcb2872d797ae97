"""Checkpoints: bitwise under the same layout, exact under another, exported to Hugging Face, and never trusted."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_testing import (
    PolicyGradient,
    assert_same,
    config_of,
    exported,
    make_model,
    make_rollout,
    model_weights,
    one_rank,
    train_here,
)
from transformers import AutoModelForCausalLM

from drivetrain_backend_api import TRAIN_BACKENDS, load_spec
from drivetrain_backend_api.errors import DataError
from drivetrain_backend_fsdp.checkpoint import export_checkpoint, read_metadata


@pytest.fixture(scope="module")
def saved(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One rank: two steps, a save, two more steps."""
    folder = tmp_path_factory.mktemp("saved")
    with one_rank(config_of(models["qwen3-tied"], lr_warmup_iters=6, global_batch_size=4)) as backend:
        train_here(backend, make_rollout(8, seed=1))
        backend.save_checkpoint(folder).finalize()
        before = exported(backend)
        random = torch.rand(3)
        metrics = backend.train(1, backend.preprocess_rollout_data(make_rollout(8, seed=2)), PolicyGradient(None))
        return {
            "folder": folder,
            "before": before,
            "random": random,
            "metrics": metrics,
            "after": exported(backend),
        }


def test_a_resumed_step_is_bitwise_the_one_that_would_have_come(saved: Any, models: dict[str, str]) -> None:
    config = config_of(models["qwen3-tied"], lr_warmup_iters=6, global_batch_size=4, load=str(saved["folder"]))
    with one_rank(config) as backend:
        assert backend.setup() == 1
        assert torch.equal(torch.rand(3), saved["random"])
        assert_same(exported(backend), saved["before"])
        metrics = backend.train(1, backend.preprocess_rollout_data(make_rollout(8, seed=2)), PolicyGradient(None))
        assert metrics == saved["metrics"]
        assert_same(exported(backend), saved["after"])


def test_two_ranks_resume_bitwise(on_ranks: Callable[[int], Any]) -> None:
    for one in (result["checkpoint"] for result in on_ranks(2)["results"]):
        assert one["next_rollout_id"] == 1
        assert_same(one["loaded"], one["saved"])
        assert one["found_metrics"] == one["expected_metrics"]
        assert_same(one["found"], one["expected"])


def check_resharding(launched: Any, model: str) -> None:
    """What several ranks wrote, one rank reads without a bit changed: weights, moments, step."""
    ranks = [one["checkpoint"] for one in launched["results"]]
    with one_rank(config_of(model, global_batch_size=4, load=str(launched["checkpoint"]))) as backend:
        assert backend.setup() == 1
        assert_same(exported(backend), ranks[0]["saved"])
        whole = {
            name: one if name.startswith("step.") else torch.cat([rank["moments"][name] for rank in ranks])
            for name, one in ranks[0]["moments"].items()
        }
        assert_same(backend.optimizer.state(), whole)
        assert backend.optimizer.steps == 2


def test_one_rank_reads_exactly_what_two_wrote(on_ranks: Callable[[int], Any], models: dict[str, str]) -> None:
    check_resharding(on_ranks(2), models["qwen3"])


@pytest.mark.slow
def test_one_rank_reads_exactly_what_four_wrote(on_ranks: Callable[[int], Any], models: dict[str, str]) -> None:
    check_resharding(on_ranks(4), models["qwen3"])


def test_an_exported_checkpoint_loads_in_transformers(saved: Any, models: dict[str, str], tmp_path: Path) -> None:
    tokenizer = Path(models["qwen3-tied"]) / "tokenizer_config.json"
    tokenizer.write_text("{}")
    spec = load_spec(TRAIN_BACKENDS, "fsdp")
    spec.load_export_checkpoint()(saved["folder"], Path(models["qwen3-tied"]), tmp_path / "out")
    tokenizer.unlink()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert_same(model_weights(model), saved["before"])
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == "{}"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out"]


def test_an_export_in_another_dtype_says_so_in_its_config(saved: Any, models: dict[str, str], tmp_path: Path) -> None:
    export_checkpoint(saved["folder"], Path(models["qwen3-tied"]), tmp_path / "out", torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert_same(model_weights(model), {name: one.bfloat16() for name, one in saved["before"].items()})


def test_an_export_leaves_a_folder_in_use_alone(saved: Any, models: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(DataError, match="exists already"):
        export_checkpoint(saved["folder"], Path(models["qwen3-tied"]), tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["mine"]


def test_a_checkpoint_of_another_model_is_refused_by_its_first_tensor(saved: Any, models: dict[str, str]) -> None:
    with (
        one_rank(config_of(models["qwen3"], load=str(saved["folder"]))) as backend,
        pytest.raises(DataError, match=r"another model.*lm_head\.weight.*--hf-checkpoint"),
    ):
        backend.setup()


def test_a_folder_without_a_checkpoint_is_refused(models: dict[str, str], tmp_path: Path) -> None:
    with (
        one_rank(config_of(models["qwen3"], load=str(tmp_path))) as backend,
        pytest.raises(DataError, match=r"no checkpoint.*trainer_state\.json"),
    ):
        backend.setup()


def test_a_damaged_state_file_is_refused_by_name(saved: Any, models: dict[str, str], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved["folder"], tmp_path / "copy"))
    state = json.loads((folder / "trainer_state.json").read_text())
    for damaged in (json.dumps(state)[:-5], json.dumps(state | {"stranger": 1}), json.dumps(state | {"format": 99})):
        (folder / "trainer_state.json").write_text(damaged)
        with pytest.raises(DataError, match=r"trainer_state\.json"):
            export_checkpoint(folder, Path(models["qwen3-tied"]), tmp_path / "out")


class Evil:
    """A pickle that runs a command when it is loaded."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.witness,)


def test_checkpoint_metadata_cannot_run_code(saved: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved["folder"], tmp_path / "copy"))
    (folder / "dcp" / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "witness")))
    with pytest.raises(DataError, match="has no place in a checkpoint's metadata"):
        read_metadata(folder)
    assert not (tmp_path / "witness").exists()


def test_large_exports_are_split_into_indexed_files(
    saved: Any, models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drivetrain_backend_fsdp.checkpoint._EXPORT_SHARD_BYTES", 8000)
    export_checkpoint(saved["folder"], Path(models["qwen3-tied"]), tmp_path / "out")
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert_same(model_weights(model), saved["before"])
    # The backend reads such an index too.
    with one_rank(config_of(str(tmp_path / "out"))) as backend:
        backend.setup()
        assert_same(exported(backend), saved["before"])


def test_bf16_models_train_in_fp32_and_export_in_bf16(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama", dtype="bfloat16")
    with one_rank(config_of(model, bf16=True, lr=1e-5)) as backend:
        train_here(backend, make_rollout(8))
        masters = exported(backend)
        assert any(not torch.equal(one, one.bfloat16().float()) for one in masters.values())
        assert_same(exported(backend, dtype=None), {name: one.bfloat16() for name, one in masters.items()})
