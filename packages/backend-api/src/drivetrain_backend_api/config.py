"""Configuration as frozen keyword-only dataclasses, and the options derived from them.

`TrainConfig` is the one owner of every setting that all train backends read; a backend subclasses it with its own. The
launcher turns the fields into flags, file keys and environment variables; nothing here parses anything, and nothing
here imports torch.
"""

import types
import typing
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

from drivetrain_backend_api.errors import ConfigError, printable

_TOO_LARGE = 2**63
"""Integers must fit what torch, files and other processes hold them in."""

Precision = Literal["bf16", "fp16", "fp32"]


def option(
    default: Any = MISSING,
    *,
    help: str,
    choices: Sequence[str] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    metavar: str | None = None,
    runs_code: bool = False,
    acts_with: str | None = None,
    aliases: Sequence[str] = (),
    free: bool = False,
) -> Any:
    """Declare one option of an `OptionGroup`.

    Args:
        default: the value when nobody sets it; without one the option is required.
        help: one line for `--help`, with the unit where there is one.
        choices: the only strings allowed.
        minimum: smallest legal value, inclusive.
        maximum: largest legal value, inclusive.
        above: the value must be strictly larger.
        metavar: what `--help` shows for the value.
        runs_code: the value "module:function", or true, makes the run execute code that the value names. Such a value
            is accepted from the command line only.
        acts_with: field of the same group without which nothing reads this option: a switch that must be on, or an
            option that must be set. Given on the command line all the same, it is refused.
        aliases: other names of the option, spelled as fields are, where the field uses more than one. Whoever writes
            an option may use any of its names, but one at a time; what Drivetrain writes has the field's.
        free: the numbers of a run do not depend on it, or only through files whose content is compared, so that a
            resumed run may have another value.
    """
    metadata = {
        "help": help,
        "choices": tuple(choices) if choices else None,
        "minimum": minimum,
        "maximum": maximum,
        "above": above,
        "metavar": metavar,
        "runs_code": runs_code,
        "acts_with": acts_with,
        "aliases": tuple(aliases),
        "free": free,
    }
    return field(default=default, metadata=metadata, kw_only=True)


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option as the launcher sees it.

    Attributes:
        name: the dataclass field, also the file key with hyphens for underscores.
        type: bool, int, float or str.
        many: the field is a tuple of `type`.
        optional: None is legal and means "not set".
        group: name of the class that owns it.
        choices, minimum, maximum, above, metavar, runs_code, acts_with, aliases, free: as in `option`.
    """

    name: str
    type: type
    many: bool
    optional: bool
    default: Any
    help: str
    group: str
    choices: tuple[str, ...] | None = None
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    metavar: str | None = None
    runs_code: bool = False
    acts_with: str | None = None
    aliases: tuple[str, ...] = ()
    free: bool = False

    @property
    def flag(self) -> str:
        """The command-line spelling, for example `--max-tokens-per-gpu`."""
        return flag(self.name)

    @property
    def required(self) -> bool:
        """True when there is no default."""
        return self.default is MISSING

    @property
    def range(self) -> str:
        """The legal numbers in words, for example "above 0 and at most 1"; "" when all are."""
        bounds = {"at least": self.minimum, "above": self.above, "at most": self.maximum}
        return " and ".join(f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None)

    def _within(self, number: float) -> bool:
        return not (
            (self.minimum is not None and not number >= self.minimum)
            or (self.above is not None and not number > self.above)
            or (self.maximum is not None and not number <= self.maximum)
        )

    def names_code(self, value: Any) -> bool:
        """Say whether `value`, or an item of it, would make the run execute code that it names."""
        items = value if self.many and value is not None else (value,)
        return self.runs_code and any(one is True or (isinstance(one, str) and ":" in one) for one in items)

    def finding(self, value: Any) -> str | None:
        """Say what is wrong with `value`, naming flag, value and range; None when it is legal."""
        if value is None:
            return None if self.optional else f"{self.flag} needs a value"
        values = value if self.many else (value,)
        for one in values:
            if self.choices and one not in self.choices:
                return f"{self.flag} {printable(str(one))}: not one of {', '.join(self.choices)}"
            if isinstance(one, bool) or not isinstance(one, int | float):
                continue
            if isinstance(one, int) and abs(one) >= _TOO_LARGE:
                return f"{self.flag}: must be a whole number of less than 64 bits"
            if not self._within(one):
                return f"{self.flag} {one}: must be {self.range}"
            if one != one or one in (float("inf"), float("-inf")):
                return f"{self.flag} {one}: must be a finite number"
        return None


def flag(name: str) -> str:
    """Spell an option's field name as its flag."""
    return "--" + name.replace("_", "-")


