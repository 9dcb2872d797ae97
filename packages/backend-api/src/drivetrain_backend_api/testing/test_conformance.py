"""The suite as `pytest --pyargs drivetrain_backend_api.testing --train-backend NAME` runs it."""

from drivetrain_backend_api.testing.suite import ConformanceSuite


class TestConformance(ConformanceSuite):
    """Judges the backend that --train-backend names."""
