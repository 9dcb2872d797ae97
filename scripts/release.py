"""Make a package ready for release, or see on every commit that it could be: version, changelog, build, clean install.

    python scripts/release.py PACKAGE ... --dry-run              check; leaves nothing behind
    python scripts/release.py PACKAGE [--version X]              check, leave the files in dist/, print what to type
    python scripts/release.py backend-api --published DIR ...    hold the new contract to the backend wheels in DIR

It never tags and never uploads: it prints the lines for that. A contract (backend-api) must also keep the train
backends that are published already: those in DIR, or the newest that git tags name, from the package index.
"""

import argparse
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

from clean_environments import (
    PREFIX,
    ROOT,
    Environment,
    PackagingError,
    altered_copy,
    build,
    closure,
    distributions,
    make_environment,
    package_folder,
    project_table,
    run,
    uv,
)
from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

CONTRACT = "drivetrain-backend-api"
BACKENDS = "drivetrain-backend-"

IMPORT = """
import importlib, sys
from importlib.metadata import distribution
name = sys.argv[1]
importlib.import_module(name.replace("-", "_"))
for entry in distribution(name).entry_points:
    # pytest's own belongs to an extra
    if entry.group == "console_scripts" or entry.group.startswith("drivetrain."):
        entry.load()
"""

REQUIREMENTS = """
from importlib.metadata import distributions
for one in distributions():
    print(*(one.requires or []), sep="\\n")
"""

LOAD_BACKENDS = """
import inspect
from drivetrain_backend_api import TRAIN_BACKENDS, DiscoveryError, installed, load_implementation, load_spec
try:
    for name in installed(TRAIN_BACKENDS):
        spec = load_spec(TRAIN_BACKENDS, name)
        if spec.probe().available:
            implementation = load_implementation(TRAIN_BACKENDS, spec)
            if inspect.isabstract(implementation):
                missing = ", ".join(sorted(implementation.__abstractmethods__))
                raise DiscoveryError(f"{spec.target} does not implement {missing}")
except DiscoveryError as error:
    print(error)
"""


def check_version(distribution: str, version: str, released: list[Version], *, dry_run: bool) -> str:
    """Hold a version against those that are released; returns a sentence on the outcome.

    A dry run takes the newest released version too: between a release and the next change of version, all is well.
    """
    where = f"{distribution} {version}"
    try:
        ours = Version(version)
    except InvalidVersion as error:
        raise PackagingError(f"{where}: not a version; write one as 0.2.0") from error
    if not released:
        return "first release"
    newest = max(released)
    if ours == newest and dry_run:
        return f"{newest} is released; choose a higher version for the next release"
    if ours <= newest:
        raise PackagingError(f"{where}: {newest} is released already; give a higher one with --version")
    return f"follows {newest}"


def released_versions(distribution: str) -> list[Version]:
    """Return the versions that git tags (`PACKAGE-vVERSION`) name."""
    start = f"{distribution.removeprefix(PREFIX)}-v"
    return [Version(tag.removeprefix(start)) for tag in run(["git", "tag", "--list", f"{start}*"], folder=ROOT).split()]


