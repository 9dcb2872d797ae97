"""Ways to break the Megatron backend that real projects got wrong."""

from mutations import Mutation

MEGATRON = "backend-megatron/src/drivetrain_backend_megatron"
NUMBERS = "test_training_equals_a_plain_model"
OPTIONS = "test_options_keep_the_numbers"
EXPERTS = "test_experts_train_as_a_plain_model"


def _break(
    name: str, mistake: str, module: str, old: str, new: str, *, test: str = NUMBERS, where: str = ""
) -> Mutation:
    file = f"{MEGATRON}/{module}.py"
    return Mutation(name=name, backend="megatron", mistake=mistake, file=file, old=old, new=new, test=test, where=where)


# -- gradients, norm and step ------------------------------------------------------------------------------------------

STEP = (
    _break(
        "copies-counted",
        "what every tensor-parallel rank holds whole counts once a rank in the gradient norm",
        "model",
        "return rule.split_dim is not None or rule.expert or self.layout.tp_rank == 0",
        "return True",
        where="tp2",
    ),
    _break(
        "shards-counted-on-one-rank",
        "weights lose the mark that they are cut, and the norm counts the first tensor-parallel rank's alone",
        "model",
        "return rule.split_dim is not None or rule.expert or self.layout.tp_rank == 0",
        "return rule.expert or self.layout.tp_rank == 0",
        where="tp2",
    ),
    _break(
        "tied-head-counted-twice",
        "the last stage's copy of a tied embedding counts in the gradient norm too",
        "model",
        "if name == OUTPUT_LAYER and self.shape.tied:",
        "if name == OUTPUT_LAYER and self.shape.tied and self.layout.pp_size == 1:",
        where="pp2 and one-by-one",
    ),
    _break(
        "norm-of-one-rank",
        "each rank clips by the norm of its own slices",
        "backend",
        "        if self.groups.world is not None:\n            dist.all_reduce(total",
        "        if self.groups.world is None:\n            dist.all_reduce(total",
        where="dp2",
    ),
    _break(
        "decay-on-norms",
        "weight decay acts on norms and biases too",
        "model",
        "decays=one.ndim >= 2",
        "decays=True",
        where="single",
    ),
    _break(
        "loss-divided-by-micro-batches",
        "Megatron divides the loss by the number of micro-batches",
        "core/model",
        "calculate_per_token_loss=True",
        "calculate_per_token_loss=False",
        where="single",
    ),
    _break(
        "gradients-kept",
        "gradient buffers are not zeroed, so that a step begins with the gradients of the one before",
        "core/schedule",
        "        for one in chunks:\n            one.zero_grad_buffer()",
        "        for one in chunks[:0]:\n            one.zero_grad_buffer()",
        where="single",
    ),
    _break(
        "weights-not-gathered",
        "after a step each data-parallel rank has its own slices of the weights alone",
        "core/buffers",
        "        if not chunk.ddp_config.overlap_param_gather:\n",
        "        if chunk.ddp_config.overlap_param_gather:\n",
        where="dp2",
    ),
    _break(
        "masters-not-copied-back",
        "the step changes masters on the host, and the live weights stay as they were",
        "optimizer",
        "                    self._update_in_pieces(name, lr, decay)\n        self.give_weights()",
        "                    self._update_in_pieces(name, lr, decay)",
        test=OPTIONS,
        where="single and optimizer_cpu_offload",
    ),
    _break(
        "masters-of-rounded-weights",
        "master weights begin as the rounded live weights, not as the stored ones",
        "optimizer",
        'self._state[name]["main"].copy_(values.view(-1)[one.start : one.start + len(one.weight)])',
        'self._state[name]["main"].copy_(one.weight)',
        test="test_low_precision_follows_fp32",
        where="single",
    ),
)

# -- tensor, sequence and context parallelism --------------------------------------------------------------------------

