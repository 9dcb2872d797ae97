"""Rewards: a number for each response. `math`, `exact` and `none` ship here; "module:function" names any other.

Knows nothing of engines, tokenizers or training, and imports no torch.
"""

import importlib
import inspect
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any, SupportsFloat

from drivetrain_backend_api import ConfigError, DataError
from drivetrain_backend_api.errors import in_one_line
from drivetrain_launcher.user_code import describe_failure

if TYPE_CHECKING:
    from drivetrain_backend_api.batch import SampleStatus
    from drivetrain_launcher.data import Prompt


@dataclass(frozen=True, kw_only=True)
class RewardInput:
    """One finished sample, as a reward function sees it.

    Attributes:
        index: of the sample in the rollout.
        prompt: text that the model read, chat template applied.
        messages: the chat messages that the prompt was made from; empty where it was plain text.
        response: decoded text that the model wrote, special tokens left out.
        label: the row's label, or None without --label-key.
        metadata: the row's table, empty without --metadata-key.
        response_length: tokens of the response.
        status: how the generation ended.
    """

    index: int
    prompt: str
    messages: tuple[Mapping[str, Any], ...] = ()
    response: str
    label: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    response_length: int
    status: "SampleStatus"


RewardFunction = Callable[[RewardInput], float | Mapping[str, float]]
"""What "module:function" must name: a number, or a table of numbers of which --reward-key chooses one."""


@dataclass(frozen=True, kw_only=True)
class Reward:
    """A reward function whose failures name the sample. Call it with a `RewardInput`.

    Attributes:
        name: what --reward said.
        function: the function itself.
        key: the entry to take where the function returns a table.
        label_problem: says why a label cannot be compared with, None when it can.
    """

    name: str
    function: RewardFunction
    key: str | None = None
    label_problem: Callable[[str | None], str | None] = field(default=lambda label: None)

    def __call__(self, sample: RewardInput) -> float:
        """Compute the reward of one sample.

        Raises:
            DataError: the function failed (the cause is chained) or returned no finite number; names the sample.
        """
        where = f"--reward {self.name} on sample {sample.index} (prompt {_beginning(sample.prompt)})"
        try:
            result = self.function(sample)
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            raise DataError(f"{where} failed: {describe_failure(error)}") from error
        value = _finite(self._chosen(result, where))
        if value is None:
            raise DataError(f"{where} returned {result!r}; it must return a finite number")
        return value

    def check_labels(self, prompts: "Iterable[Prompt]") -> None:
        """Refuse, before a run starts, prompts whose label this reward cannot compare with.

        Raises:
            DataError: names the first such prompt.
        """
        for prompt in prompts:
            if problem := self.label_problem(prompt.label):
                raise DataError(f"--reward {self.name}, {prompt.source} (prompt {_beginning(prompt.text)}): {problem}")

    def _chosen(self, result: Any, where: str) -> Any:
        if isinstance(result, Mapping):
            keys = ", ".join(map(str, result)) or "none"
            if self.key is None:
                raise DataError(f"{where} returned a table (keys: {keys}); choose one with --reward-key")
            if self.key not in result:
                raise DataError(f"{where} returned a table without --reward-key {self.key} (keys: {keys})")
            return result[self.key]
        if self.key is not None:
            raise DataError(f"{where} returned {result!r}, not a table; leave --reward-key out")
        return result


def load_reward(name: str, *, key: str | None = None) -> Reward:
    """Return the reward that --reward names: `math`, `exact`, `none` or "module:function".

    Args:
        name: what --reward said.
        key: what --reward-key said.

    Raises:
        ConfigError: there is no such function, or its import failed (the cause is chained).
    """
    if name in _BUILT_IN:
        if key is not None:
            raise ConfigError(f"--reward-key {key}: --reward {name} returns a single number; leave --reward-key out")
        return _BUILT_IN[name]
    if ":" not in name:
        raise ConfigError(f"--reward {name}: not one of {', '.join(_BUILT_IN)}, and not of the form module:function")
    function = load_function(name, flag="--reward")
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise ConfigError(
            f"--reward {name}: is an async or generator function; it must be a plain `def function(sample)`"
        )
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ConfigError(f"--reward {name}: cannot be called with one sample ({error}); it must take one") from error
    except ValueError:  # a built-in that does not tell what it takes
        pass
    return Reward(name=name, function=function, key=key)


def load_function(path: str, *, flag: str) -> Callable[..., Any]:
    """Import the function that "module:function" names; modules of the current directory are found, as by `python -m`.

    Args:
        path: what the user gave.
        flag: where, for messages.

    Raises:
        ConfigError: there is no such function, or the import failed (the cause is chained).
    """
    module_name, _, function_name = path.partition(":")
    if not (module_name and function_name):
        raise ConfigError(f"{flag} {path}: must be module:function, for example my_rewards:score")
    here = os.getcwd()
    if not {"", here} & set(sys.path):
        sys.path.insert(0, here)
    try:
        if not all(part.isidentifier() for part in module_name.split(".")):
            raise ImportError("a module's name has letters, digits, underscores and dots, no path")
        function = importlib.import_module(module_name)
        for attribute in function_name.split("."):
            function = getattr(function, attribute)
    except (Exception, SystemExit) as error:  # an import may raise anything
        place = _place_in(module_name, error) or f"modules are searched from {here} and the environment"
        reason = in_one_line(error)
        raise ConfigError(f"{flag} {path}: {type(error).__name__}: {reason:.500} ({place})") from error
    finally:
        os.chdir(here)  # an import that goes elsewhere must not take the run's relative paths along
    if not callable(function):
        raise ConfigError(
            f"{flag} {path}: is a {type(function).__name__}, not a function; name one of the module's functions"
        )
    return function


