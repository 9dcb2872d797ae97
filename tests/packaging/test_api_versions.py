"""A contract and a backend of different API versions, as wheels built for the purpose: the version error, both ways."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from clean_environments import Environment, PackagingError, altered_copy, build, make_environment

API, FSDP = "drivetrain-backend-api", "drivetrain-backend-fsdp"
NEEDED = (API, FSDP, "drivetrain-infra", "drivetrain-launcher")
"""The tree's packages without the other backend."""

LIBRARIES = ("psutil",)
"""All that `drivetrain backends` imports of the libraries that these depend on."""

NEW_API = {
    "pyproject.toml": {'version = "0.1.0"': 'version = "0.2.0"'},
    "src/drivetrain_backend_api/spec.py": {"API_VERSION = 1\n": "API_VERSION = 2\n"},
}
NEW_BACKEND = {
    "pyproject.toml": {'version = "0.1.0"': 'version = "0.2.0"', "[torch]>=0.1,<0.2": "[torch]>=0.2,<0.3"},
    "src/drivetrain_backend_fsdp/spec.py": {"api_version=1": 'api_version=2, a_field_of_version_2="unknown to 1"'},
}
OLD_API_ERROR = (
    "train backend 'fsdp' (drivetrain-backend-fsdp 0.2.0) was written for API version 2, but the installed "
    "drivetrain-backend-api speaks API version 1; upgrade, or pin the contract it was built for: "
    "pip install 'drivetrain-backend-api[torch]<0.3,>=0.2'"
)
OLD_BACKEND_ERROR = (
    "train backend 'fsdp' (drivetrain-backend-fsdp 0.1.0) was written for API version 1, but the installed "
    "drivetrain-backend-api speaks API version 2; upgrade it: pip install -U drivetrain-backend-fsdp, or pin the "
    "contract it was built for: pip install 'drivetrain-backend-api[torch]<0.2,>=0.1'"
)


@dataclass(frozen=True)
class Shelf:
    """The wheels of the tree, and two that were built for the purpose."""

    present: dict[str, Path]
    new_api: Path
    new_backend: Path


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    folder = tmp_path_factory.mktemp("shelf")
    present = {one: build(folder / one, distribution=one)[one] for one in NEEDED}
    return Shelf(
        present=present,
        new_api=build(folder / "new_api", source=altered_copy(API, folder, NEW_API))[API],
        new_backend=build(folder / "new_backend", source=altered_copy(FSDP, folder, NEW_BACKEND))[FSDP],
    )


@pytest.fixture
def make(shelf: Shelf, tmp_path: Path) -> Callable[..., Environment]:
    """An environment of the tree's wheels, in which some are replaced; version bounds do not stop it."""

    def environment(**replaced: Path) -> Environment:
        chosen = shelf.present | {f"drivetrain-backend-{name}": wheel for name, wheel in replaced.items()}
        made = make_environment(tmp_path)
        made.install(*chosen.values(), *LIBRARIES, with_dependencies=False)
        return made

    return environment


def listed_error(environment: Environment) -> str | None:
    done = environment.drivetrain("backends", "--json", seconds=60)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert row["name"] == "fsdp"
    error: str | None = row["error"]
    return error


def train_refusal(environment: Environment) -> str:
    words = ["--hf-checkpoint", "M", "--prompt-data", "P", "--save", "S", "--num-rollout", "1"]
    done = environment.drivetrain("train", "--train-backend", "fsdp", *words, seconds=60)
    assert done.returncode == 2, done.stdout + done.stderr
    return done.stderr


def test_the_same_versions_give_no_version_error(make: Callable[..., Environment]) -> None:
    assert listed_error(make()) is None


def test_an_old_api_against_a_new_backend_gives_the_version_error(
    make: Callable[..., Environment], shelf: Shelf
) -> None:
    environment = make(fsdp=shelf.new_backend)
    assert listed_error(environment) == OLD_API_ERROR
    assert train_refusal(environment) == f"drivetrain: error: {OLD_API_ERROR}\n"
    with pytest.raises(PackagingError, match=r"drivetrain-backend-fsdp.*requires.*drivetrain-backend-api.*>=0\.2"):
        environment.check()


def test_a_new_api_against_an_old_backend_gives_the_version_error(
    make: Callable[..., Environment], shelf: Shelf
) -> None:
    environment = make(api=shelf.new_api)
    assert listed_error(environment) == OLD_BACKEND_ERROR
    assert train_refusal(environment) == f"drivetrain: error: {OLD_BACKEND_ERROR}\n"
    with pytest.raises(PackagingError, match=r"drivetrain-backend-fsdp.*requires.*drivetrain-backend-api.*<0\.2"):
        environment.check()
