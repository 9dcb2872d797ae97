"""The backend itself: the seven methods of the contract, each a few calls of the modules beside it.

Process groups are made and destroyed here. Knows no algorithm, no engine and no run folder.
"""

import datetime
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain_backend_api import Capabilities, ConfigError, DrivetrainError, IllegalStateError
from drivetrain_backend_api.algorithm import HiddenOutput
from drivetrain_backend_api.backend import SaveHandle, StepFn, StepOutcome, TrainBackend
from drivetrain_backend_api.background_save import CheckpointSaver
from drivetrain_backend_api.batch import MicroBatch
from drivetrain_backend_api.lifecycle import State
from drivetrain_backend_api.log_probs import Head
from drivetrain_backend_api.packing import Batching
from drivetrain_backend_api.process_groups import RebuildableGroups
from drivetrain_backend_api.schedule import LossScaler, learning_rate, require_decay_iters
from drivetrain_backend_api.weights import Holders, WeightExport, WeightManager
from drivetrain_backend_megatron import checkpoint, export
from drivetrain_backend_megatron.architectures import read_shape
from drivetrain_backend_megatron.checks import model_findings
from drivetrain_backend_megatron.config import MegatronConfig
from drivetrain_backend_megatron.core import buffers
from drivetrain_backend_megatron.core.groups import destroy_groups, groups, layout, make_groups
from drivetrain_backend_megatron.core.model import whole_tokens
from drivetrain_backend_megatron.core.schedule import ChunkInput, run_micro_batches
from drivetrain_backend_megatron.forward import RankBatch, cut_batch
from drivetrain_backend_megatron.memory import Sleeper
from drivetrain_backend_megatron.model import build_model
from drivetrain_backend_megatron.optimizer import DTYPES, SlicedAdamW
from drivetrain_backend_megatron.sleep import memory_saver_preloaded, select_sleep_tier
from drivetrain_backend_megatron.spec import CAPABILITIES

_LOG = logging.getLogger(__name__)