CUTS = (
    _break(
        "padded-vocabulary-not-masked",
        "the rows that pad the vocabulary take part in the softmax",
        "model",
        "vocab_size=self.shape.vocab_size,\n        )",
        "vocab_size=self.padded_vocab,\n        )",
        where="tp2",
    ),
    _break(
        "hidden-gradient-not-summed",
        "the head's gradient of the hidden states is that of this rank's part of the vocabulary",
        "core/model",
        "whole = copy_to_tensor_model_parallel_region(hidden)",
        "whole = hidden",
        where="tp2 and not sp",
    ),
    _break(
        "sequence-parallel-head-gradient-not-summed",
        "under sequence parallelism the hidden states' gradient is split over the ranks without being summed",
        "core/model",
        "tensor_parallel_output_grad=True",
        "tensor_parallel_output_grad=False",
        where="tp2 and sp",
    ),
    _break(
        "norm-gradient-not-summed",
        "norms lose their mark, and each sequence-parallel rank keeps the gradient of its own tokens",
        "core/layers",
        'setattr(self.weight, "sequence_parallel", config.sequence_parallel)',
        'setattr(self.weight, "sequence_parallel", False)',
        where="tp2 and sp",
    ),
    _break(
        "positions-of-the-first-rank",
        "every context-parallel rank rotates by the positions of the first one's tokens",
        "forward",
        "positions=positions[first : first + part]",
        "positions=positions[:part]",
        where="cp2",
    ),
    _break(
        "tokens-cut-backwards",
        "context-parallel ranks take their runs of tokens in the opposite order",
        "forward",
        "first = layout.cp_rank * part",
        "first = (layout.cp_size - 1 - layout.cp_rank) * part",
        where="cp2",
    ),
    _break(
        "heads-not-traded-back",
        "the backward pass of context parallelism leaves each gradient where it is",
        "attention",
        "return _all_to_all(gradient, ctx.group), None",
        "return gradient, None",
        where="cp2",
    ),
)

# -- pipelines ---------------------------------------------------------------------------------------------------------

PIPELINES = (
    _break(
        "layers-numbered-by-stage",
        "every pipeline stage numbers its layers from 0 and loads the weights of the first ones",
        "core/model",
        "first_layer = chunk.decoder.layers[0].layer_number - 1 if len(chunk.decoder.layers) else 0",
        "first_layer = 0",
        where="pp2",
    ),
    _break(
        "chunks-in-stage-order",
        "an export of an interleaved pipeline looks for layers where a plain one has them",
        "name_map",
        "return place.layer // (shape.num_layers // (pp_size * chunks)) % pp_size",
        "return place.layer // (shape.num_layers // pp_size)",
        test=OPTIONS,
        where="pp2 and num_layers_per_virtual",
    ),
    _break(
        "export-from-the-first-stage",
        "every bucket of an export is sent by the first pipeline stage",
        "export",
        "dist.broadcast(data, group=groups.pp, group_src=stage)",
        "dist.broadcast(data, group=groups.pp, group_src=0)",
        test="test_an_export_is_what_save_pretrained_writes",
        where="pp2",
    ),
)

# -- experts -----------------------------------------------------------------------------------------------------------

MIXTURES = (
    _break(
        "experts-counted-on-one-rank",
        "the gradient norm counts experts as if all tensor-parallel ranks had the same",
        "model",
        "return rule.split_dim is not None or rule.expert or self.layout.tp_rank == 0",
        "return rule.split_dim is not None or self.layout.tp_rank == 0",
        test=EXPERTS,
        where="ep2 and tp2",
    ),
    _break(
        "experts-numbered-by-rank",
        "every expert-parallel rank numbers its experts from 0 and loads the weights of the first ones",
        "core/model",
        "first_expert = rank * ((chunk.config.num_moe_experts or 0) // ranks)",
        "first_expert = 0",
        test=EXPERTS,
        where="dp2-ep2",
    ),
    _break(
        "expert-weights-not-normalised",
        "the weights of a token's experts are scaled to a sum of 1 where the model does not",
        "core/model",
        '"moe_router_pre_softmax": not shape.experts.norm_topk_prob',
        '"moe_router_pre_softmax": False',
        test=EXPERTS,
        where="single",
    ),
    _break(
        "experts-from-the-first-rank",
        "an export takes every expert from the first expert-parallel rank",
        "export",
        "dist.broadcast(flat, group=group, group_src=owner)",
        "dist.broadcast(flat, group=group, group_src=0)",
        test="test_experts_are_exported_as_save_pretrained_writes",
        where="dp2-ep2",
    ),
)

# -- checkpoints -------------------------------------------------------------------------------------------------------

CHECKPOINTS = (
    _break(
        "step-not-loaded",
        "a resumed optimizer counts its steps from 0",
        "checkpoint",
        "    optimizer.steps = state.optimizer_steps\n",
        "    optimizer.steps = 0\n",
        test="test_a_resumed_run_is_the_same_run",
        where="single and fp32",
    ),
)

MUTATIONS = (*STEP, *CUTS, *PIPELINES, *MIXTURES, *CHECKPOINTS)
