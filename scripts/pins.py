"""Write images/*.txt, one constraint file for each stack that Drivetrain supports, or check that none is stale.

    python scripts/pins.py              write all; pins that still fit stay
    python scripts/pins.py --upgrade    take the newest releases into the resolved ones
    python scripts/pins.py --check      change nothing; exit 1 and say which file is stale and why

`newest` and `cpu` are exports of uv.lock and are compared with it. `lowest` and `sglang` are locks of their own,
resolved from the packages' requirements: each holds a hash of those in its header, and the check reads nothing but the
tree, so that a new release of somebody else's package makes no file stale.
"""

import argparse
import hashlib
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from clean_environments import ROOT, PackagingError, closure, run, uv
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

IMAGES = ROOT / "images"
ALL = ("drivetrain-launcher[parquet]", "drivetrain-backend-fsdp", "drivetrain-backend-megatron")
"""What an image holds of Drivetrain; the constraint files pin all that these need from outside the tree."""

CUDA_ONLY = ("nvidia-", "cuda-", "triton")
"""How the names of distributions begin that torch needs on a GPU only."""

REGENERATE = "write it anew: uv run python scripts/pins.py"


@dataclass(frozen=True, kw_only=True)
class Stack:
    """One set of versions that is meant to work together.

    Attributes:
        name: of its file.
        title: what it is, in a line.
        runs: what was run on it and what was not, one line each.
        python: the Python version that it is resolved for; "" where markers tell several apart.
        extra: requirements of the stack itself.
        resolve: options for the resolver; None exports uv.lock.
        keep: whether a pin of the export belongs to the stack.
    """

    name: str
    title: str
    runs: tuple[str, ...]
    python: str = ""
    extra: tuple[str, ...] = ()
    resolve: tuple[str, ...] | None = None
    keep: Callable[[str], bool] = field(default=lambda pin: True)

    @property
    def path(self) -> Path:
        """Its constraint file."""
        return IMAGES / f"{self.name}.txt"


STACKS = (
    Stack(
        name="newest",
        title="the versions of uv.lock, with torch's CUDA build",
        runs=(
            "Run on it in CI: all tests, and scripts/wheel_matrix.py, both on CPUs.",
            "Not run on it: anything on a GPU.",
        ),
    ),
    Stack(
        name="cpu",
        title="the versions of uv.lock without what only a GPU needs; for `uv pip install --torch-backend cpu`",
        runs=(
            "Run on these versions in CI: all tests, on CPUs, with torch's CUDA build.",
            "Not run on it: torch's own CPU build.",
        ),
        keep=lambda pin: not pin.startswith(CUDA_ONLY),
    ),
    Stack(
        name="lowest",
        title="the lowest versions that the packages accept",
        runs=(
            "Run on it in CI: scripts/wheel_matrix.py, on CPUs.",
            "Run on its torch, transformers and Ray on GPUs: what benchmarks/gpu_tests.md lists.",
        ),
        python="3.11",
        resolve=("--resolution", "lowest-direct", "--python-platform", "x86_64-manylinux_2_28"),
    ),
    Stack(
        name="sglang",
        title="trainer and SGLang in one environment",
        runs=(
            "Run on it by hand: scripts/wheel_matrix.py sglang, a training run of the FSDP backend on CPUs.",
            "Not run on it: anything on a GPU, and SGLang as a rollout engine, which is not built yet.",
            "SGLang 0.5.12 pins transformers 5.6 and cannot share an environment with transformers 5.17 or newer.",
        ),
        python="3.12",
        extra=("sglang==0.5.23",),
        resolve=("--python-platform", "x86_64-manylinux_2_34"),
    ),
)


def requirements(stack: Stack) -> list[str]:
    """Return what a stack must satisfy from outside the tree, sorted."""
    return sorted(closure(ALL)[1] | set(stack.extra))


