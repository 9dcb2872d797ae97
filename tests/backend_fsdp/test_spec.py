"""What discovery sees of the backend, without torch."""

import subprocess
import sys

import pytest

from drivetrain_backend_api import TRAIN_BACKENDS, ConfigError, load_spec, options
from drivetrain_backend_fsdp.config import FsdpConfig


def test_spec_and_options_import_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from drivetrain_backend_fsdp.spec import SPEC; assert SPEC.probe().available;"
        "print(sorted({'torch', 'transformers', 'safetensors'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_discovery_finds_the_backend_and_its_options() -> None:
    spec = load_spec(TRAIN_BACKENDS, "fsdp")
    assert spec.config_class is FsdpConfig
    names = {one.flag for one in options(FsdpConfig) if one.group == "FsdpConfig"}
    assert names == {"--gradient-checkpointing", "--fsdp-cpu-offload", "--fsdp-reshard-after-forward"}
    assert "torch" in spec.probe().detail


def test_two_ways_to_offload_the_optimizer_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match=r"--fsdp-cpu-offload.*--optimizer-cpu-offload"):
        FsdpConfig(hf_checkpoint="x", fsdp_cpu_offload=True, optimizer_cpu_offload=True)
