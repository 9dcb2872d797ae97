"""The Megatron backend under the conformance suite; `--conformance-thorough` judges more, `-m slow` all that follows.

CI judges the numbers under every layout, and of every other promise a few runs: `in_ci` says how many of which test.
"""

from typing import ClassVar

import pytest

from drivetrain_backend_api.testing.suite import ConformanceSuite

EVERY = 100


@pytest.mark.slow
class TestMegatron(ConformanceSuite):
    """On one rank and on two, whose layouts take turns."""

    backend = "megatron"
    world_sizes = (1, 2)
    many_ranks = 1
    in_ci: ClassVar[dict[str, int]] = {
        "test_training_equals_a_plain_model": EVERY,
        "test_options_keep_the_numbers": EVERY,
        "test_experts_train_as_a_plain_model": EVERY,
        "test_a_checkpoint_loads_under_another_layout": EVERY,
        "test_a_damaged_checkpoint_is_refused": EVERY,
        "test_illegal_calls_name_both_states": 1,
        "test_sleep_does_not_grow": 1,
        "others": 2,
    }


@pytest.mark.slow
class TestMegatronOnFourRanks(ConformanceSuite):
    """On four ranks, whose layouts take turns, and between one and four; CI runs what shows most of it."""

    backend = "megatron"
    world_sizes = (4,)
    in_ci: ClassVar[dict[str, int]] = {
        "test_training_equals_a_plain_model": EVERY,
        "test_experts_train_as_a_plain_model": 9,
        "test_a_checkpoint_loads_under_another_layout": 5,
        "others": 0,
    }
