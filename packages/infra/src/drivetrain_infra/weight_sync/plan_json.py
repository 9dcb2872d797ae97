"""A weight plan as JSON, the form in which it reaches an engine before any weight does."""

import dataclasses
import json

from drivetrain_backend_api import DataError
from drivetrain_backend_api.weights import WeightEntry, WeightPlan


def dump_plan(plan: WeightPlan) -> str:
    """Write a plan as JSON."""
    return json.dumps([dataclasses.asdict(one) for one in plan.entries])


def parse_plan(text: str) -> WeightPlan:
    """Read a plan written by `dump_plan`.

    Raises:
        DataError: it is something else.
    """
    try:
        entries = tuple(WeightEntry(**{**one, "shape": tuple(one["shape"])}) for one in json.loads(text))
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"a weight plan cannot be read ({error}); trainer and engines must run one version") from error
    return WeightPlan(entries=entries)
