"""Rewards: what counts as the same number, and failures that name sample and function."""

import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain_backend_api import ConfigError, DataError
from drivetrain_backend_api.batch import SampleStatus
from drivetrain_launcher.data import Prompt
from drivetrain_launcher.rewards import Reward, RewardInput, answer_number, label_number, load_function, load_reward


def sample(response: str, label: str | None = None, *, index: int = 3, prompt: str = "What is it?") -> RewardInput:
    return RewardInput(
        index=index,
        prompt=prompt,
        response=response,
        label=label,
        response_length=len(response),
        status=SampleStatus.COMPLETED,
    )


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current directory whose modules can be imported, as for somebody who types `drivetrain` in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


# -- math -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "number"),
    [
        ("The answer is 42.", "42"),
        ("3 + 4 = 7, so it is 7", "7"),
        ("it costs $1,234.50 in all", "1234.5"),
        ("about 12,345,678", "12345678"),
        ("1,2,3", "3"),
        ("50%", "50"),
        (r"50\% of \$80", "80"),
        ("-5", "-5"),
        ("x = -5", "-5"),
        ("\N{MINUS SIGN}5", "-5"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("7-5", "5"),
        ("f(2)-5", "5"),
        ("between 10-20", "20"),
        (".5", "1/2"),
        ("-0.25", "-1/4"),
        ("3/4", "3/4"),
        ("3 / 4 of it", "3/4"),
        ("-6/8", "-3/4"),
        (r"\frac{3}{4}", "3/4"),
        (r"-\dfrac{ 10 }{ -4 }", "5/2"),
        (r"\boxed{12} although 13 is close", "12"),
        (r"\boxed{1}, no, \boxed{x = \frac{1}{3}}", "1/3"),
        (r"so \boxed{\text{a } 9} and \boxed{8", "9"),
        (r"12{,}000 or 12\,000", "12000"),
        ("1/0", None),
        ("no number", None),
        (r"\boxed{none} 5", None),
        ("", None),
        ("9" * 5000, None),
    ],
)
def test_the_answer_of_a_response(response: str, number: str | None) -> None:
    assert answer_number(response) == (None if number is None else Fraction(number))


@pytest.mark.parametrize(
    ("label", "number"),
    [
        ("She has 16 - 3 = <<16-3=13>>13 eggs.\n#### 13", "13"),
        ("#### 1,080", "1080"),
        ("18", "18"),
        (" $2.50 ", "5/2"),
        ("75%", "75"),
        (r"\frac{14}{3}", "14/3"),
        (r"so \boxed{-7}", "-7"),
        ("18 dollars", None),
        (r"2\sqrt{3}", None),
        ("3 or 4", None),
        ("Monday", None),
        ("", None),
    ],
)
def test_the_number_of_a_label(label: str, number: str | None) -> None:
    assert label_number(label) == (None if number is None else Fraction(number))


@given(st.fractions(max_denominator=10_000), st.sampled_from(["{}/{}", r"\frac{{{}}}{{{}}}", r"\boxed{{{}/{}}} 1"]))
def test_every_spelling_of_a_fraction_equals_itself_and_nothing_else(value: Fraction, spelling: str) -> None:
    text = spelling.format(value.numerator, value.denominator)
    assert answer_number(f"Therefore it is {text}") == value
    assert load_reward("math")(sample(text, label=f"{value.numerator}/{value.denominator}")) == 1.0
    assert load_reward("math")(sample(text, label=f"{value.numerator + 1}/{value.denominator}")) == 0.0


@given(st.integers(-(10**12), 10**12), st.integers(0, 6))
def test_decimals_and_thousands_separators_are_exact(digits: int, places: int) -> None:
    value = Fraction(digits, 10**places)
    sign, magnitude = "-" * (digits < 0), abs(digits)
    whole, rest = divmod(magnitude, 10**places)
    tail = f".{rest:0{places}d}" if places else ""
    assert answer_number(f"it is {sign}{whole}{tail}") == value
    assert answer_number(f"it is {sign}${whole:,}{tail}.") == value


def test_a_response_of_nothing_but_openings_is_read_in_linear_time() -> None:
    # A quadratic search would take minutes, and the suite's deadline would end it.
    assert answer_number(r"\boxed{" * 200_000) is None
    assert answer_number(r"\frac{1" * 50_000) == 1


