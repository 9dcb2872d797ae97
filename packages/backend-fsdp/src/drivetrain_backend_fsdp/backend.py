"""The backend itself: the seven methods of the contract, each a few calls of the modules beside it.

Process groups are made and destroyed here. Knows no algorithm, no engine and no run folder.
"""

import datetime
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from drivetrain_backend_api import Capabilities, ConfigError, DataError, DrivetrainError, IllegalStateError, training
from drivetrain_backend_api.attention import choose_kernel
from drivetrain_backend_api.backend import SaveHandle, StepFn, StepOutcome, TrainBackend
from drivetrain_backend_api.background_save import CheckpointSaver
from drivetrain_backend_api.batch import MicroBatch
from drivetrain_backend_api.lifecycle import State
from drivetrain_backend_api.packing import RolloutShard
from drivetrain_backend_api.parallel import ParallelLayout, ProcessGroups
from drivetrain_backend_api.schedule import LossScaler, learning_rate, require_decay_iters
from drivetrain_backend_api.weights import Holders, WeightExport, WeightManager
from drivetrain_backend_fsdp import checkpoint, export
from drivetrain_backend_fsdp.config import FsdpConfig
from drivetrain_backend_fsdp.forward import MicroBatchRunner
from drivetrain_backend_fsdp.model import Sharding, load_model, local_part
from drivetrain_backend_fsdp.optimizer import ShardedAdamW, global_norm
from drivetrain_backend_fsdp.sleep import KeptOnHost, Sleeper
from drivetrain_backend_fsdp.spec import CAPABILITIES

