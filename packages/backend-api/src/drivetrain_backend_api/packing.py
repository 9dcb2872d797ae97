"""From a rollout batch to packed micro-batches: optimizer steps, data-parallel shards, micro-batches, packing.

Every decision here is a pure function of the sample lengths, so that all ranks take the same one without talking.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from drivetrain_backend_api.batch import Denominators, MicroBatch, RolloutBatch
from drivetrain_backend_api.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Batching:
    """How samples become micro-batches.

    Attributes:
        global_batch_size: samples an optimizer step over all ranks; None takes the whole rollout as one step.
        micro_batch_size: samples a micro-batch; ignored with `max_tokens`.
        max_tokens: most tokens a micro-batch may hold; None packs by count.
        minimum: fewest micro-batches a step may have (pipelines need some).
        multiple: the number of micro-batches is a multiple of this.
    """

    global_batch_size: int | None = None
    micro_batch_size: int = 1
    max_tokens: int | None = None
    minimum: int = 1
    multiple: int = 1


@dataclass(frozen=True, kw_only=True)
class RolloutShard:
    """One data-parallel rank's part of a rollout.

    Attributes:
        batch: this rank's samples.
        positions: where each stands in the whole rollout.
        steps: for each optimizer step, its micro-batches; each lists samples of `batch`, an empty one is a filler.
        rollout_per_sample: the per-sample columns of the whole rollout, in its order; group statistics need them.
    """

    batch: RolloutBatch
    positions: tuple[int, ...]
    steps: tuple[tuple[tuple[int, ...], ...], ...]
    rollout_per_sample: Mapping[str, Tensor]

    def with_batch(self, batch: RolloutBatch) -> "RolloutShard":
        """Return the shard with other columns on the same samples."""
        return replace(self, batch=batch)


def balanced_parts(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Split items over `parts` so that token sums are close: longest first, each to the part that has least.

    Returns, for each part, the item indices in ascending order. Parts may be empty when items are few.
    """
    sums, members = [0] * parts, [[] for _ in range(parts)]  # type: tuple[list[int], list[list[int]]]
    for item in sorted(range(len(lengths)), key=lambda one: (-lengths[one], one)):
        part = min(range(parts), key=lambda one: (sums[one], len(members[one]), one))
        sums[part] += lengths[item]
        members[part].append(item)
    return [sorted(one) for one in members]


def split_micro_batches(
    lengths: Sequence[int], batching: Batching, *, names: Sequence[int] | None = None
) -> list[list[int]]:
    """Group one rank's samples of one optimizer step into micro-batches.

    With `max_tokens`, first-fit over descending lengths, so that no micro-batch exceeds it; else by count, in order.

    Raises:
        DataError: one sample alone is longer than `max_tokens`; named by `names` where given.
    """
    if batching.max_tokens is None:
        size = batching.micro_batch_size
        return [list(range(start, min(start + size, len(lengths)))) for start in range(0, len(lengths), size)]
    bins: list[list[int]] = []
    sums: list[int] = []
    for item in sorted(range(len(lengths)), key=lambda one: (-lengths[one], one)):
        if lengths[item] > batching.max_tokens:
            raise DataError(
                f"sample {names[item] if names is not None else item} has {lengths[item]} tokens, more than a "
                f"micro-batch's {batching.max_tokens} (--max-tokens-per-gpu); raise it, or lower "
                "--rollout-max-response-len"
            )
        place = next((one for one, filled in enumerate(sums) if filled + lengths[item] <= batching.max_tokens), None)
        if place is None:
            bins.append([item])
            sums.append(lengths[item])
        else:
            bins[place].append(item)
            sums[place] += lengths[item]
    return [sorted(one) for one in bins]


