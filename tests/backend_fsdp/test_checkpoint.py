"""Checkpoints: exported to Hugging Face, looked at before they are loaded, and never trusted."""

import importlib
import json
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import TwoRanks
from fsdp_testing import BUFFER, assert_same, config_of, exported, model_weights, one_rank, rollout_of, train
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from transformers import AutoModelForCausalLM

from drivetrain_backend_api import TRAIN_BACKENDS, load_spec, manifest
from drivetrain_backend_api.checkpoint_files import read_metadata
from drivetrain_backend_api.errors import DataError
from drivetrain_backend_api.manifest import MANIFEST, read_manifest, record_of, write_manifest
from drivetrain_backend_api.schedule import LossScaler
from drivetrain_backend_api.sharded_checkpoint import Piece, read_pieces, stored_tensors
from drivetrain_backend_api.testing.models import make_model
from drivetrain_backend_fsdp.checkpoint import export_checkpoint, save_checkpoint
from drivetrain_backend_fsdp.checkpoint_files import check_checkpoint


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint and the weights in it."""

    folder: Path
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def saved(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """One rank, one step, a save."""
    folder = tmp_path_factory.mktemp("saved")
    with one_rank(config_of(models["qwen3-tied"], micro_batch_size=8)) as backend:
        backend.setup()
        train(backend, rollout_of())
        backend.save_checkpoint(folder).finalize()
        return Saved(folder=folder, weights=exported(backend))


def test_a_save_into_a_folder_that_some_rank_does_not_see_writes_nothing(two_ranks: TwoRanks) -> None:
    said = set(two_ranks.unshared)
    assert len(said) == 1
    (message,) = said
    assert message.startswith(f"rank 1 does not see the checkpoint folder {two_ranks.run / 'own_disk' / 'step_1'}")
    assert "--save must be a folder on a file system that all nodes share" in message
    assert list((two_ranks.run / "shared_disk" / "step_1").iterdir()) == []
    assert not (two_ranks.run / "own_disk").exists()


def test_an_exported_checkpoint_loads_in_transformers(saved: Saved, models: dict[str, Path], tmp_path: Path) -> None:
    tokenizer = models["qwen3-tied"] / "tokenizer_config.json"
    tokenizer.write_text("{}")
    spec = load_spec(TRAIN_BACKENDS, "fsdp")
    spec.load_export_checkpoint()(saved.folder, models["qwen3-tied"], tmp_path / "out")
    tokenizer.unlink()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert_same(model_weights(model), saved.weights)
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == "{}"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out"]


def test_an_export_in_another_dtype_says_so_in_its_config(
    saved: Saved, models: dict[str, Path], tmp_path: Path
) -> None:
    export_checkpoint(saved.folder, models["qwen3-tied"], tmp_path / "out", torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert_same(model_weights(model), {name: one.bfloat16() for name, one in saved.weights.items()})


def test_a_bf16_model_that_stores_its_embedding_as_the_head_exports_in_bf16(tmp_path: Path) -> None:
    source = make_model(tmp_path / "model", "qwen3-tied", dtype="bfloat16")
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "checkpoint").mkdir()
    with one_rank(config_of(source, lr=1e-5, micro_batch_size=8)) as backend:
        backend.setup()
        train(backend, rollout_of())
        backend.save_checkpoint(tmp_path / "checkpoint").finalize()
        expected = {name: one.bfloat16() for name, one in exported(backend).items()}
    export_checkpoint(tmp_path / "checkpoint", source, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {one.dtype for one in found.values()} == {torch.bfloat16}
    assert_same(found, expected)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_integer_and_boolean_buffers_are_exported_as_they_are(
    models: dict[str, Path], tmp_path: Path, dtype: torch.dtype | None
) -> None:
    # The next integer after 2^24 is the first that float32 cannot hold.
    buffers = {"model.seen": torch.tensor([2**24 + 1, -3]), "model.enabled": torch.tensor([True, False, True])}
    (tmp_path / "checkpoint").mkdir()
    with one_rank(config_of(models["qwen3"])) as backend:
        backend.setup()
        model = replace(backend._policy.model, weights={**backend._policy.model.weights, **buffers})
        save_checkpoint(
            tmp_path / "checkpoint",
            model,
            backend.optimizer,
            LossScaler(backend.config),
            backend._saver,
            next_rollout_id=0,
        )
    export_checkpoint(tmp_path / "checkpoint", models["qwen3"], tmp_path / "out", dtype)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: found[name].dtype for name in buffers} == {name: one.dtype for name, one in buffers.items()}
    assert_same({name: found[name] for name in buffers}, buffers)
    assert {one.dtype for name, one in found.items() if name not in buffers} == {dtype or torch.float32}


def test_an_export_that_cannot_tell_a_dtype_is_refused(saved: Saved, models: dict[str, Path], tmp_path: Path) -> None:
    source = Path(shutil.copytree(models["qwen3-tied"], tmp_path / "model"))
    tensors = load_file(source / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"no tensor 'model\.norm\.weight'.*--hf-checkpoint that training began with"):
        export_checkpoint(saved.folder, source, tmp_path / "out")
    (source / "config.json").write_text('{"model_type": "unheard-of"}')
    with pytest.raises(
        DataError, match=r"(?s)does not tell the dtype of every weight.*unheard-of.*choose one dtype with --dtype"
    ):
        export_checkpoint(saved.folder, source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_export_leaves_a_folder_in_use_alone(saved: Saved, models: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(DataError, match="exists already"):
        export_checkpoint(saved.folder, models["qwen3-tied"], tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["mine"]


def test_what_every_rank_has_whole_is_written_once(
    two_ranks: TwoRanks, models: dict[str, Path], tmp_path: Path
) -> None:
    export_checkpoint(two_ranks.checkpoint, models["qwen3"], tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.pop(BUFFER).tolist() == [7, 8]
    assert_same(found, load_file(models["qwen3"] / "model.safetensors"))


def test_tensors_that_dcp_itself_cut_and_wrote_are_read(saved: Saved, models: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved.folder, tmp_path / "copy"))
    sizes = {key: tuple(one.size) for key, one in stored_tensors(read_metadata(folder)).items()}
    whole = {key: torch.empty(size) for key, size in sizes.items()}
    pieces = [Piece(key=key, shape=sizes[key], offsets=(0,) * one.ndim, tensor=one) for key, one in whole.items()]
    read_pieces(folder, pieces, None, metadata=read_metadata(folder))
    shutil.rmtree(folder / "dcp")
    with pytest.warns(UserWarning, match="assuming the intent is to save in a single process"):
        dcp.save(whole, checkpoint_id=folder / "dcp", no_dist=True)
    relist(folder)
    with one_rank(config_of(models["qwen3-tied"], load=str(folder))) as backend:
        assert backend.setup() == 1
        assert_same(exported(backend), saved.weights)


def test_a_folder_without_a_checkpoint_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    with (
        one_rank(config_of(models["qwen3"], load=str(tmp_path))) as backend,
        pytest.raises(DataError, match=r"no checkpoint.*trainer_state\.json"),
    ):
        backend.setup()


def test_a_checkpoint_of_another_backend_is_refused_with_the_way_out(
    saved: Saved, models: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(saved.folder, tmp_path / "copy"))
    state = json.loads((folder / "trainer_state.json").read_text())
    (folder / "trainer_state.json").write_text(json.dumps(state | {"backend": "other"}))
    said = f"^{folder} was written by the other backend, and fsdp cannot read it; .*drivetrain export.*--hf-checkpoint$"
    with pytest.raises(DataError, match=said):
        export_checkpoint(folder, models["qwen3-tied"], tmp_path / "out")


def test_a_damaged_state_file_is_refused_by_name(saved: Saved, models: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved.folder, tmp_path / "copy"))
    state = json.loads((folder / "trainer_state.json").read_text())
    for damaged in (json.dumps(state)[:-5], json.dumps(state | {"stranger": 1}), json.dumps(state | {"format": 99})):
        (folder / "trainer_state.json").write_text(damaged)
        with pytest.raises(DataError, match=r"trainer_state\.json"):
            export_checkpoint(folder, models["qwen3-tied"], tmp_path / "out")


class Evil:
    """A pickle that runs a command when it is loaded."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.witness,)