_LOG = logging.getLogger(__name__)

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class FsdpBackend(TrainBackend):
    """Trains a dense causal language model over a one-dimensional data-parallel mesh with FSDP2."""

    capabilities: ClassVar[Capabilities] = CAPABILITIES

    config: FsdpConfig
    optimizer: ShardedAdamW
    _saver: CheckpointSaver

    def setup(self, with_ref: bool = False, with_opd_teacher: bool = False) -> int:
        """See `TrainBackend.setup`."""
        self.lifecycle.require("setup")
        if self.config.lr_decay_style != "constant":
            require_decay_iters(self.config)
        torch.manual_seed(self.config.seed + self.rank)
        self._make_groups()
        self._policy = self._load(self.config.hf_checkpoint, trainable=True)
        self._frozen: dict[str, MicroBatchRunner] = {}
        self._kept: dict[str, KeptOnHost] = {}
        for tag, wanted, flag, folder in (
            ("ref", with_ref, "--ref-load", self.config.ref_load),
            ("teacher", with_opd_teacher, "--opd-teacher-load", self.config.opd_teacher_load),
        ):
            if wanted:
                self._frozen[tag] = self._load_frozen(flag, folder)
                self._kept[tag] = self._keep_on_host(tag)
        model = self._policy.model
        self._trained = {name: one for name, one in model.weights.items() if isinstance(one, DTensor)}
        self.optimizer = ShardedAdamW(
            {name: local_part(one) for name, one in self._trained.items()},
            self.config,
            offload=self.config.optimizer_cpu_offload,
        )
        self._scaler = LossScaler(self.config)
        if self.config.load is not None:
            self.next_rollout_id = checkpoint.load_checkpoint(
                Path(self.config.load),
                model,
                self.optimizer,
                self._scaler,
                device=self.device,
                control=self.groups.control,
                weights_only=self.config.finetune,
                verify=self.config.verify_checkpoint,
            )
        self.weights = WeightManager(model.locals)
        self._sleeper = Sleeper(weights=self._weights_to_move, others=self._others_to_move)
        self._saver.reserve(checkpoint.pieces_to_write(model, self.optimizer, moments=not self.config.no_save_optim))
        self.lifecycle.move("setup", State.AWAKE)
        return self.next_rollout_id

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], step_fn: StepFn, forward_only: bool = False
    ) -> list[dict[str, Tensor]]:
        """See `TrainBackend.forward_backward`."""
        if forward_only:
            self.lifecycle.require("forward_only")
            return self._policy.forward_backward(micro_batches, step_fn, forward_only=True)
        self.lifecycle.require("forward_backward")
        self.weights.require_policy("forward_backward")
        self.lifecycle.begin_gradients()
        return self._policy.accumulate(micro_batches, step_fn, loss_scale=self._scaler.scale)

    def optimizer_step(self) -> StepOutcome:
        """See `TrainBackend.optimizer_step`."""
        self.lifecycle.require("optimizer_step")
        self.weights.require_policy("optimizer_step")
        self.lifecycle.end_gradients()
        lr = learning_rate(self.optimizer.steps, self.config)
        gradients = self._take_gradients()
        norm = global_norm(gradients.values(), group=self.groups.dp, device=self.device) / self._scaler.scale
        finite = norm < float("inf")
        if finite:
            factor = 1.0 / self._scaler.scale
            if self.config.grad_clip > 0:
                # The same epsilon as torch.nn.utils.clip_grad_norm_.
                factor *= min(1.0, self.config.grad_clip / (norm + 1e-6))
            if factor != 1.0:
                torch._foreach_mul_(list(gradients.values()), factor)
            self.optimizer.step(gradients, lr)
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
            self._policy.model,
            bucket_bytes=bucket_bytes,
            holders=holders,
            dtype=dtype,
            control=self.groups.control,
            device=self.device,
        )

    def save_checkpoint(self, folder: Path) -> SaveHandle:
        """See `TrainBackend.save_checkpoint`; everything is written when this returns, unless --async-save is on."""
        self.lifecycle.require("save_checkpoint")
        self.weights.require_policy("save_checkpoint")
        return checkpoint.save_checkpoint(
            folder,
            self._policy.model,
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
        state = State.WEIGHTS_ONLY if keep_weights else State.ASLEEP
        self._sleeper.enter(state)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.lifecycle.move("sleep", state)

    def wake_up(self, weights_only: bool = False) -> None:
        """See `TrainBackend.wake_up`."""
        self.lifecycle.require("wake_up")
        state = State.WEIGHTS_ONLY if weights_only else State.AWAKE
        self._sleeper.enter(state)
        self.lifecycle.move("wake_up", state)

    @property
    def model(self) -> PreTrainedModel:
        """The sharded causal language model under training."""
        return self._policy.model.module

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by before the backward pass; 1 unless fp16."""
        return self._scaler.scale

    def local_weights(self) -> dict[str, Tensor]:
        """Return this rank's part of every weight by Hugging Face name, sharing its storage."""
        return self._policy.model.locals()

    def close(self) -> None:
        """See `TrainBackend.close`."""
        super().close()
        if hasattr(self, "_saver"):  # setup came so far
            self._saver.close()
        if self._owns_groups:
            self._owns_groups = False
            dist.destroy_process_group()

    _owns_groups = False

    def _log_probs_under(self, tag: str, shard: RolloutShard) -> list[Tensor] | None:
        self.lifecycle.require("forward_only")
        if tag not in self._frozen:
            return super()._log_probs_under(tag, shard)
        self.lifecycle.require("train")
        with self._kept[tag].on_device():
            return training.forward_log_probs(self._frozen[tag], shard)

    def _make_groups(self) -> None:
        """Join the default group, with a deadline, and make the control group and the mesh."""
        if dist.is_initialized():
            raise IllegalStateError("setup() needs a process without process groups; close() the earlier backend first")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        timeout = datetime.timedelta(minutes=self.config.distributed_timeout_minutes)
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        try:
            dist.init_process_group(
                # gloo beside nccl: offloaded optimizer state lives on a mesh of its own.
                "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo",
                rank=self.rank,
                world_size=self.world_size,
                timeout=timeout,
            )
        except (dist.DistError, RuntimeError, ValueError) as error:
            raise DrivetrainError(
                f"rank {self.rank} of {self.world_size} could not meet the others at {where} "
                f"(MASTER_ADDR:MASTER_PORT) within {timeout}: {error}"
            ) from error
        self._owns_groups = True
        self._mesh = init_device_mesh(self.device.type, (self.world_size,), mesh_dim_names=("dp",))
        self.parallel = ParallelLayout(
            rank=self.rank,
            world_size=self.world_size,
            device=str(self.device),
            dp_rank=self.rank,
            dp_size=self.world_size,
        )
        if self.world_size == 1:
            self.groups = ProcessGroups()
        else:
            world = self._mesh.get_group()
            control = dist.new_group(backend="gloo", timeout=timeout)
            assert isinstance(control, dist.ProcessGroup)
            self.groups = ProcessGroups(world=world, dp=world, dp_cp=world, control=control)
        self._saver = CheckpointSaver(
            rank=self.rank,
            device=self.device,
            control=self.groups.control,
            in_background=self.config.async_save,
            timeout=timeout,
        )

    def _load(self, folder: str, *, trainable: bool) -> MicroBatchRunner:
        dtype = _DTYPES[self.config.precision]
        model = load_model(
            Path(folder),
            Sharding(
                mesh=self._mesh,
                device=self.device,
                compute_dtype=dtype,
                master_dtype=torch.float32 if trainable else dtype,
                trainable=trainable,
                reshard_after_forward=self.config.fsdp_reshard_after_forward == "always",
                cpu_offload=self.config.fsdp_cpu_offload,
                gradient_checkpointing=self.config.gradient_checkpointing and trainable,
            ),
            trust_remote_code=self.config.trust_remote_code,
            fill=not trainable or self.config.load is None,
            control=self.groups.control,
        )
        hf_config = model.module.config
        return MicroBatchRunner(
            model=model,
            parallel=self.parallel,
            groups=self.groups,
            kernel=choose_kernel(
                self.config.attention_backend,
                device=self.device,
                dtype=dtype,
                head_dim=getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads,
            ),
            temperature=self.config.log_probs_temperature,
            chunk_size=self.config.log_probs_chunk_size,
        )

    def _load_frozen(self, flag: str, folder: str | None) -> MicroBatchRunner:
        if folder is None:
            raise ConfigError(f"a frozen model was asked for, but {flag} is not given; give {flag} DIR")
        loaded = self._load(folder, trainable=False)
        mine, theirs = self._policy.model.module.config.vocab_size, loaded.model.module.config.vocab_size
        if theirs < mine:  # more may be padding, which tokenizers never use
            raise DataError(
                f"{flag} {folder} has a vocabulary of {theirs} tokens, --hf-checkpoint has {mine}; give a model that "
                "has all of them"
            )
        return loaded

    def _keep_on_host(self, tag: str) -> KeptOnHost:
        tensors = self._frozen[tag].model.locals
        size = sum(one.numel() * one.element_size() for one in tensors().values())
        if self.rank == 0:
            _LOG.info("%s: %.1f MiB of host memory on each rank", tag, size / 2**20)
        return KeptOnHost(lambda: self._on_device(tensors()))

    def _take_gradients(self) -> dict[str, Tensor]:
        """Take this rank's gradient shards out of the parameters, by weight name."""
        gradients = {}
        for name, weight in self._trained.items():
            if weight.grad is None:
                raise DrivetrainError(f"weight {name!r} got no gradient; the loss must depend on the whole model")
            assert isinstance(weight.grad, DTensor)
            gradients[name] = weight.grad.to_local()
            weight.grad = None
        return gradients

    def _weights_to_move(self) -> dict[str, Tensor]:
        return self._on_device(self.local_weights())

    def _others_to_move(self) -> dict[str, Tensor]:
        """Name the tensors that an export does not need, and that are not on the host anyway: optimizer state."""
        return self._on_device(self.optimizer.state())

    def _on_device(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Leave out what an offload option keeps on the host already."""
        return {name: one for name, one in tensors.items() if one.device.type == self.device.type}
