"""Prompts against what is asked of them: the files by their first and last rows, and, once read, against the model.

A file is never read whole here; transformers is never imported.
"""

import os
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO

from drivetrain_backend_api import ConfigError, DataError
from drivetrain_backend_api.errors import in_one_line
from drivetrain_launcher.config import DataConfig, DrivetrainConfig
from drivetrain_launcher.data import Prompt, parse_row, value_at
from drivetrain_launcher.preflight.model_folder import config_number, positions

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


def check_lengths(
    config: DrivetrainConfig,
    prompts: Sequence[Prompt],
    *,
    answers: Sequence[Sequence[int]] | None,
    held_out: Sequence[Prompt],
) -> None:
    """Compare the longest samples that can come of the prompts with the model's positions and the micro-batch's room.

    Args:
        config: of the stage.
        prompts: that are trained on.
        answers: token ids to learn after each prompt; None where responses are generated.
        held_out: prompts of evaluations, whose samples go into no micro-batch.

    Raises:
        ConfigError: names the longest prompts.
    """
    most, flag = config.rollout.rollout_max_response_len, "--rollout-max-response-len"
    room = config.train.micro_batch_tokens
    custom = config.rollout.custom_generate is not None  # nobody knows how long its samples become
    findings: list[str] = []
    if answers is not None:
        findings += _too_long(config, list(zip(prompts, map(len, answers), strict=True)), "a label", room)
    elif not custom:
        findings += _too_long(config, [(one, most) for one in prompts], flag, room)
    if config.evaluation.eval_max_response_len is not None:
        most, flag = config.evaluation.eval_max_response_len, "--eval-max-response-len"
    if held_out and not custom:
        findings += _too_long(config, [(one, most) for one in held_out], flag, None)
    if findings:
        raise ConfigError("\n".join(findings))


def _too_long(
    config: DrivetrainConfig, samples: Sequence[tuple[Prompt, int]], what: str, room: int | None
) -> Iterator[str]:
    """Yield what the longest of some samples, (prompt, tokens of its response), exceeds."""
    prompt, response = max(samples, key=lambda sample: len(sample[0].prompt_ids) + sample[1])
    length = len(prompt.prompt_ids) + response
    beginning = f"{prompt.source}: a prompt of {len(prompt.prompt_ids)} tokens and {what} of {response} make {length}"
    if room is not None and length > room:
        yield f"{beginning}, more than a micro-batch's {room} (--max-tokens-per-gpu); raise it, or shorten them"
    limit = positions(Path(config.train.hf_checkpoint))
    if limit is not None and length > limit:
        yield (
            f"{beginning}, more than the {limit} positions of {config.train.hf_checkpoint}; lower "
            "--rollout-max-prompt-len or the response"
        )


def check_vocabulary(
    config: DrivetrainConfig, prompts: Sequence[Prompt], answers: Sequence[Sequence[int]] | None = None
) -> None:
    """Compare the token ids of the prompts with the model's vocabulary; a tokenizer may know more than it uses.

    Args:
        config: of the stage.
        prompts: trained on or held out.
        answers: token ids to learn after each of the first prompts.

    Raises:
        ConfigError: names the prompt with the largest id.
    """
    folder = config.train.hf_checkpoint
    vocabulary = config_number(Path(folder), "vocab_size")
    largest = [(max(one.prompt_ids), one.source) for one in prompts]
    largest += [(max(ids), f"the label of {one.source}") for one, ids in zip(prompts, answers or ())]
    found, source = max(largest, key=itemgetter(0))
    if vocabulary is not None and found >= vocabulary:
        raise ConfigError(
            f"--hf-checkpoint {folder}: the tokenizer makes token {found} of {source}, and the model's vocabulary "
            f"(vocab_size in config.json) ends at {vocabulary - 1}; give the model its own tokenizer"
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
        raise DataError(
            f"{path}: {'is not a file' if path.exists() else 'no such file'}; give a .jsonl or .parquet file"
        )
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
