"""Properties of this machine: the fastest matrix products of its processor, GPUs, and a compiler for Triton.

This module does not import torch.
"""

import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path

from realrl.config.files import write_whole

_MEASUREMENT = "realrl.runtime.profiler.products"
"""Module that measures in a child process and prints a choice as JSON."""


@dataclass(frozen=True)
class ProductChoice:
    """Fastest method to multiply float32 matrices on a processor."""

    onednn: bool = False
    """Whether oneDNN is clearly faster than torch's default."""
    bfloat16: bool = False
    """Whether rounding operands to bfloat16 is clearly faster than any float32 product, as with AMX."""
    packed: bool = False
    """Whether our own kernel with packed weights is clearly faster in decode steps."""


def find_processor_name() -> str:
    """Find the name of this machine's processor, such as `AMD EPYC 7763 64-Core Processor`."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    # Some virtual machines hide the name. Family and features then distinguish processors.
    fields = [
        line.partition(":")[2].strip()
        for line in dict.fromkeys(lines)
        if line.startswith(("model name", "cpu family", "model\t", "flags", "Features"))
    ]
    return " ".join(fields) or platform.processor() or platform.machine()


def choose_products() -> ProductChoice:
    """Find the fastest products of this processor, from an earlier measurement or a new one.

    A measurement takes seconds, mostly for importing torch. Other processes wait for its result. If the user's
    cache directory cannot be written, each process measures for itself. If the measurement fails, torch's default
    is used.
    """
    file = _kept_file()
    kept = _read(file)
    if kept is not None:
        return kept
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            kept = _read(file)
            if kept is None and (kept := _measure()) is not None:
                keep_choice(kept)
    except OSError:
        kept = kept or _measure()
    return kept or ProductChoice()


def keep_choice(choice: ProductChoice) -> None:
    """Keep a choice for this processor and torch in the user's cache directory. Raises OSError."""
    file = _kept_file()
    content = {**asdict(choice), "processor": find_processor_name()[:80], "torch": version("torch")}
    write_whole(file, json.dumps(content, indent=2) + "\n")


def _kept_file() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    key = hashlib.sha256(f"{find_processor_name()} {version('torch')}".encode()).hexdigest()[:16]
    return Path(base).expanduser() / "realrl" / "processors" / f"{key}.json"


def _read(file: Path) -> ProductChoice | None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return ProductChoice(**{field.name: content[field.name] is True for field in fields(ProductChoice)})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _measure() -> ProductChoice | None:
    """Measure in a child process; None after a failure, which is printed."""
    command = [sys.executable, "-m", _MEASUREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    answer = done.stdout.strip().rpartition("\n")[2]
    try:
        return ProductChoice(**json.loads(answer))
    except (ValueError, TypeError):
        print(f"matrix products could not be measured ({done.stderr.strip()[-200:]})", file=sys.stderr)
        return None


_DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Driver files of NVIDIA, the Windows Subsystem for Linux, and AMD."""


def computes_on_gpus(device: str, cluster: str) -> bool:
    """Return whether a recipe's devices are GPUs.

    The setting `device` decides or, if it is `auto`, the kind in `cluster`. Without a kind, a recipe uses GPUs if
    this machine has a GPU driver.
    """
    if device != "auto":
        return device == "cuda"
    kind, colon, _ = cluster.partition(":")
    if colon:
        return kind != "cpu"
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return False
    return any(Path(file).exists() for file in _DRIVER_FILES)


def find_missing_build_tool(
    environment: Mapping[str, str] = os.environ, include: str | None = None
) -> str | None:
    """Describe a missing C compiler or missing Python headers, and the remedy; None if both are present.

    Triton compiles a C module for each signature of a kernel, with CC, gcc or clang. include: directory of
    Python.h, by default this interpreter's.
    """
    # The Triton packages of other systems bring a compiler.
    if sys.platform != "linux" or environment.get("TRITON_INTERPRET") == "1":
        return None
    compilers = [environment["CC"]] if "CC" in environment else ["gcc", "clang"]
    if not any(shutil.which(name, path=environment.get("PATH")) for name in compilers):
        named = (
            f"CC={environment['CC']} is not a program" if "CC" in environment else "there is no gcc or clang"
        )
        return (
            f"Triton needs a C compiler to launch kernels, and {named}; install gcc, or set CC to a compiler"
        )
    directory = Path(include or sysconfig.get_paths()["include"])
    if not (directory / "Python.h").is_file():
        return (
            f"Triton needs Python's headers to launch kernels, and {directory}/Python.h does not exist; install"
            " python3-dev, or use a Python that has them"
        )
    return None