def _shape_of(annotation: Any) -> tuple[type, bool, bool, tuple[str, ...] | None]:
    """Resolve an annotation to (scalar type, many, optional, choices)."""
    optional = False
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        optional = True
        (annotation,) = (one for one in typing.get_args(annotation) if one is not type(None))
    origin = typing.get_origin(annotation)
    if origin is tuple:
        return typing.get_args(annotation)[0], True, optional, None
    if origin is Literal:
        return str, False, optional, typing.get_args(annotation)
    return annotation, False, optional, None


@dataclass(frozen=True, kw_only=True)
class OptionGroup:
    """Base of every configuration dataclass. Constructing one checks every range and raises all findings at once."""

    def __post_init__(self) -> None:
        findings = [finding for one in options(type(self)) if (finding := one.finding(getattr(self, one.name)))]
        findings += self.findings()
        if findings:
            raise ConfigError("\n".join(findings))

    def findings(self) -> list[str]:
        """Return one sentence for each combination of this group's own options that cannot work."""
        return []


def options(config_class: type[OptionGroup]) -> list[Option]:
    """List the options of a configuration class, inherited ones first, in the order they are written."""
    hints = typing.get_type_hints(config_class)
    names = {one.name for one in fields(config_class)}
    found = []
    for one in fields(config_class):
        if "help" not in one.metadata:
            raise TypeError(f"{config_class.__name__}.{one.name} is not declared with option(...)")
        if (other := one.metadata["acts_with"]) is not None and other not in hints:
            raise TypeError(f"{config_class.__name__}.{one.name} acts with {other!r}, which is no option beside it")
        for alias in one.metadata["aliases"]:
            if alias in names:
                raise TypeError(f"{config_class.__name__}.{one.name} has the alias {alias!r}, which is taken already")
            names.add(alias)
        scalar, many, optional, choices = _shape_of(hints[one.name])
        owner = next(
            base for base in reversed(config_class.__mro__) if one.name in getattr(base, "__annotations__", {})
        )
        meta = dict(one.metadata)
        meta["choices"] = meta["choices"] or choices
        found.append(
            Option(
                name=one.name,
                type=scalar,
                many=many,
                optional=optional,
                default=one.default,
                group=owner.__name__,
                **meta,
            )
        )
    return found


