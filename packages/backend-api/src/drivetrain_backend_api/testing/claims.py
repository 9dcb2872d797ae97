"""What the suite found: each claim with its difference, its tolerance and the reason for that tolerance.

Never imports torch, since the pytest plugin reads and writes claims.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

FORMAT = 1
"""Version of the report's layout."""


class Verdict(StrEnum):
    """How a claim came out."""

    HOLDS = "holds"
    BROKEN = "broken"
    NOT_CLAIMED = "not claimed"
    NOT_JUDGED = "claimed, not judged"
    THINNED = "thinned"


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far something may be off, and why that far."""

    value: float
    why: str


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One thing that was judged.

    Attributes:
        test: the test that judged it.
        what: in a few words.
        where: layout, and case within it.
        verdict: how it came out.
        difference: what was measured; None for a claim that is not about a number.
        tolerance: the largest difference that holds.
        why: reason for the tolerance, or what else was seen.
    """

    test: str
    what: str
    where: str
    verdict: Verdict
    difference: float | None = None
    tolerance: float | None = None
    why: str = ""


class Claims:
    """Collects the claims of one backend."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.found: list[Claim] = []

    def close(self, test: str, what: str, where: str, difference: float, tolerance: Tolerance) -> str | None:
        """Note a difference; returns what is wrong when it is beyond the tolerance, or not a number."""
        holds = difference <= tolerance.value
        self._note(test, what, where, holds, difference=difference, tolerance=tolerance.value, why=tolerance.why)
        if holds:
            return None
        return f"{what} ({where}): off by {difference:.3g}; allowed is {tolerance.value:.3g}, because: {tolerance.why}"

    def true(self, test: str, what: str, where: str, holds: bool, seen: str = "") -> str | None:
        """Note a fact; returns what is wrong when it does not hold."""
        self._note(test, what, where, holds, why=seen)
        return None if holds else f"{what} ({where}) does not hold" + (f": {seen}" if seen else "")

    def not_claimed(self, test: str, what: str) -> None:
        """Note what the backend's capabilities leave out."""
        self.found.append(Claim(test=test, what=what, where="", verdict=Verdict.NOT_CLAIMED))

    @property
    def broken(self) -> int:
        """How many claims do not hold."""
        return sum(one.verdict is Verdict.BROKEN for one in self.found)

    def not_judged(self, test: str, what: str) -> None:
        """Note what the backend claims and what this run could not judge."""
        self.found.append(Claim(test=test, what=what, where="", verdict=Verdict.NOT_JUDGED))

    def thinned(self, test: str, where: str) -> None:
        """Note a layout and parameters of a test that were left to other layouts."""
        what = "judged under other layouts, or with other parameters"
        self.found.append(Claim(test=test, what=what, where=where, verdict=Verdict.THINNED))

    def crashed(self, test: str, where: str, error: str) -> None:
        """Note a test that failed without a broken claim of its own."""
        self._note(test, "the test ran to its end", where, False, why=error)

    def _note(self, test: str, what: str, where: str, holds: bool, **more: Any) -> None:
        verdict = Verdict.HOLDS if holds else Verdict.BROKEN
        self.found.append(Claim(test=test, what=what, where=where, verdict=verdict, **more))


def write_report(path: Path, found: Sequence[Claims], facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Write every claim of every backend judged, aside first.

    Args:
        path: the file.
        found: the claims.
        facts: for each backend, what it is: distribution, versions, capabilities.
    """
    aside = path.with_name(path.name + ".partial")
    aside.write_text(json.dumps(to_plain(found, facts), indent=1, allow_nan=False) + "\n")
    aside.replace(path)


def to_plain(found: Sequence[Claims], facts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Turn claims and facts into what a report holds."""
    backends = []
    for name in dict.fromkeys(one.backend for one in found):
        claims = [claim for one in found if one.backend == name for claim in one.found]
        counts = {verdict.value: sum(claim.verdict is verdict for claim in claims) for verdict in Verdict}
        plain = [_plain(claim) for claim in claims]
        backends.append({"backend": name, "facts": dict(facts.get(name, {})), "counts": counts, "claims": plain})
    return {"format": FORMAT, "backends": backends}


def _plain(claim: Claim) -> dict[str, Any]:
    """Write a claim as JSON can hold it: a difference that is no finite number as text."""
    difference: Any = claim.difference
    if difference is not None and not math.isfinite(difference):
        difference = str(difference)
    return asdict(claim) | {"verdict": claim.verdict.value, "difference": difference}


def from_plain(report: Mapping[str, Any]) -> tuple[list[Claims], dict[str, Mapping[str, Any]]]:
    """Inverse of `to_plain`."""
    found = []
    for one in report["backends"]:
        claims = Claims(one["backend"])
        for claim in one["claims"]:
            difference = None if claim["difference"] is None else float(claim["difference"])
            claims.found.append(Claim(**claim | {"verdict": Verdict(claim["verdict"]), "difference": difference}))
        found.append(claims)
    return found, {one["backend"]: one["facts"] for one in report["backends"]}
