import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Site:
    """A folder of small distributions, laid out as pip installs them, and a fresh interpreter that sees them."""

    folder: Path

    def install(
        self,
        distribution: str,
        *,
        module: str,
        code: str,
        name: str,
        group: str = "drivetrain.train_backends",
        requires: str = "drivetrain-backend-api<0.2,>=0.1",
        version: str = "1.2.3",
    ) -> None:
        """Install a distribution with one module, whose `SPEC` is the entry point `name`."""
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\nRequires-Dist: {requires}\n"
        )
        (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}:SPEC\n")
        (self.folder / f"{module}.py").write_text(code)

    def python(self, code: str) -> Any:
        """Run code in a fresh interpreter and return what it prints, as JSON."""
        done = self.run("-c", code)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def drivetrain(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run the command in a fresh interpreter."""
        return self.run("-m", "drivetrain_launcher.cli", *words)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *words], env=self.environ, cwd=self.folder, capture_output=True, text=True, timeout=60
        )

    @property
    def environ(self) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("DRIVETRAIN_")}
        return clean | {"PYTHONPATH": str(self.folder), "TMPDIR": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)
