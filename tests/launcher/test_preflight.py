import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

from drivetrain_backend_api import ConfigError, DataError
from drivetrain_launcher.config import DrivetrainConfig
from drivetrain_launcher.data import Prompt
from drivetrain_launcher.export import export_run
from drivetrain_launcher.preflight import check_lengths, check_vocabulary, preflight, resolve_load
from drivetrain_launcher.preflight.machine import machine_findings
from drivetrain_launcher.preflight.size import run_size
from drivetrain_launcher.sources import build_config, read_request

Words = dict[str, Any]


@pytest.fixture(autouse=True)
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be a machine without GPUs wherever these tests run."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


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


def words_of(folder: Path, **changes: object) -> list[str]:
    """Return the flags of a run that passes, but for `changes`; True is a switch, None leaves a flag out."""
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
    return [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
        for name, value in options.items()
        if value is not None
    ]


def config_of(folder: Path, **changes: object) -> DrivetrainConfig:
    return build_config(read_request(words_of(folder, **changes), {}))


def findings(folder: Path, **changes: object) -> list[str]:
    try:
        preflight(config_of(folder, **changes))
    except ConfigError as error:
        return str(error).splitlines()
    return []


def notes(folder: Path, **changes: object) -> list[str]:
    return preflight(config_of(folder, **changes))


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
    assert findings(folder) == [
        f"--hf-checkpoint {folder}/model/part-2.safetensors: No such file or directory; copy the model again"
    ]


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
        (b"{", "is not JSON: "),
        (b"\xff", "is not JSON: "),
        (b"[" * 100_000, "is not JSON: "),
        (b'\xef\xbb\xbf{"model_type": "qwen3"}', "begins with a byte order mark; save it as UTF-8 without one"),
        (b'{"model_type": 3}', "names no model_type"),
        (b"[]", "must be a JSON object, found list"),
        (b"{}", "names no model_type"),
        (None, "No such file or directory; copy the model again"),
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
        f"--hf-checkpoint {folder / 'model'}: holds no tokenizer (one of tokenizer.json, tokenizer_config.json, "
        "tokenizer.model, vocab.json, vocab.txt, spiece.model, sentencepiece.bpe.model, tiktoken.model, tekken.json); "
        "copy the model again"
    ]


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "tokenizer.model", "sentencepiece.bpe.model", "tiktoken.model", "tekken.json"]
)
def test_a_tokenizer_of_any_kind_is_left_to_its_loader(folder: Path, name: str) -> None:
    (folder / "model" / "tokenizer.json").rename(folder / "model" / name)
    assert findings(folder) == []


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
    found = findings(folder, eval_prompt_data=folder / "train.jsonl", **changes)
    assert found == [f"{flag} exceed the 64 positions of {folder / 'model'}; lower it"]


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_scaled_positions_are_what_a_response_may_use(folder: Path, key: str) -> None:
    write_json(folder / "model" / "config.json", {"model_type": "qwen3", "max_position_embeddings": 64, key: YARN})
    assert findings(folder, rollout_max_response_len=255) == []
    assert findings(folder, rollout_max_response_len=256) == [
        f"--rollout-max-response-len 256 and a prompt exceed the 256 positions of {folder / 'model'}; lower it"
    ]
    prompt = Prompt(index=0, source="train.jsonl:1", prompt_ids=(0,) * 200, text="")
    check_lengths(config_of(folder, rollout_max_response_len=56), [prompt], answers=None, held_out=[])


def test_lengths_and_memory_are_looked_at_though_something_else_is_wrong_with_the_model(folder: Path) -> None:
    (folder / "model" / "tokenizer.json").unlink()
    found = findings(folder, rollout_max_response_len=64, actor_num_gpus_per_node=100_000)
    assert ["tokenizer" in found[0], "64 positions" in found[1]] == [True, True]
    assert "100000 train workers and 1 rollout engine for a model of 19 parameters need at least" in found[2]


