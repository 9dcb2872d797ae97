"""`ConformanceSuite`: the tests that any train backend must pass. Subclass it, and say which backend.

    class TestMine(ConformanceSuite):
        backend = "mine"

What the backend's capabilities claim decides which layouts and precisions are judged. Each test is one promise of the
contract, held against a plain single-process reference or against the backend's own undisturbed run.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import entry_points, version
from typing import Any, ClassVar

import pytest

from drivetrain_backend_api.discovery import TRAIN_BACKENDS, load_spec
from drivetrain_backend_api.errors import DrivetrainError
from drivetrain_backend_api.spec import BackendSpec, Capabilities
from drivetrain_backend_api.testing.cases import CASES
from drivetrain_backend_api.testing.claims import Claims
from drivetrain_backend_api.testing.damage import DAMAGES
from drivetrain_backend_api.testing.judge import Judge
from drivetrain_backend_api.testing.judging_contract import ContractTests
from drivetrain_backend_api.testing.judging_numbers import NumbersTests
from drivetrain_backend_api.testing.judging_state import SLEEPS, StateTests
from drivetrain_backend_api.testing.judging_weights import WeightsTests
from drivetrain_backend_api.testing.layouts import KINDS, Layout, claimed_layouts
from drivetrain_backend_api.testing.plugin import CLAIMS, FACTS, chosen_ranks
from drivetrain_backend_api.testing.ranks import Ranks

EXPORTED = ("qwen3-tied", "llama", "qwen2-tied")
"""Models whose exports are compared with `save_pretrained`: each architecture, tied and not."""

_USAGE = int(pytest.ExitCode.USAGE_ERROR)
_GUARD = "test_no_standard_test_was_removed_or_overridden"


class ConformanceSuite(NumbersTests, StateTests, WeightsTests, ContractTests):
    """All standard tests. Those of a subclass's own come on top.

    Attributes:
        backend: entry point name; None takes --train-backend.
        options: of the backend's configuration, in every run of the suite.
        world_sizes: numbers of ranks; --conformance-ranks takes their place.
        exceptions: standard test that the subclass removes (sets to None) or overrides -> the reason.
    """

    backend: ClassVar[str | None] = None
    options: ClassVar[Mapping[str, Any]] = {}
    world_sizes: ClassVar[tuple[int, ...]] = (1, 2, 4)
    exceptions: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls) -> None:
        """Refuse a subclass that changes the test which guards the others."""
        super().__init_subclass__()
        if _GUARD in vars(cls):
            raise TypeError(f"{cls.__name__} must leave {_GUARD} as it is")

    @pytest.fixture(scope="class")
    @classmethod
    def judge(cls, request: pytest.FixtureRequest) -> Iterator[Judge]:
        """Everything a test needs of the backend; its processes end with the class."""
        spec = _spec_of(cls, request.config)
        claims = Claims(spec.name)
        request.config.stash[CLAIMS].append(claims)
        request.config.stash[FACTS][spec.name] = _facts(cls, request.config, spec)
        environment = spec.worker_env(spec.config_class(hf_checkpoint="none", **cls.options))
        with Ranks(spec.name, environment) as ranks:
            yield Judge(spec, cls.options, ranks, claims)

    @pytest.fixture(autouse=True)
    def _name_the_test(self, judge: Judge, request: pytest.FixtureRequest) -> None:
        judge.test = request.node.originalname

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Draw layouts and precisions from what the backend claims."""
        spec = _spec_of(type(self), metafunc.config)
        layouts = _layouts(type(self), metafunc.config, spec.capabilities)
        name = metafunc.function.__name__
        if "source" in metafunc.fixturenames:
            pairs = _pairs(layouts) if spec.capabilities.resharding else []
            ids = [f"{source.label}-to-{target.label}" for target, source in pairs]
            metafunc.parametrize(("layout", "source"), pairs or [_none(name, 2)], ids=ids or None)
            return
        if "layout" in metafunc.fixturenames:
            if name == "test_a_rank_that_raises_ends_the_others":
                layouts = [one for one in layouts if one.ranks > 1]
            if name == "test_a_damaged_checkpoint_is_refused":
                layouts = _fewest(layouts)
            ids = [one.label for one in layouts]
            metafunc.parametrize("layout", layouts or [_none(name, 1)], ids=ids or None)
        if "unjudged" in metafunc.fixturenames:
            left_out = _unjudged(spec.capabilities, layouts)
            metafunc.parametrize("unjudged", left_out or [_none(name, 1)], ids=left_out or None)
        if "sleep_order" in metafunc.fixturenames:
            orders = _sleep_orders(spec.capabilities)
            ids = [f"{one}-{precision}".replace(",", "").replace(" ", "-") for one, precision in orders]
            metafunc.parametrize(("sleep_order", "sleep_precision"), orders, ids=ids)
        for fixture, (values, ids) in _choices(spec, name).items():
            if fixture in metafunc.fixturenames:
                metafunc.parametrize(fixture, values or [_none(name, 1)], ids=ids or None)

    def test_what_is_not_claimed(self, judge: Judge, unclaimed: str) -> None:
        """Reports, for each thing that this backend does not claim, that nothing of it was judged."""
        judge.claims.not_claimed("test_what_is_not_claimed", unclaimed)
        pytest.skip(f"not claimed: {unclaimed}")

    def test_what_is_claimed_but_not_judged(self, judge: Judge, unjudged: str) -> None:
        """Reports each kind of parallelism that is claimed, but that no layout of the numbers of ranks chosen has."""
        judge.claims.not_judged("test_what_is_claimed_but_not_judged", unjudged)
        pytest.skip(f"claimed, but not judged on so few ranks: {unjudged}")

    def test_no_standard_test_was_removed_or_overridden(self, request: pytest.FixtureRequest) -> None:
        """A subclass that leaves a standard test out, or puts its own in its place, says why in `exceptions`."""
        problems = changed_tests(request.cls)
        assert not problems, "\n".join(problems)


