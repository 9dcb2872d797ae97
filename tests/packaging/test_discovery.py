import json
from typing import Any

import pytest

from drivetrain_backend_api import ConfigError, merge_environments

LOAD = """
import json
from drivetrain_backend_api import TRAIN_BACKENDS, DiscoveryError, load_implementation, load_spec
try:
    load_implementation(TRAIN_BACKENDS, load_spec(TRAIN_BACKENDS, {name!r}))
except DiscoveryError as error:
    print(json.dumps([type(error).__name__, str(error), repr(error.__cause__)]))
"""


ABSENT = "lambda: ProbeResult(available=False, detail='no such chip')"
"""A probe, as code, of a backend that cannot work here."""


def spec_code(name: str, *, api_version: int = 1, **fields: str) -> str:
    """Return a module whose `SPEC` is a train backend; `fields` are further arguments, as code."""
    more = "".join(f", {field}={value}" for field, value in fields.items())
    return (
        "from drivetrain_backend_api import BackendSpec, ProbeResult, TrainConfig\n"
        f"SPEC = BackendSpec(name={name!r}, api_version={api_version}, target='nowhere:Backend', "
        f"config_class=TrainConfig{more})\n"
    )


def test_not_installed_says_what_is_and_the_line_to_type(site: Any) -> None:
    kind, message, cause = site.python(LOAD.format(name="jax"))
    assert kind == "NotInstalledError"
    assert message == (
        "train backend 'jax' is not installed (installed: fsdp, megatron); to use it: "
        "pip install drivetrain-backend-jax; or choose an installed one with --train-backend"
    )
    assert cause == "None"


def test_a_failing_import_is_told_with_the_original_error_chained(site: Any) -> None:
    site.install("backend-jax", module="jax_spec", name="jax", code="import jax_that_is_absent")
    kind, message, cause = site.python(LOAD.format(name="jax"))
    assert kind == "PluginImportError"
    assert message == (
        "train backend 'jax' (backend-jax 1.2.3) is installed, but importing jax_spec:SPEC failed: "
        "ModuleNotFoundError: No module named 'jax_that_is_absent'; "
        "repair it: pip install --force-reinstall backend-jax"
    )
    assert cause == "ModuleNotFoundError(\"No module named 'jax_that_is_absent'\")"


def test_a_failing_import_of_the_implementation_is_told_too(site: Any) -> None:
    site.install("backend-jax", module="jax_spec", name="jax", code=spec_code("jax"))
    kind, message, cause = site.python(LOAD.format(name="jax"))
    assert kind == "PluginImportError"
    assert "importing nowhere:Backend failed: ModuleNotFoundError: No module named 'nowhere'" in message
    assert cause.startswith("ModuleNotFoundError")


@pytest.mark.parametrize(
    ("theirs", "way_out"), [(0, "upgrade it: pip install -U backend-jax, or pin"), (2, "upgrade, or pin")]
)
def test_another_api_version_names_both_and_the_pin(site: Any, theirs: int, way_out: str) -> None:
    site.install(
        "backend-jax",
        module="jax_spec",
        name="jax",
        code=spec_code("jax", api_version=theirs),
        requires="drivetrain-backend-api<9,>=8",
    )
    kind, message, _ = site.python(LOAD.format(name="jax"))
    assert kind == "ApiVersionError"
    assert message == (
        f"train backend 'jax' (backend-jax 1.2.3) was written for API version {theirs}, but the installed "
        f"drivetrain-backend-api speaks API version 1; {way_out} the contract it was built for: "
        "pip install 'drivetrain-backend-api<9,>=8'"
    )


def test_something_else_than_a_spec_is_refused(site: Any) -> None:
    site.install("backend-jax", module="jax_spec", name="jax", code=spec_code("other"))
    kind, message, _ = site.python(LOAD.format(name="jax"))
    assert kind == "PluginImportError"
    assert "jax_spec:SPEC must be a BackendSpec named 'jax'" in message


def test_two_distributions_with_one_name_are_an_error(site: Any) -> None:
    site.install("backend-jax", module="jax_spec", name="jax", code=spec_code("jax"))
    site.install("another-jax", module="jax_again", name="jax", code=spec_code("jax"))
    kind, message, _ = site.python(LOAD.format(name="jax"))
    assert kind == "DuplicateNameError"
    assert "train backend 'jax' is claimed by two distributions, " in message
    assert "another-jax" in message
    assert "backend-jax" in message


def test_the_backend_that_is_preferred_among_the_available_ones_is_the_default(site: Any) -> None:
    select = (
        "import json; from drivetrain_backend_api import select_backend; print(json.dumps(select_backend(None).name))"
    )
    assert site.python(select) == "megatron"
    site.install("backend-tpu", module="tpu_spec", name="tpu", code=spec_code("tpu", preference="99", probe=ABSENT))
    assert site.python(select) == "megatron"
    site.install("backend-jax", module="jax_spec", name="jax", code=spec_code("jax", preference="99"))
    assert site.python(select) == "jax"


