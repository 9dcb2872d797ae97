"""What a rollout engine is: it generates from token ids under one weight version, and takes new weights.

An engine knows no train backend, no reward and no Ray. Engines are found through the entry point group
`drivetrain.rollout_engines`, which resolves to an `EngineSpec`; importing this module imports no torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from drivetrain_backend_api import OptionGroup, PluginKind, PluginSpec

if TYPE_CHECKING:
    from torch import Tensor

    from drivetrain_backend_api.weights import WeightEntry, WeightPlan


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class PauseMode(StrEnum):
    """What a pause does to requests in flight: let them end, or end them at their next token."""

    DRAIN = "drain"
    ABORT = "abort"


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token.
        top_p: smallest set of tokens with at least this probability; 1 takes all.
        top_k: only the k most likely; 0 takes all.
        max_new_tokens: most tokens generated, the stop token included.
        stop_token_ids: tokens that end a generation and are kept at its end.
        stop: strings that end a generation once its decoded text contains one; the text is kept.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """One sequence to continue.

    Attributes:
        prompt_ids: at least one token id.
        seed: fixes this sequence's random stream, for example (seed, rollout id, sample index).
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What became of a request.

    Attributes:
        token_ids: the new tokens.
        log_probs: of each new token under softmax(logits / temperature) over the whole vocabulary (temperature 1 when
            greedy), which is what the trainer computes too.
        weight_version: the version that made it.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: FinishReason
    weight_version: int


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What every engine is constructed with.

    Attributes:
        model: Hugging Face folder with config, tokenizer and first weights.
        device: torch device string.
        dtype: "float32", "bfloat16" or "float16".
        trust_remote_code: allow Python code inside the model folder to run.
        options: the engine's own options: an instance of its spec's config class.
    """

    model: str
    device: str
    dtype: str
    trust_remote_code: bool
    options: Any


class RolloutEngine(ABC):
    """One engine in one process. Calls come one at a time, except that `pause(ABORT)` may come during `generate`."""

    def __init__(self, settings: EngineSettings) -> None:
        """Take the settings; `start` does the work."""
        self.settings = settings
        self.weight_version = 0

    @abstractmethod
    def start(self) -> None:
        """Load tokenizer and model. Weight version 0 means: never synced from a trainer."""

    @abstractmethod
    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Generate for all requests, results in their order; the same requests give the same result, bit for bit."""

    @abstractmethod
    def pause(self, mode: PauseMode) -> None:
        """Stop generating: `generate` calls that come later are refused until `resume`."""

    @abstractmethod
    def resume(self) -> None:
        """Serve again; legal only with whole weights."""

    @abstractmethod
    def flush_cache(self) -> None:
        """Forget everything computed with the present weights."""

    @abstractmethod
    def begin_weight_update(self, plan: "WeightPlan") -> None:
        """Check names, shapes and dtypes of a coming update against the model, before anything changes.

        From here until `commit_weight_update` the engine refuses to serve, also when the update fails.

        Raises:
            DataError: the plan does not fit the model, with the first tensor that differs.
        """

    @abstractmethod
    def load_weights(self, tensors: "Iterable[tuple[str, Tensor]]") -> None:
        """Copy some of the plan's tensors into the model."""

    @abstractmethod
    def weight_checksum(self, entries: "Sequence[WeightEntry]") -> int:
        """Return the checksum (`weight_sync.checksum`) of weights as the model now holds them, in this order."""

    @abstractmethod
    def commit_weight_update(self, version: int) -> None:
        """Make the update the engine's weights, under `version`. Raises when some tensor of the plan is missing."""

    def close(self) -> None:
        """Free everything."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec(PluginSpec):
    """Spec of a rollout engine.

    Attributes:
        config_class: the engine's options; its fields become flags.
        devices: torch device types it runs on.
    """

    config_class: type[OptionGroup]
    devices: tuple[str, ...] = ("cpu",)

    def load(self) -> type[RolloutEngine]:
        """Import and return the engine's class."""
        return self.load_target()  # type: ignore[no-any-return]


ROLLOUT_ENGINES: PluginKind[EngineSpec] = PluginKind(
    group="drivetrain.rollout_engines", noun="rollout engine", flag="--rollout-engine", spec_class=EngineSpec
)
