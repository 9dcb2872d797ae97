"""Options of this backend, beside those that every train backend reads. Never imports torch or Megatron."""

from dataclasses import dataclass

from drivetrain_backend_api import TrainConfig, option

OPTIMIZER_DTYPES = ("fp32", "bf16")
"""What the optimizer's moments can be kept in; in fp16 squares of small gradients would underflow to zero."""


@dataclass(frozen=True, kw_only=True)
class MegatronConfig(TrainConfig):
    """Settings of a model cut by tensor, pipeline, context and expert parallelism; the rest of the ranks is data."""

    # parallelism
    tensor_model_parallel_size: int = option(1, help="ranks that share each weight matrix", minimum=1)
    sequence_parallel: bool = option(
        False, help="cut the tokens between matrices over the tensor-parallel ranks, for less activation memory"
    )
    pipeline_model_parallel_size: int = option(1, help="pipeline stages", minimum=1)
    num_layers_per_virtual_pipeline_stage: int | None = option(
        None, help="layers a model chunk, for an interleaved pipeline (default: one chunk a stage)", minimum=1
    )
    context_parallel_size: int = option(1, help="ranks that share the tokens of each sequence", minimum=1)
    expert_model_parallel_size: int = option(
        1, help="ranks that share the experts of each mixture-of-experts layer", minimum=1
    )

    # model
    make_vocab_size_divisible_by: int = option(
        1, help="pad the vocabulary to a multiple of this times the tensor-parallel size", minimum=1
    )
    transformer_impl: str = option(
        "auto",
        help="linear layers of Megatron's own (local, and what auto takes) or of TransformerEngine (never run so far)",
        choices=("auto", "local", "transformer_engine"),
    )
    experimental_diffusion: bool = option(False, help="train a diffusion model (experimental, not built)")

    # recompute
    recompute_granularity: str = option(
        "none",
        help="activations to compute again in the backward pass: of attention's core (selective) or of whole layers",
        choices=("none", "selective", "full"),
    )
    recompute_method: str | None = option(
        None,
        help="under full: layers in groups of equal size, or the first layers of each stage (default: uniform)",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int | None = option(
        None, help="under full: layers a group (uniform) or a stage (block) (default: 1)", minimum=1
    )

    # optimizer
    optimizer: str = option("adam", help="optimizer; adam decouples the weight decay", choices=("adam",))
    use_precision_aware_optimizer: bool = option(
        False, help="keep optimizer state in the dtypes of --exp-avg-dtype, --exp-avg-sq-dtype, --main-params-dtype"
    )
    exp_avg_dtype: str = option(
        "fp32",
        help="dtype of Adam's first moment",
        choices=OPTIMIZER_DTYPES,
        acts_with="use_precision_aware_optimizer",
    )
    exp_avg_sq_dtype: str = option(
        "fp32",
        help="dtype of Adam's second moment",
        choices=OPTIMIZER_DTYPES,
        acts_with="use_precision_aware_optimizer",
    )
    main_params_dtype: str = option(
        "fp32",
        help="dtype of the master weights",
        choices=("fp32", "fp16"),
        acts_with="use_precision_aware_optimizer",
    )
    overlap_grad_reduce: bool = option(False, help="reduce gradients while the backward pass goes on")
    overlap_param_gather: bool = option(
        False, help="gather updated weights while the next forward pass goes on, with --overlap-grad-reduce"
    )

    # memory
    sleep_tier: str = option(
        "auto",
        help="how sleep() gives the accelerator's memory back; auto takes memory_saver where its library "
        "was preloaded, else offload",
        choices=("auto", "memory_saver", "offload", "process_groups"),
    )

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one replica of the model: tensor x pipeline x context parallel."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def micro_batch_tokens(self) -> int | None:
        """See `TrainConfig.micro_batch_tokens`: context-parallel ranks share the tokens of a micro-batch."""
        tokens = super().micro_batch_tokens
        return None if tokens is None else tokens * self.context_parallel_size

    def model_chunks(self, num_layers: int) -> int:
        """Return the model chunks a pipeline stage; 1 is a plain pipeline, more an interleaved one.

        Args:
            num_layers: transformer layers of the model, a multiple of what the stages and chunks ask for.
        """
        if self.num_layers_per_virtual_pipeline_stage is None:
            return 1
        return num_layers // self.pipeline_model_parallel_size // self.num_layers_per_virtual_pipeline_stage

    def findings(self) -> list[str]:
        """Return what cannot work together."""
        found = super().findings()
        if self.experimental_diffusion:
            found.append("--experimental-diffusion: experimental, not built; drop it")
        if self.attention_backend == "varlen" and self.fp32:
            found.append("--attention-backend varlen has no kernel for --fp32; give --bf16 or --fp16, or auto")
        return found + self._parallel_findings() + self._recompute_findings()

    def _parallel_findings(self) -> list[str]:
        found = []
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            found.append("--sequence-parallel needs --tensor-model-parallel-size of 2 or more; give both or neither")
        if self.num_layers_per_virtual_pipeline_stage is not None and self.pipeline_model_parallel_size == 1:
            found.append(
                "--num-layers-per-virtual-pipeline-stage needs --pipeline-model-parallel-size of 2 or more; "
                "give it or drop the flag"
            )
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            found.append("--overlap-param-gather needs --overlap-grad-reduce; give both")
        return found

    def _recompute_findings(self) -> list[str]:
        if self.recompute_granularity == "full":
            return []
        given = {
            "--recompute-method": self.recompute_method,
            "--recompute-num-layers": self.recompute_num_layers,
        }
        return [
            f"{flag} acts only with --recompute-granularity full; give both or neither"
            for flag, value in given.items()
            if value is not None
        ]
