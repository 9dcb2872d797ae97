"""A causal language model sharded over the data-parallel mesh: built without memory, then filled shard by shard.

`load_model` is the whole story top to bottom. Knows nothing of optimizers, losses or checkpoints.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel

from drivetrain_backend_api.collectives import from_rank0
from drivetrain_backend_api.errors import DataError, DrivetrainError, UnsupportedModelError
from drivetrain_backend_api.hf_folder import TensorHeader, check_tied, read_headers, read_tensors
from drivetrain_backend_fsdp.attention import PACKED_ATTENTION
from drivetrain_backend_fsdp.causal_lm import blocks_of, build, model_name, refuse_by_config, tied_names, weights_of
from drivetrain_backend_fsdp.hf_checkpoint import read_config
from drivetrain_backend_fsdp.proof import prove_packing


@dataclass(frozen=True, kw_only=True)
class ShardedModel:
    """One model, of which every rank holds a shard.

    Attributes:
        module: the causal language model, its root an FSDP module.
        weights: Hugging Face name -> parameter (a DTensor cut along its first dimension) or persistent buffer (whole on
            every rank); tied ones once.
        stored_dtypes: Hugging Face name -> dtype in the model folder.
        mesh: the one-dimensional data-parallel mesh.
    """

    module: PreTrainedModel
    weights: Mapping[str, Tensor]
    stored_dtypes: Mapping[str, torch.dtype]
    mesh: DeviceMesh

    def locals(self) -> dict[str, Tensor]:
        """Return this rank's part of every weight, sharing its storage."""
        return {name: local_part(one) for name, one in self.weights.items()}

    def reshard(self) -> None:
        """Free all gathered parameters, so that the next forward gathers what the shards hold then."""
        for one in self.module.modules():
            if isinstance(one, FSDPModule):
                one.reshard()


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How a model is cut and computed.

    Attributes:
        compute_dtype: dtype of gathered parameters and activations.
        master_dtype: dtype of the shards.
        trainable: False for a frozen model.
    """

    mesh: DeviceMesh
    device: torch.device
    compute_dtype: torch.dtype
    master_dtype: torch.dtype
    trainable: bool
    reshard_after_forward: bool
    cpu_offload: bool
    gradient_checkpointing: bool


def local_part(weight: Tensor) -> Tensor:
    """Return this rank's part of a weight, sharing its storage, outside of autograd."""
    detached = weight.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def load_model(
    folder: Path, sharding: Sharding, *, trust_remote_code: bool, fill: bool, control: dist.ProcessGroup | None
) -> ShardedModel:
    """Build, prove, shard and fill a model; collective.

    Args:
        folder: Hugging Face model folder.
        sharding: how to cut it.
        trust_remote_code: allow Python code inside the folder to run.
        fill: read the weights; False leaves them undefined for a checkpoint to fill.
        control: CPU group of all ranks, None for one rank.

    Raises:
        UnsupportedModelError: the architecture is refused; nothing big was touched before.
        DataError: the folder lacks a tensor, has one too many, or one of another shape.
    """
    config = read_config(folder, trust_remote_code=trust_remote_code)
    refuse_by_config(config)
    prove_packing(config, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        module = build(
            config,
            attention=PACKED_ATTENTION,
            dtype=sharding.master_dtype,
            trust_remote_code=trust_remote_code,
        )
    tied = dict(tied_names(module))

    def look() -> dict[str, TensorHeader]:
        headers = read_headers(folder)
        check_tied(folder, headers, tied)
        return headers

    headers = from_rank0(look, control)
    names = stored_names(weights_of(module), headers, tied, ignored=_ignored(module), folder=folder)
    apply_fsdp2(module, sharding)
    materialize(module, config, sharding)
    weights = weights_of(module)
    if fill:
        _fill(weights, [names[one] for one in weights], folder, headers, sharding)
    return ShardedModel(
        module=module,
        weights=weights,
        stored_dtypes={name: headers[names[name]].dtype for name in weights},
        mesh=sharding.mesh,
    )


def stored_names(
    weights: Mapping[str, Tensor],
    headers: Mapping[str, TensorHeader],
    tied: Mapping[str, str],
    *,
    ignored: Sequence[str],
    folder: Path,
) -> dict[str, str]:
    """Match a model's weights with what a folder stores: name in the model -> name in the folder.

    A tied weight may be stored under either of its names. All findings are reported at once.

    Raises:
        DataError: missing, unexpected or differently shaped tensors, with file and tensor.
    """
    aliases = {source: alias for alias, source in tied.items()}
    found: dict[str, str] = {}
    problems = []
    for name, weight in weights.items():
        stored = stored_name(name, headers, aliases)
        if stored not in headers:
            problems.append(f"tensor {name!r} is missing")
        elif headers[stored].shape != tuple(weight.shape):
            problems.append(
                f"tensor {stored!r} in {headers[stored].file} has shape {list(headers[stored].shape)}, "
                f"config.json needs {list(weight.shape)}"
            )
        elif weight.is_floating_point() != headers[stored].dtype.is_floating_point:
            problems.append(f"tensor {stored!r} in {headers[stored].file} has dtype {headers[stored].dtype}")
        else:
            found[name] = stored
    for name, header in headers.items():
        if name not in weights and name not in tied and not any(one in name for one in ignored):
            problems.append(f"tensor {name!r} in {header.file} belongs to nothing in the model")
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise DataError(f"{folder} does not fit its config.json: {shown}; copy the model again")
    return found


def stored_name(name: str, headers: Mapping[str, TensorHeader], aliases: Mapping[str, str]) -> str:
    """Return the name under which a folder stores a weight, itself where neither it nor its tied alias is there.

    Args:
        name: in the model.
        headers: of the folder.
        aliases: source of a tie -> its other name.
    """
    alias = aliases.get(name, name)
    return alias if name not in headers and alias in headers else name


def _ignored(module: PreTrainedModel) -> list[str]:
    # Old checkpoints store these computed buffers too.
    return ["rotary_emb.inv_freq", *(module._keys_to_ignore_on_load_unexpected or ())]


def apply_fsdp2(module: PreTrainedModel, sharding: Sharding) -> None:
    """Shard every transformer block (checkpointed on request), then the root with embedding, norm and head.

    Gradients are reduced in fp32 and summed, never averaged.
    """
    module.requires_grad_(sharding.trainable)
    precision = MixedPrecisionPolicy(param_dtype=sharding.compute_dtype, reduce_dtype=torch.float32)
    offload: OffloadPolicy = OffloadPolicy()
    if sharding.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=sharding.device.type == "cuda")
    for block in blocks_of(module):
        if sharding.gradient_checkpointing:
            # Inside the block's FSDP hooks, so that the recomputation finds its parameters gathered. Nothing is random.
            recomputed = functools.partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
            setattr(block, "forward", recomputed)  # noqa: B010 - a method to types
        fully_shard(
            block,
            mesh=sharding.mesh,
            reshard_after_forward=sharding.reshard_after_forward,
            mp_policy=precision,
            offload_policy=offload,
        )
    # The root's inputs hold the micro-batch: its log-probs and advantages must stay as exact as they are.
    exact_inputs = replace(precision, cast_forward_inputs=False)
    fully_shard(module, mesh=sharding.mesh, mp_policy=exact_inputs, offload_policy=offload)
    for one in module.modules():
        if isinstance(one, FSDPModule):
            # Both, and on every module: either alone averages, or fails on gloo.
            one.set_force_sum_reduction_for_comms(True)
            one.set_gradient_divide_factor(1.0)


