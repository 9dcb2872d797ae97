"""Prompts against what is asked of them: the files by their first and last rows, and, once read, against the model.

A file is never read whole here. The tokenizer is given; transformers is never imported.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from drivetrain_backend_api import ConfigError, DataError
from drivetrain_launcher.config import DataConfig, DrivetrainConfig
from drivetrain_launcher.data import Prompt, in_one_line, parse_row, sft_samples, value_at
from drivetrain_launcher.preflight.model_folder import config_number

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LONGEST_ROW = 64 * 1024**2
"""Bytes of a row. What is longer is no prompt, but a file without line ends."""

_FIRST_TRY = 64 * 1024
"""Bytes at the end of a file among which its last row is looked for first."""


def prompt_file_findings(config: DrivetrainConfig) -> list[str]:
    """Return what is wrong with the prompt files, as their first and last rows show it."""
    files = {"--prompt-data": config.data.prompt_data, "--eval-prompt-data": config.evaluation.eval_prompt_data}
    findings = []
    for flag, path in files.items():
        if path is not None:
            try:
                _check_prompt_file(Path(path), config.data)
            except DataError as error:
                findings.append(f"{flag} {error}")
    return findings


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
    positions = config_number(Path(config.train.hf_checkpoint), "max_position_embeddings")
    if positions is not None and length > positions:
        findings.append(
            f"{beginning}, more than the {positions} positions of {config.train.hf_checkpoint}; "
            "lower --rollout-max-prompt-len or the response"
        )
    if findings:
        raise ConfigError("\n".join(findings))


def check_vocabulary(config: DrivetrainConfig, prompts: Sequence[Prompt]) -> None:
    """Compare the token ids of the prompts with the model's vocabulary; a tokenizer may know more than it uses.

    Raises:
        ConfigError: names the prompt with the largest id.
    """
    folder = config.train.hf_checkpoint
    vocabulary = config_number(Path(folder), "vocab_size")
    largest = max(prompts, key=lambda one: max(one.prompt_ids))
    found = max(largest.prompt_ids)
    if vocabulary is not None and found >= vocabulary:
        raise ConfigError(
            f"--hf-checkpoint {folder}: the tokenizer makes token {found} of {largest.source}, and the model's "
            f"vocabulary (vocab_size in config.json) ends at {vocabulary - 1}; give the model its own tokenizer"
        )


# -- files -------------------------------------------------------------------------------------------------------------


def _check_prompt_file(path: Path, data: DataConfig) -> None:
    """Check that the first and the last row can be read and have the keys.

    Raises:
        DataError: names the file and which row.
    """
    if path.suffix not in (".jsonl", ".parquet"):
        raise DataError(f"{path}: must be a .jsonl or .parquet file")
    if not path.is_file():
        raise DataError(f"{path}: {'is not a file' if path.exists() else 'no such file'}")
    keys = {"--input-key": data.input_key, "--label-key": data.label_key, "--metadata-key": data.metadata_key}
    for where, row in (_parquet_columns(path) if path.suffix == ".parquet" else _outer_rows(path)).items():
        for flag, key in keys.items():
            if key is not None:
                value_at(row, key, flag, where)


def _outer_rows(path: Path) -> dict[str, dict[str, object]]:
    try:
        with path.open("rb") as file:
            lines = {f"{path}, first line": _first_line(file, path)}
            if lines[f"{path}, first line"]:
                lines[f"{path}, last line"] = _last_line(file, path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    if not all(lines.values()):
        raise DataError(f"{path}: holds no prompts")
    return {where: parse_row(line, where) for where, line in lines.items()}


def _first_line(file: BinaryIO, path: Path) -> bytes:
    """Read the first line that is not blank; none gives b""."""
    room = _LONGEST_ROW
    while line := file.readline(room):
        room -= len(line)
        if room <= 0:
            raise _endless(path)
        if line.strip():
            return line
    return b""


def _last_line(file: BinaryIO, path: Path) -> bytes:
    """Read the last line that is not blank, from ever larger parts of the file's end."""
    end, size = file.seek(0, os.SEEK_END), _FIRST_TRY
    while True:
        start = max(0, end - size)
        file.seek(start)
        tail = file.read(end - start).rstrip()
        if start == 0 or b"\n" in tail:
            return tail.rpartition(b"\n")[2]
        if size >= _LONGEST_ROW:
            raise _endless(path)
        size = min(8 * size, _LONGEST_ROW)


def _endless(path: Path) -> DataError:
    return DataError(f"{path}: has no line end within {_LONGEST_ROW // 1024**2} MiB; write one JSON object a line")


def _parquet_columns(path: Path) -> dict[str, dict[str, object]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(f"{path}: needs pyarrow; pip install 'drivetrain-launcher[parquet]'") from error
    try:
        with parquet.ParquetFile(path) as file:
            rows, names = file.metadata.num_rows, list(file.schema_arrow.names)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: is no Parquet file: {in_one_line(error)}") from error
    if not rows:
        raise DataError(f"{path}: holds no prompts")
    return {str(path): dict.fromkeys(names)}
