"""Megatron's process groups: made in one call, named as the contract names them, and destroyed."""

from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from drivetrain_backend_api.parallel import ParallelLayout, ProcessGroups
from drivetrain_backend_megatron.config import MegatronConfig


def make_groups(config: MegatronConfig, *, chunks: int, timeout: timedelta) -> None:
    """Make the groups of every kind of parallelism; the world is there already.

    Args:
        config: the sizes.
        chunks: of the model on each pipeline stage; more than one interleaves.
        timeout: deadline of one collective.
    """
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        context_parallel_size=config.context_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        # experts are spread over ranks whole
        expert_tensor_parallel_size=1,
        # one Gloo group of our own serves every agreement
        create_gloo_process_groups=False,
        distributed_timeout_minutes=timeout / timedelta(minutes=1),
    )
    model_parallel_cuda_manual_seed(config.seed)


def destroy_groups() -> None:
    """Forget the groups; the world, which owns them, is destroyed by whoever made it."""
    parallel_state.destroy_model_parallel()


def layout(device: str) -> ParallelLayout:
    """Describe this rank."""
    return ParallelLayout(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        device=device,
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=parallel_state.get_context_parallel_world_size(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        ep_size=parallel_state.get_expert_model_parallel_world_size(),
    )


def groups(control: dist.ProcessGroup | None) -> ProcessGroups:
    """Name this rank's groups; one of a single rank becomes None."""

    def shared(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
        return group if group.size() > 1 else None

    return ProcessGroups(
        world=shared(dist.group.WORLD) if dist.group.WORLD is not None else None,
        dp=shared(parallel_state.get_data_parallel_group()),
        cp=shared(parallel_state.get_context_parallel_group()),
        tp=shared(parallel_state.get_tensor_model_parallel_group()),
        pp=shared(parallel_state.get_pipeline_model_parallel_group()),
        dp_cp=shared(parallel_state.get_data_parallel_group(with_context_parallel=True)),
        control=control,
    )


def expert_group() -> dist.ProcessGroup | None:
    """Return the ranks that hold the other experts, None where this rank holds all."""
    group: dist.ProcessGroup = parallel_state.get_expert_model_parallel_group()
    return group if group.size() > 1 else None
