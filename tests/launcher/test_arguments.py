import itertools
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain_backend_api import (
    ALGORITHMS,
    TRAIN_BACKENDS,
    AlgorithmSpec,
    ConfigError,
    DiscoveryError,
    NotInstalledError,
    OptionGroup,
    installed,
    option,
)
from drivetrain_infra.engines.base import ROLLOUT_ENGINES
from drivetrain_launcher.arguments import Surface, build_parser, flags_of, load_surface
from drivetrain_launcher.config import DrivetrainConfig
from drivetrain_launcher.sources import (
    Stage,
    build_config,
    config_values,
    format_request,
    read_request,
    recipe_names,
    shipped_recipes,
)

REQUIRED = ["--hf-checkpoint", "M", "--prompt-data", "P", "--save", "S", "--num-rollout", "3"]
FSDP = ["--train-backend", "fsdp", *REQUIRED]


def refusal(argv: list[str], environ: dict[str, str] | None = None, recipes: Path | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_request(argv, environ or {}, recipes)
    return str(caught.value).splitlines()


def config_of(argv: list[str], environ: dict[str, str] | None = None, recipes: Path | None = None) -> DrivetrainConfig:
    return build_config(read_request(argv, environ or {}, recipes))


def write(path: Path, text: str) -> str:
    path.write_text(text, "utf-8")
    return str(path)


# -- the surface -------------------------------------------------------------------------------------------------------


def all_surfaces() -> list[Surface]:
    names = itertools.product(installed(TRAIN_BACKENDS), installed(ROLLOUT_ENGINES), installed(ALGORITHMS))
    return [load_surface(*one) for one in names]


def test_every_installed_combination_has_unique_flags_and_every_flag_its_help() -> None:
    surfaces = all_surfaces()
    assert {"fsdp", "megatron"} <= {one.backend.name for one in surfaces}
    assert {"grpo", "opd", "sft"} <= {one.algorithm.name for one in surfaces}
    for surface in surfaces:
        flags = [flag for one in surface.options.values() for flag in flags_of(one)]
        assert len(flags) == len(set(flags))
        shown = build_parser(surface).format_help()
        assert [flag for flag in flags if not re.search(rf"{flag}\b", shown)] == []


ALIASED = """
from dataclasses import dataclass
from drivetrain_backend_api import AlgorithmSpec, OptionGroup, option


@dataclass(frozen=True, kw_only=True)
class Aliased(OptionGroup):
    factor: float = option(0.5, help="a number", minimum=0, aliases=("ratio",))
    fast: bool = option(False, help="a switch", aliases=("quick",))
    names: tuple[str, ...] = option((), help="several", aliases=("labels",))


SPEC = AlgorithmSpec(name="aliased", api_version=1, target="nowhere:Aliased", config_class=Aliased)
"""


def install(folder: Path, source: str) -> None:
    """Make a folder of the module search path hold a distribution with the algorithm `aliased`."""
    info = folder / "aliased-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: aliased\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[drivetrain.algorithms]\naliased = aliased_spec:SPEC\n")
    (folder / "aliased_spec.py").write_text(source)


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which distributions are found."""
    folder = tmp_path / "plugins"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    yield folder
    sys.modules.pop("aliased_spec", None)


@pytest.fixture
def aliased(plugins: Path) -> None:
    """An algorithm whose options, of every shape, each have a second name."""
    install(plugins, ALIASED)


WITH_ALIASES = ["--algorithm", "aliased", *FSDP]


def aliased_options(words: list[str], environ: dict[str, str] | None = None) -> tuple[float, bool, tuple[str, ...]]:
    found: Any = config_of([*WITH_ALIASES, *words], environ).algorithm_options
    return found.factor, found.fast, found.names


@pytest.mark.usefixtures("aliased")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--ratio", "2"], (2.0, False, ())),
        (["--ratio=2", "--quick"], (2.0, True, ())),
        (["--no-quick"], (0.5, False, ())),
        (["--labels", "a", "b", "--labels", "c"], (0.5, False, ("a", "b", "c"))),
    ],
)
def test_an_alias_is_a_flag_of_its_option(words: list[str], expected: tuple[Any, ...]) -> None:
    assert aliased_options(words) == expected


@pytest.mark.usefixtures("aliased")
def test_an_alias_is_a_file_key_and_a_variable_of_its_option(tmp_path: Path) -> None:
    file = write(tmp_path / "c.toml", "ratio = 2.0\nquick = true\nlabels = ['a']")
    assert aliased_options(["--config", file]) == (2.0, True, ("a",))
    assert config_of([*WITH_ALIASES, "--config", file]).sources["factor"] == file
    variables = {"DRIVETRAIN_RATIO": "2", "DRIVETRAIN_QUICK": "true", "DRIVETRAIN_LABELS": "a b"}
    assert aliased_options([], variables) == (2.0, True, ("a", "b"))
    assert config_of(WITH_ALIASES, variables).sources["factor"] == "DRIVETRAIN_RATIO"


@pytest.mark.usefixtures("aliased")
def test_a_flag_wins_over_a_variable_over_a_file_whatever_name_each_uses(tmp_path: Path) -> None:
    words = ["--config", write(tmp_path / "c.toml", "factor = 1.0")]
    assert aliased_options(words, {"DRIVETRAIN_RATIO": "2"})[0] == 2
    assert aliased_options([*words, "--factor", "3"], {"DRIVETRAIN_RATIO": "2"})[0] == 3


@pytest.mark.usefixtures("aliased")
@pytest.mark.parametrize(
    ("words", "finding"),
    [
        (["--ratio", "1", "--factor", "1"], "--ratio and --factor are one option; give one of them"),
        (["--fast", "--no-quick"], "--fast and --quick are one option; give one of them"),
        (["--names", "a", "--labels", "b"], "--names and --labels are one option; give one of them"),
        (["--ratio", "1", "--ratio", "2"], "--ratio is given 2 times (1, 2); give it once"),
        (["--quick", "--no-quick"], "--quick is given 2 times (true, false); give it once"),
        (["--ratio", "-1"], "--factor -1.0: must be at least 0"),
        (["--labls", "a"], "unknown flag --labls; did you mean --labels?"),
    ],
)
def test_an_alias_is_no_second_option(words: list[str], finding: str) -> None:
    assert refusal([*WITH_ALIASES, *words]) == [finding]


@pytest.mark.usefixtures("aliased")
def test_an_option_under_two_names_in_a_file_or_in_variables_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "c.toml", "ratio = 1.0\nfactor = 1.0")
    assert refusal([*WITH_ALIASES, "--config", file]) == [
        f"ratio and factor are one option; give one of them (in {file})"
    ]
    assert refusal(WITH_ALIASES, {"DRIVETRAIN_RATIO": "1", "DRIVETRAIN_FACTOR": "1"}) == [
        "DRIVETRAIN_FACTOR and DRIVETRAIN_RATIO are one option; give one of them"
    ]


@pytest.mark.usefixtures("aliased")
def test_help_shows_aliases_strangers_are_told_their_owner_and_saved_values_have_one_name() -> None:
    shown = re.sub(r"\s+", " ", build_parser(load_surface("fsdp", "transformers", "aliased")).format_help())
    assert "--factor X, --ratio X a number (default: 0.5)" in shown
    assert "--fast, --no-fast, --quick, --no-quick a switch" in shown
    assert refusal([*FSDP, "--no-quick"]) == [
        "--no-quick belongs to algorithm 'aliased', but this run uses 'grpo'; drop it, or choose --algorithm aliased"
    ]
    values = config_values(config_of([*WITH_ALIASES, "--ratio", "2"]))
    assert values["factor"] == 2.0
    assert "ratio" not in values


def test_an_alias_that_is_somebody_elses_flag_is_refused(plugins: Path) -> None:
    install(plugins, ALIASED.replace('"ratio"', '"lr"'))
    with pytest.raises(DiscoveryError, match="--lr is declared by algorithm aliased, but it belongs to every train"):
        load_surface("fsdp", "transformers", "aliased")


def test_the_gradient_norm_is_clipped_under_either_of_its_names() -> None:
    assert config_of([*FSDP, "--clip-grad", "0.5"]).train.grad_clip == 0.5
    assert config_of(FSDP, {"DRIVETRAIN_CLIP_GRAD": "0.5"}).train.grad_clip == 0.5


def test_help_groups_flags_by_owner_and_shows_defaults() -> None:
    shown = re.sub(r"\s+", " ", build_parser(load_surface("fsdp", "transformers", "grpo")).format_help())
    order = ["selection:", "every train backend:", "train backend fsdp:", "algorithm grpo:", "loop:"]
    assert [shown.index(title) for title in order] == sorted(shown.index(title) for title in order)
    assert "--grad-clip X, --clip-grad X global gradient norm to clip to; 0 does not clip (default: 1)" in shown
    assert "--hf-checkpoint DIR Hugging Face model folder to train (config, safetensors, tokenizer) (required)" in shown


def test_a_plugin_that_declares_someone_elses_option_is_refused_by_name() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Greedy(OptionGroup):
        lr: float = option(1.0, help="mine")

    greedy = AlgorithmSpec(name="greedy", api_version=1, target="greedy:Greedy", config_class=Greedy)
    chosen = load_surface("fsdp", "transformers", "grpo")
    with pytest.raises(DiscoveryError, match="--lr is declared by algorithm greedy, but it belongs to every train ba"):
        Surface(backend=chosen.backend, engine=chosen.engine, algorithm=greedy)


def test_the_shipped_recipes_are_right_by_themselves() -> None:
    assert "quickstart" in recipe_names(shipped_recipes())
    for name in recipe_names(shipped_recipes()):
        request = read_request(["--recipe", name], {})
        assert request.save == Path("runs", name)
        assert request.recipe is not None
        assert request.recipe.description


@pytest.mark.parametrize("name", ["recipe", "help", "train_backend", "no_use_wandb"])
def test_a_plugin_cannot_take_the_launchers_own_flags(name: str) -> None:
    group = dataclass(frozen=True, kw_only=True)(
        type("Greedy", (OptionGroup,), {"__annotations__": {name: str}, name: option("x", help="mine")})
    )
    greedy = AlgorithmSpec(name="greedy", api_version=1, target="greedy:Greedy", config_class=group)
    chosen = load_surface("fsdp", "transformers", "grpo")
    with pytest.raises(DiscoveryError, match=f"--{name.replace('_', '-')} is declared by "):
        Surface(backend=chosen.backend, engine=chosen.engine, algorithm=greedy)


def test_the_backend_that_is_preferred_is_chosen_by_itself() -> None:
    assert read_request(REQUIRED, {}).surface.backend.name == "megatron"


# -- values ------------------------------------------------------------------------------------------------------------


def test_flags_become_typed_values() -> None:
    config = config_of(
        [
            *FSDP,
            "--lr=1e-5",
            "--use-wandb",
            "--no-apply-chat-template",
            "--rollout-stop",
            "a b",
            "c",
            "--rollout-stop-token-ids",
            "1",
            "2",
            "--rollout-stop-token-ids",
            "3",
            "--save-interval",
            "none",
        ]
    )
    assert config.train.lr == 1e-5
    assert config.tracking.use_wandb is True
    assert config.data.apply_chat_template is False
    assert config.rollout.rollout_stop == ("a b", "c")
    assert config.rollout.rollout_stop_token_ids == (1, 2, 3)
    assert config.run_folder.save_interval is None
    assert (config.backend.name, config.engine.name, config.algorithm.name) == ("fsdp", "transformers", "grpo")
    with pytest.raises(FrozenInstanceError):
        config.train.lr = 2.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("words", "finding"),
    [
        (["--lr", "fast"], "--lr fast: must be a number"),
        (["--lr", "-1"], "--lr -1.0: must be at least 0"),
        (["--lr", "1\n2"], r"--lr '1\n2': must be a number"),
        (["--lr-decay-style", "a\u2028b"], r"--lr-decay-style 'a\u2028b': not one of constant, linear, cosine"),
        (["--seed=1\x85x"], r"--seed '1\x85x': must be a whole number"),
        (["--lr", "nan"], "--lr nan: must be at least 0"),
        (["--lr", "inf"], "--lr inf: must be a finite number"),
        (["--rollout-batch-size", "1.5"], "--rollout-batch-size 1.5: must be a whole number"),
        (["--ray-address", "auto"], "--ray-address auto: must be host:port of a Ray head, with a port up to 65535"),
        (
            ["--ray-address", "h:99999"],
            "--ray-address h:99999: must be host:port of a Ray head, with a port up to 65535",
        ),
        (["--rollout-batch-size", "0"], "--rollout-batch-size 0: must be at least 1"),
        (["--rollout-batch-size", "none"], "--rollout-batch-size none: must be a whole number"),
        (["--rollout-top-p", "1.5"], "--rollout-top-p 1.5: must be above 0 and at most 1"),
        (["--lr-decay-style", "square"], "--lr-decay-style square: not one of constant, linear, cosine"),
        (["--wandb-group", ""], "--wandb-group needs a value, and was given an empty one"),
        (["--rollout-stop-token-ids", "1", "x"], "--rollout-stop-token-ids x: must be a whole number"),
        (["--lr", "1", "--lr", "2"], "--lr is given 2 times (1, 2); give it once"),
        (["--bf16", "--no-bf16"], "--bf16 is given 2 times (true, false); give it once"),
        (["--algorithm", "grpo", "--algorithm", "sft"], "--algorithm is given 2 times (grpo, sft); give it once"),
        (["--seed"], "--seed needs a value, and was given none"),
        (["--bf16=true"], "--bf16 takes no value; give --bf16 or --no-bf16"),
        (["--lr", "1e-6", "fast"], "'fast' stands alone; values follow their flag, as in --lr 1e-6"),
        (["--bf16", "--fp16"], "--bf16 and --fp16 exclude each other; give one"),
        (["--num-epoch", "2"], "--num-rollout and --num-epoch exclude each other; give one"),
    ],
)
def test_a_wrong_value_is_named_with_its_flag(words: list[str], finding: str) -> None:
    assert refusal([*FSDP, *words]) == [finding]


@pytest.mark.parametrize(
    ("words", "finding"),
    [
        (["--learning-rate", "1"], "unknown flag --learning-rate; `drivetrain train --help` lists all"),
        (["--lrr", "1"], "unknown flag --lrr; did you mean --lr?"),
        (["--lrr=1"], "unknown flag --lrr; did you mean --lr?"),
        (["-lr", "1"], "unknown flag -lr; did you mean --lr?"),
        (["--global-batch", "1"], "unknown flag --global-batch; did you mean --global-batch-size?"),
        (["--global_batch_size", "1"], "unknown flag --global_batch_size; did you mean --global-batch-size?"),
        (["--LR", "1"], "unknown flag --LR; did you mean --lr?"),
        (["--no-use-wandbb"], "unknown flag --no-use-wandbb; did you mean --no-use-wandb?"),
        (["--print-confg"], "unknown flag --print-confg; did you mean --print-config?"),
        (
            ["--algorithm", "sft", "--eps-clip", "0.2"],
            "--eps-clip belongs to algorithm 'grpo', but this run uses 'sft'; drop it, or choose --algorithm grpo",
        ),
        (
            ["--algorithm", "sft", "--no-use-kl-loss"],
            "--no-use-kl-loss belongs to algorithm 'grpo', but this run uses 'sft'; "
            "drop it, or choose --algorithm grpo",
        ),
    ],
)
def test_an_unknown_flag_gets_a_suggestion_or_its_owner(words: list[str], finding: str) -> None:
    assert refusal([*FSDP, *words]) == [finding]


def test_everything_wrong_is_said_at_once(tmp_path: Path) -> None:
    file = write(tmp_path / "c.toml", 'lr = "high"\nrollout-top-p = 2.0\neps-clp = 1')
    found = refusal(
        ["--train-backend", "fsdp", "--config", file, "--sed", "1", "--n-samples-per-prompt", "0", "--fp16", "--bf16"],
        {"DRIVETRAIN_SAVES": "x", "DRIVETRAIN_GRAD_CLIP": "-1"},
    )
    assert found == [
        f"unknown key eps-clp; did you mean eps-clip? (in {file})",
        "unknown environment variable DRIVETRAIN_SAVES; did you mean DRIVETRAIN_SAVE?",
        "unknown flag --sed; did you mean --seed?",
        f"--lr 'high': must be a number (in {file})",
        f"--rollout-top-p 2.0: must be above 0 and at most 1 (in {file})",
        "--grad-clip -1.0: must be at least 0 (in DRIVETRAIN_GRAD_CLIP)",
        "--n-samples-per-prompt 0: must be at least 1",
        "--hf-checkpoint is required: Hugging Face model folder to train (config, safetensors, tokenizer)",
        "--prompt-data is required: training prompts, .jsonl or .parquet",
        "--save is required: folder of the run: checkpoints, metrics, configuration; one that holds the run already "
        "resumes it",
        "give --num-rollout N or --num-epoch N",
    ]


def test_a_plugin_that_is_not_installed_is_named_with_those_that_are() -> None:
    with pytest.raises(NotInstalledError, match=r"algorithm 'ppo' is not installed \(installed: grpo, opd, sft\)"):
        read_request([*FSDP, "--algorithm", "ppo"], {})


# -- sources -----------------------------------------------------------------------------------------------------------


RECIPE = """
description = "for tests"
seed = 1
lr = 1e-1
grad-clip = 1.5
weight-decay = 0.5
algorithm = "sft"
"""


def test_flags_win_over_variables_over_the_file_over_the_recipe(tmp_path: Path) -> None:
    write(tmp_path / "tiny.toml", RECIPE)
    file = write(tmp_path / "c.toml", "lr = 1e-2\ngrad-clip = 2\nweight-decay = 0.25")
    config = config_of(
        [*FSDP, "--recipe", "tiny", "--config", file, "--weight-decay", "0"],
        {"DRIVETRAIN_GRAD_CLIP": "3", "DRIVETRAIN_WEIGHT_DECAY": "0.125", "HOME": "/"},
        tmp_path,
    )
    read = config.train.seed, config.train.lr, config.train.grad_clip, config.train.weight_decay, config.train.min_lr
    assert read == (1, 1e-2, 3.0, 0.0, 0.0)
    assert {name: config.sources[name] for name in ("seed", "lr", "grad_clip", "weight_decay", "min_lr")} == {
        "seed": "recipe tiny",
        "lr": file,
        "grad_clip": "DRIVETRAIN_GRAD_CLIP",
        "weight_decay": "flag",
        "min_lr": "default",
    }
    assert (config.algorithm.name, config.sources["algorithm"]) == ("sft", "recipe tiny")
    assert config.sources["rollout_engine"] == "default"


def test_the_selection_has_the_same_precedence(tmp_path: Path) -> None:
    write(tmp_path / "tiny.toml", RECIPE)
    file = write(tmp_path / "c.toml", 'algorithm = "grpo"')
    start = [*FSDP, "--recipe", "tiny"]
    assert config_of(start, {}, tmp_path).algorithm.name == "sft"
    assert config_of([*start, "--config", file], {}, tmp_path).algorithm.name == "grpo"
    environ = {"DRIVETRAIN_ALGORITHM": "sft"}
    assert config_of([*start, "--config", file], environ, tmp_path).algorithm.name == "sft"
    argv = [*start, "--config", file, "--algorithm", "grpo"]
    assert config_of(argv, environ, tmp_path).algorithm.name == "grpo"
    variable = {"DRIVETRAIN_TRAIN_BACKEND": "fsdp"}
    assert config_of(REQUIRED, variable).sources["train_backend"] == "DRIVETRAIN_TRAIN_BACKEND"


def test_variables_are_strict() -> None:
    environ = {
        "DRIVETRAIN_ROLLOUT_STOP": "'a b' c",
        "DRIVETRAIN_BF16": "1",
        "DRIVETRAIN_USE_WANDB": "False",
        "DRIVETRAIN_SAVE_INTERVAL": "none",
    }
    config = config_of(FSDP, environ)
    assert config.rollout.rollout_stop == ("a b", "c")
    assert (config.train.bf16, config.tracking.use_wandb, config.run_folder.save_interval) == (True, False, None)
    assert refusal(
        FSDP,
        {
            "DRIVETRAIN_BF16": "maybe",
            "DRIVETRAIN_CONFIG": "c.toml",
            "DRIVETRAIN_LR": "",
            "DRIVETRAIN_ROLLOUT_STOP": "'a",
            "DRIVETRAIN_X": "1",
        },
    ) == [
        "DRIVETRAIN_CONFIG can only be given as the flag --config",
        "unknown environment variable DRIVETRAIN_X; `drivetrain train --help` lists all",
        "--bf16 maybe: must be true or false (in DRIVETRAIN_BF16)",
        "--lr needs a value, and was given an empty one (in DRIVETRAIN_LR)",
        "--rollout-stop 'a: No closing quotation (in DRIVETRAIN_ROLLOUT_STOP)",
    ]


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("lr_warmup_iters = 3", "unknown key lr_warmup_iters; did you mean lr-warmup-iters?"),
        ("[train]\nlr = 1", "table [train]: options stand at the top level, outside tables"),
        ('recipe = "quickstart"', "recipe can only be given as the flag --recipe"),
        ("lr = true", "--lr True: must be a number"),
        ("seed = 1.0", "--seed 1.0: must be a whole number"),
        ("bf16 = 1", "--bf16 1: must be true or false"),
        ('rollout-stop = "a"', "--rollout-stop 'a': must be a list, each item text"),
        ('rollout-stop = ["a", 1]', "--rollout-stop 1: must be text"),
        ('reward = ""', "--reward needs a value, and was given an empty one"),
        (r'reward = "a\u0000"', r"--reward 'a\x00': must not contain the character NUL"),
        (f"lr = 1{'0' * 400}", "--lr: an integer of that size is no finite number"),
        ("lr = inf", "--lr inf: must be a finite number"),
    ],
)
def test_file_keys_are_strict(tmp_path: Path, text: str, finding: str) -> None:
    file = write(tmp_path / "c.toml", text)
    assert refusal([*FSDP, "--config", file]) == [f"{finding} (in {file})"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.toml", b"lr = 1\nlr = 2", "Cannot overwrite a value (at "),
        ("c.toml", b"lr = ", "Invalid value (at "),
        ("c.toml", b"lr = '\xff'", "can't decode byte 0xff"),
        ("c.toml", b"a = " + b"[" * 5000, "recursion"),
        ("c.json", b'{"lr": 1, "lr": 2}', "lr given twice"),
        ("c.json", b"[1]", "must be a table of options, found list"),
        ("c.yaml", b"lr: 1", "must end in .toml or .json"),
        ("absent.toml", None, "No such file or directory"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    (found,) = refusal([*FSDP, "--config", str(tmp_path / name)])
    assert found.startswith(f"--config {tmp_path / name}: ")
    assert message in found


def test_an_unknown_recipe_is_named_with_those_there_are(tmp_path: Path) -> None:
    write(tmp_path / "tiny.toml", RECIPE)
    assert refusal([*FSDP, "--recipe", "tinny"], {}, tmp_path) == ["--recipe tinny: no such recipe; did you mean tiny?"]
    assert refusal([*FSDP, "--recipe", "x"], {}, tmp_path) == ["--recipe x: no such recipe; there are: tiny"]


def refusal_of_file(path: Path, text: str, *flags: str) -> list[str]:
    return refusal([*FSDP, "--config", write(path, text), *flags])


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('reward = "evil:run"', "--reward evil:run"),
        ('custom-generate = "evil:run"', "--custom-generate evil:run"),
        ("trust-remote-code = true", "--trust-remote-code"),
    ],
)
def test_what_runs_code_is_taken_from_the_command_line_only(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "run.toml"
    finding = f"{word} runs code, so that only the command line may ask for it; add {word}"
    assert refusal_of_file(path, text) == [f"{finding} (in {path})"]
    # the very words that the message asks for
    config = config_of([*FSDP, "--config", str(path), *word.split()])
    assert config.sources[text.partition(" ")[0].replace("-", "_")] == "flag"
    key, _, value = text.partition(" = ")
    variable = "DRIVETRAIN_" + key.upper().replace("-", "_")
    assert refusal(FSDP, {variable: value.strip('"')}) == [f"{finding} (in {variable})"]


def test_what_runs_no_code_is_taken_from_anywhere(tmp_path: Path) -> None:
    text = 'reward = "exact"\ncustom-generate = "none"\ntrust-remote-code = false\n'
    config = config_of([*FSDP, "--config", write(tmp_path / "run.toml", text)])
    assert (config.rollout.reward, config.rollout.custom_generate, config.train.trust_remote_code) == (
        "exact",
        None,
        False,
    )


@pytest.mark.parametrize(
    ("words", "finding"),
    [
        (["--kl-loss-coef", "0.1"], "--kl-loss-coef acts only with --use-kl-loss; give both or neither"),
        (["--tis-clip", "3"], "--tis-clip acts only with --use-tis; give both or neither"),
        (["--wandb-project", "p"], "--wandb-project acts only with --use-wandb; give both or neither"),
        (["--loss-scale-window", "7"], "--loss-scale-window acts only with --fp16; give both or neither"),
        (
            ["--skip-eval-before-train"],
            "--skip-eval-before-train acts only with --eval-prompt-data; give both or neither",
        ),
    ],
)
def test_a_flag_that_nothing_would_read_is_refused(words: list[str], finding: str) -> None:
    assert refusal([*FSDP, *words]) == [finding]


def test_files_and_variables_may_hold_what_this_run_does_not_use(tmp_path: Path) -> None:
    text = 'use-wandb = true\nwandb-project = "p"\n'
    assert config_of(FSDP, {"DRIVETRAIN_WANDB_PROJECT": "team"}).tracking.wandb_project == "team"
    config = config_of([*FSDP, "--config", write(tmp_path / "run.toml", text), "--no-use-wandb"])
    assert (config.tracking.use_wandb, config.tracking.wandb_project) == (False, "p")


# -- stages of a recipe ------------------------------------------------------------------------------------------------

STAGED = """
description = "warm up with sft, then grpo"
make = "something"
num-rollout = 20
n-samples-per-prompt = 4
eps-clip = 0.3

