"""The bad inputs of docs/bad-input.md: what the user does wrong, and how to do it in a scratch folder.

The messages are not here: the test gets them from the code, and compares them with the page.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event

from scratch import good_words

from drivetrain_backend_api.batch import SampleStatus
from drivetrain_backend_api.manifest import MANIFEST
from drivetrain_infra.checkpoint_writer import complete_manifest
from drivetrain_infra.engines.base import FinishReason, GenerateRequest, Generation, SamplingParams
from drivetrain_infra.placement import NodeResources, resource_requests
from drivetrain_infra.placement import preflight as plan_placement
from drivetrain_infra.run_folder import RunFolder
from drivetrain_infra.run_state import RUN_STATE, RunState, installed_versions
from drivetrain_infra.tracking.jsonl import JsonlTracker
from drivetrain_launcher.custom_generate import CustomGenerate, CustomResponse, Engine
from drivetrain_launcher.data import Prompt
from drivetrain_launcher.response_checks import ResponseLimits, check_generations
from drivetrain_launcher.rewards import Reward, RewardFunction, RewardInput
from drivetrain_launcher.rollout import Generator
from drivetrain_launcher.sources import build_config, read_request

Arrange = Callable[[Path], object]
"""Does something wrong in a scratch folder."""


@dataclass(frozen=True, kw_only=True)
class BadInput:
    """One row of the page.

    Attributes:
        wrong: what the user does, as the page says it.
        changes: flags of a good run that are changed, or left out (None).
        more: words after those of the good run.
        command: the whole command line instead.
        environ: variables to set.
        arrange: changes the scratch folder first.
        call: instead of a command, a part of a run in the scratch folder that ends in a `DrivetrainError`.
        cut: words of the message behind which another library speaks, whose words change with its versions.
        varying: pattern -> what to put there, for what differs between machines.
    """

    wrong: str
    changes: Mapping[str, str | None] = field(default_factory=dict)
    more: Sequence[str] = ()
    command: Sequence[str] | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    arrange: Arrange = lambda folder: None
    call: Callable[[], object] | None = None
    cut: str | None = None
    varying: Mapping[str, str] = field(default_factory=dict)

    @property
    def words(self) -> list[str]:
        """The command line, without the command's own name."""
        return [*good_words(self.changes), *self.more] if self.command is None else list(self.command)


# -- doing wrong -------------------------------------------------------------------------------------------------------


