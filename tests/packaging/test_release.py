"""The release script: what it refuses, and that a contract which breaks a published backend is not let out."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import release
from clean_environments import ROOT, PackagingError, altered_copy, build, distributions, package_folder
from packaging.version import Version

API, FSDP = "drivetrain-backend-api", "drivetrain-backend-fsdp"
SPEC = "src/drivetrain_backend_api/spec.py"

TINY_PROJECT = """
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "drivetrain-backend-tiny"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["drivetrain-backend-api{bounds}"]

[project.entry-points."drivetrain.train_backends"]
tiny = "drivetrain_backend_tiny:SPEC"

[tool.hatch.build.targets.wheel]
packages = ["src/drivetrain_backend_tiny"]
"""
TINY_MODULE = """
from drivetrain_backend_api import BackendSpec, TrainConfig
SPEC = BackendSpec(name="tiny", api_version=1, target="drivetrain_backend_tiny:Tiny", config_class=TrainConfig)
class Tiny:
    pass
"""


def tiny_backend(folder: Path, bounds: str = ">=0.1,<0.2") -> Path:
    """Build the wheel of a backend without heavy dependencies; returns it."""
    module = folder / "src" / "drivetrain_backend_tiny"
    module.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(TINY_PROJECT.format(bounds=bounds))
    (module / "__init__.py").write_text(TINY_MODULE)
    return build(folder / "dist", source=folder)["drivetrain-backend-tiny"]


def contract(folder: Path, version: str, *, texts: dict[str, dict[str, str]] | None = None) -> Path:
    """Build a contract of another version, with changed texts; returns its wheel."""
    changes = {"pyproject.toml": {'version = "0.1.0"': f'version = "{version}"'}} | (texts or {})
    return build(folder / "dist", source=altered_copy(API, folder, changes))[API]


# -- version and changelog ---------------------------------------------------------------------------------------------


def test_a_version_must_be_above_those_released() -> None:
    released = [Version("0.9.0"), Version("0.10.0")]
    assert release.check_version(API, "0.10.1", released, dry_run=False) == "follows 0.10.0"
    assert release.check_version(API, "0.1.0", [], dry_run=False) == "first release"
    with pytest.raises(PackagingError, match=r"drivetrain-backend-api 0\.9\.1: 0\.10\.0 is released already; give a"):
        release.check_version(API, "0.9.1", released, dry_run=True)
    with pytest.raises(PackagingError, match=r"0\.10\.0 is released already"):
        release.check_version(API, "0.10.0", released, dry_run=False)
    with pytest.raises(PackagingError, match=r"drivetrain-backend-api soon: not a version"):
        release.check_version(API, "soon", released, dry_run=True)


def test_between_two_releases_a_dry_run_passes() -> None:
    standing = release.check_version(API, "0.1.0", [Version("0.1.0")], dry_run=True)
    assert standing == "0.1.0 is released; choose a higher version for the next release"


def test_released_versions_are_read_from_the_tags_of_that_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], cwd=tmp_path, check=True)
    for tag in ("infra-v0.1.0", "infra-v0.10.0", "launcher-v7.0"):
        subprocess.run([*git, "tag", tag], cwd=tmp_path, check=True)
    monkeypatch.setattr(release, "ROOT", tmp_path)
    assert sorted(release.released_versions("drivetrain-infra")) == [Version("0.1.0"), Version("0.10.0")]
    assert release.released_versions("drivetrain-backend-api") == []


def test_the_changelog_must_say_what_changed() -> None:
    text = "# Changelog\n\n## 0.2.0\n\n## 0.1.0\n\n- All of it.\n"
    release.check_changelog(API, "0.1.0", text)
    with pytest.raises(PackagingError, match=r"packages/backend-api/CHANGELOG\.md: the section '## 0\.2\.0' is empty"):
        release.check_changelog(API, "0.2.0", text)
    with pytest.raises(PackagingError, match=r"packages/backend-api/CHANGELOG\.md has no section '## 0\.1'"):
        release.check_changelog(API, "0.1", text)


@pytest.mark.parametrize("distribution", distributions())
def test_the_version_is_written_where_the_package_keeps_it(
    distribution: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(package_folder(distribution), tmp_path / "package")
    monkeypatch.setattr(release, "package_folder", lambda _: tmp_path / "package")
    monkeypatch.setattr(release, "uv", lambda: "true")
    release.set_version(distribution, "7.8.9")
    before = tomllib.loads((package_folder(distribution) / "pyproject.toml").read_text())
    after = tomllib.loads((tmp_path / "package" / "pyproject.toml").read_text())
    before["project"]["version"] = "7.8.9"
    assert after == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["jax"], "no package drivetrain-jax; choose of backend-api, backend-fsdp, "),
        (["infra", "launcher", "--version", "1"], "--version is for one package; give them one by one"),
        (["infra", "--published", "."], "--published is for backend-api; add it, or drop the flag"),
    ],
)
def test_a_wrong_command_line_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        release.parse(words)
    assert message in capsys.readouterr().err


# -- published backends ------------------------------------------------------------------------------------------------


def test_a_folder_without_backends_is_refused(tmp_path: Path) -> None:
    (tmp_path / "drivetrain_backend_api-0.1.0-py3-none-any.whl").touch()
    with pytest.raises(PackagingError, match="holds no wheel of a backend"):
        release.published_backends(tmp_path)
    (tmp_path / "drivetrain_backend_tiny-0.1.0-py3-none-any.whl").touch()
    assert [str(one) for one in release.published_backends(tmp_path)] == [str(next(tmp_path.glob("*tiny*")))]


def test_a_contract_that_keeps_a_published_backend_passes(tmp_path: Path) -> None:
    new = contract(tmp_path / "api", "0.1.1")
    said = release.check_published(new, tiny_backend(tmp_path / "tiny"), tmp_path / "environment")
    assert said == "drivetrain_backend_tiny-0.1.0-py3-none-any.whl: works with this contract"


def test_a_contract_outside_a_published_backends_bounds_passes(tmp_path: Path) -> None:
    new = contract(tmp_path / "api", "0.2.0", texts={SPEC: {"API_VERSION = 1\n": "API_VERSION = 2\n"}})
    said = release.check_published(new, tiny_backend(tmp_path / "tiny"), tmp_path / "environment")
    assert "its bounds exclude this contract" in said


def test_a_contract_that_breaks_a_backend_which_accepts_it_is_refused(tmp_path: Path) -> None:
    new = contract(tmp_path / "api", "0.1.1", texts={SPEC: {"API_VERSION = 1\n": "API_VERSION = 2\n"}})
    with pytest.raises(PackagingError) as caught:
        release.check_published(new, tiny_backend(tmp_path / "tiny"), tmp_path / "environment")
    message = str(caught.value)
    assert message.startswith(
        "drivetrain_backend_tiny-0.1.0-py3-none-any.whl accepts drivetrain_backend_api-0.1.1-py3-none-any.whl by its "
        "bounds but does not work with it: train backend 'tiny' "
    )
    assert "was written for API version 1" in message


@pytest.mark.slow
def test_an_eighth_abstract_method_is_refused(tmp_path: Path) -> None:
    old = "    @abstractmethod\n    def sleep("
    eighth = f"    @abstractmethod\n    def an_eighth(self) -> None:\n        ...\n\n{old}"
    texts = {"src/drivetrain_backend_api/backend.py": {old: eighth}}
    new = contract(tmp_path / "api", "0.1.1", texts=texts)
    published = build(tmp_path / "published", distribution=FSDP)[FSDP]
    with pytest.raises(PackagingError, match="FsdpBackend does not implement an_eighth"):
        release.check_published(new, published, tmp_path / "environment")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_dry_run_of_a_new_version_leaves_nothing_behind(capsys: pytest.CaptureFixture[str]) -> None:
    before = {one: one.read_bytes() for one in [ROOT / "uv.lock", *ROOT.glob("packages/*/pyproject.toml")]}
    with pytest.raises(PackagingError, match=r"CHANGELOG\.md has no section '## 7\.0\.0'"):
        release.main(["backend-api", "--version", "7.0.0", "--dry-run"])
    assert release.main(["backend-api", "backend-megatron", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert re.findall(r"^drivetrain-[\w-]+ 0\.1\.0: ", shown, re.MULTILINE)
    assert shown.count("built; installs into a clean environment, all bounds hold, imports") == 2
    assert {one: one.read_bytes() for one in before} == before