@dataclass(frozen=True, kw_only=True)
class TrainConfig(OptionGroup):
    """What every train backend reads: model, precision, optimizer, batch and checkpoint settings."""

    # model
    hf_checkpoint: str = option(
        help="Hugging Face model folder to train (config, safetensors, tokenizer)", metavar="DIR", free=True
    )
    ref_load: str | None = option(None, help="folder of the frozen KL reference model", metavar="DIR", free=True)
    opd_teacher_load: str | None = option(
        None, help="folder of the on-policy-distillation teacher", metavar="DIR", free=True
    )
    load: str | None = option(
        None, help="checkpoint to start from: a run's folder, or another that the train backend takes", metavar="DIR"
    )
    finetune: bool = option(
        False, help="take only the weights of --load: optimizer, schedule and rollouts begin anew", acts_with="load"
    )
    verify_checkpoint: bool = option(
        False,
        help="compare every byte of a checkpoint with its checksums before it is loaded, not only sizes",
        free=True,
    )
    async_save: bool = option(
        False, help="write checkpoints in the background, from a copy in host memory, while training goes on", free=True
    )
    no_save_optim: bool = option(
        False, help="leave the optimizer out of checkpoints: smaller, but no run can be resumed from them", free=True
    )
    trust_remote_code: bool = option(False, help="allow Python code inside the model folder to run", runs_code=True)
    attention_backend: str = option("auto", help="packed attention kernel", choices=("auto", "varlen", "per_sequence"))

    # precision
    bf16: bool = option(False, help="compute in bfloat16 with fp32 master weights (the default where there are GPUs)")
    fp16: bool = option(False, help="compute in float16 with fp32 master weights and a loss scaler")
    fp32: bool = option(False, help="compute in float32 (the default on a machine without a GPU)")
    initial_loss_scale: float = option(2.0**16, help="first loss scale under --fp16", above=0, acts_with="fp16")
    min_loss_scale: float = option(1.0, help="smallest loss scale under --fp16", above=0, acts_with="fp16")
    loss_scale_window: int = option(
        1000, help="steps without overflow before the loss scale doubles", minimum=1, acts_with="fp16"
    )

    # optimizer
    lr: float = option(1e-6, help="peak learning rate", minimum=0)
    min_lr: float = option(0.0, help="learning rate at the end of the decay", minimum=0)
    lr_decay_style: str = option(
        "constant", help="learning rate after the warm-up", choices=("constant", "linear", "cosine")
    )
    lr_warmup_iters: int = option(0, help="optimizer steps of linear warm-up from 0", minimum=0)
    lr_decay_iters: int | None = option(
        None, help="optimizer step at which --min-lr is reached (default: the run's last)", minimum=1
    )
    weight_decay: float = option(0.1, help="decoupled weight decay, on matrices only", minimum=0)
    adam_beta1: float = option(0.9, help="Adam's first moment decay", minimum=0, maximum=0.999999)
    adam_beta2: float = option(0.98, help="Adam's second moment decay", minimum=0, maximum=0.999999)
    adam_eps: float = option(1e-8, help="Adam's epsilon", above=0)
    grad_clip: float = option(
        1.0, help="global gradient norm to clip to; 0 does not clip", minimum=0, aliases=("clip_grad",)
    )
    optimizer_cpu_offload: bool = option(False, help="keep optimizer state and step on the host")

    # batch
    global_batch_size: int | None = option(
        None, help="samples an optimizer step (default: all samples of a rollout)", minimum=1
    )
    micro_batch_size: int = option(1, help="samples a micro-batch, where --use-dynamic-batch-size is off", minimum=1)
    use_dynamic_batch_size: bool = option(False, help="fill micro-batches up to --max-tokens-per-gpu")
    max_tokens_per_gpu: int | None = option(None, help="most tokens a micro-batch may hold on one rank", minimum=1)
    log_probs_chunk_size: int = option(1024, help="tokens whose logits exist at one time", minimum=1)
    rollout_temperature: float = option(
        1.0, help="sampling temperature, also that of the trainer's log-probs; 0 samples greedily", minimum=0
    )
    seed: int = option(1234, help="seed of prompt order, sampling and the trainer's random state", minimum=0)

    # distributed
    distributed_timeout_minutes: float = option(
        10.0, help="deadline of one collective, in minutes", above=0, maximum=1e5, free=True
    )

    @property
    def precision(self) -> Precision:
        """The compute precision chosen by --bf16, --fp16 or --fp32."""
        return "fp16" if self.fp16 else "fp32" if self.fp32 else "bf16"

    @property
    def micro_batch_tokens(self) -> int | None:
        """Most tokens of a micro-batch over all ranks that share its tokens; None where there is no such bound."""
        return self.max_tokens_per_gpu if self.use_dynamic_batch_size else None

    @property
    def log_probs_temperature(self) -> float:
        """Temperature of log-probs: the sampling temperature, or 1 where sampling is greedy."""
        return self.rollout_temperature or 1.0

    def findings(self) -> list[str]:
        """Return what cannot work together."""
        found = []
        if (chosen := [name for name in ("--bf16", "--fp16", "--fp32") if getattr(self, name[2:])]) and len(chosen) > 1:
            found.append(f"{' and '.join(chosen)} exclude each other; give one")
        if self.use_dynamic_batch_size and self.max_tokens_per_gpu is None:
            found.append("--use-dynamic-batch-size needs --max-tokens-per-gpu")
        if self.max_tokens_per_gpu is not None and not self.use_dynamic_batch_size:
            found.append("--max-tokens-per-gpu acts only with --use-dynamic-batch-size; give both or neither")
        if self.min_lr > self.lr:
            found.append(f"--min-lr {self.min_lr:g} is above --lr {self.lr:g}; lower it")
        if self.lr_decay_iters is not None and self.lr_decay_iters <= self.lr_warmup_iters:
            found.append(
                f"--lr-decay-iters {self.lr_decay_iters} must be above --lr-warmup-iters {self.lr_warmup_iters}"
            )
        return found
