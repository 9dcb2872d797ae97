"""What the patches must leave as it is for everybody else in the process."""

import subprocess
import sys

import pytest

CODE = """
import torch
from drivetrain_backend_megatron.core import patches
ones = torch.ones(2)
calls = {"full": ((3,), 1.0), "tensor": ([1.0],), "empty_like": (ones,), "zeros_like": (ones,)}
with torch.device("meta"):
    made = {name: getattr(torch, name)(*calls.get(name, (3,))) for name in patches.FACTORIES}
print(sorted(name for name, one in made.items() if one.device.type != "meta"))
"""


@pytest.mark.slow
def test_a_device_context_still_reaches_the_factories() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120, check=True)
    # those that are made like a given tensor are made where that is
    assert done.stdout.strip() == "['empty_like', 'zeros_like']"
