"""Algorithms that ship with the launcher: `grpo`, `opd` and `sft`."""