def _place_in(module_name: str, error: BaseException) -> str | None:
    """Return "FILE:LINE" of the innermost frame of the module's own package, None where the error came before any."""
    package = module_name.partition(".")[0]
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).partition(".")[0] == package
    ]
    if not frames:
        return None
    file, line = frames[-1]
    return f"{os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file}:{line}"


# -- exact ------------------------------------------------------------------------------------------------------------


def exact_reward(sample: RewardInput) -> float:
    """Return 1 when response and label are the same text, outer white space aside; else 0."""
    return float(sample.label is not None and sample.response.strip() == sample.label.strip())


def _exact_label_problem(label: str | None) -> str | None:
    return "it needs a label; give --label-key KEY" if label is None else None


# -- none -------------------------------------------------------------------------------------------------------------


def no_reward(sample: RewardInput) -> float:
    """Return 0: for what learns from something else, and prompts without labels."""
    return 0.0


# -- math -------------------------------------------------------------------------------------------------------------

_MOST_DIGITS = 1000
"""Longer runs of digits are no answer, and Python refuses to convert very long ones."""

_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    rf"""
    (?P<sign> (?<![\d)}}]) [-+] )?            # after a digit or a bracket it is a subtraction
    (?: \$ (?P<inner_sign>[-+])? )?
    (?:
        \\[dt]?frac \s* \{{ \s* (?P<top>[-+]?(?:{_DECIMAL})) \s* \}} \s* \{{ \s* (?P<under>[-+]?(?:{_DECIMAL})) \s* \}}
      | (?P<whole>{_DECIMAL}) (?: \s? / \s? (?P<divisor>(?:{_DECIMAL})) )?
    )
    """,
    re.VERBOSE,
)


def math_reward(sample: RewardInput) -> float:
    r"""Return 1 when the response's answer equals the label's as a rational number; else 0.

    The answer is the number in the last \boxed{...}, or without one the last number of the text. Understood are signs,
    decimals, commas between thousands, $ and % (which are ignored: 50% is 50), a/b and \frac{a}{b}. In a label, what
    follows the last `####` counts (GSM8K, arXiv:2110.14168).
    """
    expected = label_number(sample.label or "")
    if expected is None:
        raise ValueError(_math_label_problem(sample.label))
    return float(answer_number(sample.response) == expected)


def answer_number(text: str) -> Fraction | None:
    r"""Return the answer that a text gives: the last number of its last \boxed{...}, else its last number."""
    text = _plain(text)
    boxed = _last_boxed(text)
    matches = list(_NUMBER.finditer(text if boxed is None else boxed))
    values = (_value(one) for one in reversed(matches))
    return next((one for one in values if one is not None), None)


def label_number(label: str) -> Fraction | None:
    r"""Return the number that a label is, after any `####` and inside any \boxed{...}; None when it is none."""
    text = _plain(label.rpartition("####")[2])
    boxed = _last_boxed(text)
    match = _NUMBER.fullmatch((text if boxed is None else boxed).strip().removesuffix(".").strip("$% "))
    return _value(match) if match else None


def _math_label_problem(label: str | None) -> str | None:
    if label is None:
        return "it needs a label; give --label-key KEY"
    if label_number(label) is None:
        return (
            f"label {_beginning(label)} is not a number; give --label-key of a column of numbers, --reward exact, or "
            "a function of your own with --reward module:function"
        )
    return None


def _plain(text: str) -> str:
    """Undo what typesetting does to numbers: the minus sign, and LaTeX's escapes and thin spaces."""
    text = text.replace("\N{MINUS SIGN}", "-").replace("{,}", ",")
    return re.sub(r"\\([$%])", r"\1", re.sub(r"\\[!,]", "", text))


def _last_boxed(text: str) -> str | None:
    r"""Return what stands in the last \boxed{...} that is closed, braces inside it balanced."""
    opened: list[int] = []
    last: tuple[int, int] | None = None
    for brace in re.finditer(r"(?:\\boxed)?\{|\}", text):
        if brace[0] != "}":
            opened.append(brace.end() if brace[0] != "{" else -1)
        elif opened and (begin := opened.pop()) > (last[0] if last else -1):
            last = begin, brace.start()
    return text[slice(*last)] if last else None


def _value(match: re.Match[str]) -> Fraction | None:
    top, under = match["top"] or match["whole"], match["under"] or match["divisor"] or "1"
    if len(top) + len(under) > _MOST_DIGITS:
        return None
    denominator = Fraction(under.replace(",", ""))
    if denominator == 0:
        return None
    negative = [match["sign"], match["inner_sign"]].count("-") == 1
    value = Fraction(top.replace(",", "")) / denominator
    return -value if negative else value


_BUILT_IN = {
    "math": Reward(name="math", function=math_reward, label_problem=_math_label_problem),
    "exact": Reward(name="exact", function=exact_reward, label_problem=_exact_label_problem),
    "none": Reward(name="none", function=no_reward),
}


def _finite(value: Any) -> float | None:
    if not isinstance(value, SupportsFloat):
        return None
    try:
        number = float(value)
    except (OverflowError, ValueError, TypeError, RuntimeError):  # too large, or a tensor of several elements
        return None
    return number if math.isfinite(number) else None


def _beginning(text: str) -> str:
    """Quote the first characters of a text."""
    return repr(text if len(text) <= 60 else text[:57] + "...")