def materialize(module: PreTrainedModel, config: PretrainedConfig, sharding: Sharding) -> None:
    """Give a sharded model on the meta device its memory, and compute the buffers that no checkpoint stores.

    Raises:
        UnsupportedModelError: a buffer that its module does not compute anew, or a tie that got lost.
    """
    module.to_empty(device="cpu" if sharding.cpu_offload else sharding.device)
    if sharding.cpu_offload:
        for owner in module.modules():
            for name, buffer in owner.named_buffers(recurse=False):
                setattr(owner, name, buffer.to(sharding.device))
    owners = [one for one in module.modules() if one._non_persistent_buffers_set]
    # A buffer that is really computed comes out the same from two different starts.
    first, second = (_recomputed(module, owners, start) for start in (0, 1))
    for name, buffer in first.items():
        if not torch.equal(buffer, second[name]):
            raise UnsupportedModelError(
                f"{model_name(config)}: buffer {name!r} is not stored and not computed by its module; "
                "the fsdp backend cannot initialise this model"
            )
    tied_names(module)
    module.train(sharding.trainable)


def _recomputed(module: PreTrainedModel, owners: Sequence[nn.Module], start: int) -> dict[str, Tensor]:
    computed: dict[str, Tensor] = {}
    with torch.no_grad():
        for index, owner in enumerate(owners):
            buffers = {
                f"{type(owner).__name__}[{index}].{name}": buffer
                for name in sorted(owner._non_persistent_buffers_set)
                if (buffer := owner._buffers[name]) is not None
            }
            for buffer in buffers.values():
                buffer.fill_(start)
            module._init_weights(owner)  # type: ignore[no-untyped-call]
            computed |= {name: buffer.clone() for name, buffer in buffers.items()}
    return computed


def _fill(
    weights: Mapping[str, Tensor],
    stored: Sequence[str],
    folder: Path,
    headers: Mapping[str, TensorHeader],
    sharding: Sharding,
) -> None:
    """Read every tensor on rank 0 and hand each rank its shard, one tensor at a time."""
    tensors = read_tensors(folder, headers, stored) if sharding.mesh.get_rank() == 0 else None
    for (name, weight), source in zip(weights.items(), stored):
        whole = next(tensors) if tensors is not None else None
        shard = _scatter(name, weight, whole, headers[source].dtype, sharding)
        local_part(weight).copy_(shard)


def _scatter(name: str, weight: Tensor, whole: Tensor | None, dtype: torch.dtype, sharding: Sharding) -> Tensor:
    """Send one tensor from rank 0; returns this rank's part, in the stored dtype."""
    ranks, group = sharding.mesh.size(), sharding.mesh.get_group()
    if not isinstance(weight, DTensor):
        shard = torch.empty(weight.shape, dtype=dtype, device=sharding.device)
        if whole is not None:
            shard.copy_(whole)
        if ranks > 1:
            dist.broadcast(shard, group=group, group_src=0)
        return shard
    rows = -(-weight.shape[0] // ranks)
    mine = weight.to_local().shape[0]
    if mine != max(0, min(rows, weight.shape[0] - rows * sharding.mesh.get_local_rank())):
        raise DrivetrainError(f"{name} is cut in a way this release does not know; install the tested torch release")
    if ranks == 1:
        assert whole is not None
        return whole
    received = torch.empty(rows, *weight.shape[1:], dtype=dtype, device=sharding.device)
    parts = None
    if whole is not None:
        padded = torch.zeros(rows * ranks, *weight.shape[1:], dtype=dtype, device=sharding.device)
        padded[: len(whole)].copy_(whole)
        parts = list(torch.split(padded, rows))
    dist.scatter(received, parts, group=group, group_src=0)
    return received[:mine]
