"""The pytest plugin of the suite: its options and its report. pytest imports it at every start, so without torch."""

from collections.abc import Generator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from drivetrain_backend_api.discovery import TRAIN_BACKENDS
from drivetrain_backend_api.testing.claims import Claims, Verdict, from_plain, to_plain, write_report

CLAIMS = pytest.StashKey[list[Claims]]()
_BROKEN_BEFORE = pytest.StashKey[int]()
_WORKER = "drivetrain_conformance"
THINNED = pytest.StashKey[dict[type, list[tuple[str, str]]]]()
FACTS = pytest.StashKey[dict[str, Mapping[str, Any]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the suite's options."""
    group = parser.getgroup("drivetrain", "Drivetrain conformance suite")
    group.addoption("--train-backend", metavar="NAME", help="train backend that drivetrain_backend_api.testing judges")
    group.addoption(
        "--conformance-ranks",
        metavar="N[,N...]",
        help="numbers of ranks to judge on (default: those of the suite's class, else 1,2,4)",
    )
    group.addoption(
        "--conformance-thorough",
        action="store_true",
        help="judge every test under every layout; else layouts of four ranks and more take turns",
    )
    group.addoption(
        "--conformance-report", metavar="FILE.json", help="write every claim with its difference and tolerance there"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Check what was given, before anything is collected."""
    config.stash[CLAIMS] = []
    config.stash[FACTS] = {}
    config.stash[THINNED] = {}
    report = config.getoption("--conformance-report")
    if report and (Path(report).is_dir() or not Path(report).absolute().parent.is_dir()):
        raise pytest.UsageError(f"--conformance-report {report}: its folder must exist, and it must not be a folder")
    chosen_ranks(config)
    name = config.getoption("--train-backend")
    installed = sorted({one.name for one in entry_points(group=TRAIN_BACKENDS.group)})
    if name and name not in installed:
        raise pytest.UsageError(
            f"--train-backend {name}: not installed (installed: {', '.join(installed) or 'none'}); "
            "correct the name, or install the wheel that provides it"
        )


def chosen_ranks(config: pytest.Config) -> tuple[int, ...] | None:
    """Read --conformance-ranks; None when it is not given."""
    text = config.getoption("--conformance-ranks")
    if text is None:
        return None
    try:
        ranks = tuple(sorted({int(one) for one in text.split(",")}))
    except ValueError:
        ranks = ()
    if not ranks or ranks[0] < 1:
        raise pytest.UsageError(f"--conformance-ranks {text}: give numbers of processes, for example 1,2")
    return ranks


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the report; a worker of pytest-xdist hands its part to the process that started it."""
    found, facts = session.config.stash[CLAIMS], session.config.stash[FACTS]
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[_WORKER] = to_plain(found, facts)
        return
    report = session.config.getoption("--conformance-report")
    if report and found:
        write_report(Path(report), found, facts)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a worker of pytest-xdist has found."""
    found, facts = from_plain(getattr(node, "workeroutput", {}).get(_WORKER, {"backends": []}))
    node.config.stash[CLAIMS].extend(found)
    node.config.stash[FACTS].update(facts)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note a test of the suite that failed before it could judge."""
    report = yield
    judge = getattr(item, "funcargs", {}).get("judge")
    claims = getattr(judge, "claims", None)
    if not isinstance(claims, Claims):
        return report
    judged = claims.broken > item.stash.get(_BROKEN_BEFORE, claims.broken)
    if report.failed and call.excinfo is not None and not judged:
        claims.crashed(item.name.partition("[")[0], item.name, str(call.excinfo.value)[:2000])
    item.stash[_BROKEN_BEFORE] = claims.broken
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say in a few lines what was judged and what was not claimed."""
    for backend in dict.fromkeys(one.backend for one in config.stash[CLAIMS]):
        claims = [claim for one in config.stash[CLAIMS] if one.backend == backend for claim in one.found]
        if not claims:
            continue
        count = {verdict: sum(one.verdict is verdict for one in claims) for verdict in Verdict}
        left_out = dict.fromkeys(one.what for one in claims if one.verdict is Verdict.NOT_CLAIMED)
        terminalreporter.section(f"conformance of {backend}")
        terminalreporter.write_line(f"{count[Verdict.HOLDS]} claims hold, {count[Verdict.BROKEN]} are broken")
        if left_out:
            terminalreporter.write_line(f"not claimed: {', '.join(left_out)}")
        if thinned := count[Verdict.THINNED]:
            terminalreporter.write_line(f"thinned: {thinned} combinations; --conformance-thorough judges them too")
        for one in [one for one in claims if one.verdict is Verdict.BROKEN][:10]:
            terminalreporter.write_line(f"broken: {one.what} ({one.where})")
        excepted = config.stash[FACTS].get(backend, {}).get("exceptions", {})
        for test, reason in excepted.items():
            terminalreporter.write_line(f"excepted: {test}: {reason}")
    report = config.getoption("--conformance-report")
    if report and config.stash[CLAIMS]:
        terminalreporter.write_line(f"report: {report}")
