"""Transport `disk`: a version's buckets as safetensors files, with their plan, in a folder that both sides share.

Complete or absent: written aside, then renamed. Knows no backend and no engine.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drivetrain_backend_api import DataError
from drivetrain_backend_api.weights import WeightBucket, WeightPlan, unflatten
from drivetrain_infra.weight_sync.plan_json import dump_plan

_PLAN = "plan.json"


def version_folder(root: Path, version: int) -> Path:
    """Return where a version's weights lie."""
    return root / f"weights_{version:07d}"


class DiskWriter:
    """Writes one version; only the rank that holds all buckets has one."""

    def __init__(self, folder: Path, plan: WeightPlan) -> None:
        """Begin to write `folder`; what an earlier attempt left there is removed."""
        self._folder = folder
        self._aside = folder.with_name(f"{folder.name}.partial")
        discard(folder)
        self._aside.mkdir(parents=True)
        (self._aside / _PLAN).write_text(dump_plan(plan))

    def write(self, bucket: WeightBucket) -> None:
        """Write one bucket."""
        assert bucket.data is not None
        save_file(dict(unflatten(bucket.data.cpu(), bucket.entries)), self._aside / _file_name(bucket.index))

    def publish(self) -> None:
        """Make all of it visible at once."""
        self._aside.rename(self._folder)


def read_buckets(folder: Path, plan: WeightPlan) -> Iterator[tuple[int, list[tuple[str, Tensor]]]]:
    """Read a version's buckets, in plan order.

    Raises:
        DataError: the folder is not there, is of another plan, or a file cannot be read.
    """
    try:
        same = (folder / _PLAN).read_text() == dump_plan(plan)
    except OSError as error:
        raise DataError(
            f"the engine cannot read weights in {folder} ({error}); --update-weight-disk-dir must be a folder that "
            "trainer and engines share"
        ) from error
    if not same:
        raise DataError(f"{folder} holds weights of another plan; give each run its own --update-weight-disk-dir")
    for index in range(plan.num_buckets):
        file = folder / _file_name(index)
        try:
            tensors = load_file(file)
            yield index, [(one.name, tensors[one.name]) for one in plan.bucket(index)]
        except (OSError, SafetensorError, KeyError) as error:
            raise DataError(f"{file} cannot be read ({type(error).__name__}: {error})") from error


def discard(folder: Path) -> None:
    """Remove a version's weights, whole or partial."""
    for one in (folder, folder.with_name(f"{folder.name}.partial")):
        shutil.rmtree(one, ignore_errors=True)


def _file_name(bucket: int) -> str:
    return f"bucket_{bucket:05d}.safetensors"