def test_a_model_type_that_transformers_does_not_know_is_named(folder: Path) -> None:
    path = folder / "model" / "config.json"
    write_json(path, {"model_type": "novel"})
    assert findings(folder) == [
        f"--hf-checkpoint {path}: transformers knows no model_type 'novel'; pip install -U transformers, or give "
        "another model"
    ]
    write_json(path, {"model_type": "novel", "auto_map": {"AutoConfig": "novel.NovelConfig"}})
    assert findings(folder) == [
        f"--hf-checkpoint {path}: transformers knows no model_type 'novel', and the folder brings Python code for it "
        "(auto_map), which does not run unasked; read that code, then give --trust-remote-code"
    ]
    assert findings(folder, trust_remote_code=True) == []


def test_an_index_that_leads_out_of_the_folder_is_refused(folder: Path) -> None:
    index = folder / "model" / "model.safetensors.index.json"
    write_index(folder / "model", one="../part-1.safetensors")
    assert findings(folder) == [
        f"--hf-checkpoint {index}: places tensor 'one' in '../part-1.safetensors', which is no file of this "
        "folder; copy the model again"
    ]


def reference_of(folder: Path, *, mine: int, theirs: int, tokens: dict[str, int] | None = None) -> Path:
    """A reference beside the policy, both with a vocabulary of some size, and the reference's own tokenizer."""
    reference = Path(shutil.copytree(folder / "model", folder / "reference"))
    for model, size in ((folder / "model", mine), (reference, theirs)):
        write_json(model / "config.json", {"model_type": "qwen3", "vocab_size": size})
    if tokens is not None:
        Tokenizer(models.WordLevel(tokens, unk_token="a")).save(str(reference / "tokenizer.json"))
    return reference


@pytest.mark.parametrize("tokens", [None, {"a": 0, "b": 1}])
def test_a_reference_may_have_a_larger_vocabulary_of_the_same_tokens(
    folder: Path, tokens: dict[str, int] | None
) -> None:
    reference = reference_of(folder, mine=151936, theirs=152064, tokens=tokens)
    assert findings(folder, ref_load=reference, use_kl_loss=True) == []
    (folder / "model" / "tokenizer.json").rename(folder / "model" / "tokenizer.model")
    assert findings(folder, ref_load=reference, use_kl_loss=True) == []


def test_a_reference_that_lacks_tokens_is_refused(folder: Path) -> None:
    reference = reference_of(folder, mine=5, theirs=4)
    assert findings(folder, ref_load=reference, use_kl_loss=True) == [
        f"--ref-load {reference}: has a vocabulary of 4 tokens, and --hf-checkpoint {folder / 'model'} has 5; "
        "give a model with the same tokenizer"
    ]


@pytest.mark.parametrize("theirs", [5, 6])
def test_a_teacher_of_other_tokens_is_refused_however_large_its_vocabulary(folder: Path, theirs: int) -> None:
    teacher = reference_of(folder, mine=5, theirs=theirs, tokens={"b": 0, "a": 1})
    assert findings(folder, algorithm="opd", opd_teacher_load=teacher) == [
        f"--opd-teacher-load {teacher}: its token 0 is 'b', and that of --hf-checkpoint {folder / 'model'} is 'a'; "
        "give a model with the same tokenizer"
    ]


def test_a_teacher_may_name_special_tokens_otherwise(folder: Path) -> None:
    teacher = reference_of(folder, mine=5, theirs=5)
    for model, name in ((folder / "model", "<reserved_1>"), (teacher, "<tool>")):
        tokenizer = Tokenizer(models.WordLevel({"a": 0, name: 1}, unk_token="a"))
        tokenizer.add_special_tokens([name])
        tokenizer.save(str(model / "tokenizer.json"))
    assert findings(folder, algorithm="opd", opd_teacher_load=teacher) == []