def test_math_refuses_labels_it_cannot_compare_before_the_run() -> None:
    def prompt(label: str | None) -> Prompt:
        return Prompt(index=0, source="train.jsonl:4", prompt_ids=(1,), text="Which day?", label=label)

    load_reward("math").check_labels([prompt("3"), prompt("#### 4")])
    with pytest.raises(DataError, match=r"train\.jsonl:4 \(prompt 'Which day\?'\): label 'Monday' is not a number"):
        load_reward("math").check_labels([prompt("3"), prompt("Monday")])
    for name in ("math", "exact"):
        with pytest.raises(DataError, match="--label-key KEY"):
            load_reward(name).check_labels([prompt(None)])
    with pytest.raises(DataError, match=r"--reward math on sample 3 \(prompt 'What is it\?'\)"):
        load_reward("math")(sample("5", "Monday"))


# -- exact ------------------------------------------------------------------------------------------------------------


def test_exact_compares_text_and_forgives_outer_white_space() -> None:
    reward = load_reward("exact")
    assert reward(sample(" yes\n", "yes")) == 1.0
    assert reward(sample("Yes", "yes")) == 0.0
    assert reward(sample("", "")) == 1.0


# -- module:function --------------------------------------------------------------------------------------------------


def test_none_is_zero_for_everything_and_needs_no_label() -> None:
    reward = load_reward("none")
    assert reward(sample("42")) == reward(sample("42", "42")) == 0
    reward.check_labels([Prompt(index=0, source="p:1", prompt_ids=(1,), text="?")])


def test_a_function_of_the_current_directory_sees_the_sample(here: Path) -> None:
    (here / "my_reward.py").write_text(
        "def score(sample):\n    return len(sample.response) + 10 * sample.response_length + len(sample.label)\n"
        "def table(sample):\n    return {'quality': 0.5, 'cost': -2}\n"
    )
    assert load_reward("my_reward:score")(sample("abc", "xy")) == 35.0
    assert load_reward("my_reward:table", key="cost")(sample("")) == -2.0
    with pytest.raises(DataError, match=r"keys: quality, cost\); choose one with --reward-key"):
        load_reward("my_reward:table")(sample(""))
    with pytest.raises(DataError, match="without --reward-key speed"):
        load_reward("my_reward:table", key="speed")(sample(""))
    with pytest.raises(DataError, match="leave --reward-key out"):
        load_reward("my_reward:score", key="cost")(sample("", ""))


@pytest.mark.parametrize("result", [float("nan"), float("inf"), "1.0", None, [1.0]])
def test_what_is_no_finite_number_is_refused_with_the_sample(result: object) -> None:
    reward = Reward(name="mine:bad", function=lambda _: result)  # type: ignore[arg-type, return-value]
    with pytest.raises(DataError, match=r"mine:bad on sample 8 .*must return a finite number"):
        reward(sample("", index=8))


def test_a_failing_function_is_named_with_its_sample_and_cause() -> None:
    def divide(_: RewardInput) -> float:
        return 1 / 0

    with pytest.raises(DataError, match=r"mine:divide on sample 3 \(prompt 'a{57}\.\.\.'\) failed: ZeroDivi") as caught:
        Reward(name="mine:divide", function=divide)(sample("", prompt="a" * 100))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere", "must be module:function"),
        ("nowhere:", "must be module:function"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("broken:f", "ValueError: on import"),
        ("fine:missing", "no attribute 'missing'"),
        ("fine:number", "is a int, not a function"),
    ],
)
def test_a_function_that_cannot_be_loaded_says_why(here: Path, path: str, message: str) -> None:
    (here / "broken.py").write_text("raise ValueError('on import')\n")
    (here / "fine.py").write_text("number = 3\n")
    with pytest.raises(ConfigError, match=f"--custom-generate {path}: .*{message}"):
        load_function(path, flag="--custom-generate")


def test_unknown_names_and_useless_keys_are_refused() -> None:
    with pytest.raises(ConfigError, match="not one of math, exact, none, and not of the form module:function"):
        load_reward("maths")
    with pytest.raises(ConfigError, match="leave --reward-key out"):
        load_reward("math", key="x")


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("async def score(sample):\n    return 1.0\n", "is an async or generator function"),
        ("def score(sample):\n    yield 1.0\n", "is an async or generator function"),
        ("def score():\n    return 1.0\n", "cannot be called with one sample"),
        ("def score(a, b):\n    return 1.0\n", "cannot be called with one sample"),
    ],
)
def test_a_function_that_cannot_be_a_reward_is_refused_before_it_runs(
    source: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"reward_{abs(hash(source))}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=problem):
        load_reward(f"{name}:score")


def test_an_import_that_changes_the_folder_leaves_the_runs_own_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere_rewards.py").write_text("import os\nos.chdir('/')\ndef score(sample):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    load_reward("elsewhere_rewards:score")
    assert Path.cwd() == tmp_path
