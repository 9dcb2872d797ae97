"""What can be found wrong before anything starts: files, folders, sizes, functions, and what the plugins refuse.

Reads headers and first and last lines only. Knows no plugin by name, and nothing of Ray.
"""

import json
import os
import struct
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain_backend_api import ConfigError
from drivetrain_launcher.arguments import unavailable
from drivetrain_launcher.config import DataConfig, DrivetrainConfig
from drivetrain_launcher.data import Prompt, sft_samples
from drivetrain_launcher.rewards import load_reward

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def preflight(config: DrivetrainConfig) -> None:
    """Check everything that can be checked without starting anything.

    Raises:
        ConfigError: one finding a line, all of them.
    """
    findings = unavailable(config.backend, config.engine, config.algorithm)
    findings += _plugin_findings(config)
    findings += _capability_findings(config)
    findings += _model_findings(config)
    findings += _data_findings(config)
    findings += _batch_findings(config)
    findings += _function_findings(config)
    findings += _folder_findings(config)
    if findings:
        raise ConfigError("\n".join(dict.fromkeys(findings)))


def _plugin_findings(config: DrivetrainConfig) -> list[str]:
    return [finding for spec in (config.backend, config.engine, config.algorithm) for finding in spec.validate(config)]


def _batch_findings(config: DrivetrainConfig) -> list[str]:
    rollout, step = config.rollout, config.train.global_batch_size
    samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    if step is None or samples % step == 0:
        return []
    return [
        f"--global-batch-size {step} does not divide the {samples} samples of a rollout (--rollout-batch-size "
        f"{rollout.rollout_batch_size} x --n-samples-per-prompt {rollout.n_samples_per_prompt}); choose a divisor"
    ]


def _function_findings(config: DrivetrainConfig) -> list[str]:
    rollout, findings = config.rollout, []
    if rollout.custom_generate is not None:
        from drivetrain_launcher.custom_generate import load_custom_generate  # needs torch

        try:
            load_custom_generate(rollout.custom_generate)
        except ConfigError as error:
            findings.append(str(error))
    if not config.algorithm.generates and config.evaluation.eval_prompt_data is None:
        return findings  # nothing is rewarded
    try:
        reward = load_reward(rollout.reward, key=rollout.reward_key)
    except ConfigError as error:
        return [*findings, str(error)]
    if config.data.label_key is None and (problem := reward.label_problem(None)):
        findings.append(f"--reward {reward.name}: {problem}")
    return findings


# -- the model folder --------------------------------------------------------------------------------------------------


def _model_findings(config: DrivetrainConfig) -> list[str]:
    train = config.train
    findings = list(check_model_folder("--hf-checkpoint", Path(train.hf_checkpoint), with_tokenizer=True))
    for flag, folder in (("--ref-load", train.ref_load), ("--opd-teacher-load", train.opd_teacher_load)):
        if folder is not None:
            findings += check_model_folder(flag, Path(folder), with_tokenizer=False)
    if train.load is not None and not Path(train.load).is_dir():
        findings.append(f"--load {train.load}: no such folder")
    return findings or _length_findings(config)


def check_model_folder(flag: str, folder: Path, *, with_tokenizer: bool) -> Iterator[str]:
    """Yield what is missing or broken in a Hugging Face model folder.

    Weights are held to be whole when each safetensors file has the size that its header promises, and each tensor of
    the index is in the file that the index names.
    """
    if not folder.is_dir():
        yield f"{flag} {folder}: no such folder; download the model first: hf download OWNER/NAME --local-dir DIR"
        return
    try:
        if "model_type" not in _read_table(folder / "config.json"):
            yield f"{flag} {folder / 'config.json'}: names no model_type, so it is no Hugging Face model configuration"
    except ValueError as error:
        yield f"{flag} {error}"
    if with_tokenizer and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        yield f"{flag} {folder}: holds no tokenizer (one of {', '.join(_TOKENIZER_FILES)})"
    try:
        files = _weight_files(folder)
    except ValueError as error:
        yield f"{flag} {error}"
        return
    if not files:
        yield f"{flag} {folder}: holds no weights (model.safetensors, or model.safetensors.index.json and its files)"
    for file, expected in files.items():
        try:
            missing = expected - _safetensors_names(file)
        except ValueError as error:
            yield f"{flag} {error}"
            continue
        if missing:
            yield f"{flag} {file}: lacks {len(missing)} tensors that the index promises, such as {min(missing)}"