def changed_tests(suite: type[ConformanceSuite]) -> list[str]:
    """Say what a subclass changed of the standard tests without giving a reason."""
    standard = {
        name: inspect.getattr_static(ConformanceSuite, name) for name in dir(ConformanceSuite) if _guarded(name)
    }
    problems = []
    for name, original in standard.items():
        reason = suite.exceptions.get(name, "").strip()
        if inspect.getattr_static(suite, name, None) is not original and not reason:
            problems.append(
                f"{suite.__name__} removed or overrode {name}; leave it as it is, or give the reason: "
                f'exceptions = {{"{name}": "..."}}'
            )
    unknown = sorted(set(suite.exceptions) - set(standard))
    problems += [f"{suite.__name__}.exceptions names {name!r}, which is no standard test" for name in unknown]
    return problems


def _guarded(name: str) -> bool:
    return name.startswith("test_") or name in ("judge", "_name_the_test", "pytest_generate_tests")


def _spec_of(suite: type[ConformanceSuite], config: pytest.Config) -> BackendSpec:
    name = suite.backend or config.getoption("--train-backend")
    installed = ", ".join(sorted({one.name for one in entry_points(group=TRAIN_BACKENDS.group)})) or "none"
    if not name:
        pytest.exit(f"which train backend? give --train-backend NAME (installed: {installed})", returncode=_USAGE)
    try:
        spec = load_spec(TRAIN_BACKENDS, name)
    except DrivetrainError as error:
        pytest.exit(f"--train-backend {name}: {error}", returncode=_USAGE)
    assert isinstance(spec, BackendSpec)
    if "cpu" not in spec.capabilities.devices:
        devices = ", ".join(spec.capabilities.devices)
        pytest.exit(f"--train-backend {name} claims {devices} only; the suite judges on a CPU", returncode=_USAGE)
    if "fp32" not in spec.capabilities.precisions:
        pytest.exit(
            f"--train-backend {name} does not claim fp32, in which the suite compares numbers", returncode=_USAGE
        )
    return spec


def _layouts(suite: type[ConformanceSuite], config: pytest.Config, capabilities: Capabilities) -> list[Layout]:
    chosen = chosen_ranks(config)
    sizes = suite.world_sizes if chosen is None else chosen
    found = [layout for size in sizes for layout in claimed_layouts(capabilities.parallelism, size)]
    if not found:
        kinds = ", ".join(capabilities.parallelism) or "one process alone"
        pytest.exit(f"no layout of {', '.join(map(str, sizes))} ranks is claimed (claimed: {kinds})", returncode=_USAGE)
    return found