def shard_rollout(batch: RolloutBatch, *, dp_size: int, batching: Batching) -> list[RolloutShard]:
    """Cut a rollout into one shard a data-parallel rank.

    An optimizer step is a run of consecutive samples, whatever the layout; within it samples are balanced over ranks by
    token count. Every rank gets the same number of micro-batches a step, with fillers where it has too few samples.

    Raises:
        DataError: the batch is empty, or its size is no multiple of the global batch size.
    """
    size = batching.global_batch_size or len(batch)
    if not len(batch) or len(batch) % size:
        raise DataError(
            f"a rollout of {len(batch)} samples does not divide into optimizer steps of --global-batch-size {size}; "
            "choose a divisor of rollout-batch-size x n-samples-per-prompt"
        )
    lengths = batch.lengths
    indices = batch.per_sample.get("index")
    names = [int(one) for one in indices.tolist()] if indices is not None else list(range(len(batch)))
    members: list[list[int]] = [[] for _ in range(dp_size)]
    steps: list[list[tuple[tuple[int, ...], ...]]] = [[] for _ in range(dp_size)]
    for start in range(0, len(batch), size):
        parts = balanced_parts(lengths[start : start + size], dp_size)
        cuts = []
        for part in parts:
            samples = [start + one for one in part]
            cuts.append(
                split_micro_batches([lengths[one] for one in samples], batching, names=[names[one] for one in samples])
            )
        count = max(batching.minimum, *(len(one) for one in cuts))
        count = -(-count // batching.multiple) * batching.multiple
        for rank, (part, cut) in enumerate(zip(parts, cuts)):
            base = len(members[rank])
            filled = [tuple(base + one for one in micro_batch) for micro_batch in cut]
            steps[rank].append(tuple(filled + [()] * (count - len(filled))))
            members[rank] += [start + one for one in part]
    return [
        RolloutShard(
            batch=batch.select(members[rank]),
            positions=tuple(members[rank]),
            steps=tuple(steps[rank]),
            rollout_per_sample=dict(batch.per_sample),
        )
        for rank in range(dp_size)
    ]


def pack(batch: RolloutBatch, samples: Sequence[int], *, denominators: Denominators | None = None) -> MicroBatch:
    """Pack the given samples of a batch end to end; none at all gives a filler of one masked token."""
    device = batch.tokens.device
    chosen = batch.select(samples)
    if not samples:
        return _filler(chosen, denominators)
    lengths, starts = chosen.lengths, chosen.token_starts
    responses = [int(one) for one in chosen.response_lengths.tolist()]
    counts = torch.tensor(lengths, device=device)
    token_index = torch.arange(starts[-1], device=device)
    sequence_ids = torch.repeat_interleave(torch.arange(len(samples), device=device), counts, output_size=starts[-1])
    position_ids = token_index - torch.tensor(starts[:-1], device=device)[sequence_ids]
    places = predicting_positions(lengths, responses).to(device)
    labels = torch.zeros_like(chosen.tokens)
    labels[:-1] = chosen.tokens[1:]
    return MicroBatch(
        input_ids=chosen.tokens,
        position_ids=position_ids,
        labels=labels,
        loss_mask=_spread(chosen.per_token["loss_mask"].float(), places, starts[-1]),
        sequence_ids=sequence_ids,
        token_index=token_index,
        cu_seqlens=torch.tensor(starts, dtype=torch.int32, device=device),
        max_seqlen=max(lengths),
        per_token={
            name: _spread(column, places, starts[-1])
            for name, column in chosen.per_token.items()
            if name != "loss_mask"
        },
        per_sample=chosen.per_sample,
        samples=tuple(samples),
        response_lengths=tuple(responses),
        denominators=denominators,
    )


def predicting_positions(lengths: Sequence[int], response_lengths: Sequence[int]) -> Tensor:
    """Place in the packed batch that predicts each response token, int64 [R], for samples packed in this order."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    ranges = [
        torch.arange(end - response - 1, end - 1, dtype=torch.int64)
        for end, response in zip(ends, response_lengths, strict=True)
    ]
    return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64)


def unpack(values: Tensor, micro_batch: MicroBatch) -> list[Tensor]:
    """Cut a per-token result [T] of the whole packed batch into one 1-D tensor a sample, over its response."""
    if micro_batch.is_filler:
        return []
    lengths = micro_batch.cu_seqlens.diff().tolist()
    places = predicting_positions(lengths, micro_batch.response_lengths).to(values.device)
    return list(torch.split(values[places], list(micro_batch.response_lengths)))


def _spread(column: Tensor, places: Tensor, total: int) -> Tensor:
    out = column.new_zeros(total)
    out[places] = column
    return out


def _filler(empty: RolloutBatch, denominators: Denominators | None) -> MicroBatch:
    device = empty.tokens.device
    zeros = torch.zeros(1, dtype=torch.int64, device=device)
    return MicroBatch(
        input_ids=zeros,
        position_ids=zeros,
        labels=zeros,
        loss_mask=torch.zeros(1, device=device),
        sequence_ids=zeros,
        token_index=zeros,
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32, device=device),
        max_seqlen=1,
        per_token={name: column.new_zeros(1) for name, column in empty.per_token.items() if name != "loss_mask"},
        per_sample={name: column.new_zeros((1, *column.shape[1:])) for name, column in empty.per_sample.items()},
        samples=(),
        response_lengths=(),
        denominators=denominators,
    )
