"""This rank's part of the model: chunks whose weights come from a folder, and the slices that its optimizer owns."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drivetrain_backend_api.attention import Kernel, choose_kernel
from drivetrain_backend_api.collectives import from_rank0, together
from drivetrain_backend_api.log_probs import VocabShard
from drivetrain_backend_api.parallel import ParallelLayout, ProcessGroups
from drivetrain_backend_api.weights import ReplicaGroup
from drivetrain_backend_megatron.architectures import ModelShape, read_pad_token
from drivetrain_backend_megatron.config import MegatronConfig
from drivetrain_backend_megatron.core import buffers
from drivetrain_backend_megatron.core.groups import expert_group
from drivetrain_backend_megatron.core.model import Chunks, build_chunks, named_parameters, wrap
from drivetrain_backend_megatron.hf_model import find_hf, load_hf
from drivetrain_backend_megatron.name_map import OUTPUT_LAYER, padded_vocab_size, place_of
from drivetrain_backend_megatron.optimizer import OwnedSlice
from drivetrain_backend_megatron.rotary import Rotary, read_rotary


@dataclass(frozen=True, kw_only=True)
class ModelPart:
    """What one rank holds of the model.

    Attributes:
        shape: of the whole model.
        chunks: wrapped for data parallelism.
        num_chunks: model chunks on each pipeline stage.
        parameters: by global Megatron name, in the same order on every rank of the stage.
        layout: of this rank.
        groups: of this rank.
        experts: the ranks that hold the other experts; None where every rank holds all.
        stored_dtypes: dtype of each tensor in the model folder, by Hugging Face name.
        rotary: position embedding.
        kernel: of attention.
        padded_vocab: rows of the embedding over all tensor-parallel ranks.
    """

    shape: ModelShape
    chunks: Chunks
    num_chunks: int
    parameters: Mapping[str, nn.Parameter]
    layout: ParallelLayout
    groups: ProcessGroups
    experts: dist.ProcessGroup | None
    stored_dtypes: Mapping[str, torch.dtype]
    rotary: Rotary
    kernel: Kernel
    padded_vocab: int

    @property
    def vocab_shard(self) -> VocabShard:
        """Which rows of the head this rank has."""
        return VocabShard(
            group=self.groups.tp,
            rank=self.layout.tp_rank,
            size=self.layout.tp_size,
            vocab_size=self.shape.vocab_size,
        )

    def locals(self) -> dict[str, Tensor]:
        """Return this rank's weights by global Megatron name, sharing their storage."""
        buffers.finish_gathering(self.chunks)
        return {name: one.data for name, one in self.parameters.items()}

    def load(self, folder: Path, also: Callable[[str, Tensor], None] | None = None) -> None:
        """Overwrite the weights with those of a Hugging Face folder of the same shape; collective.

        Args:
            folder: with safetensors.
            also: called with each parameter's name and its values in float32, before they are rounded.

        Raises:
            DataError: the folder lacks something, or holds another model.
        """
        stored = from_rank0(lambda: find_hf(folder, self.shape), self.groups.control)
        weights = self.locals()

        def targets() -> Iterator[tuple[str, Tensor]]:
            for name, weight in weights.items():
                wide = torch.empty_like(weight, dtype=torch.float32)
                yield name, wide  # filled before the next one is asked for
                weight.copy_(wide)
                if also is not None:
                    also(name, wide)

        def read() -> None:
            load_hf(
                stored,
                targets(),
                self.shape,
                tp_size=self.layout.tp_size,
                tp_rank=self.layout.tp_rank,
                padded_vocab=self.padded_vocab,
            )

        together(read, self.groups.control)

    def replicas(self, name: str) -> ReplicaGroup | None:
        """Return the ranks that hold the same values of a parameter, None where this rank is alone."""
        group = buffers.replicas_of(self.parameters[name])
        if group.size() == 1:
            return None
        return ReplicaGroup(group=group, rank=group.rank(), size=group.size())

    def owned_slices(self) -> dict[str, OwnedSlice]:
        """Return the slices whose optimizer state this rank keeps, by global Megatron name."""
        slices = buffers.own_slices(self.chunks)
        return {
            name: OwnedSlice(
                start=slices[one].start, weight=slices[one].weight, gradient=slices[one].gradient, decays=one.ndim >= 2
            )
            for name, one in self.parameters.items()
            if one in slices
        }

    def first_copies(self, names: Iterable[str]) -> list[str]:
        """Keep one rank's copy of what several hold alike, so that over all ranks each element is there once."""
        return [name for name in names if self._is_first_copy(name)]

    def _is_first_copy(self, name: str) -> bool:
        if name == OUTPUT_LAYER and self.shape.tied:  # the last stage's copy of the embedding
            return False
        rule = place_of(name, self.shape).rule
        return rule.split_dim is not None or rule.expert or self.layout.tp_rank == 0


def build_model(
    shape: ModelShape,
    config: MegatronConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    layout: ParallelLayout,
    groups: ProcessGroups,
) -> ModelPart:
    """Build this rank's part; its weights mean nothing until `load`."""
    folder = Path(config.hf_checkpoint)
    padded_vocab = padded_vocab_size(
        shape.vocab_size, tp_size=layout.tp_size, divisible_by=config.make_vocab_size_divisible_by
    )
    bare = build_chunks(
        shape, config, dtype=dtype, device=device, padded_vocab=padded_vocab, pad_token=read_pad_token(folder)
    )
    return ModelPart(
        shape=shape,
        chunks=wrap(bare, config),
        num_chunks=len(bare),
        parameters=dict(named_parameters(bare)),
        layout=layout,
        groups=groups,
        experts=expert_group(),
        stored_dtypes=from_rank0(lambda: find_hf(folder, shape).dtypes, groups.control),
        rotary=read_rotary(folder),
        kernel=choose_kernel(config.attention_backend, device=device, dtype=dtype, head_dim=shape.head_dim),
        padded_vocab=padded_vocab,
    )
