"""The backend itself: the seven methods of the contract, in one process.

Knows no algorithm, no engine, no Ray and no run folder.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from drivetrain_backend_api import Capabilities, ConfigError, DrivetrainError, IllegalStateError
from drivetrain_backend_api.backend import SaveHandle, StepFn, StepOutcome, TrainBackend
from drivetrain_backend_api.batch import MicroBatch
from drivetrain_backend_api.lifecycle import State
from drivetrain_backend_api.offload import HostCopies
from drivetrain_backend_api.parallel import ParallelLayout, ProcessGroups
from drivetrain_backend_api.weights import Holders, WeightExport, WeightManager, flatten, plan_buckets
from plain_torch_backend import checkpoint
from plain_torch_backend.config import PlainTorchConfig
from plain_torch_backend.model import load_model, require_same_weights, run_model, stored_dtypes, weights_of
from plain_torch_backend.optimizer import AdamW, learning_rate
from plain_torch_backend.spec import CAPABILITIES


class PlainTorchBackend(TrainBackend):
    """Trains a causal language model in one process with plain torch."""

    capabilities: ClassVar[Capabilities] = CAPABILITIES

    config: PlainTorchConfig

    def setup(self, with_ref: bool = False, with_opd_teacher: bool = False) -> int:
        """See `TrainBackend.setup`."""
        self.lifecycle.require("setup")
        self._refuse_what_cannot_work()
        self.parallel = ParallelLayout(rank=0, world_size=1, device=str(self.device))
        self.groups = ProcessGroups()
        folder = Path(self.config.hf_checkpoint)
        self.model = load_model(folder, trust_remote_code=self.config.trust_remote_code)
        self._live = weights_of(self.model)
        self._stored_dtypes = stored_dtypes(folder, self.model)
        self.weights = WeightManager(lambda: {name: one.detach() for name, one in self._live.items()})
        if with_ref:
            self._keep_frozen("ref", "--ref-load", self.config.ref_load)
        if with_opd_teacher:
            self._keep_frozen("teacher", "--opd-teacher-load", self.config.opd_teacher_load)
        self._trained = {name: one for name, one in self._live.items() if one.requires_grad}
        self.optimizer = AdamW(self._trained, self.config)
        self._weight_copies, self._optimizer_copies = HostCopies(), HostCopies()
        torch.manual_seed(self.config.seed)
        if self.config.load is not None:
            self.next_rollout_id = checkpoint.load_checkpoint(
                Path(self.config.load),
                self._live,
                self.optimizer,
                weights_only=self.config.finetune,
                verify=self.config.verify_checkpoint,
            )
        self.lifecycle.move("setup", State.AWAKE)
        return self.next_rollout_id

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], step_fn: StepFn, forward_only: bool = False
    ) -> list[dict[str, Tensor]]:
        """See `TrainBackend.forward_backward`."""
        if forward_only:
            self.lifecycle.require("forward_only")
        else:
            self.lifecycle.require("forward_backward")
            self.weights.require_policy("forward_backward")
            self.lifecycle.begin_gradients()
        results = []
        with torch.set_grad_enabled(not forward_only):
            for batch in micro_batches:
                output = run_model(
                    self.model,
                    batch,
                    temperature=self.config.log_probs_temperature,
                    chunk_size=self.config.log_probs_chunk_size,
                )
                loss, metrics = step_fn(output, batch)
                if not forward_only:
                    _backward(loss)
                results.append(metrics)
        return results

    def optimizer_step(self) -> StepOutcome:
        """See `TrainBackend.optimizer_step`."""
        self.lifecycle.end_gradients()
        trained = list(self._trained.values())
        # a weight that no loss reached, such as an expert that no token chose, has a gradient all the same: zero
        norm = torch.nn.utils.get_total_norm([_gradient(one) for one in trained])
        finite, lr = bool(norm.isfinite()), learning_rate(self.optimizer.steps, self.config)
        if finite:
            if self.config.grad_clip > 0:
                torch.nn.utils.clip_grads_with_norm_(trained, self.config.grad_clip, norm)
            self.optimizer.step(lr)
        for one in trained:
            one.grad = None
        reason = "" if finite else f"the gradient norm is {norm.item()}"
        return StepOutcome(grad_norm=norm.item(), lr=lr, skipped=not finite, reason=reason)

    def export_weights(
        self, bucket_bytes: int, holders: Holders = Holders.ALL, dtype: torch.dtype | None = None
    ) -> WeightExport:
        """See `TrainBackend.export_weights`; one rank holds everything, whoever the holders are."""
        self.lifecycle.require("export_weights")
        live = self._live
        dtypes = {
            name: (dtype or self._stored_dtypes[name]) if one.is_floating_point() else one.dtype
            for name, one in live.items()
        }
        plan = plan_buckets(((name, one.shape, dtypes[name], 0) for name, one in live.items()), bucket_bytes)

        def gather(index: int) -> Tensor:
            entries = plan.bucket(index)
            return flatten([live[one.name].detach() for one in entries], entries, device=self.device)

        return WeightExport(plan, gather, agree=lambda mine: mine)

    def save_checkpoint(self, folder: Path) -> SaveHandle:
        """See `TrainBackend.save_checkpoint`; everything is written when this returns."""
        self.lifecycle.require("save_checkpoint")
        self.weights.require_policy("save_checkpoint")
        checkpoint.save_checkpoint(
            folder,
            self._live,
            self.optimizer,
            next_rollout_id=self.next_rollout_id,
            moments=not self.config.no_save_optim,
        )
        return SaveHandle()

    def sleep(self, keep_weights: bool = False) -> None:
        """See `TrainBackend.sleep`."""
        self.lifecycle.require("sleep")
        if self.lifecycle.has_gradients:
            raise IllegalStateError("sleep() is illegal while gradients are pending: call optimizer_step() first")
        self._optimizer_copies.send_away(self.optimizer.moments())
        if not keep_weights:
            self._weight_copies.send_away(self._live)
        self.lifecycle.move("sleep", State.WEIGHTS_ONLY if keep_weights else State.ASLEEP)

    def wake_up(self, weights_only: bool = False) -> None:
        """See `TrainBackend.wake_up`."""
        self.lifecycle.require("wake_up")
        self._weight_copies.bring_back()
        if not weights_only:
            self._optimizer_copies.bring_back()
        self.lifecycle.move("wake_up", State.WEIGHTS_ONLY if weights_only else State.AWAKE)

    def _refuse_what_cannot_work(self) -> None:
        if self.world_size != 1:
            raise ConfigError(
                f"the plain-torch backend trains in one process, not in {self.world_size}; "
                "give --actor-num-nodes 1 and --actor-num-gpus-per-node 1, or choose another --train-backend"
            )
        if self.device.type not in CAPABILITIES.devices:
            raise ConfigError(f"the plain-torch backend runs on {', '.join(CAPABILITIES.devices)}, not {self.device}")
        if self.config.precision != "fp32":
            raise ConfigError("the plain-torch backend computes in fp32 only; give --fp32")
        learning_rate(self.config.lr_warmup_iters, self.config)  # raises where the end of the decay is not given

    def _keep_frozen(self, tag: str, flag: str, folder: str | None) -> None:
        """Keep another model's weights on the host under a tag; the live ones stay as they are."""
        if folder is None:
            raise ConfigError(f"a frozen model was asked for, but {flag} is not given; give {flag} DIR")
        policy = self._live
        frozen = weights_of(load_model(Path(folder), trust_remote_code=self.config.trust_remote_code))
        require_same_weights(policy, frozen, what=f"{flag} {folder}")
        self._live = frozen
        self.weights.backup(tag)
        self._live = policy


def _backward(loss: Tensor) -> None:
    """Add one micro-batch's gradients to the sum."""
    if loss.ndim or not loss.requires_grad:
        raise DrivetrainError(
            f"step_fn returned a loss of shape {list(loss.shape)} with requires_grad={loss.requires_grad}; it must be "
            "a scalar computed from the model output, also for micro-batches without loss tokens"
        )
    loss.backward()  # type: ignore[no-untyped-call]


def _gradient(weight: Tensor) -> Tensor:
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad
