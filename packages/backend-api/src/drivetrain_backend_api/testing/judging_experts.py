"""Tests of mixtures of experts, where expert parallelism is claimed: the same promises, under layouts that cut experts.

Low precision is left out: it takes other experts than fp32 does where two are close.
"""

from drivetrain_backend_api.testing.cases import Case
from drivetrain_backend_api.testing.judge import Judge
from drivetrain_backend_api.testing.judging_numbers import check_training
from drivetrain_backend_api.testing.judging_state import SLEEPS, check_resharding, check_resume, check_sleep
from drivetrain_backend_api.testing.judging_weights import check_export, check_holders
from drivetrain_backend_api.testing.layouts import Layout

MIXTURES = ("qwen3_moe", "qwen3_moe-mixed")
"""Experts in every block; in all but one."""


class ExpertsTests:
    """Training, exports, checkpoints and sleep of mixtures of experts."""

    def test_experts_train_as_a_plain_model(self, judge: Judge, expert_layout: Layout, expert_case: Case) -> None:
        """One rollout in fp32; every token goes through the same experts as in the reference."""
        check_training(judge, expert_layout, expert_case, f"{expert_layout.label}, {expert_case.name}")

    def test_experts_are_exported_as_save_pretrained_writes(
        self, judge: Judge, expert_layout: Layout, mixture: str
    ) -> None:
        """Each expert's tensors once, on every rank, in buckets of any size."""
        check_export(judge, expert_layout, mixture)

    def test_each_kind_of_holders_gets_the_experts(self, judge: Judge, expert_layout: Layout, holders: str) -> None:
        """Experts of all ranks come together at whoever asked for data."""
        check_holders(judge, expert_layout, holders, MIXTURES[0])

    def test_a_resumed_run_with_experts_is_the_same_run(self, judge: Judge, expert_layout: Layout) -> None:
        """Bitwise, in fp32."""
        check_resume(judge, expert_layout, "fp32", MIXTURES[1])

    def test_experts_load_under_another_layout(
        self, judge: Judge, expert_layout: Layout, expert_source: Layout
    ) -> None:
        """Experts change ranks between a save and a load."""
        check_resharding(judge, expert_layout, expert_source, MIXTURES[0])

    def test_sleep_keeps_every_bit_of_the_experts(self, judge: Judge, expert_layout: Layout) -> None:
        """By the longest of the ways to sleep and wake."""
        check_sleep(judge, expert_layout, list(SLEEPS)[-1], "fp32", MIXTURES[0])
