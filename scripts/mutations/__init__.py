"""Ways to break a train backend on purpose, one table a backend; `mutate` applies them."""

from dataclasses import dataclass
from pathlib import Path

API = "backend-api/src/drivetrain_backend_api"


class MutationError(Exception):
    """Something that a person must mend; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One way to break a backend.

    Attributes:
        name: what the command line calls it; unique among a backend's.
        backend: the one that is judged.
        mistake: the real mistake that it imitates.
        file: below packages/.
        old: text that the file holds exactly once.
        new: what takes its place.
        test: of the suite, which must catch it.
        where: words as of pytest's -k that the test's parameters must fit, "" for all of them: saves time.
    """

    name: str
    backend: str
    mistake: str
    file: str
    old: str
    new: str
    test: str
    where: str = ""

    @property
    def place(self) -> str:
        """Package and module, for tables."""
        package, _, rest = self.file.partition("/")
        return f"{package}: {Path(rest).name}"

    @property
    def chosen(self) -> str:
        """What pytest's -k takes."""
        return f"{self.test} and ({self.where})" if self.where else self.test