def _fewest(layouts: list[Layout]) -> list[Layout]:
    """One layout of the fewest ranks, and one of the next number: what a file says does not depend on more."""
    sizes = sorted({one.ranks for one in layouts})[:2]
    return [next(one for one in layouts if one.ranks == size) for size in sizes]


def _pairs(layouts: list[Layout]) -> list[tuple[Layout, Layout]]:
    """(target, source): each layout from the one before it, and the first from the last; one rank is always there."""
    chain = layouts if Layout() in layouts else [Layout(), *layouts]
    return [(target, chain[place - 1]) for place, target in enumerate(chain) if len(chain) > 1]


def _choices(spec: BackendSpec, test: str) -> dict[str, tuple[list[Any], list[str]]]:
    """For each parametrised fixture: its values and their ids."""
    claimed = spec.capabilities
    neutral = [dict(one) for one in spec.neutral_options]
    if claimed.cpu_offload:
        neutral.append({"optimizer_cpu_offload": True})
    frozen = [name for name, how in (("ref", claimed.reference), ("teacher", claimed.teacher)) if how]
    low = [one for one in claimed.precisions if one != "fp32"]
    cases = list(CASES[:1] if test == "test_options_keep_the_numbers" else CASES)
    return {
        "case": (cases, [one.name for one in cases]),
        "neutral": (neutral, ["-".join(_option_id(*pair) for pair in one.items()) for one in neutral]),
        "precision": (list(claimed.precisions), list(claimed.precisions)),
        "low_precision": (low, low),
        "frozen": (frozen, frozen),
        "damage": (list(DAMAGES), [one.replace(" ", "-") for one in DAMAGES]),
        "exported": (list(EXPORTED), list(EXPORTED)),
        "holders": (["all", "stage_lead", "rank0"], ["all", "stage_lead", "rank0"]),
        "poison": (["nan", "inf"], ["nan", "inf"]),
        "unclaimed": (_unclaimed(claimed), _unclaimed(claimed)),
    }


def _option_id(name: str, value: Any) -> str:
    return name if value is True else f"{name}={value}"


def _none(test: str, parameters: int) -> Any:
    """The one parameter of a test that has nothing to judge: skipped, in words."""
    reasons = {
        "test_what_is_claimed_but_not_judged": "all that is claimed is judged",
        "test_what_is_not_claimed": "everything is claimed",
    }
    reason = reasons.get(test, "not claimed, or nothing of it on so few ranks")
    return pytest.param(*[None] * parameters, marks=pytest.mark.skip(reason=reason), id="nothing")


def _unclaimed(claimed: Capabilities) -> list[str]:
    """Everything that a backend could claim and this one does not."""
    missing = [kind for kind in KINDS if kind not in claimed.parallelism]
    missing += [one for one in ("bf16", "fp16") if one not in claimed.precisions]
    names = ("cpu_offload", "reference", "teacher", "resharding", "async_save")
    return missing + [name for name in names if not getattr(claimed, name)]


def _unjudged(claimed: Capabilities, layouts: list[Layout]) -> list[str]:
    """Kinds of parallelism that are claimed and that no layout has."""
    seen = {kind for one in layouts for kind in KINDS if (one.sp if kind == "sp" else getattr(one, kind) > 1)}
    return [kind for kind in claimed.parallelism if kind not in seen]


def _sleep_orders(claimed: Capabilities) -> list[tuple[str, str]]:
    """Every way to sleep in fp32; the longest in the other precisions too."""
    longest = list(SLEEPS)[-1]
    return [(one, "fp32") for one in SLEEPS] + [(longest, one) for one in claimed.precisions if one != "fp32"]


def _facts(suite: type[ConformanceSuite], config: pytest.Config, spec: BackendSpec) -> dict[str, Any]:
    """What a report says of the backend that was judged, and of how."""
    (entry,) = (one for one in entry_points(group=TRAIN_BACKENDS.group) if one.name == spec.name)
    return {
        "distribution": entry.dist.name if entry.dist else "",
        "version": entry.dist.version if entry.dist else "",
        "api_version": spec.api_version,
        "capabilities": {name: _plain(one) for name, one in asdict(spec.capabilities).items()},
        "layouts": [one.label for one in _layouts(suite, config, spec.capabilities)],
        "options": {name: str(one) for name, one in suite.options.items()},
        "exceptions": dict(suite.exceptions),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
