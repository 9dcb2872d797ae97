"""Full tensors for the engines: a plan from the model's shape, and few collectives a bucket.

A bucket belongs to one pipeline stage. There, tensor-parallel ranks put their shards together and expert-parallel ranks
send theirs around, all in flat buffers and in the dtype that is wanted; then the bucket crosses the pipeline.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain_backend_api.collectives import all_agree
from drivetrain_backend_api.weights import Holders, WeightEntry, WeightExport, flatten, plan_buckets, unflatten
from drivetrain_backend_megatron.model import ModelPart
from drivetrain_backend_megatron.name_map import Place, expert_rank, places, stage_of, to_hf


def export_weights(
    model: ModelPart, *, bucket_bytes: int, holders: Holders, dtype: torch.dtype | None, device: torch.device
) -> WeightExport:
    """Begin an export; see `TrainBackend.export_weights`."""
    return _Export(model, bucket_bytes, holders, dtype, device).begin()


class _Export:
    def __init__(
        self, model: ModelPart, bucket_bytes: int, holders: Holders, dtype: torch.dtype | None, device: torch.device
    ) -> None:
        self._model, self._holders, self._device = model, holders, device
        self._weights = model.locals()
        pp_size = model.layout.pp_size
        staged = sorted(
            (
                (stage_of(one, model.shape, pp_size=pp_size, chunks=model.num_chunks), one)
                for one in places(model.shape)
            ),
            key=lambda pair: pair[0],
        )
        self._place_of = {name: place for _, place in staged for name, _ in place.hf}
        self._plan = plan_buckets(
            (
                (name, size, dtype or model.stored_dtypes[name], stage)
                for stage, place in staged
                for name, size in place.hf
            ),
            bucket_bytes,
        )

    def begin(self) -> WeightExport:
        control = self._model.groups.control
        return WeightExport(self._plan, self._bucket, lambda mine: all_agree(mine, control))

    def _bucket(self, index: int) -> Tensor | None:
        layout, groups = self._model.layout, self._model.groups
        entries = self._plan.bucket(index)
        stage = entries[0].stage
        is_lead_replica = layout.dp_rank == 0 and layout.cp_rank == 0
        # experts come from other replicas too
        if self._holders is not Holders.ALL and not is_lead_replica and self._model.experts is None:
            return None
        data = self._assemble(entries) if layout.pp_rank == stage else None
        if self._holders is Holders.STAGE_LEAD:
            return data if layout.is_stage_lead else None
        is_lead = is_lead_replica and layout.tp_rank == 0
        if groups.pp is not None and (self._holders is Holders.ALL or is_lead):
            if data is None:
                data = torch.empty(self._plan.bucket_bytes(index), dtype=torch.uint8, device=self._device)
            dist.broadcast(data, group=groups.pp, group_src=stage)
        return data if self._holders is Holders.ALL or layout.rank == 0 else None

    def _assemble(self, entries: Sequence[WeightEntry]) -> Tensor:
        """Put whole tensors together on every rank of the stage that takes part."""
        wanted = {one.name: one.torch_dtype for one in entries}
        found: dict[str, Tensor] = {}
        by_owner: dict[int | None, dict[str, Place]] = {}
        for name in wanted:
            place = self._place_of[name]
            owner = expert_rank(place, self._model.shape, ep_size=self._model.layout.ep_size)
            by_owner.setdefault(owner if self._model.experts is not None else None, {})[place.name] = place
        for owner, chosen in by_owner.items():
            if owner is None:
                found |= self._from_tensor_parallel(list(chosen.values()), wanted)
            else:
                found |= self._from_expert_parallel(list(chosen.values()), wanted, owner)
        return flatten((found[one.name] for one in entries), entries, device=self._device)

    def _from_tensor_parallel(self, chosen: list[Place], wanted: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        shards = {one.name: [self._cast(one, wanted)] for one in chosen}
        cut = [one for one in chosen if one.rule.split_dim is not None]
        group = self._model.groups.tp
        if group is not None and cut:
            layout = _flat_layout((one.name, shards[one.name][0]) for one in cut)
            flat = flatten((shards[one.name][0] for one in cut), layout, device=self._device)
            parts = [torch.empty_like(flat) for _ in range(group.size())]
            dist.all_gather(parts, flat, group=group)
            views = [dict(unflatten(part, layout)) for part in parts]
            shards |= {one.name: [view[one.name] for view in views] for one in cut}
        return self._whole(chosen, shards)

    def _from_expert_parallel(
        self, chosen: list[Place], wanted: Mapping[str, torch.dtype], owner: int
    ) -> dict[str, Tensor]:
        group = self._model.experts
        assert group is not None
        like = {one.name: self._cast_shape(one, wanted) for one in chosen}
        layout = _flat_layout(like.items())
        if group.rank() == owner:
            flat = flatten((self._cast(one, wanted) for one in chosen), layout, device=self._device)
        else:
            flat = torch.empty(layout[-1].offset + layout[-1].nbytes, dtype=torch.uint8, device=self._device)
        dist.broadcast(flat, group=group, group_src=owner)
        return self._whole(chosen, {name: [tensor] for name, tensor in unflatten(flat, layout)})

    def _whole(self, chosen: Iterable[Place], shards: Mapping[str, Sequence[Tensor]]) -> dict[str, Tensor]:
        return {
            name: tensor
            for place in chosen
            for (name, _), tensor in zip(place.hf, to_hf(shards[place.name], place.rule, self._model.shape))
        }

    def _cast(self, place: Place, wanted: Mapping[str, torch.dtype]) -> Tensor:
        return self._weights[place.name].to(_dtype(place, wanted))

    def _cast_shape(self, place: Place, wanted: Mapping[str, torch.dtype]) -> Tensor:
        """Give a tensor without data in the shape of a whole expert's parameter."""
        rows = sum(size[0] for _, size in place.hf)
        return torch.empty((rows, *place.hf[0][1][1:]), dtype=_dtype(place, wanted), device="meta")


def _dtype(place: Place, wanted: Mapping[str, torch.dtype]) -> torch.dtype:
    """Find what a parameter is cast to: the dtype of those of its tensors that the bucket has."""
    return next(wanted[name] for name, _ in place.hf if name in wanted)


def _flat_layout(tensors: Iterable[tuple[str, Tensor]]) -> tuple[WeightEntry, ...]:
    return plan_buckets(((name, one.shape, one.dtype, 0) for name, one in tensors), bucket_bytes=2**63).entries
