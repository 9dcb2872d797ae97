"""Prompt files, chat templates and the order in which prompts are read."""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from drivetrain_backend_api import ConfigError, DataError
from drivetrain_launcher.config import DataConfig
from drivetrain_launcher.data import Prompt, PromptDataset, PromptSource, sft_samples

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, a begin-of-sequence token in front and an end-of-sequence token to end with."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1} | {letter: place for place, letter in enumerate(alphabet, start=2)}
    fast = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, bos_token="<s>", eos_token="</s>", chat_template=CHAT_TEMPLATE
    )


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config(**options: Any) -> DataConfig:
    return DataConfig(prompt_data="given apart", **options)


# -- rows -------------------------------------------------------------------------------------------------------------


def test_plain_text_keeps_its_special_tokens_labels_and_metadata(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = jsonl(
        tmp_path / "p.jsonl",
        {"q": "1+1=", "a": 2, "extra": {"level": 1}},
        {"q": "0.5·2=", "a": "one", "extra": {}, "unread": []},
        {"q": "tiny", "a": 1e-7, "extra": {"x": [1, 2]}},
    )
    found = PromptDataset.load(path, config(input_key="q", label_key="a", metadata_key="extra"), tokenizer)
    assert [one.text for one in found.prompts] == ["1+1=", "0.5·2=", "tiny"]
    assert [one.label for one in found.prompts] == ["2", "one", "0.0000001"]
    assert [one.metadata for one in found.prompts] == [{"level": 1}, {}, {"x": [1, 2]}]
    assert [one.index for one in found.prompts] == [0, 1, 2]
    assert found.left_out == 0
    for one in found.prompts:
        assert one.prompt_ids[0] == tokenizer.bos_token_id
        assert tokenizer.decode(one.prompt_ids[1:]) == one.text
        assert one.messages == ()


def test_a_chat_template_wraps_text_and_messages_alike(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = jsonl(tmp_path / "p.jsonl", {"input": "hi"}, {"input": [{"role": "user", "content": "hi"}]})
    plain = PromptDataset.load(path, config(apply_chat_template=True), tokenizer).prompts
    assert plain[0].text == plain[1].text == "<|user|>hi<|end|><|assistant|>"
    assert tokenizer.decode(plain[0].prompt_ids) == plain[0].text  # the template alone decides on special tokens
    system = PromptDataset.load(path, config(apply_chat_template=True, system_prompt="Be brief."), tokenizer).prompts
    assert system[1].text == "<|system|>Be brief.<|end|><|user|>hi<|end|><|assistant|>"
    assert [one["role"] for one in system[0].messages] == ["system", "user"]


def test_too_long_prompts_are_left_out_and_counted(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = jsonl(tmp_path / "p.jsonl", *({"input": "x" * n} for n in (3, 9, 4, 5)))
    found = PromptDataset.load(path, config(rollout_max_prompt_len=5), tokenizer)  # <s> is one of the five
    assert [one.index for one in found.prompts] == [0, 2]
    assert found.left_out == 2
    with pytest.raises(DataError, match="all 4 prompts are longer than --rollout-max-prompt-len 2"):
        PromptDataset.load(path, config(rollout_max_prompt_len=2), tokenizer)


@pytest.mark.parametrize(
    ("second_line", "message"),
    [
        (b'{"input": "caf\xe9"}', r"p\.jsonl:2: is not UTF-8 \(byte 15 of the line\)"),
        (b'{"input": "x"', r"p\.jsonl:2: is not JSON"),
        (b'["x"]', r"p\.jsonl:2: must be a JSON object, found list"),
        (b'{"question": "x", "label": "y"}', r"p\.jsonl:2: has no key 'input' \(--input-key\); it has 'question'"),
        (b'{"input": "x"}', r"p\.jsonl:2: has no key 'label' \(--label-key\)"),
        (b'{"input": 5, "label": "y"}', r"p\.jsonl:2: 'input' must be text, or a list of chat messages"),
        (b'{"input": [], "label": "y"}', r"p\.jsonl:2: 'input' must be text, or a list of chat messages"),
        (b'{"input": [{"role": "user"}], "label": "y"}', r"p\.jsonl:2: 'input' must be text"),
        (b'{"input": "x", "label": null}', r"p\.jsonl:2: label 'label' must be text or a number, found None"),
        (b'{"input": "\\ud800", "label": "y"}', r"p\.jsonl:2: holds a lone surrogate"),
        (b'{"input": [{"role": "tool", "content": ""}], "label": "y"}', r"p\.jsonl:2: the chat template refused it"),
        (b"[" * 100_000, r"p\.jsonl:2: is not JSON"),
    ],
)
def test_a_bad_line_is_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, second_line: bytes, message: str
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"input": "x", "label": "y"}\n' + second_line + b"\n")
    with pytest.raises(DataError, match=message):
        PromptDataset.load(path, config(label_key="label", apply_chat_template=True), tokenizer)


def test_blank_lines_are_skipped_and_counted(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('\n{"input": "x"}\n  \n{"input": "y"}')
    assert [one.source for one in PromptDataset.load(path, config(), tokenizer).prompts] == [f"{path}:2", f"{path}:4"]


def test_options_that_do_not_fit_the_data_are_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    chat = jsonl(tmp_path / "chat.jsonl", {"input": [{"role": "system", "content": "x"}], "meta": 3})
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(DataError, match="is a list of chat messages; give --apply-chat-template"):
        PromptDataset.load(chat, config(), tokenizer)
    with pytest.raises(DataError, match="begins with a system message; drop --system-prompt"):
        PromptDataset.load(chat, config(apply_chat_template=True, system_prompt="y"), tokenizer)
    with pytest.raises(DataError, match="'meta' must be a table of names and values, found 3"):
        PromptDataset.load(chat, config(apply_chat_template=True, metadata_key="meta"), tokenizer)
    with pytest.raises(ConfigError, match="has no chat template"):
        PromptDataset.load(chat, config(apply_chat_template=True), bare)
    with pytest.raises(ConfigError, match="--system-prompt acts only with --apply-chat-template"):
        PromptDataset.load(chat, config(system_prompt="y"), tokenizer)
    with pytest.raises(DataError, match=r"empty\.jsonl: holds no prompts"):
        PromptDataset.load(jsonl(tmp_path / "empty.jsonl"), config(), tokenizer)
    with pytest.raises(DataError, match="does not exist"):
        PromptDataset.load(tmp_path / "nowhere.jsonl", config(), tokenizer)
    with pytest.raises(DataError, match=r"must be a \.jsonl or \.parquet file"):
        PromptDataset.load(tmp_path / "p.csv", config(), tokenizer)


def test_an_empty_prompt_is_refused_where_it_has_no_token(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    fast = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    fast.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    without_bos = PreTrainedTokenizerFast(tokenizer_object=fast)
    path = jsonl(tmp_path / "p.jsonl", {"input": "x"}, {"input": ""})
    with pytest.raises(DataError, match=r"p\.jsonl:2: 'input' is empty"):
        PromptDataset.load(path, config(), without_bos)
    assert PromptDataset.load(path, config(), tokenizer).prompts[1].prompt_ids == (tokenizer.bos_token_id,)


def test_parquet_gives_the_prompts_that_jsonl_gives(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"input": [{"role": "user", "content": f"{n}+1"}], "label": n + 1, "extra": {"level": n}} for n in range(5)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet", row_group_size=2)
    options = config(label_key="label", metadata_key="extra", apply_chat_template=True)
    from_parquet = PromptDataset.load(tmp_path / "p.parquet", options, tokenizer).prompts
    from_jsonl = PromptDataset.load(jsonl(tmp_path / "p.jsonl", *rows), options, tokenizer).prompts
    for one, other in zip(from_parquet, from_jsonl, strict=True):
        assert (one.prompt_ids, one.label, one.metadata, one.messages) == (
            other.prompt_ids,
            other.label,
            other.metadata,
            other.messages,
        )
    assert from_parquet[3].source == f"{tmp_path / 'p.parquet'} row 4"


def test_parquet_that_cannot_be_read_is_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p.parquet"
    parquet.write_table(pyarrow.table({"question": ["x"]}), path)
    with pytest.raises(DataError, match=r"p\.parquet: has no column 'input'; it has 'question'"):
        PromptDataset.load(path, config(), tokenizer)
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # Python's own way to say: not installed
    with pytest.raises(DataError, match=r"pip install 'drivetrain-launcher\[parquet\]'"):
        PromptDataset.load(path, config(), tokenizer)
    monkeypatch.undo()
    path.write_bytes(b"not parquet at all")
    with pytest.raises(DataError, match=r"p\.parquet: cannot be read as Parquet"):
        PromptDataset.load(path, config(), tokenizer)


# -- order ------------------------------------------------------------------------------------------------------------


def dataset(size: int) -> PromptDataset:
    return PromptDataset(
        prompts=tuple(Prompt(index=one, source=f"x:{one}", prompt_ids=(one,), text=str(one)) for one in range(size))
    )


@given(size=st.integers(1, 12), counts=st.lists(st.integers(1, 20), max_size=8), shuffle=st.booleans())
def test_every_epoch_reads_every_prompt_once_however_it_is_asked(size: int, counts: list[int], shuffle: bool) -> None:
    source = PromptSource(dataset(size), shuffle=shuffle, seed=5)
    read = [prompt.index for count in counts for prompt in source.next_prompts(count)]
    assert len(read) == sum(counts)
    for start in range(0, len(read) - size + 1, size):
        assert Counter(read[start : start + size]) == Counter(range(size))
    if not shuffle:
        assert read == [place % size for place in range(len(read))]


@given(size=st.integers(1, 12), before=st.integers(0, 40), after=st.integers(1, 40))
def test_a_saved_position_continues_exactly(size: int, before: int, after: int) -> None:
    source = PromptSource(dataset(size), shuffle=True, seed=5)
    source.next_prompts(before)
    assert source.read == before
    other = PromptSource(dataset(size), shuffle=True, seed=5)
    other.next_prompts(source.read)
    assert other.next_prompts(after) == source.next_prompts(after)
    assert (other.read, other.epoch) == (source.read, source.epoch)


def test_order_depends_on_seed_and_epoch_alone() -> None:
    def epochs(seed: int) -> list[list[int]]:
        source = PromptSource(dataset(50), shuffle=True, seed=seed)
        return [[one.index for one in source.next_prompts(50)] for _ in range(2)]

    assert epochs(1) == epochs(1)
    assert epochs(1)[0] != epochs(1)[1]
    assert epochs(1)[0] != epochs(2)[0]


# -- sft --------------------------------------------------------------------------------------------------------------


def test_sft_samples_are_the_label_and_an_end(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = jsonl(tmp_path / "p.jsonl", {"input": "1+1=", "label": "2"}, {"input": "?", "label": ""})
    prompts = PromptDataset.load(path, config(label_key="label"), tokenizer).prompts
    (first_prompt, first), (_, second) = sft_samples(prompts, tokenizer)
    assert first_prompt == prompts[0].prompt_ids
    assert tokenizer.decode(first) == "2</s>"
    assert second == (tokenizer.eos_token_id,)
    with pytest.raises(DataError, match=f"{path}:1: has no label to learn"):
        sft_samples(PromptDataset.load(path, config(), tokenizer).prompts, tokenizer)
    endless = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(DataError, match="no eos_token"):
        sft_samples(prompts, endless)
