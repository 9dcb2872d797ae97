"""The suite that every train backend must pass."""

from drivetrain_backend_api.testing.suite import ConformanceSuite


class TestPlainTorch(ConformanceSuite):
    backend = "plain-torch"
    world_sizes = (1,)