def test_checkpoint_metadata_cannot_run_code(saved: Saved, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved.folder, tmp_path / "copy"))
    (folder / "dcp" / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "witness")))
    with pytest.raises(DataError, match="has no place in a checkpoint's metadata"):
        read_metadata(folder)
    assert not (tmp_path / "witness").exists()


def test_checkpoint_metadata_cannot_change_a_class(saved: Saved, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved.folder, tmp_path / "copy"))
    path = folder / "dcp" / ".metadata"
    module = "torch.distributed.checkpoint.metadata"
    victims = {
        ("pathlib", "PosixPath"): "is_dir",
        ("torch", "Size"): "numel",
        ("torch", "float32"): "itemsize",
        ("torch.serialization", "_get_layout"): "cache",
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): "offset",
        (module, "Metadata"): "state_dict_metadata",
        (module, "_MEM_FORMAT_ENCODING"): "TORCH_CONTIGUOUS_FORMAT",
    }
    for (where, name), attribute in victims.items():
        victim = getattr(importlib.import_module(where), name)
        before = dict(vars(victim)) if hasattr(victim, "__dict__") else None
        named, value = f"c{where}\n{name}\n", f"}}S'{attribute}'\nctorch\nSize\ns"
        for hostile in (f"{named}(N{value}tb.", f"{named}{value}b."):  # state of slots, state of a __dict__
            path.write_bytes(hostile.encode())
            with pytest.raises(DataError, match="is damaged"):
                read_metadata(folder)
        assert (dict(vars(victim)) if hasattr(victim, "__dict__") else None) == before
    assert Path(folder).is_dir() is True


