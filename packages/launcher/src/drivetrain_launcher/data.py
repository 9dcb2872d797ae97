"""Prompts: from a file's rows to token ids, and the order in which a run reads them.

Knows nothing of engines, rewards or training. The tokenizer is given; transformers is never imported here.
"""

import codecs
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain_backend_api import ConfigError, DataError
from drivetrain_backend_api.errors import in_one_line
from drivetrain_launcher.config import DataConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENIZER_BATCH = 1024
"""Prompts handed to the tokenizer at a time: its threads need many, its memory few."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One row of a prompt file, ready for an engine.

    Attributes:
        index: its row in the file, from 0.
        source: "FILE:LINE" (or row of a Parquet file), for messages.
        prompt_ids: at least one token id.
        text: what was tokenized, chat template applied.
        messages: the chat messages behind `text`, system prompt included; empty where the row is plain text.
        label: the row's label as text, or None without --label-key.
        metadata: the row's table, empty without --metadata-key.
    """

    index: int
    source: str
    prompt_ids: tuple[int, ...]
    text: str
    messages: tuple[Mapping[str, Any], ...] = ()
    label: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PromptDataset:
    """All prompts of a file, in its order.

    Attributes:
        prompts: those that are short enough.
        left_out: how many were longer than --rollout-max-prompt-len.
    """

    prompts: tuple[Prompt, ...]
    left_out: int = 0

    def __len__(self) -> int:
        return len(self.prompts)

    @staticmethod
    def load(path: str | Path, config: DataConfig, tokenizer: "PreTrainedTokenizerBase") -> "PromptDataset":
        """Read and tokenize a prompt file.

        Args:
            path: a .jsonl or .parquet file, of training or of evaluation; `config.prompt_data` is not read.
            config: keys, chat template, length limit.
            tokenizer: of the model.

        Raises:
            ConfigError: the chat template is asked for and there is none, or a system prompt has nowhere to go.
            DataError: the file or a row cannot be used; names file and line.
        """
        if config.system_prompt is not None and not config.apply_chat_template:
            raise ConfigError("--system-prompt acts only with --apply-chat-template; give both or neither")
        if config.apply_chat_template and not tokenizer.chat_template:
            raise ConfigError(
                f"--apply-chat-template: the tokenizer of {tokenizer.name_or_path or 'this model'} has no chat "
                "template; leave the flag out, or use a model folder with chat_template.jinja"
            )
        rows = [_Row.parse(index, source, row, config) for index, (source, row) in enumerate(_read_rows(path, config))]
        if not rows:
            raise DataError(f"{path}: holds no prompts")
        prompts: list[Prompt] = []
        for start in range(0, len(rows), _TOKENIZER_BATCH):
            prompts += _tokenized(rows[start : start + _TOKENIZER_BATCH], config, tokenizer)
        limit = config.rollout_max_prompt_len
        kept = tuple(one for one in prompts if limit is None or len(one.prompt_ids) <= limit)
        if not kept:
            raise DataError(
                f"{path}: all {len(rows)} prompts are longer than --rollout-max-prompt-len {limit}; raise it"
            )
        return PromptDataset(prompts=kept, left_out=len(rows) - len(kept))


class PromptSource:
    """Reads a dataset epoch after epoch. Where it stands follows from how many prompts were read.

    Attributes:
        epoch: of the next prompt, from 0.
        read: prompts that were taken so far, over all epochs.
    """

    def __init__(self, dataset: PromptDataset, *, shuffle: bool, seed: int) -> None:
        """Start at the first prompt of epoch 0.

        Args:
            dataset: at least one prompt.
            shuffle: draw a new order for each epoch from (seed, epoch).
            seed: of the order.
        """
        self._dataset = dataset
        self._shuffle = shuffle
        self._seed = seed
        self.epoch = 0
        self.read = 0
        self._offset = 0
        self._order = self._order_of(0)

    def next_prompts(self, count: int) -> list[Prompt]:
        """Return the next `count` prompts, going on into the next epoch where this one ends."""
        taken: list[Prompt] = []
        while len(taken) < count:
            if self._offset == len(self._order):
                self.epoch, self._offset = self.epoch + 1, 0
                self._order = self._order_of(self.epoch)
            part = self._order[self._offset : self._offset + count - len(taken)]
            taken += [self._dataset.prompts[one] for one in part]
            self.read += len(part)
            self._offset += len(part)
        return taken

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self._dataset)))
        if self._shuffle:
            random.Random(f"{self._seed} {epoch}").shuffle(order)
        return order