def _weight_files(folder: Path) -> dict[Path, set[str]]:
    """Return each weight file, with the tensors that the index expects in it."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return {file: set() for file in sorted(folder.glob("*.safetensors"))}
    files: dict[Path, set[str]] = {}
    weight_map = _read_table(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{index}: has no weight_map from tensors to files")
    for tensor, name in weight_map.items():
        files.setdefault(folder / name, set()).add(tensor)
    return files


def _read_table(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ValueError naming the file and what is wrong with it."""
    try:
        table = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is no JSON: {error}") from error
    if not isinstance(table, dict):
        raise ValueError(f"{path}: must be a JSON object, found {type(table).__name__}")
    return table


def _safetensors_names(path: Path) -> set[str]:
    """Return the tensors in a safetensors file. Raises ValueError when it is not one, or not whole.

    The format: 8 bytes with the header's length, little-endian; the header, JSON; the tensors' bytes.
    """
    no_file = f"{path}: is no safetensors file (a download that failed, or a Git LFS pointer?); fetch it again"
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))
            if length > size - 8:
                raise ValueError(no_file)
            header = json.loads(file.read(length))
        ends = {name: entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"}
        promised = 8 + length + max(ends.values(), default=0)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError, AttributeError, KeyError, IndexError, TypeError) as error:
        raise ValueError(no_file) from error
    if size != promised:
        raise ValueError(f"{path}: has {size} bytes where its header promises {promised}; fetch it again")
    return set(ends)


def _length_findings(config: DrivetrainConfig) -> list[str]:
    table = _read_table(Path(config.train.hf_checkpoint) / "config.json")
    limit = table.get("max_position_embeddings")
    if not isinstance(limit, int):
        return []
    lengths = {}
    if config.algorithm.generates:
        lengths["--rollout-max-response-len"] = config.rollout.rollout_max_response_len
    if config.evaluation.eval_max_response_len is not None:
        lengths["--eval-max-response-len"] = config.evaluation.eval_max_response_len
    prompt = config.data.rollout_max_prompt_len
    beside = f"and --rollout-max-prompt-len {prompt}" if prompt else "and a prompt"
    return [
        f"{flag} {length} {beside} exceed the {limit} positions of {config.train.hf_checkpoint}; lower it"
        for flag, length in lengths.items()
        if length + (prompt or 1) > limit
    ]


def check_lengths(config: DrivetrainConfig, prompts: Sequence[Prompt], tokenizer: "PreTrainedTokenizerBase") -> None:
    """Compare the longest sample that can come of each prompt with the model's positions and the micro-batch's room.

    Raises:
        ConfigError: names the longest prompt.
    """
    if config.rollout.custom_generate is not None:
        return  # nobody knows how long its samples become
    if config.algorithm.generates:
        longest = max(prompts, key=lambda one: len(one.prompt_ids))
        response, what = config.rollout.rollout_max_response_len, "--rollout-max-response-len"
    else:
        samples = [(len(response), one) for one, (_, response) in zip(prompts, sft_samples(prompts, tokenizer))]
        response, longest = max(samples, key=lambda pair: pair[0] + len(pair[1].prompt_ids))
        what = "a label"
    length = len(longest.prompt_ids) + response
    beginning = f"{longest.source}: a prompt of {len(longest.prompt_ids)} tokens and {what} of {response} make {length}"
    findings = []
    room = config.train.max_tokens_per_gpu
    if room is not None and length > room:
        findings.append(f"{beginning}, more than --max-tokens-per-gpu {room}; raise it, or shorten them")
    positions = _read_table(Path(config.train.hf_checkpoint) / "config.json").get("max_position_embeddings")
    if isinstance(positions, int) and length > positions:
        findings.append(
            f"{beginning}, more than the {positions} positions of {config.train.hf_checkpoint}; "
            "lower --rollout-max-prompt-len or the response"
        )
    if findings:
        raise ConfigError("\n".join(findings))


