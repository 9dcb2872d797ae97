"""The rollout engine `transformers`: batched sampling from a transformers causal LM in this process, on CPU or GPU.

Knows no train backend, no Ray and no transport: it takes requests and named tensors.
"""

import gc
import threading
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from drivetrain_backend_api import ConfigError, DataError, DrivetrainError
from drivetrain_backend_api.weights import WeightEntry, WeightPlan
from drivetrain_infra.engines.base import EngineSettings, GenerateRequest, Generation, PauseMode, RolloutEngine
from drivetrain_infra.engines.causal_lm import CausalLM, load_causal_lm
from drivetrain_infra.engines.decoding import Decoded, decode_batch
from drivetrain_infra.engines.lifecycle import EngineLifecycle, EngineState
from drivetrain_infra.engines.model_weights import ModelWeights
from drivetrain_infra.engines.transformers_spec import TransformersEngineConfig

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TransformersEngine(RolloutEngine):
    """Samples from one model on one device. `pause` may come from another thread at any time after `start`."""

    _lm: CausalLM
    _weights: ModelWeights

    def __init__(self, settings: EngineSettings) -> None:
        """Take the settings; `start` does the work.

        Raises:
            ConfigError: the dtype is not one of those in `EngineSettings`.
        """
        super().__init__(settings)
        if settings.dtype not in _DTYPES:
            raise ConfigError(f"rollout engine dtype {settings.dtype!r}: not one of {', '.join(_DTYPES)}")
        self.options: TransformersEngineConfig = settings.options
        self.lifecycle = EngineLifecycle()
        self._generating = threading.Lock()
        self._abort = threading.Event()

    def start(self) -> None:
        """Load tokenizer and model, and serve.

        Raises:
            DataError: the folder cannot be loaded whole.
        """
        self.lifecycle.require("start")
        self._lm = load_causal_lm(
            self.settings.model,
            device=self.settings.device,
            dtype=_DTYPES[self.settings.dtype],
            trust_remote_code=self.settings.trust_remote_code,
        )
        self._weights = ModelWeights(self._lm.model)
        self.lifecycle.move("start", EngineState.SERVING)

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Generate for all requests; see `RolloutEngine.generate`.

        Requests of similar prompt length run together, so a batch is a function of the request list alone. Stop ids are
        the request's and the model's own end-of-sequence ids. A response ends with LENGTH at the model's longest
        sequence.

        Raises:
            DataError: a request the model cannot take; the message says which.
            DrivetrainError: the logits are not finite, or the batch does not fit the device.
        """
        with self._generating:
            self.lifecycle.require("generate")
            for index, one in enumerate(requests):
                if problem := request_problem(one, vocab_size=self._lm.vocab_size, max_length=self._lm.max_length):
                    raise DataError(f"request {index} of {len(requests)} (seed {list(one.seed)}): {problem}")
            order = sorted(range(len(requests)), key=lambda index: (len(requests[index].prompt_ids), index))
            size = self.options.engine_max_batch_size
            generations: dict[int, Generation] = {}
            for start in range(0, len(order), size):
                batch = order[start : start + size]
                for index, decoded in zip(batch, self._decode([requests[one] for one in batch]), strict=True):
                    generations[index] = Generation(
                        token_ids=decoded.token_ids,
                        log_probs=decoded.log_probs,
                        finish_reason=decoded.finish_reason,
                        weight_version=self.weight_version,
                    )
            return [generations[index] for index in range(len(requests))]

    def _decode(self, requests: Sequence[GenerateRequest]) -> list[Decoded]:
        try:
            return decode_batch(self._lm, requests, self._abort.is_set)
        except torch.OutOfMemoryError as error:
            raise DrivetrainError(
                f"{len(requests)} sequences together do not fit {self.settings.device}; "
                f"lower --engine-max-batch-size (now {self.options.engine_max_batch_size})"
            ) from error

    def pause(self, mode: PauseMode) -> None:
        """Refuse new `generate` calls, and return once the one in flight has ended as `mode` says.

        Legal in any state after `start`; it does not leave a weight update.
        """
        self.lifecycle.require("pause")
        if self.lifecycle.state is EngineState.SERVING:
            self.lifecycle.move("pause", EngineState.PAUSED)
        if mode is PauseMode.ABORT:
            self._abort.set()
        with self._generating:
            self._abort.clear()

    def resume(self) -> None:
        """Serve again."""
        self.lifecycle.move("resume", EngineState.SERVING)

    def flush_cache(self) -> None:
        """Check that nothing runs: a KV cache lives no longer than its `generate` call, so there is none to forget."""
        self.lifecycle.require("flush_cache")

    def begin_weight_update(self, plan: WeightPlan) -> None:
        """Check the plan; see `RolloutEngine.begin_weight_update`. A refused plan leaves the engine as it was."""
        self.lifecycle.require("begin_weight_update")
        self._weights.begin(plan)
        self.lifecycle.move("begin_weight_update", EngineState.UPDATING)

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy some of the plan's tensors into the model.

        Raises:
            DataError: a tensor is not as the plan said.
        """
        self.lifecycle.require("load_weights")
        self._weights.load(tensors)

    def weight_checksum(self, entries: Sequence[WeightEntry]) -> int:
        """Return the checksum of weights as the model holds them, in the entries' dtypes and order."""
        self.lifecycle.require("weight_checksum")
        return self._weights.checksum(entries)

    def commit_weight_update(self, version: int) -> None:
        """Make the update the engine's weights; it stays paused until `resume`.

        Raises:
            DataError: some tensor of the plan is missing.
        """
        self.lifecycle.require("commit_weight_update")
        self._weights.finish()
        self.weight_version = version
        self.lifecycle.move("commit_weight_update", EngineState.PAUSED)

    def close(self) -> None:
        """Free the model; legal in every state, and twice."""
        if self.lifecycle.state not in (EngineState.NEW, EngineState.CLOSED):
            self.pause(PauseMode.ABORT)
            del self._lm, self._weights
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        self.lifecycle.state = EngineState.CLOSED


def request_problem(request: GenerateRequest, *, vocab_size: int, max_length: int | None) -> str | None:
    """Say why a model cannot take a request, and what to do; None when it can."""
    sampling, length = request.sampling, len(request.prompt_ids)
    if not length:
        return "its prompt is empty; a generation needs at least one token to start from"
    if max_length is not None and length >= max_length:
        return (
            f"its prompt has {length} tokens, but the model takes {max_length}, prompt and response together; "
            "leave such prompts out with --rollout-max-prompt-len"
        )
    if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocab_size:
        return f"its prompt holds a token id outside 0..{vocab_size - 1}; make it with this model's tokenizer"
    if not (0 <= sampling.temperature < float("inf")):
        return f"temperature {sampling.temperature} must be a finite number of at least 0"
    if not 0 < sampling.top_p <= 1:
        return f"top_p {sampling.top_p} must be above 0 and at most 1"
    if sampling.top_k < 0:
        return f"top_k {sampling.top_k} must be at least 0"
    if sampling.max_new_tokens < 1:
        return f"max_new_tokens {sampling.max_new_tokens} must be at least 1"
    if "" in sampling.stop:
        return "an empty stop string would end every generation; remove it"
    return None
