"""Ways to break the FSDP backend, and what of backend-api both share, that real projects got wrong."""

from mutations import API, Mutation

FSDP = "backend-fsdp/src/drivetrain_backend_fsdp"
NUMBERS = "test_training_equals_a_plain_model"


def _fsdp(name: str, mistake: str, module: str, old: str, new: str, *, test: str = NUMBERS) -> Mutation:
    file = f"{FSDP}/{module}.py"
    return Mutation(name=name, backend="fsdp", mistake=mistake, file=file, old=old, new=new, test=test)


def _api(name: str, mistake: str, module: str, old: str, new: str, *, test: str = NUMBERS) -> Mutation:
    file = f"{API}/{module}.py"
    return Mutation(name=name, backend="fsdp", mistake=mistake, file=file, old=old, new=new, test=test)


# -- gradients, norm and step ------------------------------------------------------------------------------------------

STEP = (
    _fsdp(
        "rounded-inputs",
        "old log-probs and advantages are rounded to bf16 on their way into the model, as FSDP does unasked",
        "model",
        "replace(precision, cast_forward_inputs=False)",
        "replace(precision, cast_forward_inputs=True)",
        test="test_the_first_step_is_on_policy",
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
        test="test_low_precision_follows_fp32",
    ),
    _fsdp(
        "gradients-not-unscaled",
        "fp16 gradients are clipped and applied without taking the loss scale out",
        "backend",
        "factor = 1.0 / self._scaler.scale",
        "factor = 1.0",
        test="test_low_precision_follows_fp32",
    ),
    _fsdp(
        "clipped-before-unscaling",
        "the norm that clips is that of the scaled fp16 gradients",
        "backend",
        "device=self.device) / self._scaler.scale",
        "device=self.device)",
        test="test_low_precision_follows_fp32",
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
        test="test_a_step_that_is_not_finite_changes_nothing",
    ),
    _fsdp(
        "skipped-step-advances-the-schedule",
        "a step that was skipped counts for schedule and bias correction",
        "backend",
        "        self._scaler.update(overflow=not finite)",
        "        self.optimizer.steps += int(not finite)\n        self._scaler.update(overflow=not finite)",
        test="test_a_step_that_is_not_finite_changes_nothing",
    ),
    _fsdp(
        "skipped-step-keeps-its-gradients",
        "gradients of a skipped step stay and spoil the next one",
        "backend",
        "            weight.grad = None",
        "            if bool(torch.isfinite(gradients[name]).all()):\n                weight.grad = None",
        test="test_a_step_that_is_not_finite_changes_nothing",
    ),
    _fsdp(
        "skipped-step-not-reported",
        "a step is skipped in silence",
        "backend",
        "skipped=not finite,",
        "skipped=False,",
        test="test_a_step_that_is_not_finite_changes_nothing",
    ),
    _fsdp(
        "masters-in-low-precision",
        "the master weights are kept in bf16, where small updates are lost",
        "backend",
        "master_dtype=torch.float32 if trainable else dtype",
        "master_dtype=dtype",
        test="test_low_precision_follows_fp32",
    ),
    _fsdp(
        "offloaded-step-stays-on-the-host",
        "the step of an offloaded optimizer never reaches the model",
        "optimizer",
        "self._shards[name].copy_(one)",
        "one.clone()",
        test="test_options_keep_the_numbers",
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

# -- forward -----------------------------------------------------------------------------------------------------------

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
        test="test_forward_only_leaves_no_trace",
    ),
    _fsdp(
        "forward-only-draws",
        "a pass without gradients advances the random state",
        "forward",
        "        with torch.no_grad():\n            results",
        "        torch.rand(())\n        with torch.no_grad():\n            results",
        test="test_forward_only_leaves_no_trace",
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
        test="test_forward_only_leaves_no_trace",
    ),
    _fsdp(
        "gathered-weights-kept",
        "after a pass without gradients the root computes with the weights that were gathered then",
        "forward",
        "        self.model.reshard()\n",
        "",
        test="test_forward_only_leaves_no_trace",
    ),
    _fsdp(
        "policy-for-the-reference",
        "reference log-probs are computed by the policy",
        "backend",
        "training.forward_log_probs(self._frozen[tag], shard)",
        "training.forward_log_probs(self._policy, shard)",
        test="test_reference_and_teacher_are_their_own_models",
    ),
    _fsdp(
        "reference-for-the-teacher",
        "the teacher is loaded from where the reference is",
        "backend",
        '"--opd-teacher-load", self.config.opd_teacher_load)',
        '"--opd-teacher-load", self.config.ref_load or self.config.hf_checkpoint)',
        test="test_reference_and_teacher_are_their_own_models",
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
        test="test_reference_and_teacher_are_their_own_models",
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

# -- checkpoints -------------------------------------------------------------------------------------------------------

CHECKPOINTS = (
    _fsdp(
        "moments-not-loaded",
        "a resume loads the weights and begins with empty moments",
        "checkpoint",
        "    read_pieces(folder, [one for one in pieces if one.tensor.numel()], control",
        "    weights = [one for one in pieces if one.key.startswith(_MODEL_PREFIX)]\n"
        "    read_pieces(folder, [one for one in weights if one.tensor.numel()], control",
        test="test_a_resumed_run_is_the_same_run",
    ),
    _fsdp(
        "second-moment-not-saved",
        "one of Adam's two moments is not in the checkpoint",
        "optimizer",
        'for kind in ("exp_avg", "exp_avg_sq")\n',
        'for kind in ("exp_avg",)\n',
        test="test_a_resumed_run_is_the_same_run",
    ),
    _fsdp(
        "schedule-dropped",
        "the scheduler's state is not restored, and the schedule begins anew",
        "optimizer",
        "        self._steps = value",
        "        self._steps = 0",
        test="test_a_resumed_run_is_the_same_run",
    ),
    _fsdp(
        "bias-correction-begins-anew",
        "moments come back, the step count that corrects their bias does not",
        "optimizer",
        'state["step"].fill_(value)',
        'state["step"].fill_(0)',
        test="test_a_resumed_run_is_the_same_run",
    ),
    _fsdp(
        "loss-scale-not-restored",
        "a resume begins with the initial loss scale",
        "checkpoint",
        "        scaler.scale, scaler.good_steps = state.loss_scale, state.loss_scale_good_steps",
        "        scaler.good_steps = state.loss_scale_good_steps",
        test="test_a_resumed_run_is_the_same_run",
    ),
    _api(
        "random-state-not-restored",
        "the random state is saved and never read",
        "checkpoint_files",
        '    torch.set_rng_state(states["cpu"])\n',
        "",
        test="test_a_resumed_run_is_the_same_run",
    ),
    _fsdp(
        "random-state-of-rank-0",
        "every rank restores the random state of rank 0",
        "checkpoint",
        "restore_random_state(rng_file(folder, rank), device)",
        "restore_random_state(rng_file(folder, 0), device)",
        test="test_a_resumed_run_is_the_same_run",
    ),
    _fsdp(
        "rollout-id-not-saved",
        "a resume begins at rollout 0",
        "checkpoint",
        "next_rollout_id=next_rollout_id,",
        "next_rollout_id=0,",
        test="test_a_resumed_run_is_the_same_run",
    ),
    _fsdp(
        "another-model-accepted",
        "a checkpoint of another model is loaded as far as its tensors fit",
        "checkpoint",
        """\
        _check_fit(folder, metadata, {one.key: one.shape for one in pieces}, weights_only=weights_only)
        return state, metadata

    state, metadata = together(look, control)
""",
        """\
        return state, metadata

    state, metadata = together(look, control)
    stored = {name: tuple(one.size) for name, one in stored_tensors(metadata).items()}
    pieces = [one for one in pieces if stored.get(one.key) == one.shape]
""",
        test="test_a_checkpoint_of_another_model_is_refused",
    ),
    _api(
        "checksums-not-compared",
        "a file of a checkpoint that was damaged on disk is read as it is",
        "manifest",
        "if (full or size <= SMALL_BYTES) and record_of(path) != record:",
        "if (full or size <= SMALL_BYTES) and not size and record_of(path) != record:",
        test="test_a_damaged_checkpoint_is_refused",
    ),
    _api(
        "checksums-of-rank-0-only",
        "all ranks verify rank 0's share of the files, and nobody the others",
        "manifest",
        "names = [name for name in sorted(records) if not skip(name)][rank::ranks]",
        "names = [name for name in sorted(records) if not skip(name)][0::ranks]",
        test="test_a_damaged_checkpoint_is_refused",
    ),
    _fsdp(
        "saved-under-another-tag",
        "a save while the reference's weights are live writes those",
        "backend",
        '        self.weights.require_policy("save_checkpoint")\n',
        "",
        test="test_tags_switch_bit_for_bit",
    ),
)

# -- sleep, tags, weights on their way out -----------------------------------------------------------------------------

SLEEP_AND_EXPORT = (
    _fsdp(
        "woken-without-masters",
        "after a wake-up the master weights are those that the engines hold, in bf16, and are saved so",
        "sleep",
        "            self._weight_copies.bring_back()\n",
        "            self._weight_copies.bring_back()\n"
        "            for one in self._weights().values():\n"
        "                one.copy_(one.bfloat16())\n",
        test="test_sleep_keeps_every_bit",
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
        test="test_sleep_keeps_every_bit",
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
        test="test_sleep_keeps_every_bit",
    ),
    _fsdp(
        "asleep-with-gradients",
        "a sleep between backward pass and step is not refused",
        "backend",
        "if self.lifecycle.has_gradients:",
        'if self.lifecycle.has_gradients and self.device.type == "cuda":',
        test="test_illegal_calls_name_both_states",
    ),
    _api(
        "host-buffers-leak",
        "each sleep takes new host buffers and keeps the old ones",
        "offload",
        "            buffer = self._buffers.get(name)\n",
        "            buffer = self._buffers.pop(name, None)\n"
        "            if buffer is not None:\n"
        '                self._buffers[f"{name} {len(self._buffers)}"], buffer = buffer, None\n',
        test="test_sleep_does_not_grow",
    ),
    _api(
        "saved-while-half-awake",
        "a save is legal while the optimizer is on the host",
        "lifecycle",
        '"save_checkpoint": (State.AWAKE,),',
        '"save_checkpoint": (State.AWAKE, State.WEIGHTS_ONLY),',
        test="test_illegal_calls_name_both_states",
    ),
    _api(
        "wrong-tag-restored",
        "whatever tag is asked for, the one kept first is restored",
        "weights",
        "bring(self._kept[tag], live)",
        "bring(next(iter(self._kept.values())), live)",
        test="test_tags_switch_bit_for_bit",
    ),
    _fsdp(
        "tied-weight-lost",
        "both names of a tied weight are left out of the export",
        "export",
        "            for name, weight in model.weights.items()\n",
        "            for name, weight in model.weights.items()\n"
        "            if name not in model.module.all_tied_weights_keys.values()\n",
        test="test_an_export_is_what_save_pretrained_writes",
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
        test="test_an_export_is_what_save_pretrained_writes",
    ),
    _fsdp(
        "padded-rows-exported",
        "the rows that even the shards out reach the engines",
        "export",
        "                weight.shape,\n",
        "                (-(-weight.shape[0] // model.mesh.size()) * model.mesh.size(), *weight.shape[1:]),\n",
        test="test_an_export_is_what_save_pretrained_writes",
    ),
    _fsdp(
        "masters-exported",
        "weights go out in the masters' fp32 instead of the checkpoint's dtype",
        "export",
        "(dtype or model.stored_dtypes[name])",
        "(dtype or weight.dtype)",
        test="test_an_export_is_what_save_pretrained_writes",
    ),
    _fsdp(
        "export-dtype-ignored",
        "the dtype that was asked for is ignored",
        "export",
        "(dtype or model.stored_dtypes[name])",
        "model.stored_dtypes[name]",
        test="test_an_export_is_what_save_pretrained_writes",
    ),
    _fsdp(
        "holders-ignored",
        "every rank gets the whole weights, whoever asked for them",
        "export",
        "to_all = holders is Holders.ALL",
        "to_all = True",
        test="test_each_kind_of_holders_gets_the_data",
    ),
    _fsdp(
        "abandoned-export-not-told",
        "a rank that leaves an export leaves the others waiting",
        "export",
        "lambda mine: all_agree(mine, control)",
        "lambda mine: mine",
        test="test_an_export_that_one_rank_leaves_ends_on_all",
    ),
    _api(
        "buckets-backwards",
        "buckets come in another order than the plan's",
        "weights",
        "for index in range(self.plan.num_buckets):",
        "for index in reversed(range(self.plan.num_buckets)):",
        test="test_an_export_is_what_save_pretrained_writes",
    ),
    _api(
        "buckets-too-large",
        "a bucket is closed only after it has grown too large",
        "weights",
        "start + size > bucket_bytes:",
        "start > bucket_bytes:",
        test="test_an_export_is_what_save_pretrained_writes",
    ),
)

MUTATIONS = (*STEP, *FORWARD, *CHECKPOINTS, *SLEEP_AND_EXPORT)
