import re
import shutil
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ["backend-api", "backend-fsdp", "backend-megatron", "infra", "launcher"]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    uv = shutil.which("uv")
    assert uv is not None, "uv builds the wheels; install it"
    out = tmp_path_factory.mktemp("wheels")
    done = subprocess.run(
        [uv, "build", "--all-packages", "--wheel", "--out-dir", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return out


def test_the_workspace_builds_exactly_five_wheels(wheels: Path) -> None:
    built = sorted(one.name.partition("-")[0] for one in wheels.glob("*.whl"))
    assert built == ["drivetrain_" + folder.replace("-", "_") for folder in FOLDERS]


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_wheel_is_typed_and_has_its_own_version_readme_and_entry_points(wheels: Path, folder: str) -> None:
    name = "drivetrain_" + folder.replace("-", "_")
    project = tomllib.loads((ROOT / "packages" / folder / "pyproject.toml").read_text())["project"]
    (wheel,) = wheels.glob(f"{name}-*.whl")
    assert wheel.name == f"{name}-{project['version']}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert f"{name}/py.typed" in names
        sources = (ROOT / "packages" / folder / "src").rglob("*")
        shipped = {str(one.relative_to(ROOT / "packages" / folder / "src")) for one in sources if one.is_file()}
        assert {one for one in shipped if "__pycache__" not in one} <= set(names)
        metadata = archive.read(f"{name}-{project['version']}.dist-info/METADATA").decode()
        assert (ROOT / "packages" / folder / "README.md").read_text("utf-8").strip() in metadata
        if "entry-points" in project:
            text = archive.read(f"{name}-{project['version']}.dist-info/entry_points.txt").decode()
            for group, entries in project["entry-points"].items():
                assert f"[{group}]" in text
                assert all(f"{key} = {value}" in text for key, value in entries.items())


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_package_keeps_a_changelog_that_names_its_version(folder: str) -> None:
    package = ROOT / "packages" / folder
    version = tomllib.loads((package / "pyproject.toml").read_text())["project"]["version"]
    assert re.search(rf"^## {re.escape(version)}\b", (package / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