def test_two_parties_that_set_one_variable_differently_are_an_error() -> None:
    agreed = {"a backend": {"NCCL_CUMEM_ENABLE": "0", "A": "1"}, "an engine": {"NCCL_CUMEM_ENABLE": "0", "B": "2"}}
    assert merge_environments(agreed) == {"NCCL_CUMEM_ENABLE": "0", "A": "1", "B": "2"}
    with pytest.raises(ConfigError, match=r"a backend needs A='1' and an engine needs A='2' in one process"):
        merge_environments({"a backend": {"A": "1"}, "an engine": {"A": "2"}})


# -- as the command shows it -------------------------------------------------------------------------------------------


def test_backends_lists_broken_ones_beside_those_that_work(site: Any) -> None:
    site.install("backend-bad", module="bad_spec", name="bad", code="raise RuntimeError('no luck')")
    site.install("backend-old", module="old_spec", name="old", code=spec_code("old", api_version=0))
    site.install("backend-raw", module="raw_spec", name="raw", code=spec_code("raw", probe="lambda: 1 / 0"))
    site.install("backend-tpu", module="tpu_spec", name="tpu", code=spec_code("tpu", probe=ABSENT))
    site.install("backend-new", module="new_spec", name="new", code=spec_code("new"))
    done = site.drivetrain("backends", "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert list(rows) == ["bad", "fsdp", "megatron", "new", "old", "raw", "tpu"]
    assert {name: row["available"] for name, row in rows.items()} == {
        "bad": False,
        "fsdp": True,
        "megatron": True,
        "new": True,
        "old": False,
        "raw": False,
        "tpu": False,
    }
    assert "RuntimeError: no luck" in rows["bad"]["error"]
    assert "written for API version 0" in rows["old"]["error"]
    assert "division by zero" in rows["raw"]["error"]
    assert rows["new"] == {
        "name": "new",
        "distribution": "backend-new",
        "version": "1.2.3",
        "api_version": 1,
        "capabilities": {
            "parallelism": ["dp"],
            "precisions": ["fp32"],
            "devices": ["cpu"],
            "cpu_offload": False,
            "reference": "",
            "teacher": "",
            "resharding": False,
            "async_save": False,
        },
        "tested_with": [],
        "available": True,
        "detail": "",
        "error": None,
    }
    shown = site.drivetrain("backends").stdout
    assert "bad: broken\n  distribution  backend-bad 1.2.3\n  error         train backend 'bad'" in shown
    assert "fsdp: available\n  distribution  drivetrain-backend-fsdp " in shown
    assert "tpu: not available\n  distribution  backend-tpu 1.2.3\n" in shown
    assert "  probe         no such chip\n" in shown


def test_backends_lists_both_distributions_of_a_name(site: Any) -> None:
    site.install("backend-jax", module="jax_spec", name="jax", code=spec_code("jax"))
    site.install("another-jax", module="jax_again", name="jax", code=spec_code("jax"))
    (row,) = [row for row in json.loads(site.drivetrain("backends", "--json").stdout) if row["name"] == "jax"]
    assert sorted(row["distribution"].split(", ")) == ["another-jax", "backend-jax"]
    assert "claimed by two distributions" in row["error"]


def test_a_third_partys_backend_brings_its_own_flags(site: Any) -> None:
    code = (
        "from dataclasses import dataclass\n"
        "from drivetrain_backend_api import BackendSpec, TrainConfig, option\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class JaxConfig(TrainConfig):\n"
        "    mesh_shape: tuple[int, ...] = option((1,), help='of the devices')\n"
        "SPEC = BackendSpec(name='jax', api_version=1, target='nowhere:Backend', config_class=JaxConfig)\n"
    )
    site.install("backend-jax", module="jax_spec", name="jax", code=code)
    words = [
        "--hf-checkpoint",
        "M",
        "--prompt-data",
        "P",
        "--save",
        "S",
        "--num-rollout",
        "1",
        "--mesh-shape",
        "2",
        "4",
    ]
    done = site.drivetrain("train", "--train-backend", "jax", *words, "--print-config")
    assert "mesh-shape = [2, 4]  # flag\n" in done.stdout
    assert (
        "train backend jax:\n  --mesh-shape N [N ...]" in site.drivetrain("train", "--train-backend=jax", "-h").stdout
    )
    refused = site.drivetrain("train", "--train-backend", "fsdp", *words)
    assert refused.returncode == 2
    assert refused.stderr == (
        "drivetrain: error: --mesh-shape belongs to train backend 'jax', but this run uses 'fsdp'; "
        "drop it, or choose --train-backend jax\n"
    )
