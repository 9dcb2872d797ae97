"""The flat buffers of weights and gradients that data-parallel ranks share, as slices that an optimizer can own."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor, nn

from drivetrain_backend_megatron.core.model import Chunks


@dataclass(frozen=True, kw_only=True)
class Slice:
    """The part of a parameter whose optimizer state this rank keeps; views into the flat buffers.

    Attributes:
        start: of the part, in elements of the flattened parameter on this tensor-parallel rank.
        weight: [n], of the compute dtype.
        gradient: float32 [n].
    """

    start: int
    weight: Tensor
    gradient: Tensor


def own_slices(chunks: Chunks) -> dict[nn.Parameter, Slice]:
    """Return this rank's slice of each parameter that it has one of: what reduce-scatter leaves here."""
    return {parameter: one for chunk in chunks for parameter, one in _slices_of_chunk(chunk)}


def _slices_of_chunk(chunk: DistributedDataParallel) -> Iterator[tuple[nn.Parameter, Slice]]:
    for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
        rank, ranks = buffer.data_parallel_group.rank(), buffer.data_parallel_group.size()
        for bucket in buffer.buckets:
            size = bucket.grad_data.numel() // ranks
            mine = (bucket.offset + rank * size, bucket.offset + (rank + 1) * size)
            for parameter in bucket.params_list:
                first, last, *_ = buffer.param_index_map[parameter]
                start, end = max(first, mine[0]), min(last, mine[1])
                if start < end:
                    yield (
                        parameter,
                        Slice(
                            start=start - first,
                            weight=buffer.param_data[start:end],
                            gradient=buffer.grad_data[start:end],
                        ),
                    )


def replicas_of(parameter: nn.Parameter) -> dist.ProcessGroup:
    """Return the ranks that hold the same values of a parameter, over which its optimizer state is cut."""
    is_dense = getattr(parameter, "allreduce", True)
    group: dist.ProcessGroup = (
        parallel_state.get_data_parallel_group(with_context_parallel=True)
        if is_dense
        else parallel_state.get_expert_data_parallel_group()
    )
    return group


def gather_weights(chunks: Chunks) -> None:
    """Spread the updated slices to all ranks; with overlap, the forward pass does it when it needs them."""
    for chunk in chunks:
        if not chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync()
            continue
        for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
            # a forward pass between backward and step has gathered already, what is old now
            if group.param_gather_handle is not None:
                group.param_gather_handle.wait()
                group.param_gather_handle = None
            group.param_gather_dispatched = False


def finish_gathering(chunks: Chunks) -> None:
    """Make every weight current now, also where gathering overlaps with the forward pass."""
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def weight_buffers(chunks: Chunks) -> Mapping[str, Tensor]:
    """Name the flat weight buffers; every parameter is a view into one of them."""
    return {f"weights.{place}": one.param_data for place, one in enumerate(_buffers(chunks))}


def gradient_buffers(chunks: Chunks) -> Mapping[str, Tensor]:
    """Name the flat gradient buffers."""
    return {f"gradients.{place}": one.grad_data for place, one in enumerate(_buffers(chunks))}


def drop_scratch() -> None:
    """Free what Megatron keeps for reuse between steps; it is made again when it is asked for."""
    parallel_state.get_global_memory_buffer().buffer.clear()


def _buffers(chunks: Chunks) -> list:  # type: ignore[type-arg]
    return [one for chunk in chunks for one in [*chunk.buffers, *chunk.expert_parallel_buffers]]
