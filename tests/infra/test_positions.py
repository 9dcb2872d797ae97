"""How many tokens a model takes, by the configurations that models come with."""

from typing import Any

import pytest
from transformers import GPT2Config, LlamaConfig, PretrainedConfig, Qwen3Config

from drivetrain_infra.engines.positions import usable_positions

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({}, None),
        ({"max_position_embeddings": "many"}, None),
        ({"max_position_embeddings": 64}, 64),
        ({"max_position_embeddings": 64, "rope_scaling": None}, 64),
        ({"max_position_embeddings": 32768, "rope_scaling": YARN}, 131072),
        ({"max_position_embeddings": 131072, "rope_scaling": YARN}, 131072),
        ({"max_position_embeddings": 32768, "rope_parameters": {"full_attention": YARN}}, 131072),
        ({"max_position_embeddings": 131072, "rope_scaling": LLAMA3}, 131072),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
        (
            {
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,
                "rope_scaling": {"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]},
            },
            131072,
        ),
        ({"max_position_embeddings": 64, "rope_scaling": {"factor": float("inf")}}, 64),
    ],
)
def test_scaled_positions_count_where_they_reach_further(table: dict[str, Any], expected: int | None) -> None:
    assert usable_positions(table) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Qwen3Config(max_position_embeddings=64), 64),
        (Qwen3Config(max_position_embeddings=32768, rope_parameters={**YARN, "rope_theta": 1e6}), 131072),
        (LlamaConfig(max_position_embeddings=131072, rope_parameters={**LLAMA3, "rope_theta": 5e5}), 131072),
        (GPT2Config(n_positions=1024), 1024),
    ],
)
def test_a_configuration_of_transformers_says_the_same(config: PretrainedConfig, expected: int) -> None:
    assert usable_positions(config) == expected
