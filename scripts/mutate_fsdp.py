"""Break the FSDP backend on purpose, in ways that real projects got wrong, and see that the conformance suite notices.

    python scripts/mutate_fsdp.py                      the unmutated copy, then every mutation
    python scripts/mutate_fsdp.py --only NAME ...      the unmutated copy, then these
    python scripts/mutate_fsdp.py --list               what there is
    python scripts/mutate_fsdp.py --resume FILE.json   go on where an interrupted run stopped, keeping results there
    python scripts/mutate_fsdp.py --write-docs         write docs/mutations.md too, when all are caught

Each mutation is one replacement in a copy of backend-fsdp and backend-api, on which the suite runs with one and two
ranks. One counts as caught when a test of the suite fails by a claim of its own: code that cannot be imported, names
nothing, or hangs past the deadline is a bad mutation. The exit code is 1 unless all are caught.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ROOT / "packages"
DOCS = ROOT / "docs" / "mutations.md"
FSDP, API = "backend-fsdp/src/drivetrain_backend_fsdp", "backend-api/src/drivetrain_backend_api"
COPIED = ("backend-fsdp", "backend-api")
SUITE = f"{API}/testing"
RANKS = "1,2"
DEADLINE = 400.0
"""Seconds that the suite may take on a mutation, unless told otherwise."""
BASELINE_DEADLINE = 3600.0
"""Seconds for the copy that is not mutated, on which all tests run."""
UNMUTATED = "unmutated"
NOTHING_RAN = 5
"""Exit code of pytest."""

NUMBERS = "test_training_equals_a_plain_model"

BROKEN_CODE = (
    *("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError"),
    *("NameError", "UnboundLocalError", "AttributeError"),
)
"""Errors that say of a mutation only that it is no working code."""
CLAIM_ERRORS = ("assert", "AssertionError", "RanksFailedError", "Failed")
"""How the reason of a failed test begins when the test itself passed judgement."""


class MutationError(Exception):
    """Something that a person must mend; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One way to break the backend.

    Attributes:
        name: what the command line calls it.
        mistake: the real mistake that it imitates.
        file: below packages/.
        old: text that the file holds exactly once.
        new: what takes its place.
        first: test that is tried before the whole suite, for speed; where it passes all others have their turn.
    """

    name: str
    mistake: str
    file: str
    old: str
    new: str
    first: str = NUMBERS

    @property
    def place(self) -> str:
        """Package and module, for tables."""
        package, _, rest = self.file.partition("/")
        return f"{package}: {Path(rest).name}"


def _fsdp(name: str, mistake: str, module: str, old: str, new: str, *, first: str = NUMBERS) -> Mutation:
    return Mutation(name=name, mistake=mistake, file=f"{FSDP}/{module}.py", old=old, new=new, first=first)


def _api(name: str, mistake: str, module: str, old: str, new: str, *, first: str = NUMBERS) -> Mutation:
    return Mutation(name=name, mistake=mistake, file=f"{API}/{module}.py", old=old, new=new, first=first)


# -- the table: gradients, norm and step -------------------------------------------------------------------------------

STEP = (
    _fsdp(
        "rounded-inputs",
        "old log-probs and advantages are rounded to bf16 on their way into the model, as FSDP does unasked",
        "model",
        "replace(precision, cast_forward_inputs=False)",
        "replace(precision, cast_forward_inputs=True)",
        first="test_the_first_step_is_on_policy",
    ),
    _fsdp(
        "averaged-gradients",
        "gradients are averaged over the data-parallel ranks, as FSDP does unasked",
        "model",
        "one.set_gradient_divide_factor(1.0)",
        "one.set_gradient_divide_factor(float(sharding.mesh.size()))",
    ),
    _fsdp(
        "sum-on-the-root-only",
        "summing is asked of the root module alone, so that the blocks average",
        "model",
        "    for one in module.modules():\n        if isinstance(one, FSDPModule):\n            # Both",
        "    for one in (module,):\n        if isinstance(one, FSDPModule):\n            # Both",
    ),
    _fsdp(
        "mean-of-micro-batches",
        "the loss is a mean over micro-batches instead of tokens",
        "forward",
        "(loss * loss_scale).backward()",
        "(loss * loss_scale / len(micro_batches)).backward()",
    ),
    _fsdp(
        "last-micro-batch-only",
        "gradients are zeroed before each micro-batch, so that only the last one counts",
        "forward",
        "        for batch in micro_batches:\n            loss, metrics",
        "        for batch in micro_batches:\n"
        "            for weight in self.model.weights.values():\n"
        "                weight.grad = None\n"
        "            loss, metrics",
    ),
    _fsdp(
        "filler-without-backward",
        "a rank without samples leaves the backward pass out",
        "forward",
        "            (loss * loss_scale).backward()",
        "            if not batch.is_filler:\n                (loss * loss_scale).backward()",
    ),
    _fsdp(
        "loss-not-scaled",
        "the fp16 loss scale is forgotten before the backward pass",
        "forward",
        "(loss * loss_scale).backward()",
        "loss.backward()",
        first="test_low_precision_follows_fp32",
    ),
    _fsdp(
        "gradients-not-unscaled",
        "fp16 gradients are clipped and applied without taking the loss scale out",
        "backend",
        "factor = 1.0 / self._scaler.scale",
        "factor = 1.0",
        first="test_low_precision_follows_fp32",
    ),
    _fsdp(
        "clipped-before-unscaling",
        "the norm that clips is that of the scaled fp16 gradients",
        "backend",
        "device=self.device) / self._scaler.scale",
        "device=self.device)",
        first="test_low_precision_follows_fp32",
    ),
    _fsdp(
        "clipped-by-local-norm",
        "each rank clips by the norm of its own shards",
        "backend",
        "global_norm(gradients.values(), group=self.groups.dp, device=self.device)",
        "global_norm(gradients.values(), group=None, device=self.device)",
    ),
    _fsdp(
        "never-clipped",
        "the norm is reported and nothing is clipped",
        "backend",
        "if self.config.grad_clip > 0:",
        "if self.config.grad_clip < 0:",
    ),
    _fsdp(
        "norm-after-clipping",
        "the gradient norm that is reported is the clipped one",
        "backend",
        "StepOutcome(grad_norm=norm,",
        "StepOutcome(grad_norm=min(norm, self.config.grad_clip or norm),",
    ),
    _fsdp(
        "decay-on-vectors",
        "weight decay acts on norms and biases too",
        "optimizer",
        "(vectors, 0.0)",
        "(vectors, config.weight_decay)",
    ),
    _fsdp(
        "decay-in-the-gradient",
        "weight decay is added to the gradient, Adam instead of AdamW",
        "optimizer",
        "torch.optim.AdamW(",
        "torch.optim.Adam(",
    ),
    _fsdp(
        "schedule-from-one",
        "the scheduler steps before the first optimizer step",
        "backend",
        "learning_rate(self.optimizer.steps, self.config)",
        "learning_rate(self.optimizer.steps + 1, self.config)",
    ),
    _api(
        "decay-counts-the-warm-up",
        "the decay is measured from step 0 instead of the end of the warm-up",
        "schedule",
        "(step - config.lr_warmup_iters) / (end - config.lr_warmup_iters)",
        "step / end",
    ),
    _fsdp(
        "nan-passes",
        "gradients are tested for inf only, so that nan reaches the weights",
        "backend",
        'finite = norm < float("inf")',
        'finite = norm != float("inf")',
        first="test_a_step_that_is_not_finite_changes_nothing",
    ),
    _fsdp(
        "skipped-step-advances-the-schedule",
        "a step that was skipped counts for schedule and bias correction",
        "backend",
        "        self._scaler.update(overflow=not finite)",
        "        self.optimizer.steps += int(not finite)\n        self._scaler.update(overflow=not finite)",
        first="test_a_step_that_is_not_finite_changes_nothing",
    ),
    _fsdp(
        "skipped-step-keeps-its-gradients",
        "gradients of a skipped step stay and spoil the next one",
        "backend",
        "            weight.grad = None",
        "            if bool(torch.isfinite(gradients[name]).all()):\n                weight.grad = None",
        first="test_a_step_that_is_not_finite_changes_nothing",
    ),
    _fsdp(
        "skipped-step-not-reported",
        "a step is skipped in silence",
        "backend",
        "skipped=not finite,",
        "skipped=False,",
        first="test_a_step_that_is_not_finite_changes_nothing",
    ),
    _fsdp(
        "masters-in-low-precision",
        "the master weights are kept in bf16, where small updates are lost",
        "backend",
        "master_dtype=torch.float32 if trainable else dtype",
        "master_dtype=dtype",
        first="test_low_precision_follows_fp32",
    ),
    _fsdp(
        "offloaded-step-stays-on-the-host",
        "the step of an offloaded optimizer never reaches the model",
        "optimizer",
        "self._shards[name].copy_(one)",
        "one.clone()",
        first="test_options_keep_the_numbers",
    ),
    _api(
        "local-denominators",
        "each rank divides by its own tokens: the count is summed over the wrong group",
        "training",
        "totals = sum_scalars([tokens, sequences], group=groups.dp,",
        "totals = sum_scalars([tokens, sequences], group=groups.cp,",
    ),
    _api(
        "masked-sequences-counted",
        "sequences without a loss token count in the mean over sequences",
        "training",
        "sequences = sum(bool(one.any()) for one in torch.split(mask, batch.response_lengths.tolist()))",
        "sequences = len(batch)",
    ),
    _api(
        "every-rank-the-first-shard",
        "all ranks train on the same shard of the rollout",
        "training",
        "batching=batching)[layout.dp_rank]",
        "batching=batching)[0]",
    ),
    _api(
        "metrics-of-one-rank",
        "metrics are those of this rank's samples alone",
        "reductions",
        "        if groups.dp_cp is not None:",
        "        if groups.cp is not None:",
    ),
    _api(
        "metrics-averaged",
        "metrics that are shares of a sum are averaged over micro-batches",
        "reductions",
        "for one in results]).sum(0)",
        "for one in results]).mean(0)",
    ),
)

# -- the table: forward ------------------------------------------------------------------------------------------------

FORWARD = (
    _api(
        "temperature-forgotten",
        "log-probs of training ignore the temperature of sampling",
        "algorithm",
        "temperature=self.temperature,",
        "temperature=1.0,",
    ),
    _fsdp(
        "attention-across-sequences",
        "packed sequences attend to each other",
        "forward",
        "packed_sequences(batch.cu_seqlens, batch.max_seqlen, self.kernel)",
        "packed_sequences(batch.cu_seqlens[[0, -1]], len(batch.input_ids), self.kernel)",
    ),
    _fsdp(
        "labels-not-shifted",
        "each position is asked for its own token instead of the next one",
        "forward",
        "labels=batch.labels,",
        "labels=batch.input_ids,",
    ),
    _fsdp(
        "left-in-eval-mode",
        "a pass without gradients leaves the model in eval mode",
        "forward",
        "        with torch.no_grad():\n            results",
        "        self.model.module.eval()\n        with torch.no_grad():\n            results",
        first="test_forward_only_leaves_no_trace",
    ),
    _fsdp(
        "forward-only-draws",
        "a pass without gradients advances the random state",
        "forward",
        "        with torch.no_grad():\n            results",
        "        torch.rand(())\n        with torch.no_grad():\n            results",
        first="test_forward_only_leaves_no_trace",
    ),
    _fsdp(
        "forward-only-zeroes-gradients",
        "a pass without gradients zeroes those that are pending",
        "forward",
        "        with torch.no_grad():\n            results",
        "        for weight in self.model.weights.values():\n"
        "            if weight.grad is not None:\n"
        "                weight.grad.zero_()\n"
        "        with torch.no_grad():\n            results",
        first="test_forward_only_leaves_no_trace",
    ),
    _fsdp(
        "gathered-weights-kept",
        "after a pass without gradients the root computes with the weights that were gathered then",
        "forward",
        "        self.model.reshard()\n",
        "",
        first="test_forward_only_leaves_no_trace",
    ),
    _fsdp(
        "policy-for-the-reference",
        "reference log-probs are computed by the policy",
        "backend",
        "training.forward_log_probs(self._frozen[tag], shard)",
        "training.forward_log_probs(self._policy, shard)",
        first="test_reference_and_teacher_are_their_own_models",
    ),
    _fsdp(
        "reference-for-the-teacher",
        "the teacher is loaded from where the reference is",
        "backend",
        '"--opd-teacher-load", self.config.opd_teacher_load)',
        '"--opd-teacher-load", self.config.ref_load or self.config.hf_checkpoint)',
        first="test_reference_and_teacher_are_their_own_models",
    ),
    _fsdp(
        "reference-follows-the-policy",
        "the reference is trained along with the policy",
        "backend",
        "        self._scaler.update(overflow=not finite)",
        "        for frozen in self._frozen.values():\n"
        "            for name, one in frozen.model.locals().items():\n"
        "                one.copy_(self.local_weights()[name])\n"
        "        self._scaler.update(overflow=not finite)",
        first="test_reference_and_teacher_are_their_own_models",
    ),
    _api(
        "positions-across-sequences",
        "position ids count on through the packed batch",
        "packing",
        "position_ids = token_index - torch.tensor(starts[:-1], device=device)[sequence_ids]",
        "position_ids = token_index",
    ),
    _api(
        "mask-one-token-late",
        "mask and advantages lie one token behind the log-probs that they belong to",
        "packing",
        "torch.arange(end - response - 1, end - 1, dtype=torch.int64)",
        "torch.arange(end - response, end, dtype=torch.int64)",
    ),
    _api(
        "log-probs-in-packed-order",
        "log-probs come back in the order of packing instead of the samples'",
        "training",
        "return [ordered[one] for one in range(len(shard.batch))]",
        "return list(ordered.values())",
    ),
    _api(
        "entropy-without-temperature",
        "the entropy is that of the logits before the temperature",
        "log_probs",
        "torch.special.entr(torch.softmax(logits, dim=-1))",
        "torch.special.entr(torch.softmax(logits * temperature, dim=-1))",
    ),
    _api(
        "gradient-without-temperature",
        "the backward pass forgets to divide by the temperature",
        "log_probs",
        "grad_logits *= scale / temperature",
        "grad_logits *= scale",
    ),
)

# -- the table: checkpoints --------------------------------------------------------------------------------------------

CHECKPOINTS = (
    _fsdp(
        "moments-not-loaded",
        "a resume loads the weights and begins with empty moments",
        "checkpoint",
        "        load(_tensors(model, optimizer), storage_reader",
        "        weights = {f'{_MODEL_PREFIX}{name}': one for name, one in model.weights.items()}\n"
        "        load(weights, storage_reader",
        first="test_a_resumed_run_is_the_same_run",
    ),
    _fsdp(
        "second-moment-not-saved",
        "one of Adam's two moments is not in the checkpoint",
        "optimizer",
        'for kind in ("exp_avg", "exp_avg_sq")\n',
        'for kind in ("exp_avg",)\n',
        first="test_a_resumed_run_is_the_same_run",
    ),
    _fsdp(
        "schedule-dropped",
        "the scheduler's state is not restored, and the schedule begins anew",
        "optimizer",
        "        self._steps = value",
        "        self._steps = 0",
        first="test_a_resumed_run_is_the_same_run",
    ),
    _fsdp(
        "bias-correction-begins-anew",
        "moments come back, the step count that corrects their bias does not",
        "optimizer",
        'state["step"].fill_(value)',
        'state["step"].fill_(0)',
        first="test_a_resumed_run_is_the_same_run",
    ),
    _fsdp(
        "loss-scale-not-restored",
        "a resume begins with the initial loss scale",
        "checkpoint",
        "        scaler.scale, scaler.good_steps = state.loss_scale, state.loss_scale_good_steps",
        "        scaler.good_steps = state.loss_scale_good_steps",
        first="test_a_resumed_run_is_the_same_run",
    ),
    _fsdp(
        "random-state-not-restored",
        "the random state is saved and never read",
        "checkpoint",
        '    torch.set_rng_state(states["cpu"])\n',
        "",
        first="test_a_resumed_run_is_the_same_run",
    ),
    _fsdp(
        "random-state-of-rank-0",
        "every rank restores the random state of rank 0",
        "checkpoint",
        "_restore_random_state(rng_file(folder, rank), device)",
        "_restore_random_state(rng_file(folder, 0), device)",
        first="test_a_resumed_run_is_the_same_run",
    ),
    _fsdp(
        "rollout-id-not-saved",
        "a resume begins at rollout 0",
        "checkpoint",
        "next_rollout_id=next_rollout_id,",
        "next_rollout_id=0,",
        first="test_a_resumed_run_is_the_same_run",
    ),
    _fsdp(
        "another-model-accepted",
        "a checkpoint of another model is loaded as far as its tensors fit",
        "checkpoint",
        """\
        _check_fit(folder, read_metadata(folder), {name: tuple(one.shape) for name, one in tensors.items()})
        return state

    state = together(look, control)
    if len(set(gathered(state.next_rollout_id, control))) > 1:
        raise DataError(
            f"{folder}: ranks see different checkpoints (next rollout ids {gathered(state.next_rollout_id, control)}); "
            "--load must name a folder that all nodes share"
        )
    try:
        load(_tensors(model, optimizer), storage_reader""",
        """\
        return state

    state = together(look, control)
    stored = read_metadata(folder).state_dict_metadata
    fitting = {
        name: one
        for name, one in _tensors(model, optimizer).items()
        if name in stored and tuple(stored[name].size) == tuple(one.shape)
    }
    try:
        load(fitting, storage_reader""",
        first="test_a_checkpoint_of_another_model_is_refused",
    ),
    _api(
        "checksums-not-compared",
        "a file of a checkpoint that was damaged on disk is read as it is",
        "checkpoint_files",
        "if found != checksums[name]:",
        "if found != checksums[name] and not path.stat().st_size:",
        first="test_a_damaged_checkpoint_is_refused",
    ),
    _api(
        "checksums-of-rank-0-only",
        "all ranks verify rank 0's share of the files, and nobody the others",
        "checkpoint_files",
        "for name in sorted(checksums)[rank::ranks]:",
        "for name in sorted(checksums)[0::ranks]:",
        first="test_a_damaged_checkpoint_is_refused",
    ),
    _fsdp(
        "saved-under-another-tag",
        "a save while the reference's weights are live writes those",
        "backend",
        '        self.weights.require_policy("save_checkpoint")\n',
        "",
        first="test_tags_switch_bit_for_bit",
    ),
)

# -- the table: sleep, tags, weights on their way out ------------------------------------------------------------------

SLEEP_AND_EXPORT = (
    _fsdp(
        "woken-without-masters",
        "after a wake-up the master weights are those that the engines hold, in bf16, and are saved so",
        "sleep",
        "            self._weight_copies.bring_back()\n",
        "            self._weight_copies.bring_back()\n"
        "            for one in self._weights().values():\n"
        "                one.copy_(one.bfloat16())\n",
        first="test_sleep_keeps_every_bit",
    ),
    _fsdp(
        "woken-without-moments",
        "the optimizer is made anew at a wake-up, its moments are gone",
        "sleep",
        "            self._other_copies.bring_back()\n",
        "            self._other_copies.bring_back()\n"
        "            for name, one in self._others().items():\n"
        '                if name.startswith("optimizer.exp_avg"):\n'
        "                    one.zero_()\n",
        first="test_sleep_keeps_every_bit",
    ),
    _fsdp(
        "moments-stay-away",
        "the moments come back only where the weights were away too",
        "sleep",
        "            self._weight_copies.bring_back()\n        if state is State.AWAKE and self._other_copies.away:\n"
        "            self._other_copies.bring_back()\n",
        "            self._weight_copies.bring_back()\n"
        "            if state is State.AWAKE and self._other_copies.away:\n"
        "                self._other_copies.bring_back()\n",
        first="test_sleep_keeps_every_bit",
    ),
    _fsdp(
        "asleep-with-gradients",
        "a sleep between backward pass and step is not refused",
        "backend",
        "if self.lifecycle.has_gradients:",
        'if self.lifecycle.has_gradients and self.device.type == "cuda":',
        first="test_illegal_calls_name_both_states",
    ),
    _api(
        "host-buffers-leak",
        "each sleep takes new host buffers and keeps the old ones",
        "offload",
        "            buffer = self._buffers.get(name)\n",
        "            buffer = self._buffers.pop(name, None)\n"
        "            if buffer is not None:\n"
        '                self._buffers[f"{name} {len(self._buffers)}"], buffer = buffer, None\n',
        first="test_sleep_does_not_grow",
    ),
    _api(
        "saved-while-half-awake",
        "a save is legal while the optimizer is on the host",
        "lifecycle",
        '"save_checkpoint": (State.AWAKE,),',
        '"save_checkpoint": (State.AWAKE, State.WEIGHTS_ONLY),',
        first="test_illegal_calls_name_both_states",
    ),
    _api(
        "wrong-tag-restored",
        "whatever tag is asked for, the one kept first is restored",
        "weights",
        "bring(self._kept[tag], live)",
        "bring(next(iter(self._kept.values())), live)",
        first="test_tags_switch_bit_for_bit",
    ),
    _fsdp(
        "tied-weight-lost",
        "both names of a tied weight are left out of the export",
        "export",
        "            for name, weight in model.weights.items()\n",
        "            for name, weight in model.weights.items()\n"
        "            if name not in model.module.all_tied_weights_keys.values()\n",
        first="test_an_export_is_what_save_pretrained_writes",
    ),
    _fsdp(
        "tied-weight-twice",
        "a tied weight is exported under both of its names",
        "export",
        "    plan = plan_buckets(\n",
        "    tied = model.module.all_tied_weights_keys.items()\n"
        "    model = ShardedModel(\n"
        "        module=model.module,\n"
        "        weights={**model.weights, **{one: model.weights[source] for one, source in tied}},\n"
        "        stored_dtypes={**model.stored_dtypes, **{one: model.stored_dtypes[source] for one, source in tied}},\n"
        "        mesh=model.mesh,\n"
        "    )\n"
        "    plan = plan_buckets(\n",
        first="test_an_export_is_what_save_pretrained_writes",
    ),
    _fsdp(
        "padded-rows-exported",
        "the rows that even the shards out reach the engines",
        "export",
        "                weight.shape,\n",
        "                (-(-weight.shape[0] // model.mesh.size()) * model.mesh.size(), *weight.shape[1:]),\n",
        first="test_an_export_is_what_save_pretrained_writes",
    ),
    _fsdp(
        "masters-exported",
        "weights go out in the masters' fp32 instead of the checkpoint's dtype",
        "export",
        "(dtype or model.stored_dtypes[name])",
        "(dtype or weight.dtype)",
        first="test_an_export_is_what_save_pretrained_writes",
    ),
    _fsdp(
        "export-dtype-ignored",
        "the dtype that was asked for is ignored",
        "export",
        "(dtype or model.stored_dtypes[name])",
        "model.stored_dtypes[name]",
        first="test_an_export_is_what_save_pretrained_writes",
    ),
    _fsdp(
        "holders-ignored",
        "every rank gets the whole weights, whoever asked for them",
        "export",
        "to_all = holders is Holders.ALL",
        "to_all = True",
        first="test_each_kind_of_holders_gets_the_data",
    ),
    _fsdp(
        "abandoned-export-not-told",
        "a rank that leaves an export leaves the others waiting",
        "export",
        "lambda mine: all_agree(mine, control)",
        "lambda mine: mine",
        first="test_an_export_that_one_rank_leaves_ends_on_all",
    ),
    _api(
        "buckets-backwards",
        "buckets come in another order than the plan's",
        "weights",
        "for index in range(self.plan.num_buckets):",
        "for index in reversed(range(self.plan.num_buckets)):",
        first="test_an_export_is_what_save_pretrained_writes",
    ),
    _api(
        "buckets-too-large",
        "a bucket is closed only after it has grown too large",
        "weights",
        "start + size > bucket_bytes:",
        "start > bucket_bytes:",
        first="test_an_export_is_what_save_pretrained_writes",
    ),
)

MUTATIONS = (*STEP, *FORWARD, *CHECKPOINTS, *SLEEP_AND_EXPORT)


# -- one mutation ------------------------------------------------------------------------------------------------------


def mutated_text(mutation: Mutation, packages: Path = PACKAGES) -> str:
    """Return a mutation's file with its replacement made.

    Raises:
        MutationError: the file is not there, or does not hold the old text exactly once.
    """
    path = packages / mutation.file
    if not path.is_file():
        raise MutationError(f"{mutation.name}: packages/{mutation.file} does not exist; correct the table")
    text = path.read_text()
    count = text.count(mutation.old)
    if count != 1:
        raise MutationError(
            f"{mutation.name}: packages/{mutation.file} holds the old text {count} times, it must be once; "
            f"correct the table: {mutation.old!r}"
        )
    return text.replace(mutation.old, mutation.new)


def copy_sources(mutation: Mutation | None, folder: Path, packages: Path = PACKAGES) -> list[Path]:
    """Copy the packages into a folder, break the copy, and return what PYTHONPATH must begin with."""
    paths = []
    for package in COPIED:
        source = Path(package) / "src"
        shutil.copytree(packages / source, folder / source, ignore=shutil.ignore_patterns("__pycache__"))
        paths.append(folder / source)
    if mutation is not None:
        (folder / mutation.file).write_text(mutated_text(mutation, folder))
    return paths


def environment(paths: Sequence[Path], temporary: Path) -> dict[str, str]:
    """Return the environment of a run: this process's, with the copy before whatever is installed."""
    strange = ("DRIVETRAIN_", "PYTEST_", "PYTHON", "RAY_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(strange)}
    return kept | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(temporary),
        # so wide that pytest cuts no reason off
        "COLUMNS": "1000",
    }


def require_copy(paths: Sequence[Path], variables: Mapping[str, str]) -> None:
    """See that an interpreter imports both packages from the copy.

    Raises:
        MutationError: it finds others first, so that nothing mutated would run.
    """
    code = "import drivetrain_backend_fsdp as a, drivetrain_backend_api as b; print(a.__file__, b.__file__, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=variables["TMPDIR"],
        env=dict(variables),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    found = [Path(one) for one in done.stdout.split("\n") if one]
    if len(found) != len(paths) or not all(one.is_relative_to(path) for one, path in zip(found, paths)):
        raise MutationError(f"the copy is not what is imported: {' '.join(map(str, found))}{done.stderr[-500:]}")


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of one mutation.

    Attributes:
        digest: of the mutation and of what it was applied to.
        caught: a test of the suite failed by a claim; for the unmutated copy: all passed.
        by: tests that failed, as function and parameters.
        why: what else was seen, "" when caught.
    """

    name: str
    digest: str
    caught: bool
    by: tuple[str, ...]
    seconds: float
    why: str


def digest_of(mutation: Mutation | None, packages: Path = PACKAGES) -> str:
    """Hash what decides a result: the mutation and the sources; for the unmutated copy the suite too."""
    found = hashlib.sha256(repr(mutation).encode())
    for package in COPIED:
        for path in sorted((packages / package / "src").rglob("*.py")):
            name = path.relative_to(packages).as_posix()
            # a test added for one mutation does not make another uncaught
            if mutation is None or not name.startswith(SUITE):
                found.update(name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def run_suite(mutation: Mutation | None, *, deadline: float) -> Result:
    """Run the suite on a mutated copy, or on one that is not mutated."""
    name = mutation.name if mutation else UNMUTATED
    digest = digest_of(mutation)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutation-", ignore_cleanup_errors=True) as folder:
        temporary = Path(folder) / "tmp"
        temporary.mkdir()
        paths = copy_sources(mutation, Path(folder))
        variables = environment(paths, temporary)
        require_copy(paths, variables)
        code, output = _pytest(variables, Path(folder), deadline, only=mutation.first if mutation else "")
        if mutation is not None and code in (0, NOTHING_RAN):
            code, output = _pytest(variables, Path(folder), deadline)
    seconds = round(time.monotonic() - start, 1)
    if mutation is None:
        passed, why = passes(code, output)
        return Result(name=name, digest=digest, caught=passed, by=(), seconds=seconds, why=why)
    by, why = judged(code, output)
    return Result(name=name, digest=digest, caught=not why, by=by, seconds=seconds, why=why)


def _pytest(variables: Mapping[str, str], folder: Path, deadline: float, *, only: str = "") -> tuple[int | None, str]:
    """Run the suite, or one test of it; returns the exit code, None past the deadline, and the output."""
    line = [sys.executable, "-m", "pytest", "--pyargs", "drivetrain_backend_api.testing", "--train-backend", "fsdp"]
    line += ["--conformance-ranks", RANKS, "-x", "-q", "-p", "no:cacheprovider", *(("-k", only) if only else ())]
    log = folder / "output"
    with log.open("w") as file:
        child = subprocess.Popen(
            line,
            cwd=variables["TMPDIR"],
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = child.wait(deadline)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if code is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    return code, log.read_text(errors="replace")


# -- what the output says ----------------------------------------------------------------------------------------------

_FAILED = re.compile(r"^FAILED (?P<node>\S+::test_\w+(?:\[.*?\])?)(?: - (?P<reason>.*))?$", re.MULTILINE)
_ERROR = re.compile(r"^ERROR (?P<what>\S.*)$", re.MULTILINE)
_BROKEN = re.compile(
    rf"^(?:E\s+)?(?:first error, on rank \d+: )?(?:[\w.]+\.)?(?P<kind>{'|'.join(BROKEN_CODE)})(?::.*)?$", re.MULTILINE
)


def judged(code: int | None, output: str) -> tuple[tuple[str, ...], str]:
    """Read a run of the suite on a mutation.

    Args:
        code: pytest's exit code; None when it was ended at the deadline.
        output: all that it printed.

    Returns: the tests that failed, and why the mutation counts as not caught, "" when it was.
    """
    failed = [(one["node"].rsplit("::", 1)[1], (one["reason"] or "").strip()) for one in _FAILED.finditer(output)]
    tests = tuple(dict.fromkeys(name for name, _ in failed))
    if code is None:
        return tests, "the suite was not done at the deadline"
    if code == 0:
        return (), "it survives: every test passes"
    if errors := _ERROR.findall(output):
        return tests, f"the suite could not run: {errors[0]}"
    if code != 1 or not tests:
        return tests, f"pytest ended with code {code} and no failed test: {_last_line(output)}"
    if broken := _BROKEN.search(output):
        return tests, f"the mutation is no working code: {broken[0].removeprefix('E').strip()}"
    kinds = [re.split(r"[:\s]", reason, maxsplit=1)[0].rsplit(".", 1)[-1] for _, reason in failed]
    for (name, reason), kind in zip(failed, kinds):
        if kind not in CLAIM_ERRORS:
            return tests, f"{name} failed by no claim of the suite: {reason or 'no reason is given'}"
    return tests, ""


def passes(code: int | None, output: str) -> tuple[bool, str]:
    """Read a run of the suite on the unmutated copy: whether it passes, and why not."""
    if code == 0 and re.search(r"\b[1-9]\d* passed\b", output):
        return True, ""
    tests, why = judged(code, output)
    return False, f"{', '.join(tests)} {why or 'failed'}".strip() if code else f"nothing ran: {_last_line(output)}"


def _last_line(output: str) -> str:
    return next((one for one in reversed(output.splitlines()) if one.strip()), "no output")


# -- results and the page ----------------------------------------------------------------------------------------------


def read_results(path: Path) -> dict[str, Result]:
    """Read the results of an earlier run; none when there is no such file.

    Raises:
        MutationError: it is no file of results.
    """
    if not path.exists():
        return {}
    try:
        table = json.loads(path.read_text())
        results = [Result(**{**one, "by": tuple(one["by"])}) for one in table]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise MutationError(f"--resume {path} holds no results: {error}; delete it or give another file") from error
    return {one.name: one for one in results}


def write_results(path: Path, results: Mapping[str, Result]) -> None:
    """Write results aside, then rename."""
    aside = path.with_name(path.name + ".partial")
    aside.write_text(json.dumps([asdict(one) for one in results.values()], indent=1) + "\n")
    aside.replace(path)


def page(mutations: Sequence[Mutation], results: Mapping[str, Result]) -> str:
    """Render docs/mutations.md."""
    lines = [
        "# What the conformance suite catches",
        "",
        "The FSDP backend broken on purpose, one mistake at a time, in ways that real projects got wrong. For each the",
        "table names a test of the conformance suite that fails, and the layout and case with which it does.",
        "",
        "This page is written by `uv run python scripts/mutate_fsdp.py --write-docs`, which applies each mistake to a",
        f"copy of the packages and runs the suite on it with {' and '.join(RANKS.split(','))} ranks. It needs no GPU.",
        "",
        "| what is broken | where | caught by |",
        "|---|---|---|",
    ]
    for one in mutations:
        caught = ", ".join(f"`{test}`" for test in results[one.name].by)
        lines.append(f"| {one.mistake} (`{one.name}`) | {one.place} | {caught} |")
    return "\n".join(lines) + "\n"


# -- the command -------------------------------------------------------------------------------------------------------


def chosen(names: Sequence[str] | None) -> list[Mutation]:
    """Return the mutations of these names, or all.

    Raises:
        MutationError: there is no such mutation.
    """
    known = {one.name: one for one in MUTATIONS}
    strangers = [one for one in names or () if one not in known]
    if strangers:
        raise MutationError(f"--only {' '.join(strangers)}: no such mutation; --list shows them")
    return [known[one] for one in names] if names else list(MUTATIONS)


def run_all(
    mutations: Sequence[Mutation], results: dict[str, Result], *, jobs: int, deadline: float, keep: Path | None
) -> None:
    """Run what has no valid result yet, the unmutated copy first; results are kept as they come.

    Raises:
        MutationError: the unmutated copy does not pass, so that no failure would mean anything.
    """

    def note(result: Result) -> None:
        results[result.name] = result
        if keep is not None:
            write_results(keep, results)
        said = ", ".join(result.by) if result.caught else f"NOT CAUGHT: {result.why}"
        if result.name == UNMUTATED:
            said = "passes" if result.caught else f"fails: {result.why}"
        print(f"{result.name:<36} {said}  ({result.seconds:.0f} s)", flush=True)

    def is_known(name: str, digest: str) -> bool:
        return name in results and results[name].caught and results[name].digest == digest

    if not is_known(UNMUTATED, digest_of(None)):
        note(run_suite(None, deadline=BASELINE_DEADLINE))
    if not results[UNMUTATED].caught:
        raise MutationError(f"the unmutated copy does not pass: {results[UNMUTATED].why}; mend that first")
    left = [one for one in mutations if not is_known(one.name, digest_of(one))]
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        # inline where one at a time is enough, so that Ctrl-C ends it at once
        run = map if jobs == 1 else pool.map
        for result in run(lambda one: run_suite(one, deadline=deadline), left):
            note(result)


def main(words: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        description="Break the FSDP backend on purpose and see that the conformance suite notices.", allow_abbrev=False
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run these mutations alone")
    parser.add_argument("--list", action="store_true", help="list the mutations and stop")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="mutations at one time (default: 1)")
    parser.add_argument(
        "--deadline", type=float, default=DEADLINE, metavar="S", help=f"seconds a mutation (default: {DEADLINE:.0f})"
    )
    parser.add_argument("--resume", type=Path, metavar="FILE.json", help="keep results there, and go on from them")
    parser.add_argument("--write-docs", action="store_true", help=f"write {DOCS.relative_to(ROOT)} when all are caught")
    arguments = parser.parse_args(words)
    if arguments.list:
        for one in MUTATIONS:
            print(f"{one.name:<36} {one.place:<32} {one.mistake}")
        return 0
    if arguments.jobs < 1:
        raise MutationError(f"--jobs {arguments.jobs}: give 1 or more")
    if arguments.only and arguments.write_docs:
        raise MutationError("--write-docs needs all mutations; leave --only out")
    mutations = chosen(arguments.only)
    for one in mutations:
        mutated_text(one)
    results = read_results(arguments.resume) if arguments.resume else {}
    run_all(mutations, results, jobs=arguments.jobs, deadline=arguments.deadline, keep=arguments.resume)
    uncaught = [one.name for one in mutations if not results[one.name].caught]
    print(f"{len(mutations) - len(uncaught)} of {len(mutations)} mutations are caught", flush=True)
    if uncaught:
        print(f"mutate_fsdp: error: not caught: {', '.join(uncaught)}", file=sys.stderr)
        return 1
    if arguments.write_docs:
        DOCS.write_text(page(mutations, results))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except MutationError as error:
        sys.exit(f"mutate_fsdp: error: {error}")
