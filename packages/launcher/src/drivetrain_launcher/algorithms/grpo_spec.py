"""What `grpo` says about itself before anything heavy is imported: its options and what they cannot go with."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from drivetrain_backend_api import AlgorithmSpec, OptionGroup, option

if TYPE_CHECKING:
    from drivetrain_launcher.config import DrivetrainConfig


@dataclass(frozen=True, kw_only=True)
class GrpoConfig(OptionGroup):
    """Options of GRPO, with slime's names."""

    eps_clip: float = option(0.2, help="the policy ratio is clipped below 1 - this", above=0, maximum=1)
    eps_clip_high: float | None = option(
        None, help="the policy ratio is clipped above 1 + this (default: --eps-clip)", above=0
    )
    use_kl_loss: bool = option(False, help="add the KL divergence from the reference of --ref-load to the loss")
    kl_loss_coef: float = option(
        0.001, help="factor of the KL loss, with --use-kl-loss", minimum=0, acts_with="use_kl_loss"
    )
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = option(
        "low_var_kl", help="estimator of the KL loss; low_var_kl is k3 bounded at 10 a token", acts_with="use_kl_loss"
    )
    entropy_coef: float = option(0.0, help="factor of the entropy bonus", minimum=0)
    calculate_per_token_loss: bool = option(
        False, help="average the loss over all tokens of a step (default: over each sequence, then over sequences)"
    )
    disable_grpo_std_normalization: bool = option(
        False, help="do not divide advantages by the standard deviation of their group"
    )
    use_tis: bool = option(
        False, help="correct for the mismatch of engine and trainer by truncated importance sampling"
    )
    tis_clip: float = option(2.0, help="largest importance weight, with --use-tis", above=0, acts_with="use_tis")
    tis_clip_low: float = option(0.0, help="smallest importance weight, with --use-tis", minimum=0, acts_with="use_tis")

    def findings(self) -> list[str]:
        """Return what cannot work together."""
        if self.tis_clip_low > self.tis_clip:
            return [f"--tis-clip-low {self.tis_clip_low:g} is above --tis-clip {self.tis_clip:g}"]
        return []


def validate(config: "DrivetrainConfig") -> list[str]:
    """Return what GRPO cannot work with, a sentence each."""
    found = reference_findings(config)
    if config.rollout.reward == "none":
        found.append("--reward none: --algorithm grpo learns from rewards alone; choose another")
    if config.train.opd_teacher_load is not None:
        found.append("--opd-teacher-load: --algorithm grpo uses no teacher; leave it out")
    if config.rollout.n_samples_per_prompt < 2:
        found.append(
            f"--n-samples-per-prompt {config.rollout.n_samples_per_prompt}: grpo compares the samples of a prompt with "
            "each other, and one alone always has advantage 0; give 2 or more"
        )
    if config.train.rollout_temperature == 0 and config.rollout.custom_generate is None:
        found.append(
            "--rollout-temperature 0 makes all samples of a prompt equal, so that every advantage is 0; "
            "give a temperature above 0"
        )
    return found


def reference_findings(config: "DrivetrainConfig") -> list[str]:
    """Return what is wrong with the reference of the KL loss."""
    with_kl_loss = cast(GrpoConfig, config.algorithm_options).use_kl_loss
    if with_kl_loss and config.train.ref_load is None:
        return ["--use-kl-loss needs a reference; give --ref-load DIR"]
    if config.train.ref_load is not None and not with_kl_loss:
        return ["--ref-load acts only with --use-kl-loss; give both or neither"]
    return []


SPEC = AlgorithmSpec(
    name="grpo",
    api_version=1,
    target="drivetrain_launcher.algorithms.grpo:Grpo",
    config_class=GrpoConfig,
    validate=validate,
)