def _capability_findings(config: DrivetrainConfig) -> list[str]:
    """Hold what is asked for against what the train backend claims."""
    backend, train = config.backend, config.train
    claimed = backend.capabilities
    findings = []
    if train.precision not in claimed.precisions:
        findings.append(
            f"--train-backend {backend.name} does not compute in {train.precision}; "
            f"give {' or '.join('--' + one for one in claimed.precisions)}"
        )
    if train.ref_load is not None and not claimed.reference:
        findings.append(f"--ref-load: --train-backend {backend.name} keeps no reference; use another backend")
    if train.opd_teacher_load is not None and not claimed.teacher:
        findings.append(f"--opd-teacher-load: --train-backend {backend.name} keeps no teacher; use another backend")
    return findings


# -- prompt files ------------------------------------------------------------------------------------------------------


def _data_findings(config: DrivetrainConfig) -> list[str]:
    files = {"--prompt-data": config.data.prompt_data, "--eval-prompt-data": config.evaluation.eval_prompt_data}
    findings = []
    for flag, path in files.items():
        if path is not None:
            try:
                _check_prompt_file(Path(path), config.data)
            except ValueError as error:
                findings.append(f"{flag} {error}")
    return findings


def _check_prompt_file(path: Path, data: DataConfig) -> None:
    """Check that the first and the last row can be read and have the keys. Raises ValueError naming file and line."""
    if path.suffix not in (".jsonl", ".parquet"):
        raise ValueError(f"{path}: must be a .jsonl or .parquet file")
    if not path.is_file():
        raise ValueError(f"{path}: {'is not a file' if path.exists() else 'no such file'}")
    keys = {"--input-key": data.input_key, "--label-key": data.label_key, "--metadata-key": data.metadata_key}
    for where, names in _parquet_names(path) if path.suffix == ".parquet" else _jsonl_names(path):
        for flag, key in keys.items():
            if key is not None and key not in names:
                raise ValueError(f"{where}: has no {key!r} ({flag}); it has {', '.join(map(repr, names)) or 'nothing'}")


def _jsonl_names(path: Path) -> list[tuple[str, list[str]]]:
    try:
        lines = _first_and_last_line(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    if not lines:
        raise ValueError(f"{path}: holds no prompts")
    found = []
    for which, line in lines.items():
        where = f"{path}, {which} line"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: is no JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where}: must be a JSON object, found {type(row).__name__}")
        found.append((where, list(row)))
    return found


def _first_and_last_line(path: Path, block: int = 1 << 16) -> dict[str, bytes]:
    """Read the first and the last line that are not blank, without reading what is between them."""
    with path.open("rb") as file:
        first = next((line for line in file if line.strip()), None)
        if first is None:
            return {}
        end, tail = file.seek(0, os.SEEK_END), b""
        while end > 0 and b"\n" not in tail.strip():
            start = max(0, end - block)
            file.seek(start)
            tail, end = file.read(end - start) + tail, start
    return {"first": first, "last": tail.strip().rpartition(b"\n")[2]}


def _parquet_names(path: Path) -> list[tuple[str, list[str]]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(f"{path}: needs pyarrow; pip install 'drivetrain-launcher[parquet]'") from error
    try:
        with parquet.ParquetFile(path) as file:
            rows, names = file.metadata.num_rows, list(file.schema_arrow.names)
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path}: is no Parquet file: {error}") from error
    if not rows:
        raise ValueError(f"{path}: holds no prompts")
    return [(str(path), names)]


# -- folders that are written ------------------------------------------------------------------------------------------


def _folder_findings(config: DrivetrainConfig) -> list[str]:
    folders = {"--save": config.run_folder.save, "--update-weight-disk-dir": config.weight_sync.update_weight_disk_dir}
    return [
        finding
        for flag, folder in folders.items()
        if folder is not None and (finding := _unwritable(flag, Path(folder)))
    ]


def _unwritable(flag: str, folder: Path) -> str | None:
    nearest = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    if not nearest.is_dir():
        return f"{flag} {folder}: {nearest} is a file, not a folder; choose another"
    try:
        with tempfile.TemporaryFile(dir=nearest):
            return None
    except OSError as error:
        return f"{flag} {folder}: cannot write in {nearest}: {error.strerror or error}"
