"""The Megatron backend under the conformance suite; `--conformance-thorough` judges more."""

import pytest

from drivetrain_backend_api.testing.suite import ConformanceSuite


@pytest.mark.slow
class TestMegatron(ConformanceSuite):
    """On one rank and on two, whose layouts take turns."""

    backend = "megatron"
    world_sizes = (1, 2)
    many_ranks = 1


@pytest.mark.slow
@pytest.mark.exhaustive
class TestMegatronOnFourRanks(ConformanceSuite):
    """On four ranks, whose layouts take turns, and between one and four; CI runs what shows most of it."""

    backend = "megatron"
    world_sizes = (4,)
