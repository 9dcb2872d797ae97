"""A Hugging Face model folder, before anything loads it: configuration, tokenizer files, weights present and whole.

Weights are judged by the headers of their files; no tensor is read.
"""

import codecs
import errno
import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from drivetrain_infra.engines.positions import usable_positions
from drivetrain_launcher.config import DrivetrainConfig

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "tekken.json",
)
"""One of them is in every folder with a tokenizer. Whether it can be loaded, its loader says."""

_LONGEST_HEADER = 100_000_000
"""Bytes of a safetensors header, by the format's own rule."""


def model_findings(config: DrivetrainConfig) -> list[str]:
    """Return what is wrong with the model folders, and with lengths that the model does not take."""
    train = config.train
    trust = train.trust_remote_code
    findings = list(
        check_model_folder("--hf-checkpoint", Path(train.hf_checkpoint), with_tokenizer=True, trust_remote_code=trust)
    )
    frozen = {"--ref-load": train.ref_load, "--opd-teacher-load": train.opd_teacher_load}
    for flag, folder in frozen.items():
        if folder is not None and _is_other_weights(config, Path(folder)):
            check = config.backend.load_check_checkpoint()
            world_size = config.placement.train_world_size
            findings += [f"{flag} {finding}" for finding in check(Path(folder), world_size=world_size)]
        elif folder is not None:
            findings += check_model_folder(flag, Path(folder), with_tokenizer=False, trust_remote_code=trust)
    with suppress(ValueError):  # a configuration that cannot be read, which is found already
        findings += _length_findings(config)
        for flag, folder in frozen.items():
            if folder is not None and not _is_other_weights(config, Path(folder)):
                findings += _other_vocabulary(flag, Path(folder), Path(train.hf_checkpoint))
    return findings


def _is_other_weights(config: DrivetrainConfig, folder: Path) -> bool:
    """Say whether a folder is none of Hugging Face's, and the train backend takes weights out of it all the same."""
    return not (folder / "config.json").exists() and config.backend.load_takes_weights_of()(folder)


def check_model_folder(
    flag: str, folder: Path, *, with_tokenizer: bool, trust_remote_code: bool = False
) -> Iterator[str]:
    """Yield what is missing or broken in a Hugging Face model folder.

    Weights are held to be whole when each safetensors file has the size that its header promises, and each tensor of
    the index is in the file that the index names.
    """
    if not folder.is_dir():
        yield f"{flag} {folder}: no such folder; download the model first: hf download OWNER/NAME --local-dir DIR"
        return
    try:
        yield from _architecture_findings(flag, folder, trust_remote_code)
    except ValueError as error:
        yield f"{flag} {error}"
    if with_tokenizer and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        yield f"{flag} {folder}: holds no tokenizer (one of {', '.join(_TOKENIZER_FILES)}); copy the model again"
    try:
        files = _weight_files(folder)
    except ValueError as error:
        yield f"{flag} {error}"
        return
    if not files:
        yield f"{flag} {folder}: holds no weights (model.safetensors, or model.safetensors.index.json and its files)"
    for file, expected in files.items():
        try:
            missing = expected - set(_tensor_sizes(file))
        except ValueError as error:
            yield f"{flag} {error}"
            continue
        if missing:
            yield f"{flag} {file}: lacks {len(missing)} tensors that the index promises, such as {min(missing)}"


def count_parameters(folder: Path) -> int:
    """Count the elements of all tensors in a model folder; tied weights count as often as they are stored.

    Raises:
        ValueError: the weights are not whole.
    """
    return sum(sum(_tensor_sizes(file).values()) for file in _weight_files(folder))


def config_number(folder: Path, key: str) -> int | None:
    """Return a whole number that `config.json` gives at its top level, None where it gives none.

    Raises:
        ValueError: the file cannot be read.
    """
    value = _read_table(folder / "config.json").get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def positions(folder: Path) -> int | None:
    """Return the most tokens of a sample that a model has positions for, None where it sets no limit.

    Raises:
        ValueError: its configuration cannot be read.
    """
    return usable_positions(_read_table(folder / "config.json"))


def _architecture_findings(flag: str, folder: Path, trust_remote_code: bool) -> Iterator[str]:
    """Yield why transformers would not build the model. Raises ValueError where its configuration cannot be read."""
    path = folder / "config.json"
    table = _read_table(path)
    model_type = table.get("model_type")
    if not isinstance(model_type, str):
        yield f"{flag} {path}: names no model_type, so it is no Hugging Face model configuration"
        return
    runs_code = "auto_map" in table
    if (runs_code and trust_remote_code) or _is_known(model_type):
        return
    if runs_code:
        yield (
            f"{flag} {path}: transformers knows no model_type {model_type!r}, and the folder brings Python code for it "
            "(auto_map), which does not run unasked; read that code, then give --trust-remote-code"
        )
    else:
        yield (
            f"{flag} {path}: transformers knows no model_type {model_type!r}; pip install -U transformers, or give "
            "another model"
        )


