"""Options of this backend, beside those that every train backend reads. Never imports torch."""

from dataclasses import dataclass

from drivetrain_backend_api import TrainConfig, option


@dataclass(frozen=True, kw_only=True)
class FsdpConfig(TrainConfig):
    """Settings of a model sharded over a one-dimensional data-parallel mesh."""

    gradient_checkpointing: bool = option(False, help="recompute each block's activations in the backward pass")
    fsdp_cpu_offload: bool = option(False, help="keep parameter shards, gradients and optimizer on the host")
    fsdp_reshard_after_forward: str = option(
        "always",
        help="free each block's gathered parameters after its forward, or keep them until its backward",
        choices=("always", "never"),
    )

    def findings(self) -> list[str]:
        """Return what cannot work together."""
        found = super().findings()
        if self.fsdp_cpu_offload and self.optimizer_cpu_offload:
            found.append(
                "--fsdp-cpu-offload already keeps the optimizer on the host; give it or --optimizer-cpu-offload"
            )
        if self.attention_backend == "varlen" and self.fp32:
            found.append("--attention-backend varlen has no kernel for --fp32; give --bf16 or --fp16, or auto")
        return found
