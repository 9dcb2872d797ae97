"""Which way the arrows between the packages go: launcher -> infra -> backend-api <- each backend."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PACKAGES = Path(__file__).parents[2] / "packages"
MAY_IMPORT = {
    "backend-api": set(),
    "backend-fsdp": {"drivetrain_backend_api"},
    "backend-megatron": {"drivetrain_backend_api"},
    "infra": {"drivetrain_backend_api"},
    "launcher": {"drivetrain_backend_api", "drivetrain_infra"},
}
BRINGS_ALONG = {"transformers": {"tokenizers"}}
"""Distributions whose own dependency is used together with them, in the version that they choose."""

IMPORT_NAMES = {"megatron-core": "megatron"}
"""Distributions whose import name is not their own name with underscores."""

BACKEND_NAMES = {"fsdp", "megatron"}


def modules(package: str) -> Iterator[tuple[Path, ast.Module]]:
    found = sorted((PACKAGES / package / "src").rglob("*.py"))
    assert found, f"packages/{package}/src holds no modules"
    for path in found:
        yield path, ast.parse(path.read_text("utf-8"), str(path))


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, top-level module) of every import, also those inside functions and under TYPE_CHECKING."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.lineno, (node.module or "").partition(".")[0]


def dependencies(package: str, extras: frozenset[str] = frozenset()) -> set[str]:
    """Return the distributions that a package declares, those of the workspace packages it needs included."""
    project = tomllib.loads((PACKAGES / package / "pyproject.toml").read_text())["project"]
    lines = list(project["dependencies"])
    lines += [line for extra in extras for line in project.get("optional-dependencies", {})[extra]]
    found = set()
    for line in lines:
        name, wanted = re.match(r"([\w.-]+)(?:\[([\w,-]+)\])?", line).groups()  # type: ignore[union-attr]
        found |= {name} | BRINGS_ALONG.get(name, set())
        if (PACKAGES / name.removeprefix("drivetrain-")).is_dir():
            found |= dependencies(name.removeprefix("drivetrain-"), frozenset((wanted or "").split(",")) - {""})
    return found


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_those_it_may(package: str) -> None:
    own = "drivetrain_" + package.replace("-", "_")
    wrong = [
        f"{path}:{line} imports {name}"
        for path, tree in modules(package)
        for line, name in imported(tree)
        if name.startswith("drivetrain_") and name != own and name not in MAY_IMPORT[package]
    ]
    assert wrong == []


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_declares_what_it_imports(package: str) -> None:
    project = tomllib.loads((PACKAGES / package / "pyproject.toml").read_text())["project"]
    declared = dependencies(package, frozenset(project.get("optional-dependencies", {}))) | {project["name"]}
    known = {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in declared} | set(sys.stdlib_module_names)
    wrong = [
        f"{path}:{line} imports {name}"
        for path, tree in modules(package)
        for line, name in imported(tree)
        if name not in known
    ]
    assert wrong == []


@pytest.mark.parametrize("package", ["backend-api", "infra", "launcher"])
def test_nothing_outside_a_backend_branches_on_its_name(package: str) -> None:
    wrong = []
    for path, tree in modules(package):
        for node in ast.walk(tree):
            chosen: list[ast.AST | None] = []
            if isinstance(node, ast.Compare):
                chosen = [part for side in (node.left, *node.comparators) for part in ast.walk(side)]
            elif isinstance(node, ast.MatchValue):
                chosen = [node.value]
            elif isinstance(node, ast.Dict):
                chosen = list(node.keys)
            names = {part.value for part in chosen if isinstance(part, ast.Constant)} & BACKEND_NAMES
            wrong += [f"{path}:{getattr(node, 'lineno', '?')} branches on {names}"] if names else []
    assert wrong == []


def test_the_command_and_every_spec_leave_the_heavy_libraries_alone(site: Any) -> None:
    loaded = site.python(
        """
import json, sys
import drivetrain_backend_api, drivetrain_infra.config, drivetrain_infra.engines.base
import drivetrain_launcher.cli, drivetrain_launcher.sources, drivetrain_launcher.preflight
import drivetrain_launcher.backends_command
from drivetrain_backend_api import ALGORITHMS, TRAIN_BACKENDS, installed, load_spec
from drivetrain_infra.engines.base import ROLLOUT_ENGINES
for kind in (ALGORITHMS, TRAIN_BACKENDS, ROLLOUT_ENGINES):
    for name in installed(kind):
        load_spec(kind, name).probe()
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""
    )
    assert {"drivetrain_backend_fsdp", "drivetrain_backend_megatron"} <= set(loaded)
    assert {"torch", "ray", "transformers", "pydantic", "numpy", "wandb", "rich"} & set(loaded) == set()
