"""Every transformers call of the engine: load a model folder, and run B left-padded sequences with a KV cache.

Absorbs what differs between transformers versions and architectures (argument names, optional arguments). Knows no
sampling and no requests.

Shape names: B sequences, P tokens of the longest prompt, V tokens of the vocabulary.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import transformers
from torch import Tensor

from drivetrain_backend_api import DataError
from drivetrain_infra.engines.positions import usable_positions


@dataclass(frozen=True, kw_only=True)
class CausalLM:
    """A loaded model folder.

    Attributes:
        folder: where it came from, for messages.
        model: the transformers module, in eval mode.
        tokenizer: its tokenizer.
    """

    folder: str
    model: Any
    tokenizer: Any

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        device: torch.device = self.model.device
        return device

    @property
    def vocab_size(self) -> int:
        """Token ids that the model takes: 0 up to this, exclusive."""
        return int(self.model.get_input_embeddings().num_embeddings)

    @property
    def max_length(self) -> int | None:
        """Most tokens of a sequence, prompt and response together; None when the model sets no limit."""
        return usable_positions(self.model.config)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence, by the generation config or the tokenizer."""
        found: set[int] = set()
        for one in (self.model.generation_config.eos_token_id, self.tokenizer.eos_token_id):
            found.update(one if isinstance(one, list | tuple) else () if one is None else (one,))
        return tuple(sorted(found))

    def decode(self, token_ids: Sequence[Sequence[int]]) -> list[str]:
        """Turn token ids into text, special tokens included."""
        if not token_ids:
            return []  # some versions take an empty batch for one empty text
        texts: list[str] = self.tokenizer.batch_decode(
            [list(one) for one in token_ids], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return texts

    @cached_property
    def forward_arguments(self) -> frozenset[str]:
        """Names of the arguments that the model's forward declares."""
        return frozenset(inspect.signature(self.model.forward).parameters)

    @property
    def cache_name(self) -> str:
        """What this transformers version calls the KV cache, as argument and in the output."""
        return "cache" if "cache" in self.forward_arguments else "past_key_values"


def load_causal_lm(folder: str, *, device: str, dtype: torch.dtype, trust_remote_code: bool) -> CausalLM:
    """Load model and tokenizer from a local folder.

    Raises:
        DataError: the folder does not hold a causal language model and its tokenizer, or not all of its weights.
    """
    library: Any = transformers
    # an engine is one process of many: its bars would tear the display of the whole run
    library.logging.disable_progress_bar()
    try:
        tokenizer = library.AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
        model, found = library.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            use_safetensors=True,  # never a pickle
            output_loading_info=True,
        )
    except Exception as error:  # whatever a broken folder makes the loader raise
        raise DataError(
            f"cannot load the model folder {folder} into the rollout engine: {type(error).__name__}: {error}; it needs "
            "config.json, safetensors weights and tokenizer files of a causal language model"
        ) from error
    if missing := sorted(found["missing_keys"]):
        raise DataError(
            f"the model folder {folder} lacks {len(missing)} of its model's tensors, first {missing[0]}; "
            "give --hf-checkpoint a folder with whole weights"
        )
    return CausalLM(folder=folder, model=model.to(device).eval(), tokenizer=tokenizer)


class CachedSequences:
    """B sequences on their way through a causal LM, one more token each at every `append`.

    Attributes:
        logits: float32 [B, V], of each sequence's next token.
    """

    logits: Tensor

    def __init__(self, lm: CausalLM, prompts: Sequence[Sequence[int]], room: int) -> None:
        """Run the prompts. Equal prompts are run once and their cache rows repeated.

        Args:
            lm: the model.
            prompts: B prompts of token ids.
            room: how many tokens may be appended.
        """
        self._lm = lm
        distinct = {prompt: row for row, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
        longest = max(map(len, distinct))
        tokens = torch.zeros(len(distinct), longest, dtype=torch.int64)
        mask = torch.ones(len(distinct), longest + room, dtype=torch.int64)
        for prompt, row in distinct.items():
            tokens[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, : longest - len(prompt)] = 0
        self._mask = mask.to(lm.device)
        self._length = longest
        positions = (self._mask[:, :longest].cumsum(dim=1) - 1).clamp_(min=0)
        self._cache: Any = None
        self._forward(tokens.to(lm.device), positions)
        self._next_position = positions[:, -1] + 1
        if len(distinct) < len(prompts):
            self.select(torch.tensor([distinct[tuple(one)] for one in prompts], device=lm.device))

    def append(self, tokens: Tensor) -> None:
        """Add one token, int64 [B], to every sequence."""
        self._length += 1
        positions = self._next_position
        if self._lm.max_length is not None:
            # a sequence that has ended may still be carried along; its rows mean nothing, but must stay in the table
            positions = positions.clamp(max=self._lm.max_length - 1)
        self._forward(tokens[:, None], positions[:, None])
        self._next_position = self._next_position + 1

    def select(self, rows: Tensor) -> None:
        """Keep only these sequences, int64 [new B], in this order; a row may repeat."""
        # the one selection that every kind of cache layer implements, recurrent ones included
        self._cache.reorder_cache(rows)
        self._mask, self._next_position, self.logits = self._mask[rows], self._next_position[rows], self.logits[rows]

    def _forward(self, tokens: Tensor, positions: Tensor) -> None:
        arguments = {
            "input_ids": tokens,
            "attention_mask": self._mask[:, : self._length],
            "use_cache": True,
            self._lm.cache_name: self._cache,
        }
        optional = {"position_ids": positions, "logits_to_keep": 1}
        arguments |= {name: value for name, value in optional.items() if name in self._lm.forward_arguments}
        output = self._lm.model(**arguments)
        self._cache = getattr(output, self._lm.cache_name)
        self.logits = output.logits[:, -1].float()
