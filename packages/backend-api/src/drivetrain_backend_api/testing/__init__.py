"""The conformance suite: one set of tests that any train backend must pass, on a CPU.

    pytest --pyargs drivetrain_backend_api.testing --train-backend NAME

or subclass `drivetrain_backend_api.testing.suite.ConformanceSuite` in tests of your own. This module and `plugin`,
which pytest imports at every start, never import torch.
"""
