"""Break the train backends on purpose, in ways that real projects got wrong, and see that the suite notices.

    python scripts/mutate.py                      each backend's unmutated copy, then every mutation
    python scripts/mutate.py --backend megatron   those of one backend
    python scripts/mutate.py --only NAME ...      these
    python scripts/mutate.py --list               what there is
    python scripts/mutate.py --resume FILE.json   go on where an interrupted run stopped, keeping results there
    python scripts/mutate.py --write-docs         write docs/mutations.md too, when all are caught

Each mutation is one replacement in a copy of a backend and of backend-api, on which the test of the conformance suite
that must catch it runs with one and two ranks. It counts as caught when the test fails by a claim of its own: code that
cannot be imported, names nothing, or hangs past the deadline is a bad mutation. The same tests must pass on a copy that
is not mutated. The tables are in `mutations`. The exit code is 1 unless all are caught.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from mutations import API, Mutation, MutationError, fsdp, megatron

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ROOT / "packages"
DOCS = ROOT / "docs" / "mutations.md"
TABLES = {"fsdp": fsdp.MUTATIONS, "megatron": megatron.MUTATIONS}
TITLES = {"fsdp": "FSDP", "megatron": "Megatron"}
MUTATIONS = tuple(one for table in TABLES.values() for one in table)
SUITE = f"{API}/testing"
RANKS = "1,2"
DEADLINE = 400.0
"""Seconds that the suite may take on a mutation, unless told otherwise."""
BASELINE_DEADLINE = 3600.0
"""Seconds for the copy that is not mutated, on which the tests of all mutations run."""
UNMUTATED = "unmutated"
NOTHING_RAN = 5
"""Exit code of pytest."""

BROKEN_CODE = (
    *("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError"),
    *("NameError", "UnboundLocalError", "AttributeError"),
)
"""Errors that say of a mutation only that it is no working code."""
CLAIM_ERRORS = ("assert", "AssertionError", "RanksFailedError", "Failed")
"""How the reason of a failed test begins when the test itself passed judgement."""


# -- one mutation ------------------------------------------------------------------------------------------------------


def mutated_text(mutation: Mutation, packages: Path = PACKAGES) -> str:
    """Return a mutation's file with its replacement made.

    Raises:
        MutationError: the file is not there, or does not hold the old text exactly once.
    """
    path = packages / mutation.file
    if not path.is_file():
        raise MutationError(f"{mutation.name}: packages/{mutation.file} does not exist; correct the table")
    text = path.read_text()
    count = text.count(mutation.old)
    if count != 1:
        raise MutationError(
            f"{mutation.name}: packages/{mutation.file} holds the old text {count} times, it must be once; "
            f"correct the table: {mutation.old!r}"
        )
    return text.replace(mutation.old, mutation.new)


def copied(backend: str) -> tuple[str, str]:
    """Return the packages that decide what is judged."""
    return f"backend-{backend}", "backend-api"


def copy_sources(backend: str, mutation: Mutation | None, folder: Path, packages: Path = PACKAGES) -> list[Path]:
    """Copy the packages into a folder, break the copy, and return what PYTHONPATH must begin with."""
    paths = []
    for package in copied(backend):
        source = Path(package) / "src"
        shutil.copytree(packages / source, folder / source, ignore=shutil.ignore_patterns("__pycache__"))
        paths.append(folder / source)
    if mutation is not None:
        (folder / mutation.file).write_text(mutated_text(mutation, folder))
    return paths


def environment(paths: Sequence[Path], temporary: Path) -> dict[str, str]:
    """Return the environment of a run: this process's, with the copy before whatever is installed."""
    strange = ("DRIVETRAIN_", "PYTEST_", "PYTHON", "RAY_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(strange)}
    return kept | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(temporary),
        # so wide that pytest cuts no reason off
        "COLUMNS": "1000",
    }


