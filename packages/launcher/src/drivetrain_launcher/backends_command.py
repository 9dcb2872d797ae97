"""`drivetrain backends`: what is installed to train with, and whether it works here. Imports specs, nothing more."""

import dataclasses
import json
from importlib.metadata import entry_points
from typing import Any

from drivetrain_backend_api import TRAIN_BACKENDS, load_spec


def describe_backends() -> list[dict[str, Any]]:
    """Describe every installed train backend, in the order of names.

    Returns, for each: name, distribution, version, api_version, capabilities, tested_with, available, detail and
    error. A broken one has its `error`, and None for what only its spec knows; without an error, `error` is None.
    """
    entries = sorted(entry_points(group=TRAIN_BACKENDS.group), key=lambda one: one.name)
    return [
        _describe(name, [one.dist for one in entries if one.name == name])
        for name in dict.fromkeys(one.name for one in entries)
    ]


def _describe(name: str, distributions: list[Any]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": name,
        "distribution": ", ".join(dict.fromkeys(one.name for one in distributions)),
        "version": ", ".join(dict.fromkeys(one.version for one in distributions)),
        "api_version": None,
        "capabilities": None,
        "tested_with": None,
        "available": False,
        "detail": "",
        "error": None,
    }
    try:
        spec = load_spec(TRAIN_BACKENDS, name)
        probe = spec.probe()
    except Exception as error:  # others' code, and a listing must list the others
        return row | {"error": f"{error}"}
    return row | {
        "api_version": spec.api_version,
        "capabilities": dataclasses.asdict(spec.capabilities),
        "tested_with": spec.tested_with,
        "available": probe.available,
        "detail": probe.detail,
    }


def format_json(rows: list[dict[str, Any]]) -> str:
    """Write the description for programs."""
    return json.dumps(rows, indent=2)


def format_table(rows: list[dict[str, Any]]) -> str:
    """Write the description for people: a block of lines for each backend."""
    if not rows:
        return f"no train backend is installed; {TRAIN_BACKENDS.install_hint('fsdp')}"
    return "\n\n".join(_format_row(row) for row in rows)


def _format_row(row: dict[str, Any]) -> str:
    state = "broken" if row["error"] else "available" if row["available"] else "not available"
    lines = [f"{row['name']}: {state}", f"  distribution  {row['distribution']} {row['version']}"]
    if row["error"]:
        return "\n".join([*lines, f"  error         {row['error']}"])
    lines += [f"  API version   {row['api_version']}", f"  probe         {row['detail'] or 'nothing to report'}"]
    for name, value in row["capabilities"].items():
        lines.append(f"  {name.replace('_', ' '):<13} {_shown(value)}")
    stacks = row["tested_with"] or ("nothing that its author names",)
    lines += [f"  {label:<13} {stack}" for label, stack in zip(("tested with", *[""] * len(stacks)), stacks)]
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return (value if isinstance(value, str) else ", ".join(value)) or "none"
