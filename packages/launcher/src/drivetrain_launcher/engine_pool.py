"""All rollout engines as one: requests go to them in a fixed way, results come back in order."""

from collections.abc import Sequence
from dataclasses import dataclass

from drivetrain_infra.calls import gather
from drivetrain_infra.engines.actor import EngineHandle
from drivetrain_infra.engines.base import GenerateRequest, Generation


@dataclass(frozen=True, kw_only=True)
class EnginePool:
    """The engines of a run.

    Attributes:
        engines: those that take requests.
        seconds: deadline of one call.
    """

    engines: Sequence[EngineHandle]
    seconds: float

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Generate for all requests; each engine takes one run of the list, so that batches depend on the list alone.

        Raises:
            DrivetrainError: an engine failed, died or missed the deadline; names it.
        """
        count = len(self.engines)
        cuts = [round(place * len(requests) / count) for place in range(count + 1)]
        calls = {
            engine.name: engine.actor.generate.remote(list(requests[cuts[place] : cuts[place + 1]]))
            for place, engine in enumerate(self.engines)
            if cuts[place] < cuts[place + 1]
        }
        results = gather(calls, what="generating", seconds=self.seconds, flag="--rollout-timeout")
        return [generation for name in calls for generation in results[name]]

    def weight_version(self) -> int:
        """Return the weight version that all engines serve."""
        calls = {one.name: one.actor.weight_version.remote() for one in self.engines}
        versions = gather(calls, what="asking for the weight version", seconds=self.seconds, flag="--rollout-timeout")
        return int(min(versions.values()))