def require_copy(backend: str, paths: Sequence[Path], variables: Mapping[str, str]) -> None:
    """See that an interpreter imports both packages from the copy.

    Raises:
        MutationError: it finds others first, so that nothing mutated would run.
    """
    modules = f"drivetrain_backend_{backend} as a, drivetrain_backend_api as b"
    code = f"import {modules}; print(a.__file__, b.__file__, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=variables["TMPDIR"],
        env=dict(variables),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    found = [Path(one) for one in done.stdout.split("\n") if one]
    if len(found) != len(paths) or not all(one.is_relative_to(path) for one, path in zip(found, paths)):
        raise MutationError(f"the copy is not what is imported: {' '.join(map(str, found))}{done.stderr[-500:]}")


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of one mutation.

    Attributes:
        digest: of the mutation and of what it was applied to.
        caught: a test of the suite failed by a claim; for the unmutated copy: all passed.
        by: tests that failed, as function and parameters.
        why: what else was seen, "" when caught.
    """

    name: str
    digest: str
    caught: bool
    by: tuple[str, ...]
    seconds: float
    why: str


def digest_of(backend: str, mutation: Mutation | None, words: str, packages: Path = PACKAGES) -> str:
    """Hash what decides a result: the mutation, the tests and the sources; for the unmutated copy the suite too.

    Args:
        backend: that is judged.
        mutation: None for the unmutated copy.
        words: which tests run, as of pytest's -k.
        packages: where the sources are.
    """
    found = hashlib.sha256(repr((backend, mutation, words)).encode())
    for package in copied(backend):
        for path in sorted((packages / package / "src").rglob("*.py")):
            name = path.relative_to(packages).as_posix()
            # a test added for one mutation does not make another uncaught
            if mutation is None or not name.startswith(SUITE):
                found.update(name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def run_suite(backend: str, mutation: Mutation | None, words: str, *, deadline: float) -> Result:
    """Run tests of the suite on a mutated copy, or on one that is not mutated; see `digest_of`."""
    name = mutation.name if mutation else f"{UNMUTATED} {backend}"
    digest = digest_of(backend, mutation, words)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutation-", ignore_cleanup_errors=True) as folder:
        temporary = Path(folder) / "tmp"
        temporary.mkdir()
        paths = copy_sources(backend, mutation, Path(folder))
        variables = environment(paths, temporary)
        require_copy(backend, paths, variables)
        code, output = _pytest(backend, words, variables, Path(folder), deadline)
    seconds = round(time.monotonic() - start, 1)
    if mutation is None:
        passed, why = passes(code, output)
        return Result(name=name, digest=digest, caught=passed, by=(), seconds=seconds, why=why)
    by, why = judged(code, output)
    return Result(name=name, digest=digest, caught=not why, by=by, seconds=seconds, why=why)


def _pytest(
    backend: str, words: str, variables: Mapping[str, str], folder: Path, deadline: float
) -> tuple[int | None, str]:
    """Run tests of the suite; returns the exit code, None past the deadline, and the output."""
    line = [sys.executable, "-m", "pytest", "--pyargs", "drivetrain_backend_api.testing", "--train-backend", backend]
    line += ["--conformance-ranks", RANKS, "-x", "-q", "-p", "no:cacheprovider", "-k", words]
    log = folder / "output"
    with log.open("w") as file:
        child = subprocess.Popen(
            line,
            cwd=variables["TMPDIR"],
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = child.wait(deadline)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if code is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    return code, log.read_text(errors="replace")


# -- what the output says ----------------------------------------------------------------------------------------------

_FAILED = re.compile(r"^FAILED (?P<node>\S+::test_\w+(?:\[.*?\])?)(?: - (?P<reason>.*))?$", re.MULTILINE)
_ERROR = re.compile(r"^ERROR (?P<what>\S.*)$", re.MULTILINE)
_BROKEN = re.compile(
    rf"^(?:E\s+)?(?:first error, on rank \d+: )?(?:[\w.]+\.)?(?P<kind>{'|'.join(BROKEN_CODE)})(?::.*)?$", re.MULTILINE
)


def judged(code: int | None, output: str) -> tuple[tuple[str, ...], str]:
    """Read a run of the suite on a mutation.

    Args:
        code: pytest's exit code; None when it was ended at the deadline.
        output: all that it printed.

    Returns: the tests that failed, and why the mutation counts as not caught, "" when it was.
    """
    failed = [(one["node"].rsplit("::", 1)[1], (one["reason"] or "").strip()) for one in _FAILED.finditer(output)]
    tests = tuple(dict.fromkeys(name for name, _ in failed))
    if code is None:
        return tests, "the suite was not done at the deadline"
    if code == 0:
        return (), "it survives: its tests pass"
    if errors := _ERROR.findall(output):
        return tests, f"the suite could not run: {errors[0]}"
    if code != 1 or not tests:
        return tests, f"pytest ended with code {code} and no failed test: {_last_line(output)}"
    if broken := _BROKEN.search(output):
        return tests, f"the mutation is no working code: {broken[0].removeprefix('E').strip()}"
    kinds = [re.split(r"[:\s]", reason, maxsplit=1)[0].rsplit(".", 1)[-1] for _, reason in failed]
    for (name, reason), kind in zip(failed, kinds):
        if kind not in CLAIM_ERRORS:
            return tests, f"{name} failed by no claim of the suite: {reason or 'no reason is given'}"
    return tests, ""


def passes(code: int | None, output: str) -> tuple[bool, str]:
    """Read a run of the suite on the unmutated copy: whether it passes, and why not."""
    if code == 0 and re.search(r"\b[1-9]\d* passed\b", output):
        return True, ""
    tests, why = judged(code, output)
    return False, f"{', '.join(tests)} {why or 'failed'}".strip() if code else f"nothing ran: {_last_line(output)}"


def _last_line(output: str) -> str:
    return next((one for one in reversed(output.splitlines()) if one.strip()), "no output")


# -- results and the page ----------------------------------------------------------------------------------------------


def read_results(path: Path) -> dict[str, Result]:
    """Read the results of an earlier run; none when there is no such file.

    Raises:
        MutationError: it is no file of results.
    """
    if not path.exists():
        return {}
    try:
        table = json.loads(path.read_text())
        results = [Result(**{**one, "by": tuple(one["by"])}) for one in table]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise MutationError(f"--resume {path} holds no results: {error}; delete it or give another file") from error
    return {one.name: one for one in results}


def write_results(path: Path, results: Mapping[str, Result]) -> None:
    """Write results aside, then rename."""
    aside = path.with_name(path.name + ".partial")
    aside.write_text(json.dumps([asdict(one) for one in results.values()], indent=1) + "\n")
    aside.replace(path)


_INTRODUCTION = f"""# What the conformance suite catches

