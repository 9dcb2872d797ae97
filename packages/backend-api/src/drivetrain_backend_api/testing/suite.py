"""`ConformanceSuite`: the tests that any train backend must pass. Subclass it, and say which backend.

    class TestMine(ConformanceSuite):
        backend = "mine"

What the backend's capabilities claim decides which layouts and precisions are judged. Each test is one promise of the
contract, held against a plain single-process reference or against the backend's own undisturbed run.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import entry_points, version
from typing import Any, ClassVar

import pytest

from drivetrain_backend_api.discovery import TRAIN_BACKENDS, load_spec
from drivetrain_backend_api.errors import DrivetrainError
from drivetrain_backend_api.spec import BackendSpec, Capabilities
from drivetrain_backend_api.testing.cases import CASES, EXPERT_CASES, SPLITS
from drivetrain_backend_api.testing.claims import Claims
from drivetrain_backend_api.testing.damage import DAMAGES
from drivetrain_backend_api.testing.drawing import Axis, Drawn, neutral_sets, product, refusal, thin, untaken_sets
from drivetrain_backend_api.testing.judge import Judge
from drivetrain_backend_api.testing.judging_contract import ContractTests
from drivetrain_backend_api.testing.judging_experts import MIXTURES, ExpertsTests
from drivetrain_backend_api.testing.judging_numbers import NumbersTests
from drivetrain_backend_api.testing.judging_saves import SavesTests
from drivetrain_backend_api.testing.judging_state import SLEEPS, StateTests
from drivetrain_backend_api.testing.judging_weights import WeightsTests
from drivetrain_backend_api.testing.layouts import KINDS, Layout, claimed_expert_layouts, claimed_layouts
from drivetrain_backend_api.testing.plugin import CLAIMS, FACTS, THINNED, chosen_ranks
from drivetrain_backend_api.testing.ranks import Ranks

EXPORTED = ("qwen3-tied", "llama", "qwen2-tied")
"""Models whose exports are compared with `save_pretrained`: each architecture, tied and not."""

_OF_FEW_RANKS = (
    "test_a_damaged_checkpoint_is_refused",
    "test_a_background_save_is_never_lost",
    "test_weights_alone_begin_a_new_run",
)
"""Tests of files and of whole saves, which are the same under every layout."""

_USAGE = int(pytest.ExitCode.USAGE_ERROR)
_GUARD = "test_no_standard_test_was_removed_or_overridden"


class ConformanceSuite(NumbersTests, StateTests, SavesTests, WeightsTests, ExpertsTests, ContractTests):
    """All standard tests. Those of a subclass's own come on top.

    Attributes:
        backend: entry point name; None takes --train-backend.
        options: of the backend's configuration, in every run of the suite.
        world_sizes: numbers of ranks; --conformance-ranks takes their place.
        thorough: judge every test under every layout; else, and without --conformance-thorough, layouts of many ranks
            take turns (see `drawing`).
        many_ranks: how many ranks are many.
        exceptions: standard test that the subclass removes (sets to None) or overrides -> the reason.
    """

    backend: ClassVar[str | None] = None
    options: ClassVar[Mapping[str, Any]] = {}
    world_sizes: ClassVar[tuple[int, ...]] = (1, 2, 4)
    thorough: ClassVar[bool] = False
    many_ranks: ClassVar[int] = 4
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
        """Draw layouts and everything else from what the backend claims."""
        suite, config, name = type(self), metafunc.config, metafunc.function.__name__
        spec = _spec_of(suite, config)
        axes = [one for one in _axes(suite, config, spec, name) if set(one.names) & set(metafunc.fixturenames)]
        if not axes:
            return
        names = [fixture for one in axes for fixture in one.names]
        drawn = product(axes)
        refusals = {one.id: _refusal_of(suite, spec, names, one) for one in drawn}
        kept = drawn
        if not (suite.thorough or config.getoption("--conformance-thorough")):
            kept = thin(drawn, name, suite.many_ranks, lambda one: not refusals[one.id])
            left_out = [one for one in drawn if one not in kept and not refusals[one.id]]
            config.stash[THINNED].setdefault(suite, []).extend((name, one.id) for one in left_out)
        metafunc.parametrize(
            names,
            [_parameters(one, refusals[one.id]) for one in kept] or [_none(name, len(names))],
        )

    def test_what_is_not_claimed(self, judge: Judge, unclaimed: str) -> None:
        """Reports, for each thing that this backend does not claim, that nothing of it was judged."""
        judge.claims.not_claimed("test_what_is_not_claimed", unclaimed)
        pytest.skip(f"not claimed: {unclaimed}")

    def test_what_is_claimed_but_not_judged(self, judge: Judge, unjudged: str) -> None:
        """Reports what is claimed, but needs other numbers of ranks: kinds of parallelism, and neutral options."""
        judge.claims.not_judged("test_what_is_claimed_but_not_judged", unjudged)
        pytest.skip(f"claimed, but not judged on these numbers of ranks: {unjudged}")

    def test_each_set_of_neutral_options_is_taken_somewhere(self, judge: Judge, refused: str) -> None:
        """A set of options that the configuration refuses under every layout that the suite knows is never judged."""
        judge.test = "test_options_keep_the_numbers"
        with judge.check(refused) as check:
            check.true("some layout takes these neutral options", False, "refused under every layout that is claimed")

    def test_what_is_thinned(self, judge: Judge, request: pytest.FixtureRequest) -> None:
        """Reports what layouts of many ranks left to each other."""
        chosen = {
            getattr(one, "originalname", "") for one in request.session.items if one.parent is request.node.parent
        }
        thinned = [one for one in request.config.stash[THINNED].get(request.cls, []) if one[0] in chosen]
        for test, where in thinned:
            judge.claims.thinned(test, where)
        if thinned:
            pytest.skip(f"thinned: {len(thinned)} combinations; --conformance-thorough judges them too")

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


def _sizes(suite: type[ConformanceSuite], config: pytest.Config) -> tuple[int, ...]:
    chosen = chosen_ranks(config)
    return suite.world_sizes if chosen is None else chosen


def _layouts(suite: type[ConformanceSuite], config: pytest.Config, capabilities: Capabilities) -> list[Layout]:
    sizes = _sizes(suite, config)
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


def _axes(suite: type[ConformanceSuite], config: pytest.Config, spec: BackendSpec, test: str) -> list[Axis]:
    """Everything that a test can ask for, in the order of its ids."""
    claimed = spec.capabilities
    every = _layouts(suite, config, claimed)
    experts = [one for size in _sizes(suite, config) for one in claimed_expert_layouts(claimed.parallelism, size)]
    layouts = every
    if test == "test_a_rank_that_raises_ends_the_others":
        layouts = [one for one in every if one.ranks > 1]
    if test in _OF_FEW_RANKS:
        layouts = _fewest(every)
    resharded = test in ("test_a_checkpoint_loads_under_another_layout", "test_experts_load_under_another_layout")
    frozen = [name for name, how in (("ref", claimed.reference), ("teacher", claimed.teacher)) if how]
    low = [one for one in claimed.precisions if one != "fp32"]
    neutral = neutral_sets(spec)
    cases = CASES[:1] if test == "test_options_keep_the_numbers" else CASES
    axes = [
        _moves("layout", "source", layouts if claimed.resharding else []) if resharded else _places("layout", layouts),
        _moves("expert_layout", "expert_source", experts if claimed.resharding else [])
        if resharded
        else _places("expert_layout", experts),
        Axis(names=("case",), values=[(one,) for one in cases], ids=[one.name for one in cases]),
        Axis(names=("expert_case",), values=[(one,) for one in EXPERT_CASES], ids=[one.name for one in EXPERT_CASES]),
        Axis(names=("neutral",), values=[(one,) for one in neutral], ids=[_set_id(one) for one in neutral]),
    ]
    orders = _sleep_orders(claimed)
    axes.append(
        Axis(
            names=("sleep_order", "sleep_precision"),
            values=orders,
            ids=[f"{one}-{precision}".replace(",", "").replace(" ", "-") for one, precision in orders],
        )
    )
    words = {
        "unjudged": _unjudged(suite, spec, every, experts),
        "refused": _refused(suite, spec),
        "split": list(SPLITS),
        "precision": list(claimed.precisions),
        "low_precision": low,
        "frozen": frozen,
        "damage": list(DAMAGES),
        "background": ["background"] if claimed.async_save else [],
        "exported": list(EXPORTED),
        "mixture": list(MIXTURES),
        "holders": ["all", "stage_lead", "rank0"],
        "poison": ["nan", "inf"],
        "unclaimed": _unclaimed(claimed),
    }
    return axes + [
        Axis(
            names=(name,),
            values=[(one,) for one in found],
            ids=[one.replace(",", "").replace(" ", "-") for one in found],
        )
        for name, found in words.items()
    ]


def _places(name: str, layouts: Sequence[Layout]) -> Axis:
    return Axis(names=(name,), values=[(one,) for one in layouts], ids=[one.label for one in layouts])


def _moves(target: str, source: str, layouts: list[Layout]) -> Axis:
    pairs = _pairs(layouts) if layouts else []
    return Axis(names=(target, source), values=pairs, ids=[f"{old.label}-to-{new.label}" for new, old in pairs])


def _refusal_of(suite: type[ConformanceSuite], spec: BackendSpec, names: Sequence[str], one: Drawn) -> str:
    options = dict(zip(names, one.values)).get("neutral")
    return refusal(spec, one.layout, {**suite.options, **options}) if one.layout is not None and options else ""


def _parameters(one: Drawn, refusal: str) -> Any:
    marks = [pytest.mark.skip(reason=f"refused under this layout: {refusal}")] if refusal else []
    return pytest.param(*one.values, marks=marks, id=one.id)


def _none(test: str, parameters: int) -> Any:
    """The one parameter of a test that has nothing to judge: skipped, in words."""
    reasons = {
        "test_what_is_claimed_but_not_judged": "all that is claimed is judged",
        "test_what_is_not_claimed": "everything is claimed",
        "test_each_set_of_neutral_options_is_taken_somewhere": "each is",
    }
    reason = reasons.get(test, "not claimed, or nothing of it on so few ranks")
    return pytest.param(*[None] * parameters, marks=pytest.mark.skip(reason=reason), id="nothing")


def _unclaimed(claimed: Capabilities) -> list[str]:
    """Everything that a backend could claim and this one does not."""
    missing = [kind for kind in KINDS if kind not in claimed.parallelism]
    missing += [one for one in ("bf16", "fp16") if one not in claimed.precisions]
    names = ("cpu_offload", "reference", "teacher", "resharding", "async_save")
    return missing + [name for name in names if not getattr(claimed, name)]


def _unjudged(
    suite: type[ConformanceSuite], spec: BackendSpec, layouts: Sequence[Layout], experts: Sequence[Layout]
) -> list[str]:
    """Kinds of parallelism and neutral options that are claimed, and that no layout of this run has."""
    every = [*layouts, *experts]
    seen = {kind for one in every for kind in KINDS if (one.sp if kind == "sp" else getattr(one, kind) > 1)}
    left_out = [kind for kind in spec.capabilities.parallelism if kind not in seen]
    untaken = untaken_sets(spec, suite.options, layouts)
    return left_out + [_set_id(one) for one in untaken if not _is_hopeless(suite, spec, one)]


def _refused(suite: type[ConformanceSuite], spec: BackendSpec) -> list[str]:
    return [_set_id(one) for one in neutral_sets(spec) if _is_hopeless(suite, spec, one)]


def _is_hopeless(suite: type[ConformanceSuite], spec: BackendSpec, options: Mapping[str, Any]) -> bool:
    """Whether no layout takes neutral options, neither one of this run nor another one that the suite knows."""
    sizes = {*ConformanceSuite.world_sizes, *suite.world_sizes}
    known = [one for size in sizes for one in claimed_layouts(spec.capabilities.parallelism, size)]
    return options in untaken_sets(spec, suite.options, known)


def _set_id(options: Mapping[str, Any]) -> str:
    return "-".join(name if value is True else f"{name}={value}" for name, value in options.items())


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
