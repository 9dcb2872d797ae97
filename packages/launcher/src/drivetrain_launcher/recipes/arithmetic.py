"""What the quickstart recipe needs: a tiny model of the Qwen3 architecture, a tokenizer, and sums to learn from.

Everything is made on the spot from a seed, so that nothing is downloaded.
"""

import json
import random
from collections.abc import Iterable
from pathlib import Path

LARGEST = 39
"""Sums are a + b with both from 0 to this."""

HELD_OUT = 128
"""Sums that no training file holds."""

WRONG_ANSWERS = 0.5
"""Share of the warm-up answers that are off by a little: the model learns to write sums, but is right half of the time,
as one that read the open web would be. Reinforcement must find out which half."""

WARMUP_EPOCHS = 8
"""How often the warm-up file holds each training sum, each time with an answer drawn anew."""

_CHARACTERS = "0123456789+="


def options(folder: Path) -> dict[str, str]:
    """Return the options of the run that `make` prepares in this folder: name -> path."""
    return {
        "hf_checkpoint": str(folder / "model"),
        "prompt_data": str(folder / "train.jsonl"),
        "eval_prompt_data": str(folder / "held_out.jsonl"),
    }


def warmup_options(folder: Path) -> dict[str, str]:
    """Return what differs in the warm-up stage."""
    return {"prompt_data": str(folder / "warmup.jsonl")}


def make(folder: Path, seed: int) -> None:
    """Write the model folder and the prompt files; `seed` fixes weights and sums."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    sums = [(a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
    rng.shuffle(sums)
    held_out, training = sums[:HELD_OUT], sums[HELD_OUT:]
    noisy = ((a, b, _perhaps_wrong(a + b, rng)) for _ in range(WARMUP_EPOCHS) for a, b in training)
    _write(folder / "warmup.jsonl", noisy)
    _write(folder / "train.jsonl", ((a, b, a + b) for a, b in training))
    _write(folder / "held_out.jsonl", ((a, b, a + b) for a, b in held_out))
    _make_model(folder / "model", seed)


def _perhaps_wrong(answer: int, rng: random.Random) -> int:
    return max(0, answer + rng.choice((-10, -2, -1, 1, 2, 10))) if rng.random() < WRONG_ANSWERS else answer


def _write(path: Path, rows: Iterable[tuple[int, int, int]]) -> None:
    with path.open("w") as file:
        for a, b, answer in rows:
            file.write(json.dumps({"question": f"{a}+{b}=", "answer": str(answer)}) + "\n")


def _make_model(folder: Path, seed: int) -> None:
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    words = ["<pad>", "<eos>", *_CHARACTERS]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    )
    config = Qwen3Config(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = 1
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