def test_a_broken_teacher_is_found_before_anything_starts(folder: Path) -> None:
    def found(teacher: Path | None) -> list[str]:
        return findings(folder, algorithm="opd", opd_teacher_load=teacher)

    assert found(None) == ["--algorithm opd needs a teacher; give --opd-teacher-load DIR"]
    absent = folder / "nowhere"
    assert found(absent) == [
        f"--opd-teacher-load {absent}: no such folder; download the model first: hf download OWNER/NAME --local-dir DIR"
    ]
    teacher = Path(shutil.copytree(folder / "model", folder / "teacher"))
    (teacher / "config.json").unlink()
    assert found(teacher) == [
        f"--opd-teacher-load {teacher / 'config.json'}: No such file or directory; copy the model again"
    ]
    shutil.copy(folder / "model" / "config.json", teacher)
    (teacher / "part-2.safetensors").write_bytes(b"")
    assert found(teacher) == [
        f"--opd-teacher-load {teacher / 'part-2.safetensors'}: is no safetensors file (a download that failed, or a "
        "Git LFS pointer?); fetch it again"
    ]


def test_labels_are_needed_only_where_a_reward_reads_them(folder: Path) -> None:
    teacher = Path(shutil.copytree(folder / "model", folder / "teacher"))
    distil: Words = {"algorithm": "opd", "opd_teacher_load": teacher, "label_key": None, "n_samples_per_prompt": 1}
    assert findings(folder, **distil) == ["--reward math: it needs a label; give --label-key KEY"]
    assert findings(folder, **distil, reward="none") == []
    assert findings(folder, reward="none") == [
        "--reward none: --algorithm grpo learns from rewards alone; choose another"
    ]


def test_host_memory_of_frozen_models_is_told_before_anything_starts(folder: Path) -> None:
    teacher = Path(shutil.copytree(folder / "model", folder / "teacher"))
    save_file({"one": np.ones((1024, 512), np.float32)}, teacher / "part-1.safetensors")
    frozen: Words = {"algorithm": "opd", "opd_teacher_load": teacher, "fp32": True}
    assert notes(folder, **frozen) == [f"--opd-teacher-load {teacher}: takes 2.0 MiB of host memory on the only rank"]
    reference: Words = {"use_kl_loss": True, "ref_load": teacher}
    assert notes(folder, **frozen, **reference, actor_num_gpus_per_node=2) == [
        f"--ref-load {teacher}: takes 1.0 MiB of host memory on each of 2 ranks",
        f"--opd-teacher-load {teacher}: takes 1.0 MiB of host memory on each of 2 ranks",
    ]
    config = config_of(folder, **frozen, actor_num_gpus_per_node=2)
    tagged = replace(config.backend, capabilities=replace(config.backend.capabilities, teacher="tag"))
    assert preflight(replace(config, backend=tagged)) == [
        f"--opd-teacher-load {teacher}: takes up to 2.0 MiB of host memory on each of 2 ranks"
    ]


def test_a_token_outside_the_models_vocabulary_is_named(folder: Path) -> None:
    write_json(folder / "model" / "config.json", {"model_type": "qwen3", "vocab_size": 7})
    prompts = [
        Prompt(index=number, source=f"train.jsonl:{number}", prompt_ids=ids, text="")
        for number, ids in enumerate([(0, 6), (2, 7, 1), (3,)])
    ]
    check_vocabulary(config_of(folder), prompts[::2])
    with pytest.raises(ConfigError) as caught:
        check_vocabulary(config_of(folder), prompts)
    assert str(caught.value) == (
        f"--hf-checkpoint {folder / 'model'}: the tokenizer makes token 7 of train.jsonl:1, and the model's vocabulary "
        "(vocab_size in config.json) ends at 6; give the model its own tokenizer"
    )


SFT: Words = {"algorithm": "sft", "n_samples_per_prompt": None, "rollout_max_response_len": None}


def test_answers_to_learn_are_held_against_the_vocabulary_and_the_positions(folder: Path) -> None:
    write_json(folder / "model" / "config.json", {"model_type": "qwen3", "vocab_size": 7, "max_position_embeddings": 4})
    config = config_of(folder, **SFT)
    prompts = [Prompt(index=one, source=f"train.jsonl:{one}", prompt_ids=(0, 1), text="") for one in range(2)]
    check_vocabulary(config, prompts, [(6,), (5, 6)])
    check_lengths(config, prompts, answers=[(6,), (5, 6)], held_out=[])
    with pytest.raises(ConfigError, match=r"makes token 7 of the label of train\.jsonl:1, and the model's vocabulary"):
        check_vocabulary(config, prompts, [(6,), (7,)])
    with pytest.raises(ConfigError, match=r"train\.jsonl:1: a prompt of 2 tokens and a label of 3 make 5, more"):
        check_lengths(config, prompts, answers=[(6,), (1, 1, 1)], held_out=[])