def write(name: str, content: str | bytes) -> Arrange:
    """Write a file."""
    return lambda folder: (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def remove(name: str) -> Arrange:
    """Remove a file or a folder."""
    return lambda folder: shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()


def shorten(name: str, by: int) -> Arrange:
    """Cut the last bytes off a file."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-by])


def overwrite(name: str, *, at: int, zeros: int) -> Arrange:
    """Put zeros into a file."""

    def arrange(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:at] + bytes(zeros) + content[at + zeros :])

    return arrange


def flip(name: str) -> Arrange:
    """Change the middle byte of a file."""

    def arrange(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(content)

    return arrange


def edit_json(name: str, **changes: object) -> Arrange:
    """Change keys of a JSON file; None removes one."""

    def arrange(folder: Path) -> None:
        table = {**json.loads((folder / name).read_text()), **changes}
        (folder / name).write_text(json.dumps({key: value for key, value in table.items() if value is not None}))

    return arrange


def lines(*rows: object, name: str = "train.jsonl") -> Arrange:
    """Write a prompt file; a row that is text is written as it is."""
    texts = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    return write(name, "".join(text + "\n" for text in texts))


def several(*steps: Arrange) -> Arrange:
    """Do several things wrong."""
    return lambda folder: [step(folder) for step in steps]


def parquet(columns: Mapping[str, Sequence[object]]) -> Arrange:
    """Write train.parquet."""

    def arrange(folder: Path) -> None:
        import pyarrow
        from pyarrow.parquet import write_table

        write_table(pyarrow.table(dict(columns)), folder / "train.parquet")

    return arrange


def as_saved(**changes: object) -> Arrange:
    """Let the run's checkpoint have been saved with another state."""

    def arrange(folder: Path) -> None:
        path = folder / "run/iter_0000001" / RUN_STATE
        replace(RunState.read(path), **changes).write(path)  # type: ignore[arg-type]
        listed_anew(path.parent)

    return arrange


def edit_state(**changes: object) -> Arrange:
    """Change fields of the run's newest state, which no longer need to be right."""

    def arrange(folder: Path) -> None:
        path = folder / "run/resume_state.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return arrange


def without_optimizer(folder: Path) -> None:
    """Let the run's checkpoint say that it was saved with --no-save-optim."""
    edit_json("run/iter_0000001/trainer_state.json", moments=False)(folder)
    options = RunState.read(folder / "run/iter_0000001" / RUN_STATE).options
    as_saved(options={**options, "no-save-optim": True})(folder)


def listed_anew(checkpoint: Path) -> None:
    """Let the manifest list what is there."""
    (checkpoint / MANIFEST).unlink()
    complete_manifest(checkpoint)


def also_saved(done: int, *, newest: bool = False) -> Arrange:
    """Let the run have saved another checkpoint, after so many rollouts."""

    def arrange(folder: Path) -> None:
        checkpoint = folder / f"run/iter_{done:07d}"
        shutil.copytree(folder / "run/iter_0000001", checkpoint)
        state = replace(RunState.read(checkpoint / RUN_STATE), next_rollout_id=done, checkpoint=checkpoint.name)
        state.write(checkpoint / RUN_STATE)
        listed_anew(checkpoint)
        if newest:
            (folder / "run/latest").write_text(checkpoint.name + "\n")

    return arrange


def renamed(folder: Path) -> None:
    """Give the run's checkpoint the name of another."""
    (folder / "run/iter_0000001").rename(folder / "run/iter_0000002")
    (folder / "run/latest").write_text("iter_0000002\n")


def before_its_first_checkpoint(folder: Path) -> None:
    """Let the run have been interrupted before it saved anything."""
    shutil.rmtree(folder / "run/iter_0000001")
    (folder / "run/latest").unlink()
    edit_state(next_rollout_id=0, checkpoint=None, prompts_read=0)(folder)


def copies(folder: Path) -> None:
    """Make a folder with files that have names of rollouts."""
    (folder / "copies").mkdir()
    for one in range(2):
        (folder / f"copies/rollout_{one}.pt").touch()


HOSTILE = b"cos\nmkdir\n(S'canary'\ntR."
"""A pickle that makes a folder when it is loaded."""

_TWO_RANKS = ("--actor-num-gpus-per-node", "2")

LAST, BELOW = {"--num-rollout": "1"}, {"--save": "run/iter_0000001/new"}

GOOD_ROW = {"question": "1+1=", "answer": "2"}


def resuming(*, changes: Mapping[str, str | None] | None = None, **rest: object) -> BadInput:
    """A start that goes on with the run in run/."""
    return BadInput(changes={"--save": "run", **(changes or {})}, **rest)  # type: ignore[arg-type]


def flag(*words: str, wrong: str | None = None, **rest: object) -> BadInput:
    """Words that are wrong by themselves, which is what the page shows of them."""
    return BadInput(wrong=(f"{wrong}: " if wrong else "") + f"`{' '.join(words)}`", more=words, **rest)  # type: ignore[arg-type]


def megatron(*words: str, wrong: str | None = None, **rest: object) -> BadInput:
    """Words that are wrong for the Megatron backend, and the model of the scratch folder."""
    shown = (f"{wrong}: " if wrong else "") + f"`{' '.join(words)}`"
    return BadInput(wrong=shown, changes={"--train-backend": "megatron"}, more=words, **rest)  # type: ignore[arg-type]


def toml(text: str, wrong: str | None = None, **rest: object) -> BadInput:
    """A configuration file of these lines."""
    shown = wrong or f"`{text}`"
    return BadInput(wrong=shown, more=["--config", "c.toml"], arrange=write("c.toml", text), **rest)  # type: ignore[arg-type]


def variable(name: str, text: str) -> BadInput:
    """An environment variable."""
    return BadInput(wrong=f"`{name}={text}`", environ={name: text})


# -- parts of a run ----------------------------------------------------------------------------------------------------

PROMPT = Prompt(index=0, source="train.jsonl:1", prompt_ids=(2, 3), text="1+1=", label="2")


def reward(function: RewardFunction, key: str | None = None) -> Callable[[], object]:
    """Compute a reward of a sample, as a rollout does."""
    sample = RewardInput(
        index=3,
        prompt="1+1=",
        response="2",
        label="2",
        response_length=1,
        status=SampleStatus.COMPLETED,
    )
    return lambda: Reward(name="mine:score", function=function, key=key)(sample)


def rollout(
    *, custom: CustomGenerate | None = None, score: RewardFunction = lambda sample: 1.0, seconds: float = 60.0
) -> Callable[[], object]:
    """Make a rollout of one sample, of which the custom generate function or the reward is wrong."""

    def engine(requests: Sequence[GenerateRequest], *, samples: Sequence[str], weight_version: int) -> list[Generation]:
        return [generation() for _ in requests]

    def make() -> None:
        from transformers import AutoTokenizer

        Generator(
            call=engine,
            tokenizer=AutoTokenizer.from_pretrained("model"),
            reward=Reward(name="mine:score", function=score),
            custom_generate=("mine:chat", custom) if custom else None,
            limits=ResponseLimits(vocab_size=14, max_positions=64, max_tokens=None),
            seed=0,
            seconds=seconds,
        ).generate(0, [PROMPT], samples_per_prompt=1, sampling=SamplingParams())

    return make


def generation(**changes: object) -> Generation:
    """What an engine returns."""
    values = {"token_ids": (2,), "log_probs": (-0.5,), "finish_reason": FinishReason.STOP, "weight_version": 1}
    return Generation(**(values | changes))  # type: ignore[arg-type]


def engine_returns(*generations: object) -> Callable[[], object]:
    """Check what an engine made of one request."""
    request = GenerateRequest(prompt_ids=PROMPT.prompt_ids, sampling=SamplingParams(max_new_tokens=2), seed=(0,))
    return lambda: check_generations(
        "engine 0", [request], generations, samples=["sample 0 (train.jsonl:1)"], weight_version=1, vocab_size=14
    )


def fails(error: BaseException) -> RewardFunction:
    """A function that raises."""

    def function(sample: RewardInput) -> float:
        raise error

    return function


def never_returns(sample: RewardInput) -> float:
    """A function that hangs."""
    Event().wait()
    return 0.0


def chat(response: object) -> CustomGenerate:
    """A custom generate function that returns something."""

    async def function(prompt: Prompt, engine: Engine, tokenizer: object) -> CustomResponse:
        return response  # type: ignore[return-value]

    return function


async def chat_at_another_temperature(prompt: Prompt, engine: Engine, tokenizer: object) -> CustomResponse:
    """A custom generate function that asks for what the trainer cannot follow."""
    await engine.generate(prompt.prompt_ids, SamplingParams(temperature=0.5))
    raise AssertionError


async def chat_that_raises(prompt: Prompt, engine: Engine, tokenizer: object) -> CustomResponse:
    """A custom generate function that fails."""
    raise KeyError("tool")


def place_on(nodes: Sequence[NodeResources], device: str, *words: str) -> Callable[[], object]:
    """Plan the processes of a run on a cluster."""

    def place() -> None:
        config = build_config(read_request([*good_words()[1:], *words], {}))
        plan_placement(resource_requests(config.placement), nodes, device).require()

    return place


def node(*, cpus: int, gpus: int = 0) -> NodeResources:
    """A machine of a cluster."""
    return NodeResources(node_id="0123456789", host="10.0.0.1", cpus=cpus, gpus=gpus)


def log_after(trouble: Arrange) -> Callable[[], object]:
    """Log once, then something happens to the run's folder, then log again."""

    def log() -> None:
        with closing(JsonlTracker(Path("run/metrics.jsonl"))) as tracker:
            tracker.log(0, {"rollout/reward": 0.5})
            trouble(Path())
            tracker.log(1, {"rollout/reward": 0.5})

    return log


def save_after(trouble: Arrange) -> Callable[[], object]:
    """Save a checkpoint after something happened to the run's folder."""

    def save() -> None:
        trouble(Path())
        with RunFolder(Path("run")).new_checkpoint(2) as aside:
            (aside / "weights").write_bytes(b"0")

    return save


def disk_is_full() -> None:
    """Save a checkpoint on a disk without room."""
    with RunFolder(Path("run")).new_checkpoint(2):
        Path("/dev/full").write_bytes(b"0")


# -- the table ---------------------------------------------------------------------------------------------------------

REFUSED: Mapping[str, Sequence[BadInput]] = {
    "Commands": (
        BadInput(wrong="`drivetrain` alone", command=[]),
        BadInput(wrong="`drivetrain trian`", command=["trian"]),
        BadInput(wrong="`drivetrain --recipe quickstart`", command=["--recipe", "quickstart"]),
        BadInput(wrong="`drivetrain backends --jso`", command=["backends", "--jso"]),
        BadInput(wrong="`drivetrain export run` without `--out`", command=["export", "run"]),
        BadInput(
            wrong="`drivetrain export run --out x --dtype int8`",
            command=["export", "run", "--out", "x", "--dtype", "int8"],
            cut="invalid choice: ",
        ),
    ),
    "Flags": (
        flag("--learning-rate", "1e-5", wrong="unknown"),
        flag("--weigth-decay", "0.1", wrong="misspelt"),
        flag("--global-batch", "16", wrong="abbreviated"),
        flag("--global_batch_size", "16", wrong="underscores"),
        flag("-lr", "1e-5", wrong="one hyphen"),
        flag("--LR", "1e-5", wrong="capitals"),
        BadInput(
            wrong="another algorithm's: `--algorithm sft --eps-clip 0.2`",
            changes={"--n-samples-per-prompt": "1"},
            more=["--algorithm", "sft", "--eps-clip", "0.2"],
        ),
        flag("--lr", "1e-5", "--lr", "1e-6", wrong="given twice"),
        flag("--grad-clip", "1", "--clip-grad", "1", wrong="given under two of its names"),
        flag("--bf16", "--no-bf16", wrong="switched on and off"),
        flag("--lr", wrong="without its value"),
        BadInput(wrong="with an empty value: `--wandb-group ''`", more=["--wandb-group", ""]),
        flag("--bf16=true", wrong="a switch with a value"),
        flag("--lr", "1e-5", "fast", wrong="a word too many"),
        flag("--lr", "fast", wrong="not a number"),
        flag("--rollout-top-k", "1.5", wrong="not a whole number"),
        flag("--lr", "-1", wrong="out of range"),
        flag("--rollout-top-p", "1.5", wrong="out of range"),
        flag("--adam-eps", "0", wrong="out of range"),
        flag("--lr", "inf", wrong="not finite"),
        flag("--grad-clip", "nan", wrong="not a number at all"),
        flag("--lr-decay-style", "square", wrong="not among the choices"),
        BadInput(wrong="required, and left out: `--hf-checkpoint`", changes={"--hf-checkpoint": None}),
        BadInput(wrong="neither `--num-rollout` nor `--num-epoch`", changes={"--num-rollout": None}),
        BadInput(
            wrong="several things wrong at once",
            changes={"--lr": "high", "--save": None, "--n-samples-per-prompt": "0"},
            more=["--sed", "1"],
        ),
    ),
    "Environment variables": (
        variable("DRIVETRAIN_LEARNING_RATE", "1"),
        variable("DRIVETRAIN_GRAD_CLP", "1"),
        variable("DRIVETRAIN_CONFIG", "c.toml"),
        variable("DRIVETRAIN_LR", ""),
        variable("DRIVETRAIN_LR", "fast"),
        variable("DRIVETRAIN_BF16", "maybe"),
        variable("DRIVETRAIN_ROLLOUT_STOP", "'a"),
        variable("DRIVETRAIN_CUSTOM_GENERATE", "mine:chat"),
    ),
    "Recipes": (
        BadInput(wrong="`--recipe quickstrat`", command=["train", "--recipe", "quickstrat"]),
        BadInput(wrong="`--recipe nothing`", command=["train", "--recipe", "nothing"]),
    ),
    "Configuration files": (
        BadInput(wrong="`--config absent.toml`, which is not there", more=["--config", "absent.toml"]),
        BadInput(wrong="`--config c.yaml`", more=["--config", "c.yaml"], arrange=write("c.yaml", "lr: 1e-5\n")),
        BadInput(wrong="`--config model`, a folder", more=["--config", "model"]),
        toml("lr = = 1", wrong="broken TOML", cut="--config c.toml: "),
        BadInput(
            wrong="broken JSON",
            more=["--config", "c.json"],
            arrange=write("c.json", '{"lr": '),
            cut="--config c.json: ",
        ),
        BadInput(wrong="JSON, but no table: `[1]`", more=["--config", "c.json"], arrange=write("c.json", "[1]")),
        BadInput(
            wrong='a key twice: `{"lr": 1, "lr": 2}`',
            more=["--config", "c.json"],
            arrange=write("c.json", '{"lr": 1, "lr": 2}'),
        ),
        toml("learning-rate = 1e-5"),
        toml("weigth-decay = 0.1"),
        toml("lr_decay_style = 'linear'"),
        toml("[optimizer]\nlr = 1e-5", wrong="a table: `[optimizer]`, then `lr = 1e-5`"),
        toml("lr = 'high'"),
        toml("seed = 1.5"),
        toml("bf16 = 1"),
        toml("rollout-stop = 'a'"),
        toml("rollout-top-p = 2.0"),
        toml("recipe = 'quickstart'"),
        toml("reward = 'mine:score'"),
        toml("custom-generate = 'mine:chat'"),
        toml("trust-remote-code = true"),
    ),
    "Options that cannot go together": (
        flag("--bf16", "--fp16"),
        flag("--num-epoch", "2", wrong="beside `--num-rollout`"),
        flag("--use-dynamic-batch-size"),
        flag("--max-tokens-per-gpu", "1024"),
        flag("--min-lr", "1"),
        flag("--lr-warmup-iters", "10", "--lr-decay-iters", "5"),
        flag("--lr-decay-style", "linear", "--lr-warmup-iters", "10", wrong="in a run of 2 steps"),
        flag("--fsdp-cpu-offload", "--optimizer-cpu-offload"),
        flag("--attention-backend", "varlen", "--fp32"),
        flag("--rollout-num-gpus", "3", "--rollout-num-gpus-per-engine", "2"),
        flag("--rollout-num-gpus", "2", "--rollout-num-gpus-per-engine", "2", wrong="with the transformers engine"),
        flag("--use-tis", "--tis-clip-low", "3"),
        flag("--use-kl-loss"),
        flag("--ref-load", "model"),
        flag("--opd-teacher-load", "model"),
        flag("--algorithm", "opd", wrong="no teacher"),
        flag(
            *("--algorithm", "opd", "--opd-teacher-load", "model", "--disable-grpo-std-normalization"),
            wrong="without `--opd-reward-coef`",
        ),
        flag("--reward", "none", wrong="under grpo"),
        BadInput(wrong="`--n-samples-per-prompt 1` under grpo", changes={"--n-samples-per-prompt": "1"}),
        flag("--rollout-temperature", "0"),
        flag("--eval-interval", "1"),
        flag("--loss-scale-window", "10", wrong="without `--fp16`"),
        flag("--wandb-project", "sums", wrong="without `--use-wandb`"),
        flag("--eval-temperature", "1", wrong="without `--eval-prompt-data`"),
        flag("--tis-clip", "1", wrong="without `--use-tis`"),
        flag("--update-weight-disk-dir", "weights", wrong="without `--update-weight-transport disk`"),
        flag("--system-prompt", "Be brief.", wrong="without `--apply-chat-template`"),
        flag("--apply-chat-template", wrong="with a tokenizer that has none"),
        BadInput(
            wrong="`--algorithm sft` with what only generation has",
            changes={"--label-key": None},
            more=["--algorithm", "sft", "--rollout-temperature", "0.5", "--reward", "exact"],
        ),
    ),
    "Plugins": (
        BadInput(wrong="`--train-backend deepspeed`", changes={"--train-backend": "deepspeed"}),
        flag("--rollout-engine", "vllm"),
        flag("--algorithm", "ppo"),
    ),
    "The Megatron backend": (
        megatron("--actor-num-gpus-per-node", "3", "--tensor-model-parallel-size", "3", wrong="4 heads cut in 3"),
        megatron("--tensor-model-parallel-size", "2", "--actor-num-gpus-per-node", "3", wrong="3 ranks cut in pairs"),
        megatron("--sequence-parallel", wrong="without tensor parallelism"),
        megatron(*_TWO_RANKS, "--expert-model-parallel-size", "2", wrong="no mixture of experts"),
        megatron("--actor-num-gpus-per-node", "4", "--pipeline-model-parallel-size", "4", wrong="2 layers cut in 4"),
        megatron("--actor-num-gpus-per-node", "8", "--context-parallel-size", "8", wrong="4 heads cut in 8"),
        megatron("--num-layers-per-virtual-pipeline-stage", "1", wrong="without a pipeline"),
        megatron("--recompute-num-layers", "1"),
        megatron("--overlap-param-gather"),
        megatron("--experimental-diffusion"),
        megatron("--fsdp-cpu-offload", wrong="another backend's"),
        BadInput(
            wrong="an architecture that it does not build",
            changes={"--train-backend": "megatron"},
            arrange=edit_json("model/config.json", model_type="gemma2"),
        ),
        BadInput(
            wrong="a teacher of another size",
            changes={"--train-backend": "megatron"},
            more=["--algorithm", "opd", "--opd-teacher-load", "other"],
            arrange=several(
                lambda folder: shutil.copytree(folder / "model", folder / "other"),
                edit_json("other/config.json", num_hidden_layers=1),
            ),
        ),
        megatron("--load", "run", wrong="a checkpoint of the FSDP backend"),
        BadInput(
            wrong="`--load other`, a model folder whose weights are cut off",
            changes={"--train-backend": "megatron"},
            more=["--load", "other"],
            arrange=several(
                lambda folder: shutil.copytree(folder / "model", folder / "other"),
                shorten("other/model.safetensors", 100),
            ),
            cut="is damaged: ",
        ),
        BadInput(
            wrong="`--load other`, a checkpoint of Megatron-LM's whose metadata would run code",
            changes={"--train-backend": "megatron"},
            more=["--load", "other"],
            arrange=several(
                lambda folder: (folder / "other").mkdir(),
                write("other/metadata.json", "{}"),
                write("other/.metadata", HOSTILE),
            ),
        ),
    ),
    "Model folders": (
        BadInput(wrong="`--hf-checkpoint absent`, which is not there", changes={"--hf-checkpoint": "absent"}),
        BadInput(wrong="no `config.json`", arrange=remove("model/config.json")),
        BadInput(wrong="a broken `config.json`", arrange=write("model/config.json", "{"), cut="is not JSON: "),
        BadInput(wrong="`config.json` is a list", arrange=write("model/config.json", "[]")),
        BadInput(wrong="`config.json` names no `model_type`", arrange=edit_json("model/config.json", model_type=None)),
        BadInput(
            wrong="an architecture that transformers does not know",
            arrange=edit_json("model/config.json", model_type="qwen99"),
        ),
        BadInput(
            wrong="an architecture that the folder brings as code",
            arrange=edit_json("model/config.json", model_type="mine", auto_map={"AutoConfig": "mine.MyConfig"}),
        ),
        BadInput(
            wrong="`config.json` with a byte order mark",
            arrange=lambda folder: write(
                "model/config.json", b"\xef\xbb\xbf" + (folder / "model/config.json").read_bytes()
            )(folder),
        ),
        BadInput(
            wrong="no tokenizer", arrange=several(remove("model/tokenizer.json"), remove("model/tokenizer_config.json"))
        ),
        BadInput(wrong="a broken tokenizer", arrange=write("model/tokenizer.json", "{}"), cut="cannot be loaded: "),
        BadInput(
            wrong="a tokenizer that fails only when it is used",
            arrange=edit_json("model/tokenizer_config.json", model_max_length={}),
            cut="TypeError: ",
        ),
        BadInput(
            wrong="`config.json` is a pipe",
            arrange=several(remove("model/config.json"), lambda folder: os.mkfifo(folder / "model/config.json")),
        ),
        BadInput(wrong="no weights", arrange=remove("model/model.safetensors")),
        BadInput(
            wrong="weights whose last bytes are missing",
            arrange=shorten("model/model.safetensors", 100),
            varying={r"has \d+ bytes": "has 394848 bytes", r"promises \d+": "promises 394948"},
        ),
        BadInput(
            wrong="weights that are a Git LFS pointer",
            arrange=write(
                "model/model.safetensors",
                "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 394948\n",
            ),
        ),
        BadInput(
            wrong="an index whose file is missing",
            arrange=write(
                "model/model.safetensors.index.json",
                json.dumps({"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}),
            ),
        ),
        BadInput(
            wrong="an index of tensors that its file lacks",
            arrange=write(
                "model/model.safetensors.index.json",
                json.dumps({"weight_map": {"lm_head.bias": "model.safetensors"}}),
            ),
        ),
        BadInput(
            wrong="an index that leads out of the folder",
            arrange=write(
                "model/model.safetensors.index.json",
                json.dumps({"weight_map": {"lm_head.weight": "../other/model.safetensors"}}),
            ),
        ),
        BadInput(wrong="an index without a `weight_map`", arrange=write("model/model.safetensors.index.json", "{}")),
        BadInput(wrong="`--ref-load absent`, which is not there", more=["--use-kl-loss", "--ref-load", "absent"]),
        BadInput(
            wrong="`--ref-load other` with a smaller vocabulary",
            more=["--use-kl-loss", "--ref-load", "other"],
            arrange=several(
                lambda folder: shutil.copytree(folder / "model", folder / "other"),
                edit_json("other/config.json", vocab_size=13),
            ),
        ),
        BadInput(
            wrong="a tokenizer with more tokens than the model",
            arrange=edit_json("model/config.json", vocab_size=8),
        ),
    ),
    "Prompt files": (
        BadInput(wrong="`--prompt-data absent.jsonl`, which is not there", changes={"--prompt-data": "absent.jsonl"}),
        BadInput(wrong="`--prompt-data train.csv`", changes={"--prompt-data": "train.csv"}),
        BadInput(
            wrong="a folder named `train.jsonl`",
            arrange=several(remove("train.jsonl"), lambda folder: (folder / "train.jsonl").mkdir()),
        ),
        BadInput(wrong="an empty file", arrange=write("train.jsonl", "")),
        BadInput(wrong="the first line is no JSON", arrange=lines("1+1=", GOOD_ROW), cut="is not JSON: "),
        BadInput(wrong="the last line is cut off", arrange=lines(GOOD_ROW, '{"question": "1+1='), cut="is not JSON: "),
        BadInput(
            wrong="line 2 of 3 is no JSON", arrange=lines(GOOD_ROW, "{question: 1}", GOOD_ROW), cut="is not JSON: "
        ),
        BadInput(
            wrong="line 2 of 3 is not UTF-8",
            arrange=write("train.jsonl", b"%s\n\xff\n%s" % ((json.dumps(GOOD_ROW).encode(),) * 2)),
        ),
        BadInput(
            wrong="a byte order mark before the first line",
            arrange=write("train.jsonl", b"\xef\xbb\xbf" + json.dumps(GOOD_ROW).encode()),
        ),
        BadInput(wrong="line 2 of 3 is a list", arrange=lines(GOOD_ROW, [1], GOOD_ROW)),
        BadInput(wrong="`--input-key prompt`, which no line has", changes={"--input-key": "prompt"}),
        BadInput(wrong="`--label-key label`, which no line has", changes={"--label-key": "label"}),
        BadInput(wrong="line 2 of 3 lacks the label", arrange=lines(GOOD_ROW, {"question": "1+1="}, GOOD_ROW)),
        BadInput(wrong="a prompt that is a number", arrange=lines(GOOD_ROW, {"question": 2, "answer": "2"}, GOOD_ROW)),
        BadInput(
            wrong="chat messages without `--apply-chat-template`",
            arrange=lines({"question": [{"role": "user", "content": "1+1="}], "answer": "2"}),
        ),
        BadInput(wrong="an empty prompt", arrange=lines(GOOD_ROW, {"question": "", "answer": "2"})),
        BadInput(
            wrong="half of a surrogate pair in a prompt",
            arrange=lines(GOOD_ROW, r'{"question": "1+\ud800=", "answer": "2"}', GOOD_ROW),
            cut="which is no text: ",
        ),
        BadInput(wrong="a label that is a list", arrange=lines(GOOD_ROW, {"question": "1+1=", "answer": [2]})),
        BadInput(
            wrong="a label that `--reward math` cannot read",
            arrange=lines(GOOD_ROW, {"question": "1+1=", "answer": "two"}),
        ),
        BadInput(wrong="no `--label-key`, which `--reward math` needs", changes={"--label-key": None}),
        BadInput(
            wrong="metadata that is no table",
            more=["--metadata-key", "meta"],
            arrange=lines({**GOOD_ROW, "meta": 1}),
        ),
        flag("--rollout-max-prompt-len", "2", wrong="all prompts are longer"),
        BadInput(
            wrong="a Parquet file that is none",
            changes={"--prompt-data": "train.parquet"},
            arrange=write("train.parquet", "PAR1"),
            cut="is no Parquet file: ",
        ),
        BadInput(
            wrong="a Parquet file that is damaged within",
            changes={"--prompt-data": "train.parquet"},
            arrange=several(
                parquet({"question": ["1+1="], "answer": ["2"]}),
                overwrite("train.parquet", at=4, zeros=40),
            ),
            cut="cannot be read as Parquet: ",
        ),
        BadInput(
            wrong="a Parquet file without rows",
            changes={"--prompt-data": "train.parquet"},
            arrange=parquet({"question": [], "answer": []}),
        ),
        BadInput(
            wrong="a Parquet file without the column",
            changes={"--prompt-data": "train.parquet"},
            arrange=parquet({"question": ["1+1="]}),
        ),
        BadInput(
            wrong="a Parquet file with a prompt that is null",
            changes={"--prompt-data": "train.parquet"},
            arrange=parquet({"question": ["1+1=", None], "answer": ["2", "2"]}),
        ),
        BadInput(
            wrong="`--eval-prompt-data` whose line 2 of 3 is broken",
            more=["--eval-prompt-data", "held_out.jsonl"],
            arrange=lines(GOOD_ROW, "[", GOOD_ROW, name="held_out.jsonl"),
            cut="is not JSON: ",
        ),
    ),
    "Sizes": (
        flag("--global-batch-size", "5", wrong="in a rollout of 4 x 4 samples"),
        BadInput(
            wrong="`--rollout-max-response-len 64` of a model with 64 positions",
            changes={"--rollout-max-response-len": "64"},
        ),
        BadInput(
            wrong="a prompt so long that with its response it exceeds the model's positions",
            changes={"--rollout-max-response-len": "50"},
            arrange=lines(GOOD_ROW, {"question": "1+1+1+1+1+1+1+1+1+1=", "answer": "10"}),
        ),
        flag("--use-dynamic-batch-size", "--max-tokens-per-gpu", "8", wrong="samples are longer"),
        BadInput(
            wrong="a held-out prompt too long for `--eval-max-response-len 60`",
            more=["--eval-prompt-data", "held_out.jsonl", "--eval-max-response-len", "60"],
            arrange=lines(GOOD_ROW, {"question": "1+1+1=", "answer": "3"}, name="held_out.jsonl"),
        ),
    ),
    "Functions of your own": (
        flag("--reward", "maths"),
        flag("--reward", "absent:score", wrong="no such module"),
        BadInput(
            wrong="`--reward mine:scores`: no such function in it",
            more=["--reward", "mine:scores"],
            arrange=write("mine.py", "def score(sample):\n    return 1.0\n"),
        ),
        BadInput(
            wrong="`--reward mine:score`: its import fails",
            more=["--reward", "mine:score"],
            arrange=write("mine.py", "raise ValueError('no licence')\n"),
        ),
        BadInput(
            wrong="`--reward mine:score`: not a function",
            more=["--reward", "mine:score"],
            arrange=write("mine.py", "score = 1.0\n"),
        ),
        flag("--reward-key", "quality", wrong="with `--reward math`"),
        BadInput(
            wrong="`--custom-generate mine:chat`: not an `async def`",
            more=["--custom-generate", "mine:chat"],
            arrange=write("mine.py", "def chat(prompt, engine, tokenizer):\n    return None\n"),
        ),
        flag("--custom-generate", "chat", wrong="no module"),
    ),
    "Folders": (
        BadInput(wrong="`--save train.jsonl`, a file", changes={"--save": "train.jsonl"}),
        BadInput(wrong="`--save train.jsonl/new`, below a file", changes={"--save": "train.jsonl/new"}),
        BadInput(wrong="`--save /proc/new`, not writable", changes={"--save": "/proc/new"}),
        BadInput(wrong="`--save /`", changes={"--save": "/"}),
        BadInput(wrong="`--save model`, the model's folder", changes={"--save": "model"}),
        BadInput(
            wrong="`--recipe quickstart --save /proc/new`, not writable",
            command=["train", "--recipe", "quickstart", "--save", "/proc/new"],
        ),
        BadInput(
            wrong="`--save loop`, a link to itself",
            changes={"--save": "loop"},
            arrange=lambda folder: (folder / "loop").symlink_to("loop"),
        ),
        flag("--update-weight-transport", "disk", "--update-weight-disk-dir", "train.jsonl", wrong="a file"),
        flag("--update-weight-transport", "disk", "--update-weight-disk-dir", "model", wrong="the model's folder"),
    ),
    "Checkpoints to start from": (
        flag("--load", "absent", wrong="not there"),
        flag("--load", "model", wrong="not a run"),
        BadInput(
            wrong="`latest` names a checkpoint that is gone",
            more=["--load", "run"],
            arrange=remove("run/iter_0000001"),
        ),
        BadInput(wrong="`latest` is empty", more=["--load", "run"], arrange=write("run/latest", "")),
        BadInput(
            wrong="no `trainer_state.json`",
            more=["--load", "run"],
            arrange=remove("run/iter_0000001/trainer_state.json"),
        ),
        BadInput(
            wrong="no random states, and an older checkpoint beside it",
            more=["--load", "run"],
            arrange=several(
                lambda folder: shutil.copytree(folder / "run/iter_0000001", folder / "run/iter_0000000"),
                remove("run/iter_0000001/rng_rank00000.safetensors"),
            ),
        ),
        BadInput(wrong="no tensors", more=["--load", "run"], arrange=remove("run/iter_0000001/dcp/__0_0.distcp")),
        BadInput(
            wrong="tensors that are cut off",
            more=["--load", "run"],
            arrange=shorten("run/iter_0000001/dcp/__0_0.distcp", 1_000_000),
            varying={r"has \d+ bytes of \d+": "has 308552 bytes of 1308552"},
        ),
        BadInput(
            wrong="metadata that would run code",
            more=["--load", "run"],
            arrange=write("run/iter_0000001/dcp/.metadata", HOSTILE),
        ),
        BadInput(
            wrong="all of its rollouts are done: `--load run --num-rollout 1`", changes=LAST, more=["--load", "run"]
        ),
        flag("--load", "run", "--ckpt-step", "3", wrong="no such checkpoint"),
        flag("--finetune", wrong="without `--load`"),
        BadInput(
            wrong="it was saved with `--no-save-optim`: `--load run`", more=["--load", "run"], arrange=without_optimizer
        ),
        BadInput(
            wrong="a byte has changed: `--load run --verify-checkpoint`",
            more=["--load", "run", "--verify-checkpoint"],
            arrange=flip("run/iter_0000001/dcp/__0_0.distcp"),
        ),
        BadInput(
            wrong="`--save` in it: `--load run --save run/iter_0000001/new`", changes=BELOW, more=["--load", "run"]
        ),
    ),
    "Going on with the run in `--save`": (
        resuming(wrong="another learning rate: `--lr 1`", more=["--lr", "1"]),
        resuming(
            wrong="two changes of which one is accepted: `--lr 1 --seed 5 --accept-change lr`",
            more=["--lr", "1", "--seed", "5", "--accept-change", "lr"],
        ),
        resuming(wrong="more ranks: `--actor-num-gpus-per-node 2`", more=_TWO_RANKS),
        resuming(wrong="another `--load` than it began with", more=["--load", "run/iter_0000001"]),
        resuming(wrong="`--load run --finetune`", more=["--load", "run", "--finetune"]),
        resuming(wrong="another backend: `--train-backend megatron`", changes={"--train-backend": "megatron"}),
        resuming(
            wrong="other prompts in the file",
            arrange=lines(GOOD_ROW),
            varying={r"SHA-256 \w+": "SHA-256 ..."},
        ),
        resuming(
            wrong="another model in the folder",
            arrange=edit_json("model/config.json", initializer_range=0.5),
            varying={r"SHA-256 \w+": "SHA-256 ..."},
        ),
        resuming(
            wrong="another release of PyTorch",
            arrange=as_saved(versions={**installed_versions(), "torch": "1.0"}),
            varying={r"torch \S+ now": "torch 2.11.0 now"},
        ),
        resuming(wrong="`--accept-change lrr`: no such option", more=["--accept-change", "lrr"]),
        flag("--accept-change", "lrr", wrong="no such option, in a new run"),
        resuming(wrong="`--ckpt-step 3` of a run with one checkpoint", more=["--ckpt-step", "3"]),
        flag("--ckpt-step", "3", wrong="in a folder without a run"),
        resuming(
            wrong="its newest checkpoint is damaged, and there is another",
            arrange=several(also_saved(0), shorten("run/iter_0000001/trainer_state.json", 5)),
        ),
        resuming(
            wrong="its newest checkpoint is damaged, and there is no other",
            arrange=shorten("run/iter_0000001/trainer_state.json", 5),
        ),
        resuming(
            wrong="a byte has changed, with `--verify-checkpoint`",
            more=["--verify-checkpoint"],
            arrange=flip("run/iter_0000001/dcp/__0_0.distcp"),
        ),
        resuming(
            wrong="a file in the checkpoint that nobody listed",
            arrange=write("run/iter_0000001/notes.txt", "good"),
        ),
        resuming(wrong="no `manifest.json`", arrange=remove("run/iter_0000001/manifest.json")),
        resuming(wrong="a checkpoint that was renamed", arrange=renamed),
        resuming(
            wrong="all its checkpoints are gone", arrange=several(remove("run/iter_0000001"), remove("run/latest"))
        ),
        resuming(wrong="what `latest` names is gone", arrange=remove("run/iter_0000001")),
        resuming(wrong="`resume_state.json` is broken", arrange=write("run/resume_state.json", "{"), cut="is damaged "),
        resuming(wrong="`resume_state.json` of a later release", arrange=edit_json("run/resume_state.json", schema=99)),
        resuming(wrong="`resume_state.json` with text for a number", arrange=edit_state(prompts_read="12")),
        resuming(wrong="it was saved with `--no-save-optim`", arrange=without_optimizer),
        BadInput(
            wrong="`--load start` is damaged, and the run was interrupted before its first checkpoint",
            changes={"--save": "run", "--load": "start"},
            arrange=several(
                lambda folder: shutil.copytree(folder / "run", folder / "start"),
                write("start/iter_0000001/trainer_state.json", "x"),
                before_its_first_checkpoint,
            ),
        ),
        resuming(
            wrong="`--ckpt-step 1` of a run that was interrupted before its first checkpoint",
            more=["--ckpt-step", "1"],
            arrange=before_its_first_checkpoint,
        ),
        BadInput(
            wrong="it has more rollouts than that: `--num-rollout 1` after 2",
            changes={"--save": "run", **LAST},
            arrange=also_saved(2, newest=True),
        ),
    ),
    "Time": (
        flag("--wall-time-limit", "7w"),
        flag("--wall-time-reserve=-5m"),
        flag("--wall-time-limit", "5m", wrong="no longer than the default reserve"),
        flag("--wall-time-limit", "1h", "--wall-time-reserve", "1h"),
        variable("WALL_TIME_LIMIT", "soon"),
        variable("WALL_TIME_RESERVE", "8d"),
        variable("SLURM_JOB_END_TIME", "5"),
        variable("SLURM_JOB_END_TIME", "tomorrow"),
        variable("DRIVETRAIN_WALL_TIME_LIMIT", "5q"),
    ),
    "Rollouts of their own": (
        flag("--debug-train-only"),
        flag("--load-debug-rollout-data", "absent"),
        flag("--load-debug-rollout-data", "model", wrong="no rollouts in it"),
        flag("--debug-rollout-only", "--load-debug-rollout-data", "run"),
        flag("--save-debug-rollout-data", "run", "--load-debug-rollout-data", "run"),
        flag("--save-debug-rollout-data", "train.jsonl", wrong="a file"),
        flag("--save-debug-rollout-data", "/proc/x", wrong="not writable"),
        flag("--debug-rollout-only", "--eval-prompt-data", "train.jsonl"),
        BadInput(
            wrong="`--debug-train-only` with `--eval-prompt-data`",
            more=["--debug-train-only", "--load-debug-rollout-data", "copies", "--eval-prompt-data", "train.jsonl"],
            arrange=copies,
        ),
        BadInput(
            wrong="`--algorithm sft --debug-rollout-only`",
            changes={"--n-samples-per-prompt": "1"},
            more=["--algorithm", "sft", "--debug-rollout-only"],
        ),
    ),
    "This machine": (
        flag("--actor-num-nodes", "2"),
        flag(
            "--actor-num-gpus-per-node",
            "1000000",
            varying={
                r"\d+\.\d (TiB) of memory": r"244.1 \1 of memory",
                r"\d+\.\d \w+ are available": "12.0 GiB are available",
            },
        ),
    ),
    "Export, refused": (
        BadInput(
            wrong="`--out` is there and not empty",
            command=["export", "run", "--out", "model"],
        ),
        BadInput(wrong="`--out` is a file", command=["export", "run", "--out", "train.jsonl"]),
        BadInput(wrong="no such run", command=["export", "absent", "--out", "x"]),
        BadInput(wrong="not a run", command=["export", "model", "--out", "x"]),
        BadInput(
            wrong="a run without its `config.json`",
            command=["export", "run", "--out", "x"],
            arrange=remove("run/config.json"),
        ),
        BadInput(
            wrong="a run whose `config.json` is a folder",
            command=["export", "run", "--out", "x"],
            arrange=several(remove("run/config.json"), lambda folder: (folder / "run/config.json").mkdir()),
        ),
    ),
}
"""Heading -> inputs that are refused before anything starts: exit code 2."""

FAILED: Mapping[str, Sequence[BadInput]] = {
    "Export": (
        BadInput(
            wrong="a run whose `config.json` is broken",
            command=["export", "run", "--out", "x"],
            arrange=write("run/config.json", "{"),
            cut="is not JSON ",
        ),
        BadInput(
            wrong="a run whose `config.json` lacks the model",
            command=["export", "run", "--out", "x"],
            arrange=edit_json("run/config.json", **{"hf-checkpoint": None}),
        ),
        BadInput(
            wrong="a run whose `config.json` has a number for the model",
            command=["export", "run", "--out", "x"],
            arrange=edit_json("run/config.json", **{"hf-checkpoint": 1}),
        ),
        BadInput(
            wrong="a run whose model folder is gone",
            command=["export", "run", "--out", "x"],
            arrange=remove("model"),
        ),
        BadInput(
            wrong="a checkpoint without `trainer_state.json`",
            command=["export", "run", "--out", "x"],
            arrange=remove("run/iter_0000001/trainer_state.json"),
        ),
        BadInput(
            wrong="a checkpoint of a later release",
            command=["export", "run", "--out", "x"],
            arrange=edit_json("run/iter_0000001/trainer_state.json", format=99),
        ),
        BadInput(
            wrong="a checkpoint without its metadata",
            command=["export", "run", "--out", "x"],
            arrange=remove("run/iter_0000001/dcp/.metadata"),
        ),
        BadInput(
            wrong="a checkpoint whose metadata would run code",
            command=["export", "run", "--out", "x"],
            arrange=write("run/iter_0000001/dcp/.metadata", HOSTILE),
        ),
        BadInput(
            wrong="a checkpoint whose tensors are cut off",
            command=["export", "run", "--out", "x"],
            arrange=shorten("run/iter_0000001/dcp/__0_0.distcp", 1_000_000),
            varying={r"has \d+ bytes of \d+": "has 308552 bytes of 1308552"},
        ),
        BadInput(
            wrong="`--out` where nothing can be written",
            command=["export", "run", "--out", "/proc/x"],
            cut="cannot be written ",
        ),
    ),
    "Rewards": (
        BadInput(wrong="the function raises", call=reward(fails(ValueError("no such unit")))),
        BadInput(wrong="the function ends the process", call=reward(fails(SystemExit(1)))),
        BadInput(wrong="the function returns NaN", call=reward(lambda sample: float("nan"))),
        BadInput(wrong="the function returns text", call=reward(lambda sample: "1.0")),  # type: ignore[arg-type, return-value]
        BadInput(wrong="the function returns nothing", call=reward(lambda sample: None)),  # type: ignore[arg-type, return-value]
        BadInput(
            wrong="the function returns a table, without `--reward-key`", call=reward(lambda sample: {"quality": 1.0})
        ),
        BadInput(
            wrong="the table lacks `--reward-key cost`",
            call=reward(lambda sample: {"quality": 1.0}, key="cost"),
        ),
        BadInput(wrong="no table, with `--reward-key cost`", call=reward(lambda sample: 1.0, key="cost")),
        BadInput(wrong="the function returns 1e31", call=rollout(score=lambda sample: 1e31)),
        BadInput(wrong="the function never returns", call=rollout(score=never_returns, seconds=0.2)),
    ),
    "Custom generate functions": (
        BadInput(wrong="the function raises", call=rollout(custom=chat_that_raises)),
        BadInput(wrong="the function returns text", call=rollout(custom=chat("2"))),
        BadInput(
            wrong="lists of different lengths",
            call=rollout(custom=chat(CustomResponse(token_ids=[2, 3], loss_mask=[1], log_probs=[-0.5]))),
        ),
        BadInput(
            wrong="a loss mask of other values",
            call=rollout(custom=chat(CustomResponse(token_ids=[2], loss_mask=[2], log_probs=[-0.5]))),
        ),
        BadInput(
            wrong="a token that the model does not have",
            call=rollout(custom=chat(CustomResponse(token_ids=[14], loss_mask=[1], log_probs=[-0.5]))),
        ),
        BadInput(
            wrong="more tokens than the model has positions for",
            call=rollout(custom=chat(CustomResponse(token_ids=[2] * 64, loss_mask=[1] * 64, log_probs=[-0.5] * 64))),
        ),
        BadInput(
            wrong="a log-prob above 0",
            call=rollout(custom=chat(CustomResponse(token_ids=[2], loss_mask=[1], log_probs=[0.5]))),
        ),
        BadInput(wrong="another temperature", call=rollout(custom=chat_at_another_temperature)),
    ),
    "Engines": (
        BadInput(wrong="too few generations", call=engine_returns()),
        BadInput(wrong="no generation", call=engine_returns(None)),
        BadInput(wrong="fewer log-probs than tokens", call=engine_returns(generation(log_probs=()))),
        BadInput(wrong="a token that the model does not have", call=engine_returns(generation(token_ids=(14,)))),
        BadInput(wrong="a log-prob that is NaN", call=engine_returns(generation(log_probs=(float("nan"),)))),
        BadInput(wrong="a log-prob above 0", call=engine_returns(generation(log_probs=(0.5,)))),
        BadInput(
            wrong="too many tokens", call=engine_returns(generation(token_ids=(2, 3, 4), log_probs=(-1.0, -1.0, -1.0)))
        ),
        BadInput(wrong="made with older weights", call=engine_returns(generation(weight_version=0))),
    ),
    "The run's folder": (
        BadInput(wrong="it is removed, and a checkpoint is due", call=save_after(remove("run"))),
        BadInput(wrong="it is removed, and metrics are due", call=log_after(remove("run"))),
        BadInput(wrong="the disk is full while a checkpoint is written", call=disk_is_full),
    ),
    "Placement": (
        BadInput(
            wrong="8 ranks and an engine, on a cluster of one node of 8 GPUs",
            call=place_on([node(cpus=32, gpus=8)], "GPU", "--actor-num-gpus-per-node", "8"),
        ),
        BadInput(
            wrong="a rank and an engine, on one GPU",
            call=place_on([node(cpus=32, gpus=1)], "GPU"),
        ),
    ),
}
"""Heading -> what goes wrong when something runs already: exit code 1."""
