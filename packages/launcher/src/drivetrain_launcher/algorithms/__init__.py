"""Algorithms that ship with the launcher: `grpo` and `sft`."""
