"""What `sft` says about itself before anything heavy is imported: its options and what they cannot go with."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from drivetrain_backend_api import AlgorithmSpec, OptionGroup

if TYPE_CHECKING:
    from drivetrain_launcher.config import DrivetrainConfig


@dataclass(frozen=True, kw_only=True)
class SftConfig(OptionGroup):
    """Supervised fine-tuning has no options of its own."""


def validate(config: "DrivetrainConfig") -> list[str]:
    """Return what supervised fine-tuning cannot work with, a sentence each."""
    found = []
    if config.data.label_key is None:
        found.append("--algorithm sft learns the labels; give --label-key KEY")
    if config.rollout.n_samples_per_prompt != 1:
        found.append(
            f"--n-samples-per-prompt {config.rollout.n_samples_per_prompt}: under --algorithm sft a prompt has one "
            "sample, its label; leave it at 1"
        )
    if config.rollout.custom_generate is not None:
        found.append("--custom-generate: --algorithm sft generates nothing; leave it out")
    if config.train.ref_load is not None:
        found.append("--ref-load: --algorithm sft uses no reference; leave it out")
    if config.train.opd_teacher_load is not None:
        found.append("--opd-teacher-load: --algorithm sft uses no teacher; leave it out")
    if config.train.log_probs_temperature != 1.0:
        found.append(
            f"--rollout-temperature {config.train.rollout_temperature:g} would also scale the logits that "
            "--algorithm sft learns from; leave it at 1 (evaluations have --eval-temperature)"
        )
    return found


SPEC = AlgorithmSpec(
    name="sft",
    api_version=1,
    target="drivetrain_launcher.algorithms.sft:Sft",
    config_class=SftConfig,
    validate=validate,
    generates=False,
)
