"""Options of this backend, beside those that every train backend reads. Never imports torch."""

from dataclasses import dataclass

from drivetrain_backend_api import TrainConfig


@dataclass(frozen=True, kw_only=True)
class PlainTorchConfig(TrainConfig):
    """Settings of a model in one process; it adds none of its own, and refuses those it cannot honour."""

    def findings(self) -> list[str]:
        """Return what cannot work together, or not here."""
        found = super().findings()
        for flag, given in (("--bf16", self.bf16), ("--fp16", self.fp16)):
            if given:
                found.append(f"{flag}: the plain-torch backend computes in fp32 only; give --fp32")
        if self.optimizer_cpu_offload:
            found.append("--optimizer-cpu-offload: the plain-torch backend has no offload; leave it out")
        if self.async_save:
            found.append("--async-save: the plain-torch backend writes while training waits; leave it out")
        if self.attention_backend != "auto":
            found.append(
                f"--attention-backend {self.attention_backend}: the plain-torch backend attends to one sequence at a "
                "time; give auto"
            )
        return found
