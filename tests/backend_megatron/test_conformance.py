"""The Megatron backend under the conformance suite."""

import pytest

from drivetrain_backend_api.testing.suite import ConformanceSuite


@pytest.mark.slow
class TestMegatron(ConformanceSuite):
    """On one rank in full, and on two and four, whose many layouts take turns."""

    backend = "megatron"
    many_ranks = 2
