"""Where Megatron keeps a parameter: ranges of a rank's parameter as rectangles of the whole, and keys by model."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from drivetrain_backend_api.errors import DataError
from drivetrain_backend_megatron.architectures import ExpertShape, ModelShape
from drivetrain_backend_megatron.checkpoint_keys import find_stored, slice_rectangles, whole_shape, write_place
from drivetrain_backend_megatron.name_map import place_of, places, to_local

DENSE = ModelShape(
    model_type="qwen2",
    num_layers=2,
    hidden_size=4,
    ffn_hidden_size=6,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=2,
    vocab_size=7,
    max_position_embeddings=16,
    rms_norm_eps=1e-6,
    tied=False,
    qk_norm=False,
    qkv_bias=True,
    output_bias=False,
    rope={},
)


def sparse(*layers: int) -> ModelShape:
    experts = ExpertShape(
        num_experts=2, top_k=1, moe_ffn_hidden_size=2, norm_topk_prob=True, sparse_layers=tuple(layers)
    )
    return replace(DENSE, model_type="qwen3_moe", qkv_bias=False, qk_norm=True, experts=experts)


def numbered(shape: ModelShape, name: str) -> tuple[Tensor, list[Tensor]]:
    """A whole parameter, as one rank alone has it, of numbers; and the Hugging Face tensors that it is made of."""
    place = place_of(name, shape)
    parts, at = [], 0
    for _, size in place.hf:
        part = torch.arange(at, at + torch.Size(size).numel()).view(size)
        parts.append(part)
        at += part.numel()
    whole = to_local(parts, place.rule, shape, tp_size=1, tp_rank=0, padded_vocab=shape.vocab_size)
    return whole, parts


def ranges(count: int) -> Iterator[tuple[int, int]]:
    yield 0, count
    for start in range(0, count, 5):
        for end in range(start + 1, count + 1, 7):
            yield start, end - start


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("shape", [DENSE, sparse(0, 1)], ids=["dense", "sparse"])
def test_a_range_of_a_rank_is_found_in_the_whole(shape: ModelShape, tp: int) -> None:
    padded = -(-shape.vocab_size // tp) * tp
    for place in places(shape):
        whole, parts = numbered(shape, place.name)
        assert whole.shape == whole_shape(place)
        for rank in range(tp):
            local = to_local(parts, place.rule, shape, tp_size=tp, tp_rank=rank, padded_vocab=padded).flatten()
            for start, count in ranges(local.numel()):
                found, at = [], 0
                for one in slice_rectangles(
                    place, start, count, shape=shape, tp_size=tp, tp_rank=rank, padded_vocab=padded
                ):
                    assert one.start == at
                    index = tuple(slice(first, first + size) for first, size in zip(one.offsets, one.sizes))
                    found += whole[index].flatten().tolist()
                    at += one.count
                expected = local[start : start + count].tolist()
                assert found == expected[: len(found)], place.name
                assert not any(expected[len(found) :]), place.name  # padding
                if padded == shape.vocab_size or not place.rule.vocab:
                    assert len(found) == count


@pytest.mark.parametrize(
    ("shape", "name", "key", "size", "index"),
    [
        (DENSE, "decoder.layers.1.mlp.linear_fc2.weight", "decoder.layers.mlp.linear_fc2.weight", (2, 4, 6), (1,)),
        (
            DENSE,
            "decoder.layers.0.input_layernorm.weight",
            "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
            (2, 4),
            (0,),
        ),
        (
            sparse(0, 1),
            "decoder.layers.1.mlp.experts.local_experts.1.linear_fc1.weight",
            "decoder.layers.1.mlp.experts.experts.linear_fc1.weight",
            (2, 4, 4),
            (1,),
        ),
        (
            sparse(1),
            "decoder.layers.1.mlp.experts.local_experts.1.linear_fc1.weight",
            "decoder.layers.1.mlp.experts.experts.linear_fc1.weight",
            (2, 4, 4),
            (1,),
        ),
        (
            sparse(1),
            "decoder.layers.1.pre_mlp_layernorm.weight",
            "decoder.layers.1.pre_mlp_layernorm.weight",
            (4,),
            (),
        ),
        (replace(DENSE, tied=True), "output_layer.weight", "embedding.word_embeddings.weight", (7, 4), ()),
    ],
)
def test_keys(shape: ModelShape, name: str, key: str, size: tuple[int, ...], index: tuple[int, ...]) -> None:
    found = write_place(place_of(name, shape), shape)
    assert (found.key, found.shape, found.index) == (key, size, index)


def test_other_spellings_and_padded_vocabularies_are_found() -> None:
    norm = place_of("decoder.layers.1.input_layernorm.weight", DENSE)
    for key, size, index in (
        ("decoder.layers.input_layernorm.weight", (2, 4), (1,)),
        ("decoder.layers.1.self_attention.linear_qkv.layer_norm_weight", (4,), ()),
    ):
        found = find_stored(norm, DENSE, {key: size})
        assert (found.key, found.index) == (key, index)
    embedding = place_of("embedding.word_embeddings.weight", DENSE)
    assert find_stored(embedding, DENSE, {embedding.name: (128, 4)}).shape == (128, 4)
    for stored, said in (({}, "has shape none there"), ({embedding.name: (6, 4)}, r"has shape \(6, 4\) there")):
        with pytest.raises(DataError, match=f"tensor 'embedding.word_embeddings.weight' {said}"):
            find_stored(embedding, DENSE, stored)
