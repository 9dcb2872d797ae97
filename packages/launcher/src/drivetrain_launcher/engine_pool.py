"""All rollout engines as one: requests go to them in a fixed way, results come back in order and checked."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from drivetrain_infra.calls import gather
from drivetrain_infra.engines.actor import EngineHandle
from drivetrain_infra.engines.base import GenerateRequest, Generation
from drivetrain_launcher.response_checks import check_generations


class EngineCall(Protocol):
    """Generates for a list of requests, results in their order; blocks."""

    def __call__(
        self, requests: Sequence[GenerateRequest], *, samples: Sequence[str], weight_version: int
    ) -> list[Generation]:
        """Generate; see `EnginePool.generate`."""
        ...


@dataclass(frozen=True, kw_only=True)
class EnginePool:
    """The engines of a run.

    Attributes:
        engines: those that take requests.
        seconds: deadline of one call.
        vocab_size: of the model, None where that is not known.
    """

    engines: Sequence[EngineHandle]
    seconds: float
    vocab_size: int | None

    def generate(
        self, requests: Sequence[GenerateRequest], *, samples: Sequence[str], weight_version: int
    ) -> list[Generation]:
        """Generate for all requests; each engine takes one run of the list, so that batches depend on the list alone.

        Args:
            requests: one a generation.
            samples: what each request is for, for messages.
            weight_version: that the engines must serve.

        Raises:
            DataError: an engine returned something else than was asked for; names it and the sample.
            DrivetrainError: an engine failed, died or missed the deadline; names it.
        """
        count = len(self.engines)
        cuts = [round(place * len(requests) / count) for place in range(count + 1)]
        parts = {
            engine.name: slice(cuts[place], cuts[place + 1])
            for place, engine in enumerate(self.engines)
            if cuts[place] < cuts[place + 1]
        }
        actors = {engine.name: engine.actor for engine in self.engines}
        results = gather(
            {name: actors[name].generate.remote(list(requests[part])) for name, part in parts.items()},
            what="generating",
            seconds=self.seconds,
            flag="--rollout-timeout",
        )
        return [
            generation
            for name, part in parts.items()
            for generation in check_generations(
                name,
                requests[part],
                results[name],
                samples=samples[part],
                weight_version=weight_version,
                vocab_size=self.vocab_size,
            )
        ]