def test_checkpoint_metadata_cannot_change_what_all_share(saved: Saved, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved.folder, tmp_path / "copy"))
    encodings = "ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
    hostile = f"{encodings}(I0\ntR}}S'_value_'\nI7\nsb."
    (folder / "dcp" / ".metadata").write_bytes(hostile.encode())
    with pytest.raises(DataError, match="is damaged"):
        read_metadata(folder)
    assert [one.value for one in _MEM_FORMAT_ENCODING] == [0, 1, 2]


def test_checkpoint_metadata_is_read_as_pickle_would_read_it(saved: Saved, two_ranks: TwoRanks) -> None:
    for folder in (saved.folder, two_ranks.checkpoint):
        assert read_metadata(folder) == pickle.loads((folder / "dcp" / ".metadata").read_bytes())


# -- is it whole? ------------------------------------------------------------------------------------------------------


@pytest.fixture
def copy(saved: Saved, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved.folder, tmp_path / "copy"))


def relist(folder: Path) -> None:
    """Write the list of the folder's files anew, as if they had been written as they are now."""
    names = [*read_manifest(folder)]
    write_manifest(folder, {name: record_of(folder / name) for name in names if (folder / name).exists()})


def shard_of(folder: Path) -> Path:
    (shard,) = (folder / "dcp").glob("*.distcp")
    return shard


def test_a_whole_checkpoint_is_found_whole(saved: Saved, two_ranks: TwoRanks) -> None:
    check = load_spec(TRAIN_BACKENDS, "fsdp").load_check_checkpoint()
    assert check(saved.folder, world_size=1) == []
    assert check(two_ranks.checkpoint, world_size=2) == []


