"""Kernels are compiled once for arguments that differ from call to call, on a machine without a GPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import torch
from compile_kernels import Compiler
from realrl.model.gpu import paged_attention

pools = torch.zeros(2, 4, 2, 16, 64, dtype=torch.bfloat16)
qkv, lengths = torch.zeros(3, 8 * 64, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int64)
with Compiler() as compiler:
    compiler.target(90, torch.bfloat16)
    for prompt_width, own_width, window in [(1, 5, 1 << 24), (16, 1, 4095), (5, 32, 4096), (7, 7, 1)]:
        tables = [torch.zeros(3, width, dtype=torch.int64) for width in (prompt_width, own_width)]
        cache = (*pools, tables[0], lengths, tables[1], lengths)
        paged_attention.launch_attention(qkv, *cache, 4, window, 0.0, None)
assert not compiler.failures, compiler.failures
print(sum(made.kernel == "paged_attention.attend_part" for made in compiler.found.values()))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not for this platform")
def test_attention_is_compiled_once_for_tables_of_any_width_and_windows_of_any_length(tmp_path: Path) -> None:
    tools = str(Path(__file__).parents[2] / "tools" / "gpu")
    path = os.pathsep.join([tools, *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": path,
    }
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1"]
