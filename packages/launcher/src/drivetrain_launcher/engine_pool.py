"""All rollout engines as one: requests go to them in a fixed way, results come back in order and checked."""

from collections.abc import Callable, Sequence
from typing import Protocol

from drivetrain_backend_api import DrivetrainError
from drivetrain_infra.calls import LostProcessError, gather
from drivetrain_infra.engines.actor import EngineHandle
from drivetrain_infra.engines.base import GenerateRequest, Generation
from drivetrain_infra.weight_sync.errors import WeightSyncError
from drivetrain_launcher.response_checks import check_generations


class EngineCall(Protocol):
    """Generates for a list of requests, results in their order; blocks."""

    def __call__(
        self, requests: Sequence[GenerateRequest], *, samples: Sequence[str], weight_version: int
    ) -> list[Generation]:
        """Generate; see `EnginePool.generate`."""
        ...


class EnginePool:
    """The engines of a run.

    Attributes:
        engines: those that take requests, by number; one that is replaced keeps its name.
    """

    def __init__(
        self,
        engines: Sequence[EngineHandle],
        *,
        seconds: float,
        vocab_size: int | None,
        start_again: Callable[[int], EngineHandle],
        most_restarts: int,
    ) -> None:
        """Take the running engines.

        Args:
            engines: all of them.
            seconds: deadline of one call.
            vocab_size: of the model, None where that is not known.
            start_again: starts a new engine in the place of the one with this number.
            most_restarts: engines that may be replaced in all.
        """
        self.engines = list(engines)
        self._seconds = seconds
        self._vocab_size = vocab_size
        self._start_again = start_again
        self._restarts_left = most_restarts

    def replace(self, error: DrivetrainError) -> bool:
        """Replace the engine that an error says is gone; the new one has no weights of the trainer yet.

        Returns: False where the error says nothing of the kind, or too many were replaced already.
        """
        died = isinstance(error, LostProcessError | WeightSyncError) and error.died
        name = error.who if isinstance(error, LostProcessError) else getattr(error, "engine", None)
        numbers = [number for number, one in enumerate(self.engines) if one.name == name]
        if not died or not numbers:
            return False
        while self._restarts_left:
            self._restarts_left -= 1
            try:
                self.engines[numbers[0]] = self._start_again(numbers[0])
                return True
            except LostProcessError as again:
                if not again.died or not self._restarts_left:
                    raise
        return False

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
            LostProcessError: an engine died or missed the deadline; names it.
            DrivetrainError: an engine failed; names it.
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
            seconds=self._seconds,
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
                vocab_size=self._vocab_size,
            )
        ]
