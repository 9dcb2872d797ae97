"""Install the wheels as a user does, one backend at a time, and see that they work: the wheel matrix of CI.

    python scripts/wheel_matrix.py             the rows that CI runs
    python scripts/wheel_matrix.py NAME ...    these rows
    python scripts/wheel_matrix.py --list      what there is

For each row: a clean environment, the wheels with the pins of one stack, `uv pip check`, `drivetrain backends`, and one
tiny training run.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from clean_environments import ROOT, Environment, PackagingError, build, closure, make_environment

LAUNCHER = "drivetrain-launcher"
ROLLOUTS = 2
MAKE_RUN = """
import sys
from pathlib import Path
from drivetrain_launcher.recipes import arithmetic
arithmetic.make(Path(sys.argv[1]), seed=7)
"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One environment and what is expected of it.

    Attributes:
        name: what the command line calls it.
        backend: the train backend, installed alone beside the launcher.
        stack: the constraint file whose pins it is installed with, below images/.
        python: the interpreter's version.
        also: further requirements.
        in_ci: whether it runs when no row is named.
    """

    name: str
    backend: str
    stack: str = "newest"
    python: str = "3.11"
    also: tuple[str, ...] = ()
    in_ci: bool = True

    @property
    def distribution(self) -> str:
        """The distribution of its backend."""
        return f"drivetrain-backend-{self.backend}"


ROWS = (
    Row(name="fsdp", backend="fsdp"),
    Row(name="fsdp-lowest", backend="fsdp", stack="lowest"),
    Row(name="megatron", backend="megatron"),
    Row(name="megatron-lowest", backend="megatron", stack="lowest"),
    # the newer Megatron-Core; uv finds or fetches that Python
    Row(name="megatron-3.12", backend="megatron", python="3.12", in_ci=False),
    # tens of GB of others' wheels
    Row(name="sglang", backend="fsdp", stack="sglang", python="3.12", also=("sglang",), in_ci=False),
)


def run_row(row: Row, wheels: dict[str, Path], folder: Path) -> None:
    """Make a row's environment below a folder and hold it to what the row expects.

    Raises:
        PackagingError: something is not as expected.
    """
    environment = make_environment(folder, python=row.python)
    needed, _ = closure([LAUNCHER, row.distribution])
    # by path: a name could also be found in a registry
    paths = [wheels[one] for one in sorted(needed)]
    environment.install(*paths, *row.also, constraints=ROOT / "images" / f"{row.stack}.txt")
    environment.check()
    found = {one for one in environment.installed() if one.startswith("drivetrain-")}
    if found != needed:
        raise PackagingError(f"{row.name}: holds {sorted(found)}, expected {sorted(needed)}")
    check_listing(row, environment)
    check_training(row, environment)


def check_listing(row: Row, environment: Environment) -> None:
    """See that `drivetrain backends` lists the row's backend, and no other, as it should."""
    done = environment.drivetrain("backends", "--json", seconds=60)
    if done.returncode:
        raise PackagingError(f"{row.name}: drivetrain backends: exit code {done.returncode}\n{done.stderr}")
    listed = {one["name"]: one for one in json.loads(done.stdout)}
    if list(listed) != [row.backend]:
        raise PackagingError(f"{row.name}: drivetrain backends lists {list(listed)}, expected {row.backend!r} alone")
    mine = listed[row.backend]
    if mine["error"] or not mine["available"]:
        raise PackagingError(f"{row.name}: drivetrain backends says {mine}")


def check_training(row: Row, environment: Environment) -> None:
    """Train for a few rollouts."""
    data, save = environment.folder / "sums", environment.folder / "run"
    environment.run_python(MAKE_RUN, data)
    done = environment.drivetrain(
        *("train", "--train-backend", row.backend, "--fp32", "--hf-checkpoint", data / "model"),
        *("--prompt-data", data / "train.jsonl", "--input-key", "question", "--label-key", "answer"),
        *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "5"),
        *("--num-rollout", str(ROLLOUTS), "--save", save),
    )
    output = f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
    if done.returncode:
        raise PackagingError(f"{row.name}: training failed: {output}")
    metrics = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    norms = [one["train/grad_norm"] for one in metrics if "train/grad_norm" in one]
    latest = (save / "latest").read_text().strip()
    if len(norms) < ROLLOUTS or not all(math.isfinite(one) for one in norms) or not (save / latest).is_dir():
        raise PackagingError(f"{row.name}: grad norms {norms}, checkpoint {latest!r}: {output}")


def chosen_rows(names: list[str]) -> list[Row]:
    """Return the rows of these names, or those of CI."""
    known = {row.name: row for row in ROWS}
    strangers = [one for one in names if one not in known]
    if strangers:
        raise PackagingError(f"no row {', '.join(strangers)}; choose of {', '.join(known)}")
    return [known[one] for one in names] or [row for row in ROWS if row.in_ci]


def main(words: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description="Try the wheels in clean environments.", allow_abbrev=False)
    parser.add_argument("rows", nargs="*", metavar="NAME", help="rows to run; those of CI when none is given")
    parser.add_argument("--list", action="store_true", help="list the rows and stop")
    arguments = parser.parse_args(words)
    if arguments.list:
        for row in ROWS:
            print(f"{row.name:<15} {row.backend} with images/{row.stack}.txt, Python {row.python}")
        return 0
    rows = chosen_rows(arguments.rows)
    failed = []
    with tempfile.TemporaryDirectory() as temporary:
        wheels = build(Path(temporary) / "wheels")
        for row in rows:
            start = time.monotonic()
            try:
                run_row(row, wheels, Path(temporary) / row.name)
            except PackagingError as error:
                failed.append(row.name)
                print(f"wheel_matrix: error: {error}", file=sys.stderr)
            outcome = "failed" if row.name in failed else "trains"
            print(f"{row.name:<15} {outcome}  ({time.monotonic() - start:.0f} s)", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except PackagingError as error:
        sys.exit(f"wheel_matrix: error: {error}")
