"""The FSDP backend under the conformance suite."""

import pytest

from drivetrain_backend_api.testing.suite import ConformanceSuite


class TestFsdp(ConformanceSuite):
    """On one rank and on two."""

    backend = "fsdp"
    world_sizes = (1, 2)


@pytest.mark.slow
@pytest.mark.exhaustive
class TestFsdpOnFourRanks(ConformanceSuite):
    """On four ranks, and between one and four."""

    backend = "fsdp"
    world_sizes = (4,)
