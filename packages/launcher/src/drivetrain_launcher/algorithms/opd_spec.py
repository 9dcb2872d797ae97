"""What `opd` says about itself before anything heavy is imported: its options and what they cannot go with."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from drivetrain_backend_api import AlgorithmSpec, option
from drivetrain_launcher.algorithms.grpo_spec import GrpoConfig, reference_findings

if TYPE_CHECKING:
    from drivetrain_launcher.config import DrivetrainConfig


@dataclass(frozen=True, kw_only=True)
class OpdConfig(GrpoConfig):
    """Options of on-policy distillation, with slime's names: those of the policy loss, and what advantages are."""

    opd_kl_coef: float = option(1.0, help="factor of the reverse KL to the teacher, in advantages", above=0)
    opd_reward_coef: float = option(
        0.0, help="factor of GRPO's advantages, added to the teacher's; 0 learns from the teacher alone", minimum=0
    )
    disable_grpo_std_normalization: bool = option(
        False,
        help="do not divide GRPO's advantages by the standard deviation of their group",
        acts_with="opd_reward_coef",
    )


def validate(config: "DrivetrainConfig") -> list[str]:
    """Return what on-policy distillation cannot work with, a sentence each."""
    options = cast(OpdConfig, config.algorithm_options)
    found = []
    if config.train.opd_teacher_load is None:
        found.append("--algorithm opd needs a teacher; give --opd-teacher-load DIR")
    found += reference_findings(config)
    if options.opd_reward_coef and config.rollout.reward == "none":
        found.append(f"--opd-reward-coef {options.opd_reward_coef:g} needs a reward; choose another than --reward none")
    if options.opd_reward_coef and config.rollout.n_samples_per_prompt < 2:
        found.append(
            f"--n-samples-per-prompt {config.rollout.n_samples_per_prompt}: --opd-reward-coef compares the samples of "
            "a prompt with each other; give 2 or more, or leave --opd-reward-coef out"
        )
    if config.train.rollout_temperature == 0 and config.rollout.custom_generate is None:
        found.append(
            "--rollout-temperature 0 samples greedily, and the reverse KL is taken over what the policy samples; give "
            "a temperature above 0"
        )
    return found


SPEC = AlgorithmSpec(
    name="opd",
    api_version=1,
    target="drivetrain_launcher.algorithms.opd:Opd",
    config_class=OpdConfig,
    validate=validate,
)
