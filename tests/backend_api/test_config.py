"""Options declared by dataclasses: what they are derived to, and what values they refuse."""

from dataclasses import dataclass
from typing import Any, Literal

import pytest

from drivetrain_backend_api import ConfigError, OptionGroup, TrainConfig, option, options


@dataclass(frozen=True, kw_only=True)
class Base(OptionGroup):
    needed: str = option(help="must be given", metavar="DIR")
    ratio: float = option(0.5, help="in between", minimum=0, maximum=1)


@dataclass(frozen=True, kw_only=True)
class Derived(Base):
    how_many: int | None = option(None, help="a count", above=0)
    names: tuple[str, ...] = option((), help="several", choices=("a", "b"))
    kind: Literal["x", "y"] = option("x", help="one of two")
    switch: bool = option(False, help="on or off")

    def findings(self) -> list[str]:
        return ["--switch needs --how-many"] if self.switch and self.how_many is None else []


def test_options_are_derived_from_fields_with_their_owner() -> None:
    found = {one.name: one for one in options(Derived)}
    assert list(found) == ["needed", "ratio", "how_many", "names", "kind", "switch"]
    assert [one.group for one in found.values()] == ["Base"] * 2 + ["Derived"] * 4
    assert found["how_many"].flag == "--how-many"
    assert [name for name, one in found.items() if one.required] == ["needed"]
    assert [(one.type, one.many, one.optional) for one in found.values()] == [
        (str, False, False),
        (float, False, False),
        (int, False, True),
        (str, True, False),
        (str, False, False),
        (bool, False, False),
    ]
    assert found["kind"].choices == ("x", "y")
    assert found["needed"].metavar == "DIR"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ratio": -0.1}, "--ratio -0.1: must be at least 0 and at most 1"),
        ({"ratio": 1.5}, "--ratio 1.5: must be at least 0 and at most 1"),
        ({"ratio": float("nan")}, "--ratio nan: must be at least 0 and at most 1"),
        ({"ratio": None}, "--ratio needs a value"),
        ({"how_many": 0}, "--how-many 0: must be above 0"),
        ({"how_many": float("inf")}, "--how-many inf: must be a finite number"),
        ({"names": ("a", "c")}, "--names c: not one of a, b"),
        ({"kind": "z"}, "--kind z: not one of x, y"),
        ({"switch": True}, "--switch needs --how-many"),
    ],
)
def test_values_out_of_range_name_flag_value_and_range(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Derived(needed="x", **values)
    assert str(caught.value) == message


def test_all_findings_come_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Derived(needed="x", ratio=2, kind="z", switch=True)  # type: ignore[arg-type]
    assert str(caught.value).splitlines() == [
        "--ratio 2: must be at least 0 and at most 1",
        "--kind z: not one of x, y",
        "--switch needs --how-many",
    ]


def test_a_field_without_a_description_is_a_programming_error() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Careless(OptionGroup):
        forgotten: int = 3

    with pytest.raises(TypeError, match=r"Careless\.forgotten is not declared with option"):
        options(Careless)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bf16": True, "fp32": True}, "--bf16 and --fp32 exclude each other"),
        ({"use_dynamic_batch_size": True}, "--use-dynamic-batch-size needs --max-tokens-per-gpu"),
        ({"max_tokens_per_gpu": 10}, "acts only with --use-dynamic-batch-size"),
        ({"lr": 1e-6, "min_lr": 1e-3}, "--min-lr 0.001 is above --lr 1e-06"),
        ({"lr_decay_iters": 5, "lr_warmup_iters": 5}, "--lr-decay-iters 5 must be above --lr-warmup-iters 5"),
    ],
)
def test_train_options_that_contradict_each_other_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig(hf_checkpoint="model", **values)


def test_precision_and_temperature_have_their_defaults() -> None:
    assert TrainConfig(hf_checkpoint="m").precision == "bf16"
    assert TrainConfig(hf_checkpoint="m", fp16=True).precision == "fp16"
    assert TrainConfig(hf_checkpoint="m", fp32=True).precision == "fp32"
    assert TrainConfig(hf_checkpoint="m", rollout_temperature=0.0).log_probs_temperature == 1.0
    assert TrainConfig(hf_checkpoint="m", rollout_temperature=0.6).log_probs_temperature == 0.6


@pytest.mark.parametrize("value", [2**63, -(2**63), 10**5000], ids=["large", "negative", "unprintable"])
def test_an_integer_of_more_than_64_bits_is_refused_without_being_printed(value: int) -> None:
    with pytest.raises(ConfigError) as caught:
        Derived(needed="x", how_many=value)
    assert str(caught.value) == "--how-many: must be a whole number of less than 64 bits"


def test_an_option_can_only_act_with_one_beside_it() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Lonely(OptionGroup):
        factor: int = option(1, help="a factor", acts_with="switched")

    with pytest.raises(TypeError, match=r"Lonely\.factor acts with 'switched', which is no option beside it"):
        options(Lonely)


def test_code_is_named_by_a_function_path_or_by_true_also_in_a_list() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Running(OptionGroup):
        function: str | None = option(None, help="a function", runs_code=True)
        functions: tuple[str, ...] = option((), help="several", runs_code=True)
        trust: bool = option(False, help="run it", runs_code=True)
        plain: str = option("a:b", help="no code")

    found = {one.name: one for one in options(Running)}
    assert [found["function"].names_code(one) for one in (None, "math", "m:f")] == [False, False, True]
    assert [found["functions"].names_code(one) for one in ((), ("a",), ("a", "m:f"))] == [False, False, True]
    assert [found["trust"].names_code(one) for one in (False, True)] == [False, True]
    assert not found["plain"].names_code("m:f")


def test_an_alias_that_is_another_options_name_is_a_mistake_of_its_author() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Clashing(OptionGroup):
        one: int = option(1, help="first", aliases=("uno", "two"))
        two: int = option(2, help="second")

    @dataclass(frozen=True, kw_only=True)
    class Twice(OptionGroup):
        one: int = option(1, help="first", aliases=("number",))
        two: int = option(2, help="second", aliases=("number",))

    for group, message in ((Clashing, "one has the alias 'two'"), (Twice, "two has the alias 'number'")):
        with pytest.raises(TypeError, match=rf"\.{message}, which is taken already"):
            options(group)


def test_an_option_carries_its_aliases() -> None:
    found = {one.name: one for one in options(TrainConfig)}
    assert found["grad_clip"].aliases == ("clip_grad",)
    assert found["grad_clip"].flag == "--grad-clip"
    assert found["lr"].aliases == ()
