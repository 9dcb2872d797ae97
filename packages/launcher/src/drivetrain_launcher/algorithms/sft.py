"""Supervised fine-tuning: maximise the likelihood of given responses. Knows no backend and no engine."""

from collections.abc import Mapping

from torch import Tensor

from drivetrain_backend_api.algorithm import Algorithm, ModelOutput
from drivetrain_backend_api.batch import MicroBatch
from drivetrain_backend_api.parallel import ProcessGroups
from drivetrain_launcher.algorithms.loss_aggregation import token_mean_weights


class Sft(Algorithm):
    """Mean negative log-likelihood over the response tokens of the step."""

    def extract_model_output(self, output: ModelOutput, batch: MicroBatch) -> Mapping[str, Tensor]:
        """Ask for the log-probs of the labels, [T]."""
        return {"log_probs": output.label_log_probs().log_probs}

    def compute_loss(
        self, outputs: Mapping[str, Tensor], batch: MicroBatch, groups: ProcessGroups
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute this micro-batch's part of the cross-entropy, in nats a token."""
        loss = -(outputs["log_probs"] * token_mean_weights(batch)).sum()
        return loss, {"loss": loss.detach()}
