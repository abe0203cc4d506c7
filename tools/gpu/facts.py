"""Print facts about the machine, and check that the other stages find the packages that they need."""

import importlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from results import CPU, PLACE, record

NEEDED = (
    *("numpy", "numba", "pydantic", "yaml", "typer", "rich", "safetensors", "tokenizers", "transformers"),
    *("jinja2", "datasets", "pyarrow", "xxhash", "triton", "pytest", "pytest_timeout", "xdist"),
    "realrl.engine.training.trainer",
)
OPTIONAL = ("trl", "peft", "scipy", "hypothesis", "liger_kernel", "cut_cross_entropy")
TRY_ALLOCATOR = """
import torch
blocks = [torch.zeros(1 << 28, device="cuda") for _ in range(4)]
del blocks
source, graph = torch.zeros(1 << 29, device="cuda"), torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    result = source[:1000] * 2
graph.replay()
torch.cuda.synchronize()
print(torch.cuda.memory_reserved() >> 20, "MiB reserved")
"""


def describe_host() -> dict[str, Any]:
    """Describe the interpreter, the processor and the memory."""
    return {
        "python": sys.version.split()[0],
        "machine": platform.machine(),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "processor": read_field("/proc/cpuinfo", "model name"),
        "memory": read_field("/proc/meminfo", "MemTotal"),
        "locked_memory": subprocess.run(
            ["bash", "-c", "ulimit -l"], capture_output=True, text=True
        ).stdout.strip(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        # Triton needs a compiler and Python's headers to build its launchers.
        "compiler": os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"),
        "python_headers": (Path(sysconfig.get_paths()["include"]) / "Python.h").exists(),
    }


def read_field(file: str, name: str) -> str:
    """Read the first value of a field of a file in /proc."""
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "unknown")


def describe_gpu() -> dict[str, Any]:
    """Describe the GPU, and measure how long its context takes to start."""
    begin = time.perf_counter()
    torch.zeros(1, device=PLACE)
    seconds = time.perf_counter() - begin
    properties = torch.cuda.get_device_properties(PLACE)
    free, total = torch.cuda.mem_get_info()
    return {
        "gpu": properties.name,
        "context_s": round(seconds, 1),
        "capability": torch.cuda.get_device_capability(PLACE),
        "processors": properties.multi_processor_count,
        "memory_gib": round(total / 2**30, 1),
        "free_gib": round(free / 2**30, 1),
        "nccl": torch.cuda.nccl.version(),
        "flash_attention": torch.backends.cuda.is_flash_attention_available(),
    }


def import_packages() -> tuple[dict[str, str], list[str]]:
    """Import what realrl and the stages use. Returns versions by name, and an error message for each failure."""
    found, missing = {}, []
    for name in (*NEEDED, *OPTIONAL):
        try:
            module = importlib.import_module(name)
        except Exception as error:  # this stage must report every error of an import
            missing.append(f"{name}: {type(error).__name__}: {str(error)[:150]}")
        else:
            found[name] = str(getattr(module, "__version__", module.__file__))
    return found, missing


def try_allocators() -> bool:
    """Capture a graph under both settings of torch's allocator that runs use."""
    good = True
    for setting in ("expandable_segments:True", ""):
        done = subprocess.run(
            [sys.executable, "-c", TRY_ALLOCATOR],
            env={**os.environ, "PYTORCH_ALLOC_CONF": setting},
            capture_output=True,
            text=True,
        )
        text = done.stdout.strip() or done.stderr.strip()[-500:]
        print(f"allocator {setting or 'by default'}: {text}")
        status = "FAIL" if done.returncode else "ok"
        record("facts", f"allocator {setting or 'by default'}", status=status, text=text)
        good &= not done.returncode
    return good


def main() -> int:
    versions, missing = import_packages()
    found = {**describe_host(), **({} if CPU else describe_gpu()), **versions}
    for key, value in found.items():
        print(f"{key:32} {value}")
    print("missing:", *(missing or ["nothing"]), sep="\n  ")
    record("facts", "machine", **found, missing=missing)
    good = CPU or try_allocators()
    optional = [line for line in missing if line.partition(":")[0] in OPTIONAL]
    return 0 if good and len(missing) == len(optional) else 1


if __name__ == "__main__":
    sys.exit(main())