def test_held_out_prompts_have_a_length_of_their_own(folder: Path) -> None:
    held_out = [Prompt(index=0, source="eval.jsonl:1", prompt_ids=(0,) * 40, text="")]
    prompts = [Prompt(index=0, source="train.jsonl:1", prompt_ids=(0,) * 9, text="")]
    evaluated = {"eval_prompt_data": folder / "train.jsonl", "eval_max_response_len": 24}
    check_lengths(config_of(folder, **evaluated), prompts, answers=None, held_out=held_out)
    check_lengths(
        config_of(folder, **evaluated, use_dynamic_batch_size=True, max_tokens_per_gpu=41),
        prompts,
        answers=None,
        held_out=held_out,
    )
    lengths = {25: "--eval-max-response-len of 25 make 65", None: "--rollout-max-response-len of 32 make 72"}
    for length, words in lengths.items():
        config = config_of(folder, **evaluated | {"eval_max_response_len": length})
        with pytest.raises(ConfigError, match=f"^eval.jsonl:1: a prompt of 40 tokens and {words}, more than the 64 po"):
            check_lengths(config, prompts, answers=None, held_out=held_out)


def test_the_longest_response_that_fits_is_accepted(folder: Path) -> None:
    assert findings(folder, rollout_max_response_len=63) == []
    assert findings(folder, rollout_max_prompt_len=32) == []


# -- prompts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", ": holds no prompts"),
        (b"\n  \n", ": holds no prompts"),
        (b'{"q": 1, "a": 2}\n{"q": 1, "a"', ", last line: is not JSON: "),
        (b'{"q": 1, "a": 2}\n[1]\n\n', ", last line: must be a JSON object, found list"),
        (b'\n{"q": 1}\n{"q": 1, "a": 2}', ", first line: has no key 'a' (--label-key); it has 'q'"),
        (b'{"q": 1, "a": 2}\n{}\n', ", last line: has no key 'q' (--input-key); it has none"),
        (b'{"q": "\xff", "a": 2}\n', ", first line: is not UTF-8 (byte 8 of the line)"),
        (b'{"q": ' + b"[" * 100_000 + b"\n", ", first line: is not JSON: "),
        (b'\xef\xbb\xbf{"q": 1}\n', ", first line: begins with a byte order mark; save the file as UTF-8 without one"),
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
    assert found.endswith("last line: has no key 'a' (--label-key); it has 'q', 'b'")


def test_a_huge_file_is_not_read_whole(folder: Path) -> None:
    path = folder / "train.jsonl"
    row = b'{"q": "1", "a": "2"}\n'
    with path.open("wb") as file:
        file.write(row)
        file.seek(1 << 40)  # a hole: a terabyte of zeros that takes no room
        file.write(b"\n" + row)
    assert findings(folder) == []
    with path.open("r+b") as file:
        file.seek(len(row) - 1)
        file.write(b" ")
    assert findings(folder) == [f"--prompt-data {path}: has no line end within 64 MiB; write one JSON object a line"]
    with path.open("r+b") as file:
        file.write(row)
        file.truncate(1 << 40)
    assert findings(folder) == [f"--prompt-data {path}: has no line end within 64 MiB; write one JSON object a line"]


def test_an_empty_evaluation_file_is_refused(folder: Path) -> None:
    (folder / "eval.jsonl").touch()
    assert findings(folder, eval_prompt_data=folder / "eval.jsonl") == [
        f"--eval-prompt-data {folder / 'eval.jsonl'}: holds no prompts"
    ]