def check_changelog(distribution: str, version: str, text: str) -> None:
    """See that the changelog has a section on this version, and that it says something."""
    name = f"packages/{distribution.removeprefix(PREFIX)}/CHANGELOG.md"
    section = re.search(rf"^## {re.escape(version)}\s*$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if section is None:
        raise PackagingError(f"{name} has no section '## {version}'; write one that says what changed")
    if not section[1].strip():
        raise PackagingError(f"{name}: the section '## {version}' is empty; say what changed")


def set_version(distribution: str, version: str) -> None:
    """Write a version into a package's pyproject.toml and into uv.lock."""
    path = package_folder(distribution) / "pyproject.toml"
    text, count = re.subn(r'^version = ".*"$', f'version = "{version}"', path.read_text(), count=1, flags=re.MULTILINE)
    if count != 1:
        raise PackagingError(f"{path.relative_to(ROOT)} has no line 'version = \"...\"'; write one")
    path.write_text(text)
    run([uv(), "lock", "--quiet"], folder=ROOT)


def check_install(distribution: str, wheels: dict[str, Path], folder: Path) -> None:
    """Install a wheel into a clean environment, with only the packages it needs, and import what it offers."""
    environment = make_environment(folder)
    needed, _ = closure([distribution])
    environment.install(*(wheels[one] for one in sorted(needed)), constraints=ROOT / "images" / "newest.txt")
    environment.check()
    environment.run_python(IMPORT, distribution)


def check_published(contract: Path, backend: Path | str, folder: Path) -> str:
    """Hold a contract's wheel to one published backend; returns a sentence on the outcome.

    Args:
        contract: the new wheel of backend-api.
        backend: a published backend: its wheel, or a requirement as `drivetrain-backend-fsdp==0.1.0`.
        folder: where the environment goes.

    Raises:
        PackagingError: the backend's bounds accept the contract, but it does not work with it.
    """
    name = backend.name if isinstance(backend, Path) else backend
    environment = make_environment(folder)
    environment.install(contract, backend, with_dependencies=False)
    if not _accepts(environment, contract):
        return f"{name}: its bounds exclude this contract, so installers keep the one before"
    environment.install(contract, backend, constraints=ROOT / "images" / "newest.txt")
    environment.check()
    error = environment.run_python(LOAD_BACKENDS).strip()
    if error:
        raise PackagingError(
            f"{name} accepts {contract.name} by its bounds but does not work with it: {error}; "
            "keep what it needs, or give the contract a version outside its bounds"
        )
    return f"{name}: works with this contract"


def _accepts(environment: Environment, contract: Path) -> bool:
    """Whether the bounds of all that is installed accept the contract's version."""
    lines = [line for line in environment.run_python(REQUIREMENTS).splitlines() if line]
    bounds = [one.specifier for one in map(Requirement, lines) if one.name == CONTRACT]
    return all(one.contains(contract.name.split("-")[1], prereleases=True) for one in bounds)


def published_backends(folder: Path | None) -> list[Path | str]:
    """Return the published backends: all wheels of a folder, or the newest that git tags name."""
    if folder is not None:
        found = [one for one in sorted(folder.glob("*.whl")) if not one.name.startswith(CONTRACT.replace("-", "_"))]
        if not found:
            raise PackagingError(f"--published {folder} holds no wheel of a backend; give the folder that does")
        return list(found)
    backends = [one for one in distributions() if one.startswith(BACKENDS) and one != CONTRACT]
    return [f"{one}=={max(versions)}" for one in backends if (versions := released_versions(one))]


def release(distribution: str, arguments: argparse.Namespace, folder: Path, wheels: dict[str, Path]) -> None:
    """Check one package, and leave its files in dist/ unless it is a dry run.

    Args:
        distribution: which.
        arguments: of the command line.
        folder: a temporary one.
        wheels: of all packages, as they are; this package's is replaced by the one that is to be released.
    """
    version = arguments.version or project_table(distribution)["version"]
    standing = check_version(distribution, version, released_versions(distribution), dry_run=arguments.dry_run)
    changelog = package_folder(distribution) / "CHANGELOG.md"
    check_changelog(distribution, version, changelog.read_text() if changelog.exists() else "")
    print(f"{distribution} {version}: {standing}; its changelog has the version", flush=True)
    source = package_folder(distribution)
    present = project_table(distribution)["version"]
    if version != present:
        change = {f'version = "{present}"': f'version = "{version}"'}
        source = altered_copy(distribution, folder, {"pyproject.toml": change})
    out = folder / "dist"
    built = build(out, source=source, wheel_only=False)[distribution]
    check_install(distribution, wheels | {distribution: built}, folder / "alone")
    print("  built; installs into a clean environment, all bounds hold, imports", flush=True)
    if distribution == CONTRACT:
        published = published_backends(arguments.published)
        for number, backend in enumerate(published):
            print(f"  {check_published(built, backend, folder / f'published_{number}')}", flush=True)
        if not published:
            print("  no train backend is published yet, so there is none to hold the contract to", flush=True)
    if not arguments.dry_run:
        if version != present:
            set_version(distribution, version)
        _leave(distribution, version, out)


def _leave(distribution: str, version: str, out: Path) -> None:
    """Copy the built files to dist/ and print the lines that publish them."""
    dist = ROOT / "dist"
    dist.mkdir(exist_ok=True)
    built = [one for one in sorted(out.iterdir()) if one.suffix in (".whl", ".gz")]
    kept = [Path(shutil.copy(one, dist)) for one in built]
    tag = f"{distribution.removeprefix(PREFIX)}-v{version}"
    print("  now type, after the commit of the version:")
    print(f"    git tag {tag} && git push origin {tag}")
    print(f"    uv publish {' '.join(str(one.relative_to(ROOT)) for one in kept)}")


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line; package names may be folders (`backend-api`) or distributions."""
    parser = argparse.ArgumentParser(description="Check and build releases.", allow_abbrev=False)
    parser.add_argument("packages", nargs="+", metavar="PACKAGE", help="folder below packages/")
    parser.add_argument("--version", help="the version to release; the one in pyproject.toml when not given")
    parser.add_argument("--dry-run", action="store_true", help="leave nothing behind")
    parser.add_argument("--published", type=Path, metavar="DIR", help="backend wheels to hold the contract to")
    arguments = parser.parse_args(words)
    arguments.packages = [PREFIX + one.removeprefix(PREFIX) for one in arguments.packages]
    strangers = [one for one in arguments.packages if one not in distributions()]
    if strangers:
        known = ", ".join(one.removeprefix(PREFIX) for one in distributions())
        parser.error(f"no package {', '.join(strangers)}; choose of {known}")
    if arguments.version and len(arguments.packages) > 1:
        parser.error("--version is for one package; give them one by one")
    if arguments.published and CONTRACT not in arguments.packages:
        parser.error(f"--published is for {CONTRACT.removeprefix(PREFIX)}; add it, or drop the flag")
    if arguments.published:
        arguments.published = arguments.published.resolve()
    return arguments


def main(words: list[str]) -> int:
    """Run the command; returns the exit code."""
    arguments = parse(words)
    if not arguments.dry_run and run(["git", "status", "--porcelain"], folder=ROOT).strip():
        raise PackagingError("the working tree has changes; commit them, or add --dry-run")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        wheels = build(folder / "wheels")
        for distribution in arguments.packages:
            start = time.monotonic()
            release(distribution, arguments, folder / distribution, wheels)
            print(f"  {time.monotonic() - start:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except PackagingError as error:
        sys.exit(f"release: error: {error}")
