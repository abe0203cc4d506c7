"""Kernels compile for every generation of GPUs, on a machine without one, and fit into them."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "gpu" / "compile_kernels.py"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not for this platform")
@pytest.mark.parametrize(
    "capability", [90, *(pytest.param(other, marks=pytest.mark.exhaustive) for other in (80, 100))]
)
def test_kernels_compile_without_spills_and_fit_into_every_generation_of_gpus(capability: int) -> None:
    command = [sys.executable, str(SCRIPT), "--models", "small", "--dtypes", "bfloat16"]
    done = subprocess.run([*command, "--capabilities", str(capability)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"sm_{capability}" in done.stdout
