"""The Megatron backend keeps Megatron in one package, and its patches of others' code in one file of it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

BACKEND = Path(__file__).parents[2] / "packages" / "backend-megatron" / "src" / "drivetrain_backend_megatron"
ADAPTER = BACKEND / "core"
PATCHES = ADAPTER / "patches.py"
FOREIGN = {"torch", "megatron", "transformers", "safetensors", "psutil", "torch_memory_saver"}
"""Libraries whose modules and classes are somebody else's."""


def sources() -> list[Path]:
    found = sorted(BACKEND.rglob("*.py"))
    assert {PATCHES, ADAPTER / "__init__.py", BACKEND / "backend.py"} <= set(found)
    return found


def megatron_imports(tree: ast.Module) -> Iterator[int]:
    """Yield the line of every import of Megatron, also those inside functions, and those by a name in quotes."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
            names = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        if any(name.partition(".")[0] == "megatron" for name in names):
            yield node.lineno


def foreign_changes(tree: ast.Module) -> Iterator[int]:
    """Yield the line of every assignment or deletion of an attribute or item of what was imported from a library.

    What a name stands for is followed through imports, and through names bound to such an attribute or to a module
    looked up by name.
    """
    foreign = _foreign_names(tree)
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign | ast.AugAssign):
            targets = [node.target]
        elif isinstance(node, ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.Call) and _called(node) in ("setattr", "delattr") and node.args:
            targets = [ast.Attribute(value=node.args[0], attr="", ctx=ast.Store())]
        parts = [part for target in targets for part in ast.walk(target)]
        if any(
            isinstance(part, ast.Attribute | ast.Subscript)
            and isinstance(part.ctx, ast.Store | ast.Del)
            and _root(part.value) in foreign
            for part in parts
        ):
            yield node.lineno


def _foreign_names(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [(alias.asname or alias.name.partition(".")[0], alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [(alias.asname or alias.name, node.module or "") for alias in node.names]
        else:
            continue
        names |= {name for name, module in found if module.partition(".")[0] in FOREIGN}
    for node in ast.walk(tree):  # only what stands for a module, class or function: an attribute, never a call's result
        if isinstance(node, ast.Assign) and (
            _is_foreign_attribute(node.value, names) or _is_module_by_name(node.value)
        ):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def _is_foreign_attribute(value: ast.expr, names: set[str]) -> bool:
    return isinstance(value, ast.Attribute) and _root(value) in names


def _is_module_by_name(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and _called(value) == "import_module"


def _root(node: ast.expr) -> str | None:
    """The name that a chain of attributes and items begins with; None where a call is in between."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _called(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def test_megatron_is_imported_in_its_adapter_alone() -> None:
    places = {path: list(megatron_imports(ast.parse(path.read_text("utf-8")))) for path in sources()}
    outside = [
        f"{path.relative_to(BACKEND)}:{line} imports megatron; move it into core/"
        for path, lines in places.items()
        for line in lines
        if not path.is_relative_to(ADAPTER)
    ]
    assert outside == []
    assert any(lines for path, lines in places.items() if path.is_relative_to(ADAPTER))


def test_others_code_is_patched_in_one_file_alone() -> None:
    outside = [
        f"{path.relative_to(BACKEND)}:{line} changes what a library defines; move it into core/patches.py"
        for path in sources()
        for line in foreign_changes(ast.parse(path.read_text("utf-8")))
        if path != PATCHES
    ]
    assert outside == []


@pytest.mark.parametrize(
    "code",
    [
        "import megatron",
        "import megatron.core.utils as utils",
        "def late():\n    from megatron.core import parallel_state",
        "import importlib\nimportlib.import_module('megatron.core')",
    ],
)
def test_an_import_of_megatron_is_seen(code: str) -> None:
    assert list(megatron_imports(ast.parse(code))) != []
    assert list(megatron_imports(ast.parse(code.replace("megatron", "megatron_like")))) == []


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.cuda.synchronize = print",
        "import torch\nsetattr(torch.Tensor, 'cuda', print)",
        "from torch import Tensor\ndel Tensor.cuda",
        "import torch.distributed as dist\ndist.distributed_c10d._world.pg_names['x'] = 1",
        "from megatron.core import parallel_state\nparallel_state._GROUP, rest = 1, 2",
        "import torch\ncuda = torch.cuda\ncuda.Stream: type = object",
        "import importlib\nmodule = importlib.import_module('megatron.core')\nmodule.x = 1",
    ],
)
def test_a_patch_is_seen(code: str) -> None:
    assert list(foreign_changes(ast.parse(code))) != []


@pytest.mark.parametrize(
    "code",
    [
        "import torch\nclass Own(torch.nn.Module):\n    def build(self):\n        self.weight = torch.zeros(1)",
        "import torch\nvalues = torch.zeros(3)\nvalues[0] = 1\nvalues.label = 'x'",
        "config = object()\nsetattr(config, 'x', 1)",
    ],
)
def test_what_is_our_own_may_be_changed(code: str) -> None:
    assert list(foreign_changes(ast.parse(code))) == []