class MegatronBackend(TrainBackend):
    """Trains a causal language model over tensor, pipeline, context, expert and data parallelism."""

    capabilities: ClassVar[Capabilities] = CAPABILITIES

    config: MegatronConfig
    optimizer: SlicedAdamW
    _saver: CheckpointSaver

    def setup(self, with_ref: bool = False, with_opd_teacher: bool = False) -> int:
        """See `TrainBackend.setup`."""
        self.lifecycle.require("setup")
        if self.config.lr_decay_style != "constant":
            require_decay_iters(self.config)
        if findings := model_findings(self.config, world_size=self.world_size):
            raise ConfigError("\n".join(findings))
        shape = read_shape(Path(self.config.hf_checkpoint))
        self._model_chunks = self.config.model_chunks(shape.num_layers)
        all_groups = self._make_groups()
        self._model = build_model(
            shape,
            self.config,
            dtype=DTYPES[self.config.precision],
            device=self.device,
            layout=self.parallel,
            groups=self.groups,
        )
        slices = self._model.owned_slices()
        self.optimizer = SlicedAdamW(slices, self.config)
        self._counted = self._model.first_copies(slices)
        self.weights = WeightManager(self._model.locals, replicas=self._model.replicas)
        for tag, wanted, flag, folder in (
            ("ref", with_ref, "--ref-load", self.config.ref_load),
            ("teacher", with_opd_teacher, "--opd-teacher-load", self.config.opd_teacher_load),
        ):
            if wanted:
                self._load_tag(tag, flag, folder)
        self._scaler = LossScaler(self.config)
        if self.config.load is None:
            self._model.load(Path(self.config.hf_checkpoint), also=self.optimizer.take_master)
        else:
            self.next_rollout_id = checkpoint.load_checkpoint(
                Path(self.config.load),
                self._model,
                self.optimizer,
                self._scaler,
                device=self.device,
                control=self.groups.control,
                weights_only=self.config.finetune,
                verify=self.config.verify_checkpoint,
            )
        tier, reason = select_sleep_tier(
            self.config.sleep_tier, device=self.device.type, preload=memory_saver_preloaded()
        )
        if self.rank == 0:
            _LOG.info("sleep tier: %s (%s)", tier, reason)
        self._sleeper = Sleeper(
            tier,
            weights=lambda: buffers.weight_buffers(self._model.chunks),
            optimizer=self._optimizer_on_device,
            gradients=lambda: buffers.gradient_buffers(self._model.chunks),
            groups=all_groups,
            release=self._release,
        )
        moments = not self.config.no_save_optim
        self._saver.reserve(checkpoint.pieces_to_write(self._model, self.optimizer, moments=moments))
        self.lifecycle.move("setup", State.AWAKE)
        return self.next_rollout_id

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], step_fn: StepFn, forward_only: bool = False
    ) -> list[dict[str, Tensor]]:
        """See `TrainBackend.forward_backward`."""
        if forward_only:
            self.lifecycle.require("forward_only")
            with torch.no_grad():
                return self._run(micro_batches, step_fn, forward_only=True)
        self.lifecycle.require("forward_backward")
        self.weights.require_policy("forward_backward")
        self.lifecycle.begin_gradients()
        return self._run(micro_batches, step_fn, forward_only=False)

    def optimizer_step(self) -> StepOutcome:
        """See `TrainBackend.optimizer_step`."""
        self.lifecycle.require("optimizer_step")
        self.weights.require_policy("optimizer_step")
        self.lifecycle.end_gradients()
        lr = learning_rate(self.optimizer.steps, self.config)
        norm = self._gradient_norm() / self._scaler.scale
        finite = math.isfinite(norm)
        if finite:
            factor = 1.0 / self._scaler.scale
            if self.config.grad_clip > 0:
                # The same epsilon as torch.nn.utils.clip_grad_norm_.
                factor *= min(1.0, self.config.grad_clip / (norm + 1e-6))
            self.optimizer.step(lr, factor)
            buffers.gather_weights(self._model.chunks)
        self._scaler.update(overflow=not finite)
        reason = "" if finite else f"the gradient norm is {norm}"
        if not finite and self._scaler.enabled:
            reason += f"; the loss scale is now {self._scaler.scale:g}"
        return StepOutcome(grad_norm=norm, lr=lr, skipped=not finite, reason=reason)

    def export_weights(
        self, bucket_bytes: int, holders: Holders = Holders.ALL, dtype: torch.dtype | None = None
    ) -> WeightExport:
        """See `TrainBackend.export_weights`."""
        self.lifecycle.require("export_weights")
        return export.export_weights(
            self._model, bucket_bytes=bucket_bytes, holders=holders, dtype=dtype, device=self.device
        )

    def save_checkpoint(self, folder: Path) -> SaveHandle:
        """See `TrainBackend.save_checkpoint`; everything is written when this returns, unless --async-save is on."""
        self.lifecycle.require("save_checkpoint")
        self.weights.require_policy("save_checkpoint")
        buffers.finish_gathering(self._model.chunks)
        return checkpoint.save_checkpoint(
            folder,
            self._model,
            self.optimizer,
            self._scaler,
            self._saver,
            next_rollout_id=self.next_rollout_id,
            moments=not self.config.no_save_optim,
        )

    def sleep(self, keep_weights: bool = False) -> None:
        """See `TrainBackend.sleep`."""
        self.lifecycle.require("sleep")
        if self.lifecycle.has_gradients:
            raise IllegalStateError(
                "sleep() is illegal while gradients are pending; it needs a backend whose last call was "
                "optimizer_step()"
            )
        buffers.finish_gathering(self._model.chunks)
        state = State.WEIGHTS_ONLY if keep_weights else State.ASLEEP
        if state is State.ASLEEP:
            self._saver.finish()  # its group is destroyed with the others
        self._sleeper.enter(state)
        self.lifecycle.move("sleep", state)

    def wake_up(self, weights_only: bool = False) -> None:
        """See `TrainBackend.wake_up`."""
        self.lifecycle.require("wake_up")
        state = State.WEIGHTS_ONLY if weights_only else State.AWAKE
        self._sleeper.enter(state)
        self.lifecycle.move("wake_up", state)

    @property
    def batching(self) -> Batching:
        """See `TrainBackend.batching`: an interleaved pipeline works on as many micro-batches as stages at a time."""
        if self._model_chunks == 1:
            return super().batching
        stages = self.config.pipeline_model_parallel_size
        return replace(super().batching, minimum=stages, multiple=stages)

    def local_weights(self) -> dict[str, Tensor]:
        """Return this rank's part of every weight by Megatron name, sharing its storage."""
        return self._model.locals()

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by before the backward pass; 1 unless fp16."""
        return self._scaler.scale

    def close(self) -> None:
        """See `TrainBackend.close`."""
        super().close()
        if hasattr(self, "_saver"):  # setup came so far
            self._saver.close()
        if self._all_groups is not None:
            destroy_groups()
            self._all_groups.close()
            self._all_groups = None

    _all_groups: RebuildableGroups | None = None

    def _make_groups(self) -> RebuildableGroups:
        """Join the default group, with a deadline, and make all others."""
        if dist.is_initialized():
            raise IllegalStateError("setup() needs a process without process groups; close() the earlier backend first")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        timeout = datetime.timedelta(minutes=self.config.distributed_timeout_minutes)
        self._all_groups = RebuildableGroups()
        self._all_groups.install()
        self._all_groups.init(
            "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo",
            rank=self.rank,
            world_size=self.world_size,
            timeout=timeout,
        )
        control = dist.new_group(backend="gloo", timeout=timeout) if self.world_size > 1 else None
        assert control is None or isinstance(control, dist.ProcessGroup)
        make_groups(self.config, chunks=self._model_chunks, timeout=timeout)
        self.parallel = layout(str(self.device))
        self.groups = groups(control)
        self._saver = CheckpointSaver(
            rank=self.rank,
            device=self.device,
            control=control,
            in_background=self.config.async_save,
            timeout=timeout,
        )
        return self._all_groups

    def _load_tag(self, tag: str, flag: str, folder: str | None) -> None:
        if folder is None:
            raise ConfigError(f"a frozen model was asked for, but {flag} is not given; give {flag} DIR")
        # through the live weights, which the policy's follow
        checkpoint.load_weights(
            Path(folder),
            flag,
            self._model,
            self.optimizer,
            control=self.groups.control,
            verify=self.config.verify_checkpoint,
        )
        self.weights.backup(tag)
        if self.rank == 0:
            mib = self.weights.host_bytes(tag) / 2**20
            _LOG.info("%s: %.1f MiB of host memory on each rank (%s %s)", tag, mib, flag, folder)

    def _optimizer_on_device(self) -> dict[str, Tensor]:
        """Leave out what an offload option keeps on the host already."""
        state = self.optimizer.state()
        return {name: one for name, one in state.items() if one.device.type == self.device.type}

    def _release(self) -> None:
        """Give back what is cached for reuse."""
        buffers.drop_scratch()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _run(
        self, micro_batches: Sequence[MicroBatch], step_fn: StepFn, *, forward_only: bool
    ) -> list[dict[str, Tensor]]:
        cut = [self._cut(one) for one in micro_batches]

        def inputs(number: int) -> ChunkInput:
            one = cut[number]
            tokens = one.tokens(cp=self.groups.cp, kernel=self._model.kernel, rotary=self._model.rotary)
            return ChunkInput(input_ids=one.input_ids, tokens=tokens)

        def loss_of(number: int, hidden: Tensor, head: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            batch = cut[number].batch
            whole = whole_tokens(hidden, sequence_parallel=self.config.sequence_parallel)
            output = HiddenOutput(
                hidden=whole[: len(batch.labels)],
                head=Head(weight=head()),
                labels=batch.labels,
                temperature=self.config.log_probs_temperature,
                chunk_size=self.config.log_probs_chunk_size,
                shard=self._model.vocab_shard,
            )
            loss, results = step_fn(output, batch)
            if not forward_only and (not loss.requires_grad or loss.ndim):
                raise DrivetrainError(
                    f"step_fn returned a loss of shape {list(loss.shape)} with requires_grad={loss.requires_grad}; it "
                    "must be a scalar computed from the model output, also for micro-batches without loss tokens"
                )
            return loss, results

        return run_micro_batches(
            self._model.chunks,
            inputs,
            len(cut),
            loss_of,
            loss_scale=self._scaler.scale,
            forward_only=forward_only,
        )

    def _cut(self, batch: MicroBatch) -> RankBatch:
        return cut_batch(
            batch,
            layout=self.parallel,
            multiple=self.parallel.tp_size if self.config.sequence_parallel else 1,
        )

    def _gradient_norm(self) -> float:
        """Return the L2 norm over all ranks' slices, each element once, summed in fp64."""
        squares = [
            torch.linalg.vector_norm(one, dtype=torch.float64).square()
            for one in self.optimizer.gradients(self._counted)
        ]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=self.device)
        if self.groups.world is not None:
            dist.all_reduce(total, group=self.groups.world)
        return math.sqrt(total.item()) if math.isfinite(total.item()) else total.item()