The train backends broken on purpose, one mistake at a time, in ways that real projects got wrong. For each the tables
name a test of the conformance suite that fails, and the layout and case with which it does.

This page is written by `uv run python scripts/mutate.py --write-docs`, which applies each mistake to a copy of the
packages and runs that test on it with {" and ".join(RANKS.split(","))} ranks. It needs no GPU.
"""


def page(tables: Mapping[str, Sequence[Mutation]], results: Mapping[str, Result], before: str = "") -> str:
    """Render docs/mutations.md.

    Args:
        tables: of the backends whose results are new.
        results: theirs.
        before: the present page, of which other backends' parts stay.
    """
    parts = [_INTRODUCTION]
    kept = {one.partition("\n")[0]: one.rstrip() + "\n" for one in before.split("\n## ")[1:]}
    for backend, title in TITLES.items():
        if backend in tables:
            parts.append(_table(f"The {title} backend", tables[backend], results))
        elif f"The {title} backend" in kept:
            parts.append(f"## {kept[f'The {title} backend']}")
    return "\n".join(parts)


def _table(title: str, mutations: Sequence[Mutation], results: Mapping[str, Result]) -> str:
    lines = [f"## {title}", "", "| what is broken | where | caught by |", "|---|---|---|"]
    for one in mutations:
        caught = ", ".join(f"`{test}`" for test in results[one.name].by)
        lines.append(f"| {one.mistake} (`{one.name}`) | {one.place} | {caught} |")
    return "\n".join(lines) + "\n"


# -- the command -------------------------------------------------------------------------------------------------------


def chosen(backend: str | None, names: Sequence[str] | None) -> list[Mutation]:
    """Return the mutations of these names, or all; of one backend, or of all.

    Raises:
        MutationError: there is no such mutation.
    """
    known = {one.name: one for one in (TABLES[backend] if backend else MUTATIONS)}
    strangers = [one for one in names or () if one not in known]
    if strangers:
        raise MutationError(f"--only {' '.join(strangers)}: no such mutation; --list shows them")
    return [known[one] for one in names] if names else list(known.values())


def run_all(
    mutations: Sequence[Mutation], results: dict[str, Result], *, jobs: int, deadline: float, keep: Path | None
) -> None:
    """Run what has no valid result yet, the unmutated copy first; results are kept as they come.

    Raises:
        MutationError: the unmutated copy does not pass, so that no failure would mean anything.
    """

    def note(result: Result) -> None:
        results[result.name] = result
        if keep is not None:
            write_results(keep, results)
        said = ", ".join(result.by) if result.caught else f"NOT CAUGHT: {result.why}"
        if result.name.startswith(UNMUTATED):
            said = "passes" if result.caught else f"fails: {result.why}"
        print(f"{result.name:<36} {said}  ({result.seconds:.0f} s)", flush=True)

    def is_known(name: str, digest: str) -> bool:
        return name in results and results[name].caught and results[name].digest == digest

    for backend in dict.fromkeys(one.backend for one in mutations):
        mine = [one for one in mutations if one.backend == backend]
        words = " or ".join(dict.fromkeys(f"({one.chosen})" for one in mine))
        name = f"{UNMUTATED} {backend}"
        if not is_known(name, digest_of(backend, None, words)):
            note(run_suite(backend, None, words, deadline=BASELINE_DEADLINE))
        if not results[name].caught:
            raise MutationError(f"the unmutated copy does not pass: {results[name].why}; mend that first")
    left = [one for one in mutations if not is_known(one.name, digest_of(one.backend, one, one.chosen))]
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        # inline where one at a time is enough, so that Ctrl-C ends it at once
        run = map if jobs == 1 else pool.map
        for result in run(lambda one: run_suite(one.backend, one, one.chosen, deadline=deadline), left):
            note(result)


def main(words: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        description="Break the train backends on purpose and see that the conformance suite notices.",
        allow_abbrev=False,
    )
    parser.add_argument("--backend", choices=TABLES, help="run the mutations of this backend alone")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run these mutations alone")
    parser.add_argument("--list", action="store_true", help="list the mutations and stop")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="mutations at one time (default: 1)")
    parser.add_argument(
        "--deadline", type=float, default=DEADLINE, metavar="S", help=f"seconds a mutation (default: {DEADLINE:.0f})"
    )
    parser.add_argument("--resume", type=Path, metavar="FILE.json", help="keep results there, and go on from them")
    parser.add_argument("--write-docs", action="store_true", help=f"write {DOCS.relative_to(ROOT)} when all are caught")
    arguments = parser.parse_args(words)
    if arguments.list:
        for one in chosen(arguments.backend, None):
            print(f"{one.name:<36} {one.place:<32} {one.mistake}")
        return 0
    if arguments.jobs < 1:
        raise MutationError(f"--jobs {arguments.jobs}: give 1 or more")
    if arguments.only and arguments.write_docs:
        raise MutationError("--write-docs needs all mutations; leave --only out")
    mutations = chosen(arguments.backend, arguments.only)
    for one in mutations:
        mutated_text(one)
    results = read_results(arguments.resume) if arguments.resume else {}
    run_all(mutations, results, jobs=arguments.jobs, deadline=arguments.deadline, keep=arguments.resume)
    uncaught = [one.name for one in mutations if not results[one.name].caught]
    print(f"{len(mutations) - len(uncaught)} of {len(mutations)} mutations are caught", flush=True)
    if uncaught:
        print(f"mutate: error: not caught: {', '.join(uncaught)}", file=sys.stderr)
        return 1
    if arguments.write_docs:
        tables = {arguments.backend: TABLES[arguments.backend]} if arguments.backend else TABLES
        DOCS.write_text(page(tables, results, DOCS.read_text() if DOCS.exists() else ""))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except MutationError as error:
        sys.exit(f"mutate: error: {error}")
