"""Options of the loop: prompt data, rollout, evaluation, length of the run; and the whole resolved configuration."""

from collections.abc import Mapping
from dataclasses import dataclass

from drivetrain_backend_api import AlgorithmSpec, BackendSpec, OptionGroup, TrainConfig, option
from drivetrain_infra.config import PlacementConfig, RunFolderConfig, SurvivalConfig, TrackingConfig, WeightSyncConfig
from drivetrain_infra.engines.base import EngineSpec


@dataclass(frozen=True, kw_only=True)
class DataConfig(OptionGroup):
    """Prompts: where they are and how a row becomes token ids."""

    prompt_data: str = option(help="training prompts, .jsonl or .parquet", metavar="FILE", free=True)
    input_key: str = option("input", help="key of the prompt: text, or a list of chat messages")
    label_key: str | None = option(None, help="key of the label that rewards compare with, or of the answer to learn")
    metadata_key: str | None = option(None, help="key of a table handed to the reward function")
    apply_chat_template: bool = option(False, help="wrap each prompt with the tokenizer's chat template")
    system_prompt: str | None = option(None, help="system message before each prompt, with --apply-chat-template")
    rollout_shuffle: bool = option(False, help="shuffle the prompts anew in each epoch, from --seed")
    rollout_max_prompt_len: int | None = option(
        None, help="longest prompt in tokens; longer ones are left out and counted (default: no limit)", minimum=1
    )


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(OptionGroup):
    """Generation and reward."""

    rollout_batch_size: int = option(8, help="prompts a rollout", minimum=1)
    n_samples_per_prompt: int = option(1, help="samples a prompt: one group", minimum=1)
    rollout_max_response_len: int = option(128, help="most tokens a response", minimum=1)
    rollout_top_p: float = option(1.0, help="nucleus sampling; 1 is off", above=0, maximum=1)
    rollout_top_k: int = option(0, help="sample among the k most likely tokens; 0 is off", minimum=0)
    rollout_stop: tuple[str, ...] = option((), help="strings that end a response")
    rollout_stop_token_ids: tuple[int, ...] = option((), help="token ids that end a response, beside the model's own")
    reward: str = option("math", help="math, exact, none (0 for all), or module:function", runs_code=True)
    reward_key: str | None = option(None, help="key of the reward where the function returns a table of numbers")
    custom_generate: str | None = option(
        None, help="module:function that makes the response of each sample", runs_code=True
    )
    rollout_timeout: float = option(
        1800.0, help="deadline of one rollout, rewards included, in seconds", above=0, maximum=1e7, free=True
    )
    save_debug_rollout_data: str | None = option(
        None, help="folder for a second copy of each rollout that is made, as rollout_N.pt", metavar="DIR", free=True
    )
    load_debug_rollout_data: str | None = option(
        None,
        help="folder of rollout_N.pt files to train on instead of generating, as a run's rollout_ckpts",
        metavar="DIR",
    )
    debug_train_only: bool = option(
        False,
        help="start no rollout engines, and train on --load-debug-rollout-data",
        acts_with="load_debug_rollout_data",
    )
    debug_rollout_only: bool = option(
        False, help="start no train workers: make and save rollouts with the weights of --hf-checkpoint"
    )

    def findings(self) -> list[str]:
        """Return what cannot work together."""
        found = []
        if self.debug_rollout_only and self.load_debug_rollout_data is not None:
            found.append("--debug-rollout-only makes rollouts and --load-debug-rollout-data reads them; give one")
        if self.load_debug_rollout_data is not None and self.load_debug_rollout_data == self.save_debug_rollout_data:
            found.append("--save-debug-rollout-data and --load-debug-rollout-data name one folder; give two")
        return found


@dataclass(frozen=True, kw_only=True)
class EvalConfig(OptionGroup):
    """Evaluation on held-out prompts."""

    eval_interval: int | None = option(None, help="rollouts between evaluations", minimum=1, free=True)
    eval_prompt_data: str | None = option(None, help="held-out prompts, .jsonl or .parquet", metavar="FILE", free=True)
    n_samples_per_eval_prompt: int = option(
        1, help="samples an evaluation prompt", minimum=1, acts_with="eval_prompt_data"
    )
    eval_max_response_len: int | None = option(
        None, help="most tokens a response (default: as in rollouts)", minimum=1, acts_with="eval_prompt_data"
    )
    eval_temperature: float = option(
        0.0, help="sampling temperature of evaluations; 0 is greedy", minimum=0, acts_with="eval_prompt_data"
    )
    skip_eval_before_train: bool = option(
        False, help="do not evaluate before the first rollout", acts_with="eval_prompt_data"
    )

    def findings(self) -> list[str]:
        """Return what cannot work together."""
        if self.eval_interval is not None and self.eval_prompt_data is None:
            return ["--eval-interval needs --eval-prompt-data FILE"]
        return []


@dataclass(frozen=True, kw_only=True)
class LoopConfig(OptionGroup):
    """Length of the run."""

    num_rollout: int | None = option(
        None, help="rollouts in all (default: --num-epoch epochs of the data)", minimum=1, free=True
    )
    num_epoch: int | None = option(
        None, help="epochs over the prompt data, where --num-rollout is not given", minimum=1, free=True
    )

    def findings(self) -> list[str]:
        """Return what cannot work together."""
        if self.num_rollout is None and self.num_epoch is None:
            return ["give --num-rollout N or --num-epoch N"]
        if self.num_rollout is not None and self.num_epoch is not None:
            return ["--num-rollout and --num-epoch exclude each other; give one"]
        return []


@dataclass(frozen=True, kw_only=True)
class DrivetrainConfig:
    """Everything a run was asked for, resolved and checked.

    Attributes:
        sources: option name -> where its value came from: "default", "recipe NAME", "FILE", "DRIVETRAIN_X" or "flag".
    """

    backend: BackendSpec
    engine: EngineSpec
    algorithm: AlgorithmSpec
    train: TrainConfig
    engine_options: OptionGroup
    algorithm_options: OptionGroup
    placement: PlacementConfig
    weight_sync: WeightSyncConfig
    run_folder: RunFolderConfig
    survival: SurvivalConfig
    tracking: TrackingConfig
    data: DataConfig
    rollout: RolloutConfig
    evaluation: EvalConfig
    loop: LoopConfig
    sources: Mapping[str, str]