[warmup]
algorithm = "sft"
num-rollout = 5
n-samples-per-prompt = 1
label-key = "answer"
"""


def test_a_recipe_trains_in_two_stages_with_what_was_made_for_it(tmp_path: Path) -> None:
    write(tmp_path / "staged.toml", STAGED)
    argv = ["--train-backend", "fsdp", "--recipe", "staged", "--num-rollout", "7", "--eps-clip", "0.1", "--seed", "5"]
    request = read_request(argv, {}, tmp_path)
    assert request.recipe is not None
    assert (request.recipe.make, request.save) == ("something", Path("runs/staged"))
    made = {"hf_checkpoint": tmp_path / "model", "prompt_data": "made.jsonl"}

    warmup = build_config(request, stage=Stage.WARMUP, made=made, overrides={"save": "elsewhere"})
    assert (warmup.algorithm.name, warmup.loop.num_rollout, warmup.rollout.n_samples_per_prompt) == ("sft", 5, 1)
    assert (warmup.data.label_key, warmup.train.seed, warmup.run_folder.save) == ("answer", 5, "elsewhere")
    assert "eps_clip" not in warmup.sources

    main = build_config(request, made=made, overrides={"hf_checkpoint": "warm"})
    assert (main.algorithm.name, main.loop.num_rollout, main.rollout.n_samples_per_prompt) == ("grpo", 7, 4)
    assert main.data.label_key is None
    assert main.algorithm_options.eps_clip == 0.1  # type: ignore[attr-defined]
    assert (main.train.hf_checkpoint, main.data.prompt_data) == ("warm", "made.jsonl")
    assert main.sources["prompt_data"] == "recipe staged"


def test_the_users_own_value_wins_over_the_one_that_was_made(tmp_path: Path) -> None:
    write(tmp_path / "staged.toml", STAGED)
    request = read_request(["--recipe", "staged", "--hf-checkpoint", "mine"], {}, tmp_path)
    config = build_config(request, made={"hf_checkpoint": "made", "prompt_data": "made.jsonl"})
    assert (config.train.hf_checkpoint, config.sources["hf_checkpoint"]) == ("mine", "flag")


def test_what_a_maker_leaves_out_or_misnames_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "staged.toml", STAGED)
    request = read_request(["--recipe", "staged"], {}, tmp_path)
    with pytest.raises(ConfigError, match=r"^--prompt-data is required"):
        build_config(request, made={"hf_checkpoint": "made"})
    with pytest.raises(ConfigError, match="recipe staged sets hf_chekpoint, which this run has no option for"):
        build_config(request, made={"hf_chekpoint": "made"})


def test_a_wrong_key_in_the_warmup_table_is_found_when_the_recipe_is_read(tmp_path: Path) -> None:
    write(tmp_path / "staged.toml", STAGED + "eps-clip = 0.2\nlr = -1.0\n")
    assert refusal(["--recipe", "staged"], {}, tmp_path) == [
        "eps-clip belongs to algorithm 'grpo', but this run uses 'sft'; drop it, or choose --algorithm grpo "
        "(in recipe staged)",
        "--lr -1.0: must be at least 0 (in recipe staged)",
    ]


# -- showing and saving ------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    prompt=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1),
    stops=st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1)),
    lr=st.floats(min_value=0, max_value=1e300),
)
def test_what_print_config_shows_means_the_same_when_read_back(
    tmp_path_factory: pytest.TempPathFactory, prompt: str, stops: list[str], lr: float
) -> None:
    first = read_request(
        [*FSDP, f"--system-prompt={prompt}", f"--lr={lr!r}", *(f"--rollout-stop={one}" for one in stops)], {}
    )
    file = write(tmp_path_factory.mktemp("shown") / "c.toml", format_request(first))
    assert config_values(config_of(["--config", file])) == config_values(build_config(first))


def test_a_saved_configuration_is_accepted_back_as_json(tmp_path: Path) -> None:
    first = config_of([*FSDP, "--algorithm", "sft", "--rollout-stop", "x", "--lr-decay-iters", "9", "--fp32"])
    file = write(tmp_path / "config.json", json.dumps(config_values(first)))
    again = config_of(["--config", file])
    assert config_values(again) == config_values(first)
    assert set(again.sources.values()) == {file}


def test_a_saved_configuration_names_no_code_by_itself(tmp_path: Path) -> None:
    saved = config_values(config_of([*FSDP, "--reward", "my_rewards:score"]))
    path = write(tmp_path / "config.json", json.dumps(saved))
    assert refusal(["--config", path]) == [
        "--reward my_rewards:score runs code, so that only the command line may ask for it; "
        f"add --reward my_rewards:score (in {path})"
    ]
    assert config_values(config_of(["--config", path, "--reward", "my_rewards:score"])) == saved


def test_print_config_names_the_source_of_each_value_and_what_is_still_to_be_made(tmp_path: Path) -> None:
    write(tmp_path / "staged.toml", STAGED)
    shown = format_request(read_request(["--recipe", "staged", "--lr", "0.5", "--print-config"], {}, tmp_path))
    lines = shown.splitlines()
    assert "lr = 0.5  # flag" in lines
    assert "eps-clip = 0.3  # recipe staged" in lines
    assert 'algorithm = "grpo"  # default' in lines
    assert "# hf-checkpoint is made by recipe staged when it runs" in lines
    assert "# eval-prompt-data is not set" in lines
    assert "#   num-rollout = 5" in lines
    assert tomllib.loads(shown)["num-rollout"] == 20
