"""The Megatron backend under the conformance suite."""

import pytest

from drivetrain_backend_api.testing.suite import ConformanceSuite


@pytest.mark.slow
class TestMegatron(ConformanceSuite):
    """On one rank and on two."""

    backend = "megatron"
    world_sizes = (1, 2)


@pytest.mark.slow
class TestMegatronOnFourRanks(ConformanceSuite):
    """On four ranks, whose layouts take turns, and between one and four."""

    backend = "megatron"
    world_sizes = (4,)