def test_held_out_prompts_and_metadata_are_checked_too(folder: Path) -> None:
    write_lines(folder / "eval.jsonl", {"q": "1", "a": "1", "m": {}})
    found = findings(folder, eval_prompt_data=folder / "eval.jsonl", metadata_key="m")
    assert found == [
        f"--prompt-data {folder / 'train.jsonl'}, first line: has no key 'm' (--metadata-key); it has 'q', 'a'"
    ]
    (found,) = findings(folder, eval_prompt_data=folder)
    assert found == f"--eval-prompt-data {folder}: must be a .jsonl or .parquet file"


def test_parquet_columns_are_checked(folder: Path) -> None:
    path = folder / "train.parquet"
    parquet.write_table(pyarrow.table({"q": ["1"], "a": ["1"]}), path)
    assert findings(folder, prompt_data=path) == []
    assert findings(folder, prompt_data=path, label_key="b") == [
        f"--prompt-data {path}: has no key 'b' (--label-key); it has 'q', 'a'"
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
    assert (
        found == "--reward preflight_functions:constant: is a int, not a function; name one of the module's functions"
    )
    (found,) = findings(folder, custom_generate="preflight_functions:score")
    assert found.startswith("--custom-generate preflight_functions:score: must be an `async def ")


def test_a_function_whose_import_fails_is_shown_by_file_and_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "preflight_broken.py").write_text("import math\n\nmath.sqrt(-1)\n")
    (folder / "preflight_leaving.py").write_text("import sys\nsys.exit(3)\n")
    (folder / "preflight_caller.py").write_text("import preflight_broken\n")
    (folder / "preflight_needy.py").write_text("\nimport no_such_library\n")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    messages = {
        "preflight_broken": "ValueError: math domain error (preflight_broken.py:3)",
        "preflight_leaving": "SystemExit: 3 (preflight_leaving.py:2)",
        "preflight_caller": "ValueError: math domain error (preflight_caller.py:1)",
        "preflight_needy": "ModuleNotFoundError: No module named 'no_such_library' (preflight_needy.py:2)",
    }
    for module, message in messages.items():
        assert findings(folder, reward=f"{module}:score") == [f"--reward {module}:score: {message}"]


def test_a_reward_that_compares_needs_labels(folder: Path) -> None:
    assert findings(folder, label_key=None) == ["--reward math: it needs a label; give --label-key KEY"]


def test_an_unwritable_folder_is_named(folder: Path) -> None:
    (folder / "file").touch()
    assert findings(folder, save=folder / "file" / "run") == [
        f"--save {folder / 'file' / 'run'}: {folder / 'file'} is a file, not a folder; choose another"
    ]
    assert findings(folder, save="/proc/drivetrain")[0].startswith("--save /proc/drivetrain: cannot write in /proc: ")
    disk = {"update_weight_transport": "disk", "update_weight_disk_dir": folder / "file"}
    assert findings(folder, **disk) == [
        f"--update-weight-disk-dir {folder / 'file'}: {folder / 'file'} is a file, not a folder; choose another"
    ]


@pytest.mark.parametrize("path", ["a\0b", "x" * 300])
@pytest.mark.parametrize("option", ["hf_checkpoint", "prompt_data", "save", "load"])
def test_a_path_that_cannot_be_looked_up_is_named(folder: Path, option: str, path: str) -> None:
    (found,) = findings(folder, **{option: path})
    assert found.startswith(f"--{option.replace('_', '-')} {path!r}: is no usable path (")


def test_a_run_does_not_write_over_what_it_reads(folder: Path) -> None:
    model = folder / "model"
    (folder / "link").symlink_to(model)
    assert findings(folder, save="/") == [
        "--save /: is the root of the file system; choose a folder of its own for the run"
    ]
    for save in (model, folder / "link"):
        assert findings(folder, save=save) == [
            f"--save {save}: is the model folder of --hf-checkpoint {model}; choose a folder of its own"
        ]
    disk = {"update_weight_transport": "disk", "update_weight_disk_dir": model}
    assert findings(folder, **disk) == [
        f"--update-weight-disk-dir {model}: is the model folder of --hf-checkpoint {model}; choose a folder of its own"
    ]
    disk["update_weight_disk_dir"] = inside = folder / "run" / "iter_0000002" / "weights"
    assert findings(folder, **disk) == [
        f"--update-weight-disk-dir {inside}: lies in the checkpoint {inside.parent}; choose a folder outside of it"
    ]


