import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

from drivetrain_backend_api import ConfigError
from drivetrain_launcher.config import DrivetrainConfig
from drivetrain_launcher.preflight import preflight
from drivetrain_launcher.sources import build_config, read_request

Words = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a whole model, in two weight files with an index, and prompts."""
    model = tmp_path / "model"
    model.mkdir()
    write_json(model / "config.json", {"model_type": "qwen3", "max_position_embeddings": 64})
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(model / "tokenizer.json"))
    save_file({"one": np.ones((4, 3), np.float32)}, model / "part-1.safetensors")
    save_file({"two": np.ones(5, np.float16), "three": np.ones(2, np.int64)}, model / "part-2.safetensors")
    write_index(model, one="part-1.safetensors", two="part-2.safetensors", three="part-2.safetensors")
    write_lines(tmp_path / "train.jsonl", {"q": "1+1", "a": "2"}, {"q": "1+2", "a": "3"})
    return tmp_path


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), "utf-8")


def write_index(model: Path, **weight_map: str) -> None:
    write_json(model / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def write_lines(path: Path, *rows: object) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def config_of(folder: Path, **changes: object) -> DrivetrainConfig:
    """Return a configuration that passes, but for `changes`."""
    options: Words = {
        "train_backend": "fsdp",
        "hf_checkpoint": folder / "model",
        "prompt_data": folder / "train.jsonl",
        "input_key": "q",
        "label_key": "a",
        "num_rollout": 1,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 4,
        "rollout_max_response_len": 32,
        "save": folder / "run",
    } | changes
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value is not None]
    return build_config(read_request(words, {}))


def findings(folder: Path, **changes: object) -> list[str]:
    try:
        preflight(config_of(folder, **changes))
    except ConfigError as error:
        return str(error).splitlines()
    return []


def test_a_run_that_can_start_passes_and_leaves_nothing_behind(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    assert findings(folder) == []
    assert sorted(folder.rglob("*")) == before


def test_everything_is_found_at_once(folder: Path) -> None:
    (folder / "file").touch()
    found = findings(
        folder,
        hf_checkpoint=folder / "nowhere",
        prompt_data=folder / "absent.jsonl",
        save=folder / "file",
        global_batch_size=5,
        reward="no_such_module:score",
        n_samples_per_prompt=1,
    )
    assert [one.partition(":")[0] for one in found] == [
        "--n-samples-per-prompt 1",
        f"--hf-checkpoint {folder / 'nowhere'}",
        f"--prompt-data {folder / 'absent.jsonl'}",
        "--global-batch-size 5 does not divide the 4 samples of a rollout (--rollout-batch-size 4 x "
        "--n-samples-per-prompt 1); choose a divisor",
        "--reward no_such_module",
        f"--save {folder / 'file'}",
    ]


# -- model folder ------------------------------------------------------------------------------------------------------


def test_a_truncated_weight_file_is_named_with_both_sizes(folder: Path) -> None:
    file = folder / "model" / "part-1.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert findings(folder) == [
        f"--hf-checkpoint {file}: has {len(whole) - 1} bytes where its header promises {len(whole)}; fetch it again"
    ]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        b"\x02" + bytes(7) + b"[]",
        b"\x02" + bytes(7) + b"{",
        b"\x0a" + bytes(7) + b'{"a": "b"}',
    ],
)
def test_what_is_no_safetensors_file_is_said_so(folder: Path, content: bytes) -> None:
    file = folder / "model" / "part-2.safetensors"
    file.write_bytes(content)
    (found,) = findings(folder)
    assert found.startswith(f"--hf-checkpoint {file}: is no safetensors file (a download that failed, or a Git LFS")


def test_a_missing_weight_file_is_named(folder: Path) -> None:
    (folder / "model" / "part-2.safetensors").unlink()
    assert findings(folder) == [f"--hf-checkpoint {folder}/model/part-2.safetensors: No such file or directory"]


def test_a_tensor_that_the_index_promises_in_vain_is_named(folder: Path) -> None:
    write_index(folder / "model", one="part-1.safetensors", four="part-1.safetensors")
    (found,) = findings(folder)
    assert found.endswith("part-1.safetensors: lacks 1 tensors that the index promises, such as four")


def test_an_index_without_a_map_is_refused(folder: Path) -> None:
    write_json(folder / "model" / "model.safetensors.index.json", {"weight_map": {"one": 1}})
    (found,) = findings(folder)
    assert found.endswith("model.safetensors.index.json: has no weight_map from tensors to files")


def test_a_single_weight_file_needs_no_index(folder: Path) -> None:
    for file in (folder / "model").glob("*.safetensors*"):
        file.unlink()
    (found,) = findings(folder)
    assert found.endswith("holds no weights (model.safetensors, or model.safetensors.index.json and its files)")
    save_file({"one": np.ones(3, np.float32)}, folder / "model" / "model.safetensors")
    assert findings(folder) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is no JSON: "),
        (b"\xff", "is no JSON: "),
        (b"[" * 100_000, "is no JSON: "),
        (b"[]", "must be a JSON object, found list"),
        (b"{}", "names no model_type"),
        (None, "No such file or directory"),
    ],
)
def test_a_broken_model_configuration_is_named(folder: Path, content: bytes | None, message: str) -> None:
    path = folder / "model" / "config.json"
    path.unlink() if content is None else path.write_bytes(content)
    (found,) = findings(folder)
    assert found.startswith(f"--hf-checkpoint {path}: ")
    assert message in found


def test_the_tokenizer_must_be_there_for_the_policy_only(folder: Path) -> None:
    (folder / "model" / "tokenizer.json").unlink()
    found = findings(folder, ref_load=folder / "model")
    assert [one for one in found if "tokenizer" in one] == [
        f"--hf-checkpoint {folder / 'model'}: holds no tokenizer (one of tokenizer.json, tokenizer.model, vocab.json, "
        "vocab.txt, spiece.model)"
    ]


def test_other_model_folders_are_checked_under_their_own_flags(folder: Path) -> None:
    found = findings(folder, ref_load=folder / "r", opd_teacher_load=folder / "t", load=folder / "l")
    assert {f"--ref-load {folder / 'r'}", f"--opd-teacher-load {folder / 't'}", f"--load {folder / 'l'}"} <= {
        one.partition(": no such folder")[0] for one in found
    }


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"rollout_max_response_len": 64}, "--rollout-max-response-len 64 and a prompt"),
        ({"rollout_max_prompt_len": 33}, "--rollout-max-response-len 32 and --rollout-max-prompt-len 33"),
        ({"eval_max_response_len": 100}, "--eval-max-response-len 100 and a prompt"),
    ],
)
def test_responses_longer_than_the_models_positions_are_refused(folder: Path, changes: Words, flag: str) -> None:
    assert findings(folder, **changes) == [f"{flag} exceed the 64 positions of {folder / 'model'}; lower it"]


def test_the_longest_response_that_fits_is_accepted(folder: Path) -> None:
    assert findings(folder, rollout_max_response_len=63) == []
    assert findings(folder, rollout_max_prompt_len=32) == []


# -- prompts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", ": holds no prompts"),
        (b"\n  \n", ": holds no prompts"),
        (b'{"q": 1, "a": 2}\n{"q": 1, "a"', ", last line: is no JSON: "),
        (b'{"q": 1, "a": 2}\n[1]\n\n', ", last line: must be a JSON object, found list"),
        (b'\n{"q": 1}\n{"q": 1, "a": 2}', ", first line: has no 'a' (--label-key); it has 'q'"),
        (b'{"q": 1, "a": 2}\n{}\n', ", last line: has no 'q' (--input-key); it has nothing"),
        (b'{"q": "\xff", "a": 2}\n', ", first line: is no JSON: "),
        (b'{"q": ' + b"[" * 100_000 + b"\n", ", first line: is no JSON: "),
    ],
)
def test_the_first_and_the_last_line_are_read(folder: Path, content: bytes, message: str) -> None:
    (folder / "train.jsonl").write_bytes(content)
    (found,) = findings(folder)
    assert found.startswith(f"--prompt-data {folder / 'train.jsonl'}{message}")


def test_a_last_line_longer_than_a_block_is_read_whole(folder: Path) -> None:
    rows = [{"q": "1", "a": "2"}, {"q": "x" * 200_000, "b": "2"}]
    write_lines(folder / "train.jsonl", *rows)
    (found,) = findings(folder)
    assert found.endswith("last line: has no 'a' (--label-key); it has 'q', 'b'")


def test_held_out_prompts_and_metadata_are_checked_too(folder: Path) -> None:
    write_lines(folder / "eval.jsonl", {"q": "1", "a": "1", "m": {}})
    found = findings(folder, eval_prompt_data=folder / "eval.jsonl", metadata_key="m")
    assert found == [
        f"--prompt-data {folder / 'train.jsonl'}, first line: has no 'm' (--metadata-key); it has 'q', 'a'"
    ]
    (found,) = findings(folder, eval_prompt_data=folder)
    assert found == f"--eval-prompt-data {folder}: must be a .jsonl or .parquet file"


def test_parquet_columns_are_checked(folder: Path) -> None:
    path = folder / "train.parquet"
    parquet.write_table(pyarrow.table({"q": ["1"], "a": ["1"]}), path)
    assert findings(folder, prompt_data=path) == []
    assert findings(folder, prompt_data=path, label_key="b") == [
        f"--prompt-data {path}: has no 'b' (--label-key); it has 'q', 'a'"
    ]
    parquet.write_table(pyarrow.table({"q": pyarrow.array([], "string"), "a": pyarrow.array([], "string")}), path)
    assert findings(folder, prompt_data=path) == [f"--prompt-data {path}: holds no prompts"]
    path.write_bytes(b"PAR1")
    (found,) = findings(folder, prompt_data=path)
    assert found.startswith(f"--prompt-data {path}: is no Parquet file: ")


# -- functions, folders, plugins ---------------------------------------------------------------------------------------


def test_reward_and_generate_functions_must_be_importable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "preflight_functions.py").write_text("def score(sample):\n    return 1.0\nconstant = 3\n")
    monkeypatch.syspath_prepend(folder)
    assert findings(folder, reward="preflight_functions:score") == []
    (found,) = findings(folder, reward="preflight_functions:constant")
    assert found == "--reward preflight_functions:constant: is a int, not a function"
    (found,) = findings(folder, custom_generate="preflight_functions:score")
    assert found.startswith("--custom-generate preflight_functions:score: must be an `async def ")


def test_a_reward_that_compares_needs_labels(folder: Path) -> None:
    assert findings(folder, label_key=None) == ["--reward math: it needs a label; give --label-key KEY"]


def test_an_unwritable_folder_is_named(folder: Path) -> None:
    (folder / "file").touch()
    assert findings(folder, save=folder / "file" / "run") == [
        f"--save {folder / 'file' / 'run'}: {folder / 'file'} is a file, not a folder; choose another"
    ]
    assert findings(folder, save="/proc/drivetrain")[0].startswith("--save /proc/drivetrain: cannot write in /proc: ")
    assert findings(folder, update_weight_disk_dir=folder / "file") == [
        f"--update-weight-disk-dir {folder / 'file'}: {folder / 'file'} is a file, not a folder; choose another"
    ]


def test_what_a_plugin_refuses_is_shown(folder: Path) -> None:
    found = findings(folder, rollout_num_gpus=2, rollout_num_gpus_per_engine=2)
    assert len(found) == 1
    assert found[0].startswith("--rollout-num-gpus-per-engine 2: a transformers engine runs on one device")
