"""What each test is drawn for: the product of layouts with everything else that it asks for, thinned on many ranks.

Two ranks show nearly every mistake, and four ranks have many layouts. Unless everything is asked for, layouts of many
ranks (four, or what the suite's class says) take turns: each of them has its share of a test's other parameters, and
each of these its share of the layouts. Never imports torch.
"""

import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain_backend_api.errors import ConfigError
from drivetrain_backend_api.spec import BackendSpec
from drivetrain_backend_api.testing.cases import BASE
from drivetrain_backend_api.testing.layouts import Layout

_FEW, _HALF = 3, 7

SPARSE = {
    # outcomes that hang on the number of ranks more than on how they are laid out
    "test_a_rank_that_raises_ends_the_others": _FEW,
    "test_an_export_that_one_rank_leaves_ends_on_all": _FEW,
    "test_illegal_calls_name_both_states": _FEW,
    "test_a_checkpoint_of_another_model_is_refused": _FEW,
    "test_a_save_is_of_the_moment_it_began": _FEW,
    "test_sleep_does_not_grow": _FEW,
    # what these compute under a layout, other tests hold to the reference under every one
    "test_the_first_step_is_on_policy": _HALF,
    "test_reference_and_teacher_are_their_own_models": _HALF,
    "test_forward_only_leaves_no_trace": _HALF,
    "test_a_step_that_is_not_finite_changes_nothing": _HALF,
    "test_tags_switch_bit_for_bit": _HALF,
    "test_weights_alone_are_enough_for_an_export": _HALF,
    "test_each_kind_of_holders_gets_the_data": _HALF,
    # mixtures of experts, after all those of dense models
    "test_experts_train_as_a_plain_model": 2 * _HALF,
    "test_experts_are_exported_as_save_pretrained_writes": _HALF,
    "test_each_kind_of_holders_gets_the_experts": _FEW,
    "test_a_resumed_run_with_experts_is_the_same_run": _HALF,
    "test_experts_load_under_another_layout": _HALF,
    "test_sleep_keeps_every_bit_of_the_experts": _FEW,
}
"""Test -> how many layouts of many ranks are enough for it."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Parameters that change together.

    Attributes:
        names: of the test's fixtures.
        values: for each id, one value a name.
        ids: what pytest shows.
    """

    names: tuple[str, ...]
    values: Sequence[tuple[Any, ...]]
    ids: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One run of a test: a point of the product."""

    values: tuple[Any, ...]
    id: str
    places: tuple[int, ...]

    @property
    def layout(self) -> Layout | None:
        """What it runs on, the first value; None for a test without layouts."""
        first = self.values[0] if self.values else None
        return first if isinstance(first, Layout) else None


def product(axes: Sequence[Axis]) -> list[Drawn]:
    """Draw every combination, the first axis slowest."""
    return [
        Drawn(
            values=tuple(value for axis, place in zip(axes, places) for value in axis.values[place]),
            id="-".join(axis.ids[place] for axis, place in zip(axes, places)),
            places=places,
        )
        for places in itertools.product(*(range(len(axis.values)) for axis in axes))
    ]


def thin(
    drawn: Sequence[Drawn], test: str, many_ranks: int, fits: Callable[[Drawn], bool] = lambda _: True
) -> list[Drawn]:
    """Let layouts of many ranks take turns.

    Args:
        drawn: the whole product, layouts first.
        test: its name, which says where the turns begin, so that tests differ.
        many_ranks: layouts of so many ranks, and of more, take turns.
        fits: whether a combination can be judged at all; one that cannot takes no turn.

    Returns: in the order of `drawn`, what is judged: of each layout, and of each combination of the other parameters,
        at least one, where one fits; a test in `SPARSE` is judged on a few of the layouts.
    """
    many = [one for one in drawn if one.layout is not None and one.layout.ranks >= many_ranks]
    layouts = list(dict.fromkeys(one.places[0] for one in many))
    others = list(dict.fromkeys(one.places[1:] for one in many))
    first = zlib.crc32(test.encode())
    if len(layouts) > (few_layouts := SPARSE.get(test, len(layouts))):
        step = len(layouts) / few_layouts
        layouts = [layouts[(first + int(step * turn)) % len(layouts)] for turn in range(few_layouts)]
        many = [one for one in many if one.places[0] in layouts]

    def turn(one: Drawn) -> tuple[int, int]:
        layout, other = layouts.index(one.places[0]), others.index(one.places[1:])
        return (other - layout - first) % len(others), layout

    seen: set[tuple[str, Any]] = set()
    kept = set()
    for one in sorted((one for one in many if fits(one)), key=turn):
        shown = {("layout", one.places[0]), ("others", one.places[1:])}
        if not shown <= seen:
            seen |= shown
            kept.add(one.id)
    few = {one.id for one in drawn if one.layout is None or one.layout.ranks < many_ranks}
    return [one for one in drawn if one.id in kept | few]


def neutral_sets(spec: BackendSpec) -> list[Mapping[str, Any]]:
    """Return the sets of options that must not change the numbers."""
    offload = [{"optimizer_cpu_offload": True}] if spec.capabilities.cpu_offload else []
    return [*spec.neutral_options, *offload]


def refusal(spec: BackendSpec, layout: Layout, options: Mapping[str, Any]) -> str:
    """Say why the backend's configuration does not take options under a layout; "" where it does."""
    try:
        spec.config_class(**{**BASE, "hf_checkpoint": "none", "fp32": True, **layout.options, **options})
    except ConfigError as error:
        return str(error)
    return ""


def untaken_sets(spec: BackendSpec, options: Mapping[str, Any], layouts: Sequence[Layout]) -> list[Mapping[str, Any]]:
    """Return the sets of neutral options that the configuration refuses, beside other options, under every layout."""
    return [one for one in neutral_sets(spec) if all(refusal(spec, layout, {**options, **one}) for layout in layouts)]