def sft_samples(
    prompts: Sequence[Prompt], tokenizer: "PreTrainedTokenizerBase"
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return (prompt ids, response ids) of each prompt: its label's tokens and the end-of-sequence token.

    Raises:
        DataError: a prompt has no label, or the tokenizer no end-of-sequence token.
    """
    if tokenizer.eos_token_id is None:
        raise DataError(f"the tokenizer of {tokenizer.name_or_path} has no eos_token, so no response could be ended")
    samples = []
    for prompt in prompts:
        if prompt.label is None:
            raise DataError(f"{prompt.source}: has no label to learn; give --label-key KEY")
        label_ids = tokenizer(prompt.label, add_special_tokens=False)["input_ids"]
        samples.append((prompt.prompt_ids, (*label_ids, tokenizer.eos_token_id)))
    return samples


# -- rows -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One row with its fields checked, not tokenized yet."""

    index: int
    source: str
    text: str | None
    messages: tuple[dict[str, Any], ...]
    label: str | None
    metadata: Mapping[str, Any]

    @staticmethod
    def parse(index: int, source: str, row: Mapping[str, Any], config: DataConfig) -> "_Row":
        given = value_at(row, config.input_key, "--input-key", source)
        text = given if isinstance(given, str) else None
        messages: tuple[dict[str, Any], ...] = ()
        if text is None:
            messages = _checked_messages(given, config, source)
        elif config.apply_chat_template:
            text, messages = None, ({"role": "user", "content": text},)
        if messages and config.system_prompt is not None:
            if messages[0]["role"] == "system":
                raise DataError(f"{source}: {config.input_key!r} begins with a system message; drop --system-prompt")
            messages = ({"role": "system", "content": config.system_prompt}, *messages)
        label = metadata = None
        if config.label_key is not None:
            label = _label_text(value_at(row, config.label_key, "--label-key", source), config.label_key, source)
        if config.metadata_key is not None:
            metadata = value_at(row, config.metadata_key, "--metadata-key", source)
            if not isinstance(metadata, dict):
                raise DataError(
                    f"{source}: {config.metadata_key!r} must be a table of names and values, found {metadata!r:.60}"
                )
        return _Row(index=index, source=source, text=text, messages=messages, label=label, metadata=metadata or {})


def value_at(row: Mapping[str, Any], key: str, flag: str, source: str) -> Any:
    """Return what a row has under the key that a flag names.

    Raises:
        DataError: it has no such key; names the row and its keys.
    """
    if key not in row:
        raise DataError(f"{source}: has no key {key!r} ({flag}); it has {', '.join(map(repr, row)) or 'none'}")
    return row[key]


def _checked_messages(given: Any, config: DataConfig, source: str) -> tuple[dict[str, Any], ...]:
    well_formed = (
        isinstance(given, list)
        and len(given) > 0
        and all(isinstance(one, dict) and isinstance(one.get("role"), str) and "content" in one for one in given)
    )
    if not well_formed:
        raise DataError(
            f"{source}: {config.input_key!r} must be text, or a list of chat messages such as "
            f'{{"role": "user", "content": "..."}}, found {given!r:.60}'
        )
    if not config.apply_chat_template:
        raise DataError(f"{source}: {config.input_key!r} is a list of chat messages; give --apply-chat-template")
    return tuple(given)


def _label_text(label: Any, key: str, source: str) -> str:
    if isinstance(label, str):
        return label
    if isinstance(label, int | float) and not isinstance(label, bool):
        return f"{Decimal(repr(label)):f}"  # never 1e-07, which nobody writes in an answer
    raise DataError(f"{source}: label {key!r} must be text or a number, found {label!r:.60}")


def _tokenized(rows: Sequence[_Row], config: DataConfig, tokenizer: "PreTrainedTokenizerBase") -> Iterator[Prompt]:
    texts = [_rendered(row, tokenizer) for row in rows]
    # A chat template writes the special tokens itself.
    try:
        ids = tokenizer(texts, add_special_tokens=not config.apply_chat_template)["input_ids"]
    except Exception as error:  # a damaged tokenizer may fail in any way, and only when it is used
        raise DataError(
            f"the tokenizer of {tokenizer.name_or_path} failed on {rows[0].source} to {rows[-1].source}: "
            f"{type(error).__name__}: {in_one_line(error)}; copy the model again"
        ) from error
    for row, text, prompt_ids in zip(rows, texts, ids, strict=True):
        if not prompt_ids:
            raise DataError(f"{row.source}: {config.input_key!r} is empty; a prompt needs at least one token")
        yield Prompt(
            index=row.index,
            source=row.source,
            prompt_ids=tuple(prompt_ids),
            text=text,
            messages=row.messages,
            label=row.label,
            metadata=row.metadata,
        )


def _rendered(row: _Row, tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the text to tokenize; tokenizers fail without naming the row on text that UTF-8 cannot hold."""
    text = row.text
    try:
        if text is None:
            text = str(tokenizer.apply_chat_template(list(row.messages), tokenize=False, add_generation_prompt=True))
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{row.source}: holds a lone surrogate, which is no text: {error}") from error
    except Exception as error:  # templates raise whatever their authors chose
        raise DataError(
            f"{row.source}: the chat template refused it: {type(error).__name__}: {in_one_line(error)}"
        ) from error
    return text


# -- files ------------------------------------------------------------------------------------------------------------


def _read_rows(path: str | Path, config: DataConfig) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (where it stands, the row) for each row of the file."""
    path = Path(path)
    if path.suffix not in (".jsonl", ".parquet"):
        raise DataError(f"{path}: prompt data must be a .jsonl or .parquet file")
    if not path.is_file():
        raise DataError(f"{path}: {'is not a file' if path.exists() else 'does not exist'}")
    if path.suffix == ".jsonl":
        yield from _read_jsonl(path)
    else:
        keys = [one for one in (config.input_key, config.label_key, config.metadata_key) if one is not None]
        yield from _read_parquet(path, keys)


def _read_jsonl(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            source = f"{path}:{number}"
            yield source, parse_row(line, source)


def parse_row(line: bytes, source: str) -> dict[str, Any]:
    """Read one line of a .jsonl file.

    Raises:
        DataError: it is no JSON object in UTF-8; names the source.
    """
    if line.startswith(codecs.BOM_UTF8):
        raise DataError(f"{source}: begins with a byte order mark; save the file as UTF-8 without one")
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{source}: is not UTF-8 (byte {error.start + 1} of the line)") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{source}: is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{source}: must be a JSON object, found {type(row).__name__}")
    return row


def _read_parquet(path: Path, keys: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(f"{path}: reading Parquet needs pyarrow; pip install 'drivetrain-launcher[parquet]'") from error
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if missing := [key for key in keys if key not in names]:
                raise DataError(f"{path}: has no column {missing[0]!r}; it has {', '.join(map(repr, names)) or 'none'}")
            row_number = 0
            for batch in file.iter_batches(columns=keys):
                for row in batch.to_pylist():
                    row_number += 1
                    yield f"{path} row {row_number}", row
    # the last two: text that is not UTF-8, times that Python cannot hold
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {in_one_line(error)}") from error