def _is_known(model_type: str) -> bool:
    from transformers import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def _other_vocabulary(flag: str, folder: Path, policy: Path) -> Iterator[str]:
    """Yield why a frozen model cannot say how likely the policy's tokens are.

    Models of one tokenizer may differ in size, since vocabularies are padded to what hardware likes.
    """
    mine, theirs = config_number(policy, "vocab_size"), config_number(folder, "vocab_size")
    if mine is None or theirs is None:
        return
    if theirs < mine:
        yield (
            f"{flag} {folder}: has a vocabulary of {theirs} tokens, and --hf-checkpoint {policy} has {mine}; give a "
            "model with the same tokenizer"
        )
    elif (differing := _differing_token(policy, folder)) is not None:
        number, my_token, their_token = differing
        yield (
            f"{flag} {folder}: its token {number} is {their_token!r}, and that of --hf-checkpoint {policy} is "
            f"{my_token!r}; give a model with the same tokenizer"
        )


def _differing_token(one: Path, other: Path) -> tuple[int, str, str] | None:
    """Return the first id that stands for different tokens in two folders; None where that cannot be told.

    Special tokens are left out: a fine-tuned model may rename them.
    """
    mine, theirs = _tokens(one), _tokens(other)
    shared = sorted(mine.keys() & theirs.keys())
    return next(((number, mine[number], theirs[number]) for number in shared if mine[number] != theirs[number]), None)


def _tokens(folder: Path) -> dict[int, str]:
    """Return the vocabulary of a `tokenizer.json` by id; empty where there is none, or of another form."""
    try:
        table = _read_table(folder / "tokenizer.json")
        special = {one["id"] for one in table.get("added_tokens") or ()}
        vocabulary = table["model"]["vocab"]
        if isinstance(vocabulary, list):  # of Unigram: [token, score] in the order of ids
            vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
        return {number: token for token, number in vocabulary.items() if number not in special}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def _length_findings(config: DrivetrainConfig) -> list[str]:
    limit = positions(Path(config.train.hf_checkpoint))
    if limit is None:
        return []
    lengths = {}
    evaluation = config.evaluation
    if config.algorithm.generates or (evaluation.eval_prompt_data and evaluation.eval_max_response_len is None):
        lengths["--rollout-max-response-len"] = config.rollout.rollout_max_response_len
    if evaluation.eval_max_response_len is not None:
        lengths["--eval-max-response-len"] = evaluation.eval_max_response_len
    prompt = config.data.rollout_max_prompt_len
    beside = f"and --rollout-max-prompt-len {prompt}" if prompt else "and a prompt"
    return [
        f"{flag} {length} {beside} exceed the {limit} positions of {config.train.hf_checkpoint}; lower it"
        for flag, length in lengths.items()
        if length + (prompt or 1) > limit
    ]


# -- files -------------------------------------------------------------------------------------------------------------


def _weight_files(folder: Path) -> dict[Path, set[str]]:
    """Return each weight file, with the tensors that the index expects in it."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        single = folder / "model.safetensors"
        return {single: set()} if single.is_file() else {}
    files: dict[Path, set[str]] = {}
    weight_map = _read_table(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{index}: has no weight_map from tensors to files")
    for tensor, name in weight_map.items():
        if Path(name).name != name:
            raise ValueError(
                f"{index}: places tensor {tensor!r} in {name!r}, which is no file of this folder; copy the model again"
            )
        files.setdefault(folder / name, set()).add(tensor)
    return files


def _require_file(path: Path) -> None:
    """Refuse what is there and no file; to open a pipe is to wait. Raises OSError."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is not a file")


def _read_table(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ValueError naming the file and what is wrong with it."""
    try:
        _require_file(path)
        content = path.read_bytes()
        if content.startswith(codecs.BOM_UTF8):
            raise ValueError("it begins with a byte order mark; save it as UTF-8 without one")
        table = json.loads(content.decode("utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}; copy the model again") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not JSON: {error}") from error
    if not isinstance(table, dict):
        raise ValueError(f"{path}: must be a JSON object, found {type(table).__name__}; copy the model again")
    return table


def _tensor_sizes(path: Path) -> dict[str, int]:
    """Return the elements of each tensor in a safetensors file. Raises ValueError when it is not one, or not whole.

    The format: 8 bytes with the header's length, little-endian; the header, JSON; the tensors' bytes.
    """
    no_file = f"{path}: is no safetensors file (a download that failed, or a Git LFS pointer?); fetch it again"
    try:
        _require_file(path)
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))
            if length > min(size - 8, _LONGEST_HEADER):
                raise ValueError(no_file)
            header = json.loads(file.read(length))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        promised = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        sizes = {name: _elements(entry) for name, entry in entries.items()}
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}; copy the model again") from error
    except (ValueError, RecursionError, AttributeError, KeyError, IndexError, TypeError) as error:
        raise ValueError(no_file) from error
    if size != promised:
        raise ValueError(f"{path}: has {size} bytes where its header promises {promised}; fetch it again")
    return sizes


def _elements(entry: Mapping[str, Any]) -> int:
    shape = entry["shape"]
    if not all(isinstance(one, int) and one >= 0 for one in shape):
        raise ValueError(f"no shape: {shape}")
    return math.prod(shape)