def test_a_shard_that_is_cut_short_or_overwritten_or_gone_is_named(copy: Path) -> None:
    shard = shard_of(copy)
    content = shard.read_bytes()
    shard.write_bytes(content[:-200])
    assert check_checkpoint(copy) == [
        f"{shard} is cut short: it has {len(content) - 200} bytes of {len(content)}; use another checkpoint of the run"
    ]
    # what a machine that lost its power may leave: the length is right, the end was never written
    shard.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))
    (found,) = check_checkpoint(copy)
    assert found.startswith(f"{shard} is damaged: ")
    relist(copy)
    assert check_checkpoint(copy) == [
        f"{shard} is damaged: it holds something else than tensors; use another checkpoint of the run"
    ]
    shard.unlink()
    assert check_checkpoint(copy) == [f"{shard} is missing; use another checkpoint of the run"]
    shard.mkdir()
    (found,) = check_checkpoint(copy)
    assert found.startswith(f"{shard} cannot be read: ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 99}, "has format 99, this release reads 1; use the release that wrote it"),
        ({"world_size": 0}, "is damaged: world_size is 0, out of range"),
        ({"next_rollout_id": "one"}, "is damaged: next_rollout_id is 'one', which is no number of its kind"),
        ({"optimizer_steps": True}, "is damaged: optimizer_steps is True, which is no number of its kind"),
        ({"loss_scale": float("inf")}, "is damaged: loss_scale is inf, out of range"),
        ({"stranger": 1}, "is damaged: "),
    ],
)
def test_what_is_wrong_with_the_state_file_is_said(copy: Path, change: dict[str, Any], message: str) -> None:
    path = copy / "trainer_state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    (found,) = check_checkpoint(copy)
    assert found.startswith(f"{path} {message}")
    relist(copy)
    assert check_checkpoint(copy) == [found]


def test_random_states_are_looked_at_for_every_rank(copy: Path) -> None:
    path = copy / "trainer_state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"world_size": 3}))
    relist(copy)
    assert check_checkpoint(copy, world_size=3) == [
        f"{copy / 'rng_rank00001.safetensors'} is missing; use another checkpoint of the run"
    ]
    state = copy / "rng_rank00000.safetensors"
    save_file({"cpu": torch.zeros(3)}, state)
    first, _ = check_checkpoint(copy, world_size=3)
    assert first == f"{state} is damaged: it holds no random state of a CPU; use another checkpoint of the run"
    state.write_bytes(b"")
    first, _ = check_checkpoint(copy, world_size=3)
    assert first.startswith(f"{state} is damaged: ")


@pytest.mark.parametrize("content", [None, b""])
def test_random_states_that_nobody_will_read_may_be_missing_or_damaged(
    copy: Path, models: dict[str, Path], tmp_path: Path, content: bytes | None
) -> None:
    state = copy / "rng_rank00000.safetensors"
    state.unlink() if content is None else state.write_bytes(content)
    assert check_checkpoint(copy, world_size=2) == check_checkpoint(copy, world_size=None) == []
    assert len(check_checkpoint(copy, world_size=1)) == 1
    export_checkpoint(copy, models["qwen3-tied"], tmp_path / "out")


def test_all_that_is_wrong_is_found_at_once_and_nothing_is_executed(copy: Path, tmp_path: Path) -> None:
    hostile = pickle.dumps(Evil(tmp_path / "witness"))
    for path in copy.rglob("*"):
        if path.is_file():
            path.write_bytes(hostile)
    listed, state, metadata = check_checkpoint(copy)
    assert listed.startswith(f"{copy / MANIFEST} is damaged: ")
    assert state.startswith(f"{copy / 'trainer_state.json'} is damaged: ")
    assert metadata.startswith(f"{copy / 'dcp' / '.metadata'} is damaged: ")
    assert metadata.endswith(" has no place in a checkpoint's metadata; use another checkpoint of the run")
    assert not (tmp_path / "witness").exists()


def test_metadata_that_points_elsewhere_is_refused(copy: Path) -> None:
    metadata = read_metadata(copy)
    path = copy / "dcp" / ".metadata"

    def found_with(change: Callable[[Any], None]) -> str:
        changed = pickle.loads(pickle.dumps(metadata))
        change(changed)
        path.write_bytes(pickle.dumps(changed))
        (found,) = check_checkpoint(copy)
        return found

    def leave_the_folder(one: Any) -> None:
        next(iter(one.storage_data.values())).relative_path = "../trainer_state.json"

    def begin_before_the_file(one: Any) -> None:
        next(iter(one.storage_data.values())).offset = -1

    def forget_a_tensor(one: Any) -> None:
        del one.storage_data[next(iter(one.storage_data))]

    assert f"{path} is damaged: '../trainer_state.json' at " in found_with(leave_the_folder)
    assert " at -1 is no place in this folder" in found_with(begin_before_the_file)
    assert "it does not say where all of tensor " in found_with(forget_a_tensor)
    assert found_with(lambda one: setattr(one, "storage_data", 3)).startswith(f"{path} is damaged: ")


