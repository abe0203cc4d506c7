"""Kernels compile for GPUs, on a machine without one."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_kernels.py")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not for this platform")
@pytest.mark.parametrize(
    ("capability", "dtypes"),
    [(90, ()), *(pytest.param(c, ("bfloat16",), marks=pytest.mark.slow) for c in (80, 100))],
)
def test_kernels_compile_for_every_generation_of_gpus(
    capability: int, dtypes: tuple[str, ...], tmp_path: Path
) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(capability), *dtypes],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 12