def test_folders_may_lie_in_each_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder / "model")
    assert findings(folder, hf_checkpoint=".", save="runs/a") == []
    disk = {"update_weight_transport": "disk", "update_weight_disk_dir": folder / "model" / "weights"}
    assert findings(folder, save=folder, **disk) == []
    assert findings(folder, save=folder / "iter_0000001" / "run") == []


def test_checkpoints_that_do_not_all_fit_are_worth_a_note(folder: Path) -> None:
    assert notes(folder, num_rollout=10**13) == []
    (found,) = notes(folder, num_rollout=10**13, save_interval=2)
    # 19 parameters of 12 bytes each
    assert found.startswith(
        "--save-interval 2: the 5000000000000 checkpoints of this run take about 1036.8 TiB together, and the file "
        f"system of --save {folder / 'run'} has "
    )
    assert found.endswith("free; raise it, or give --save-max-to-keep")
    assert notes(folder, num_rollout=10**13, save_interval=2, save_max_to_keep=3) == []
    # the new one is whole before the oldest goes
    (found,) = notes(folder, num_rollout=10**13, save_interval=2, save_max_to_keep=10**12)
    assert "the 1000000000001 checkpoints of this run" in found


def test_a_model_too_large_for_this_machine_is_found_by_its_header_alone(folder: Path) -> None:
    for file in (folder / "model").glob("*.safetensors*"):
        file.unlink()
    elements = 1 << 40
    header = json.dumps({"one": {"dtype": "BF16", "shape": [elements // 4, 4], "data_offsets": [0, 2 * elements]}})
    with (folder / "model" / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(8 + len(header) + 2 * elements)  # a hole, which takes no room
    disk = {"update_weight_transport": "disk", "update_weight_disk_dir": folder / "weights"}
    checkpoint, weights, memory = findings(folder, bf16=True, rollout_num_gpus=2, **disk)
    assert checkpoint.startswith(
        f"--save {folder / 'run'}: a checkpoint of {elements} parameters takes about 12.0 TiB, and its file system has "
    )
    assert weights.startswith(
        f"--update-weight-disk-dir {folder / 'weights'}: --update-weight-transport disk writes about 2.0 TiB of weights"
    )
    # 16 bytes a parameter to train, 2 in each engine
    assert memory.startswith(
        f"1 train worker and 2 rollout engines for a model of {elements} parameters need at least 20.0 TiB of memory, "
    )
    assert memory.endswith(
        "lower --rollout-num-gpus 2, or give a smaller --hf-checkpoint, or use a machine with more memory"
    )


# -- the checkpoint to start from --------------------------------------------------------------------------------------


def test_a_run_to_start_from_must_hold_its_checkpoint(folder: Path) -> None:
    run = folder / "old"
    run.mkdir()
    assert findings(folder, load=run) == [
        f"--load {run} holds no checkpoint: {run / 'latest'} is missing; give the folder of a run that saved one"
    ]


def test_a_damaged_checkpoint_is_refused_and_others_are_named(folder: Path) -> None:
    run = folder / "old"
    for name in ("iter_0000002", "iter_0000004", "iter_0000006.partial"):
        (run / name).mkdir(parents=True)
    (run / "latest").write_text("iter_0000004\n")
    damage = [
        f"{run}/iter_0000004 is no complete checkpoint: {run}/iter_0000004/manifest.json is missing; use another "
        "checkpoint of the run",
        f"{run}/iter_0000004 is no checkpoint of the fsdp backend: it has no trainer_state.json; use another "
        "checkpoint of the run",
        f"{run}/iter_0000004 is no complete checkpoint: {run}/iter_0000004/dcp/.metadata is missing; use another "
        "checkpoint of the run",
    ]
    assert findings(folder, load=run, num_rollout=9) == [f"--load {one} (beside it: iter_0000002)" for one in damage]
    with pytest.raises(ConfigError, match=r"config\.json: is missing; give the folder of a whole run"):
        export_run(run, folder / "out")
    for nowhere in (folder / "nowhere", folder / "model"):
        with pytest.raises(ConfigError, match=f"^(RUN )?{nowhere}"):
            export_run(nowhere, folder / "out")
    write_json(run / "config.json", {"train-backend": "fsdp", "hf-checkpoint": str(folder / "model")})
    with pytest.raises(DataError) as caught:
        export_run(run, folder / "out")
    assert str(caught.value).splitlines() == [f"RUN {one} (beside it: iter_0000002)" for one in damage]
    assert not (folder / "out").exists()


def test_a_backend_without_a_check_of_checkpoints_is_not_asked(folder: Path) -> None:
    checkpoint = folder / "old" / "iter_0000004"
    checkpoint.mkdir(parents=True)
    config = config_of(folder, load=checkpoint, num_rollout=9)
    preflight(replace(config, backend=replace(config.backend, check_checkpoint="")))


def megatron_weights(folder: Path) -> Path:
    """Make what looks like a checkpoint of Megatron-LM's, with a name that a run's checkpoint could have."""
    weights = folder / "megatron" / "iter_0000500"
    weights.mkdir(parents=True)
    for name in (".metadata", "metadata.json"):
        (weights / name).touch()
    (weights.parent / "latest_checkpointed_iteration.txt").write_text("500\n")
    return weights


def test_weights_of_another_kind_are_loaded_where_the_backend_takes_them(folder: Path) -> None:
    weights = megatron_weights(folder)
    taking = config_of(folder, train_backend="megatron").backend
    for path in (weights, weights.parent, folder / "model"):
        found = resolve_load(taking, str(path))
        # no run wrote it, so that training begins at the first rollout
        assert (found.folder, found.run, found.rollouts) == (path, None, 0)
    assert resolve_load(config_of(folder).backend, str(weights)).rollouts == 500
    with pytest.raises(DataError, match=r"model holds no checkpoint: .*latest is missing"):
        resolve_load(config_of(folder).backend, str(folder / "model"))


def test_a_damaged_checkpoint_of_another_kind_is_found_under_the_flag_that_names_it(folder: Path) -> None:
    weights = megatron_weights(folder)
    for flag, more in (("--load", {}), ("--ref-load", {"use_kl_loss": True})):
        words = {flag.strip("-").replace("-", "_"): weights, **more}
        found = findings(folder, train_backend="megatron", **words)
        assert [one for one in found if one.startswith(f"{flag} {weights}/.metadata")], found
    assert findings(folder, use_kl_loss=True, ref_load=weights)[0].startswith(f"--ref-load {weights / 'config.json'}: ")


def test_a_run_does_not_write_into_the_weights_it_starts_from(folder: Path) -> None:
    weights = megatron_weights(folder)
    found = findings(folder, train_backend="megatron", load=weights, save=weights)
    assert f"--save {weights}: is the model folder of --load {weights}; choose a folder of its own" in found


def test_weights_that_have_had_all_rollouts_are_refused(folder: Path) -> None:
    checkpoint = folder / "old" / "iter_0000004"
    checkpoint.mkdir(parents=True)
    assert findings(folder, load=checkpoint, num_rollout=4)[-1] == (
        f"--load {checkpoint} was trained on 4 rollouts already, and --num-rollout ends the run at 4; raise it above 4"
    )


def test_a_run_is_saved_into_no_checkpoint(folder: Path) -> None:
    run = folder / "old"
    (run / "iter_0000004").mkdir(parents=True)
    (run / "latest").write_text("iter_0000004\n")
    for save in (run / "iter_0000004", run / "iter_0000004" / "next", run / "iter_0000002" / "next"):
        found = findings(folder, load=run, save=save, num_rollout=9)
        checkpoint = save if save.name != "next" else save.parent
        assert found[-1] == f"--save {save}: lies in the checkpoint {checkpoint}; choose a folder outside of it"
    assert not any(one.startswith("--save") for one in findings(folder, load=run, save=run / "next", num_rollout=9))
    # nor into one of a run that it has nothing else to do with, which it would no longer be whole with
    checkpoint = run / "iter_0000004"
    (checkpoint / "manifest.json").touch()
    assert findings(folder, save=checkpoint / "next") == [
        f"--save {checkpoint / 'next'}: lies in the checkpoint {checkpoint}; choose a folder outside of it"
    ]


# -- the machine -------------------------------------------------------------------------------------------------------


def test_more_processes_than_memory_holds_are_refused(folder: Path) -> None:
    (found,) = findings(folder, actor_num_gpus_per_node=100_000)
    assert found.startswith(
        "100000 train workers and 1 rollout engine for a model of 19 parameters need at least 24.4 TiB of memory, and "
    )
    assert found.endswith("are available; lower --actor-num-gpus-per-node 100000, or use a machine with more memory")
    assert findings(folder, actor_num_gpus_per_node=100_000, ray_address="127.0.0.1:6379") == []


def test_one_machine_is_one_node(folder: Path) -> None:
    assert findings(folder, actor_num_nodes=2) == [
        "--actor-num-nodes 2: this machine is one node; give --ray-address of a cluster, or leave it at 1"
    ]
    assert findings(folder, actor_num_nodes=2, ray_address="127.0.0.1:6379") == []


def gpu_findings(folder: Path, gpus: int, **changes: object) -> list[str]:
    """What would be found on a machine with this many GPUs."""
    config = config_of(folder, **changes)
    return machine_findings(config, replace(run_size(config), gpus=gpus))


def test_ranks_are_held_against_the_gpus_of_the_machine(folder: Path) -> None:
    assert gpu_findings(folder, 4, actor_num_gpus_per_node=2, rollout_num_gpus=2) == []
    assert gpu_findings(folder, 4, actor_num_gpus_per_node=4, rollout_num_gpus=2) == [
        "--actor-num-gpus-per-node 4 and --rollout-num-gpus 2 ask for 6 GPUs, and this machine has 4; lower one of "
        "them, give --ray-address of a cluster, or put CUDA_VISIBLE_DEVICES= (empty) before the command to run on CPU "
        "ranks"
    ]
    assert gpu_findings(folder, 1) == [
        "--actor-num-gpus-per-node 1 and --rollout-num-gpus 1 ask for 2 GPUs, and this machine has 1; trainer and "
        "engine need a GPU each: add one, give --ray-address of a cluster, or put CUDA_VISIBLE_DEVICES= (empty) before "
        "the command to run on CPU ranks"
    ]


def test_a_run_without_engines_needs_no_gpus_for_them(folder: Path) -> None:
    sft = {"algorithm": "sft", "n_samples_per_prompt": None, "reward": None}
    assert gpu_findings(folder, 1, **sft) == []
    (found,) = gpu_findings(folder, 1, **sft, actor_num_gpus_per_node=2)
    assert found.startswith("--actor-num-gpus-per-node 2 ask for 2 GPUs, and this machine has 1; lower it, ")
    (found,) = gpu_findings(folder, 1, **sft, eval_prompt_data=folder / "train.jsonl")
    assert found.startswith("--actor-num-gpus-per-node 1 and --rollout-num-gpus 1 ask for 2 GPUs")


def test_a_backend_that_needs_a_gpu_is_refused_without_one(folder: Path) -> None:
    config = config_of(folder)
    capabilities = replace(config.backend.capabilities, devices=("cuda",))
    config = replace(config, backend=replace(config.backend, capabilities=capabilities))
    assert machine_findings(config, run_size(config)) == [
        "--train-backend fsdp: runs on cuda, and there is no GPU here; use a machine that has one, give --ray-address "
        "of a cluster, or choose another backend"
    ]


def test_what_a_plugin_refuses_is_shown(folder: Path) -> None:
    found = findings(folder, rollout_num_gpus=2, rollout_num_gpus_per_engine=2)
    assert len(found) == 1
    assert found[0].startswith("--rollout-num-gpus-per-engine 2: a transformers engine runs on one device")