def test_a_damaged_tensor_is_refused_in_one_line(copy: Path, models: dict[str, Path], tmp_path: Path) -> None:
    shard = shard_of(copy)
    content = bytearray(shard.read_bytes())
    offsets = [one.offset for one in read_metadata(copy).storage_data.values()]
    for offset in offsets:
        content[offset + 60 : offset + 160] = b"\xff" * 100
    shard.write_bytes(content)
    relist(copy)
    with pytest.raises(DataError, match=r"^reading the checkpoint .*; use another checkpoint of the run$"):
        export_checkpoint(copy, models["qwen3-tied"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_one_changed_byte_of_the_tensors_is_found_when_all_bytes_are_read(
    copy: Path, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "SMALL_BYTES", 0)  # no file is as small as those of tiny models are
    shard = shard_of(copy)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert check_checkpoint(copy, world_size=1) == []
    said = f"^{shard} is damaged, or of another checkpoint: its checksum is not the one in {MANIFEST}; use another"
    (found,) = check_checkpoint(copy, world_size=1, full=True)
    assert re.match(said, found)
    config = config_of(models["qwen3-tied"], load=str(copy))
    with one_rank(config) as backend:
        backend.setup()
    with one_rank(replace(config, verify_checkpoint=True)) as backend, pytest.raises(DataError, match=said):
        backend.setup()
    with pytest.raises(DataError, match=said):
        export_checkpoint(copy, models["qwen3-tied"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_shard_that_is_cut_short_is_found_without_reading_it(
    copy: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "SMALL_BYTES", 0)
    shard = shard_of(copy)
    shard.write_bytes(shard.read_bytes()[:-1])
    with (
        one_rank(config_of(models["qwen3-tied"], load=str(copy))) as backend,
        pytest.raises(DataError, match=f"^{shard} is cut short: "),
    ):
        backend.setup()


def test_a_list_that_is_missing_or_not_its_own_is_named(copy: Path) -> None:
    path = copy / MANIFEST
    whole = path.read_text()
    another_number = whole.replace('": ', '": 1', 1)
    for damaged in ("", "[]", '{"files": 3, "crc32": 0}', whole[:-20], another_number):
        path.write_text(damaged)
        (found,) = check_checkpoint(copy)
        assert found.startswith(f"{path} is damaged: ")
    path.unlink()
    assert check_checkpoint(copy) == [
        f"{copy} is no complete checkpoint: {path} is missing; use another checkpoint of the run"
    ]


def test_a_file_that_another_added_and_listed_changes_nothing(copy: Path, models: dict[str, Path]) -> None:
    (copy / "run_state.json").write_text("{}")
    (found,) = check_checkpoint(copy, world_size=1)
    assert found.startswith(f"{copy / 'run_state.json'} is not in {MANIFEST}")
    write_manifest(copy, read_manifest(copy) | {"run_state.json": record_of(copy / "run_state.json")})
    assert check_checkpoint(copy, world_size=1, full=True) == []
    with one_rank(config_of(models["qwen3-tied"], load=str(copy), verify_checkpoint=True)) as backend:
        assert backend.setup() == 1


def test_tensors_that_the_list_does_not_cover_are_not_read(copy: Path, models: dict[str, Path]) -> None:
    shard = shard_of(copy)
    kept = {name: one for name, one in read_manifest(copy).items() if name != f"dcp/{shard.name}"}
    write_manifest(copy, kept)
    with (
        one_rank(config_of(models["qwen3-tied"], load=str(copy))) as backend,
        pytest.raises(DataError, match=f"^{copy / MANIFEST} does not cover dcp/{shard.name}; "),
    ):
        backend.setup()


# -- export ------------------------------------------------------------------------------------------------------------


def test_large_exports_are_split_into_indexed_files(
    saved: Saved, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drivetrain_backend_api.hf_export.SHARD_BYTES", 8000)
    export_checkpoint(saved.folder, models["qwen3-tied"], tmp_path / "out")
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert_same(model_weights(model), saved.weights)
    # The backend reads such an index too.
    with one_rank(config_of(tmp_path / "out")) as backend:
        backend.setup()
        assert_same(exported(backend), saved.weights)
