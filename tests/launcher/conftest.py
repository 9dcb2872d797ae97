"""The scratch folder that the tests of bad input share."""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Helpers stand beside the tests that use them.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def good_scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, prompts and a run's checkpoint; copy it, never change it."""
    from scratch import make_scratch

    folder = tmp_path_factory.mktemp("scratch")
    make_scratch(folder)
    return folder


@pytest.fixture
def short_tempdir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The system's temporary folder for one test, with a path that is short enough for Ray's sockets."""
    folder = Path(tempfile.mkdtemp(prefix="d"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    shutil.rmtree(folder)