def inputs_hash(stack: Stack) -> str:
    """Return a hash of all that a resolved stack is resolved from, but for the registry."""
    lines = [*requirements(stack), stack.python, *(stack.resolve or ())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def header(stack: Stack) -> str:
    """Return the comment that a constraint file begins with."""
    lines = [f"{stack.title[0].upper()}{stack.title[1:]}.", *stack.runs]
    lines.append(
        f"Written for Python {stack.python}." if stack.python else "For every Python that the packages accept."
    )
    if stack.resolve is not None:
        lines.append(f"inputs: sha256 {inputs_hash(stack)}")
    lines.append("Use it: uv pip install --constraints images/" + stack.path.name + " ...  (or pip install -c)")
    lines.append("Written by scripts/pins.py; do not edit.")
    return "".join(f"# {line}\n" for line in lines)


def export(stack: Stack) -> str:
    """Return the whole text of an exported stack's file."""
    words = ["export", "--frozen", "--quiet", "--no-dev", "--no-emit-workspace", "--no-hashes", "--no-annotate"]
    pins = run([uv(), *words, "--no-header"], folder=ROOT).splitlines()
    return header(stack) + "".join(f"{pin}\n" for pin in pins if stack.keep(pin))


def resolve(stack: Stack, *, upgrade: bool) -> str:
    """Ask the registry and return the whole text of a resolved stack's file; pins of the present file that fit stay."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "requirements.in").write_text("".join(f"{one}\n" for one in requirements(stack)))
        if stack.path.exists() and not upgrade:
            (folder / "pins.txt").write_text(stack.path.read_text())
        words = ["pip", "compile", "--quiet", "--no-annotate", "--no-header", "--python-version", stack.python]
        words += [*(stack.resolve or ()), "--output-file", "pins.txt", "requirements.in"]
        run([uv(), *words], folder=folder)
        pins = (folder / "pins.txt").read_text().splitlines()
    return header(stack) + "".join(f"{pin}\n" for pin in pins if pin and not pin.startswith("#"))


def findings(stack: Stack) -> list[str]:
    """Return one sentence for each thing that makes a stack's file stale. Reads the tree only."""
    name = f"images/{stack.path.name}"
    if not stack.path.exists():
        return [f"{name} is missing; {REGENERATE}"]
    text = stack.path.read_text()
    if stack.resolve is None:
        return [] if text == export(stack) else [f"{name} differs from uv.lock; {REGENERATE}"]
    found = [] if text.startswith(header(stack)) else [f"{name}: the packages' requirements changed; {REGENERATE}"]
    pins = read_pins(text)
    for line in requirements(stack):
        wanted = Requirement(line)
        if wanted.marker and not wanted.marker.evaluate({"python_version": stack.python}):
            continue
        pin = pins.get(canonicalize_name(wanted.name))
        if pin is None:
            found.append(f"{name} pins no {wanted.name}, but {line!r} is required; {REGENERATE}")
        elif not wanted.specifier.contains(pin, prereleases=True):
            found.append(f"{name} pins {wanted.name} {pin}, but {line!r} is required; {REGENERATE}")
    return found


def read_pins(text: str) -> dict[str, str]:
    """Return normalised distribution name -> version of a constraint file without markers."""
    pins = (re.match(r"([\w.-]+)==([^\s;]+)", line) for line in text.splitlines())
    return {canonicalize_name(pin[1]): pin[2] for pin in pins if pin}


def main(words: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description="Write or check images/*.txt.", allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a file is stale")
    parser.add_argument("--upgrade", action="store_true", help="take the newest releases into the resolved files")
    arguments = parser.parse_args(words)
    if arguments.check and arguments.upgrade:
        parser.error("--check changes nothing; drop it, or drop --upgrade")
    if arguments.check:
        found = [one for stack in STACKS for one in findings(stack)]
        print("\n".join(found) or f"{len(STACKS)} constraint files are as uv.lock and the packages' requirements say")
        return 1 if found else 0
    IMAGES.mkdir(exist_ok=True)
    for stack in STACKS:
        text = export(stack) if stack.resolve is None else resolve(stack, upgrade=arguments.upgrade)
        stack.path.write_text(text)
        print(f"images/{stack.path.name}: {sum('==' in line for line in text.splitlines())} pins")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except PackagingError as error:
        sys.exit(f"pins: error: {error}")
