"""Environments that hold wheels and nothing of the workspace: build wheels, make an environment, install, run.

The workspace ignores version bounds between its members; an installer of wheels does not. Shared by the scripts and the
tests of packaging. Knows the folders of the packages and their metadata, nothing of what they do.
"""

import os
import re
import shutil
import signal
import subprocess
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ROOT / "packages"
PREFIX = "drivetrain-"


class PackagingError(Exception):
    """Something that a person must mend; the message is one line, with the output of a failed command below it."""


def run(words: Iterable[str | Path], *, folder: Path, seconds: float = 600, **variables: str) -> str:
    """Run a command in a folder and return its stdout.

    Raises:
        PackagingError: it failed, or did not end within the deadline.
    """
    line = [str(one) for one in words]
    try:
        done = attempt(line, folder=folder, seconds=seconds, **variables)
    except subprocess.TimeoutExpired as error:
        raise PackagingError(f"{' '.join(line)}: not done after {seconds:.0f} s") from error
    if done.returncode:
        raise PackagingError(f"{' '.join(line)}: exit code {done.returncode}\n{done.stdout}{done.stderr}".rstrip())
    return done.stdout


def attempt(
    words: Iterable[str | Path], *, folder: Path, seconds: float = 600, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, whatever comes of it, with none of this process's Python, Ray or run settings.

    Raises:
        PackagingError: it has not ended in time; what it started in its session is killed.
    """
    strange = ("DRIVETRAIN_", "RAY_", "PYTHON", "VIRTUAL_ENV", "UV_PROJECT", "UV_RUN")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(strange)}
    command = [str(one) for one in words]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment | {"OMP_NUM_THREADS": "1", "COLUMNS": "160"} | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as error:
        os.killpg(process.pid, signal.SIGKILL)
        out, errors = process.communicate()
        raise PackagingError(f"{' '.join(command)} did not end within {seconds:.0f} s\n{out}{errors}") from error
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


def uv() -> str:
    """Return the path of uv."""
    found = shutil.which("uv")
    if found is None:
        raise PackagingError("uv is not on PATH; install it: python3 -m pip install uv")
    return found


# -- what the packages declare -----------------------------------------------------------------------------------------


def distributions() -> list[str]:
    """Return the names of the distributions of this tree."""
    return sorted(PREFIX + one.parent.name for one in PACKAGES.glob("*/pyproject.toml"))


def package_folder(distribution: str) -> Path:
    """Return where a distribution's sources are."""
    return PACKAGES / distribution.removeprefix(PREFIX)


def project_table(distribution: str) -> dict[str, Any]:
    """Return the `[project]` table of a distribution's pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((package_folder(distribution) / "pyproject.toml").read_text())["project"]
    return table


def split_requirement(line: str) -> tuple[str, frozenset[str]]:
    """Return the name and the extras of a requirement line."""
    found = re.match(r"([\w.-]+)\s*(?:\[([^\]]*)\])?", line)
    if found is None:
        raise PackagingError(f"{line!r} is no requirement; write name[extra]>=version")
    return found[1], frozenset(one.strip() for one in (found[2] or "").split(",") if one.strip())


def closure(requirements: Iterable[str]) -> tuple[set[str], set[str]]:
    """Follow requirements through this tree's packages.

    Args:
        requirements: as `drivetrain-launcher[parquet]`.

    Returns:
        The distributions of this tree that they need, and the requirement lines of those that lead out of it.
    """
    own = set(distributions())
    queue, seen, outside = list(requirements), set[str](), set[str]()
    while queue:
        line = queue.pop()
        name, extras = split_requirement(line)
        if name not in own:
            outside.add(line)
        elif line not in seen:
            seen.add(line)
            table = project_table(name)
            queue += table.get("dependencies", [])
            queue += [one for extra in extras for one in table.get("optional-dependencies", {})[extra]]
    return {split_requirement(one)[0] for one in seen}, outside


# -- wheels and environments -------------------------------------------------------------------------------------------


def build(
    out: Path, *, source: Path = ROOT, distribution: str | None = None, wheel_only: bool = True
) -> dict[str, Path]:
    """Build wheels into a folder.

    Args:
        out: the folder.
        source: the workspace, or one package outside of it.
        distribution: one of the workspace's; None builds all, or the package at `source`.
        wheel_only: without a source distribution; else the wheel is built from it.

    Returns:
        Distribution name -> its wheel, of all wheels in the folder.
    """
    chosen = ["--package", distribution] if distribution else ["--all-packages"] if source == ROOT else []
    kind = ["--wheel"] if wheel_only else []
    run([uv(), "build", "--quiet", *chosen, *kind, "--out-dir", out, source], folder=source, seconds=300)
    return wheels_in(out)


def wheels_in(folder: Path) -> dict[str, Path]:
    """Return distribution name -> wheel of a folder."""
    return {one.name.split("-")[0].replace("_", "-"): one for one in sorted(folder.glob("*.whl"))}


def altered_copy(distribution: str, folder: Path, changes: Mapping[str, Mapping[str, str]]) -> Path:
    """Copy a package and change its text: how tests build a wheel for a purpose.

    Args:
        distribution: which package.
        folder: where the copy goes.
        changes: file within the package -> {text that it holds: text to put instead}.

    Raises:
        PackagingError: a file does not hold the text exactly once, so that the copy would not be what was asked for.
    """
    copy = folder / package_folder(distribution).name
    shutil.copytree(package_folder(distribution), copy, ignore=shutil.ignore_patterns("__pycache__", "dist"))
    for name, texts in changes.items():
        content = (copy / name).read_text()
        for old, new in texts.items():
            if content.count(old) != 1:
                raise PackagingError(f"{distribution}/{name} holds {old!r} {content.count(old)} times, expected once")
            content = content.replace(old, new)
        (copy / name).write_text(content)
    return copy


@dataclass(frozen=True)
class Environment:
    """A virtual environment. Commands run in `folder`, outside the tree, so that only what is installed is found."""

    folder: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "venv" / "bin" / "python"

    def install(
        self, *requirements: str | Path, constraints: Path | None = None, with_dependencies: bool = True
    ) -> None:
        """Install wheels and requirements."""
        pins: list[str | Path] = ["--constraints", constraints] if constraints else []
        alone = [] if with_dependencies else ["--no-deps"]
        words = [uv(), "pip", "install", "--quiet", "--python", self.python, *pins, *alone, *requirements]
        run(words, folder=self.folder, seconds=1200)

    def check(self) -> None:
        """Hold every installed distribution to the bounds of the others (`uv pip check`)."""
        run([uv(), "pip", "check", "--python", self.python], folder=self.folder)

    def installed(self) -> dict[str, str]:
        """Return distribution name -> version."""
        lines = run([uv(), "pip", "freeze", "--python", self.python], folder=self.folder).splitlines()
        pairs = (re.match(r"([\w.-]+)(?:==| @ )(.*)", line) for line in lines)
        return {pair[1]: pair[2] for pair in pairs if pair}

    def run_python(self, code: str, *words: str | Path, seconds: float = 120) -> str:
        """Run code and return what it prints."""
        return run([self.python, "-c", code, *words], folder=self.folder, seconds=seconds)

    def drivetrain(self, *words: str | Path, seconds: float = 400) -> subprocess.CompletedProcess[str]:
        """Run the installed command, whatever comes of it."""
        return attempt([self.python.parent / "drivetrain", *words], folder=self.folder, seconds=seconds)


def make_environment(folder: Path, *, python: str = "3.11") -> Environment:
    """Make an empty environment below a folder, which is made too."""
    folder.mkdir(parents=True, exist_ok=True)
    run([uv(), "venv", "--quiet", "--no-project", "--python", python, folder / "venv"], folder=folder)
    return Environment(folder)
