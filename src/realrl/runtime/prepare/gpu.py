"""Find the devices of this machine without using GPUs in this process. Does not import torch."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from realrl.config.errors import UserError

NO_GPU = "device=cuda, but torch finds no GPU here; use device=cpu"
"""Error message if a run requests a GPU that is missing."""

_ASK = """
import json, torch
if torch.cuda.is_available():
    device = torch.cuda.get_device_properties(0)
    print(json.dumps([device.name, device.total_memory]))
"""


@dataclass(frozen=True)
class Gpu:
    """A GPU, as its driver describes it."""

    name: str
    """Name, for example `NVIDIA H100 80GB HBM3`."""
    memory_bytes: int


_COUNT = "import torch; print('GPUs', torch.cuda.device_count())"

Here = Gpu | Literal["cpu"]
"""The device on which the ranks of this machine compute: a GPU or the CPU."""


def ask_machine(device: Literal["auto", "cpu", "cuda"]) -> Here:
    """Find the device that ranks on this machine use with this setting of `device`: the first GPU, or the CPU.

    A child process queries CUDA, because CUDA may occupy device memory in each process that uses it.
    """
    if device == "cpu":
        return "cpu"
    done = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, check=False)
    answer = next((line for line in done.stdout.splitlines() if line.startswith("[")), None)
    return Gpu(*json.loads(answer)) if answer is not None else "cpu"


def count_visible_gpus(device: Literal["auto", "cpu", "cuda"]) -> int | None:
    """Count the GPUs that ranks on this machine would find now; None if they compute on CPUs."""
    if device == "cpu":
        return None
    done = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, text=True, check=False)
    answer = next((line for line in done.stdout.splitlines() if line.startswith("GPUs ")), "GPUs 0")
    return int(answer.split()[1]) or None


_TRY = """
import sys, torch
from realrl.config.errors import UserError
from realrl.engine.optional_kernels import use_kernels
try:
    with use_kernels(sys.argv[1:], torch.device("cuda" if torch.cuda.is_available() else "cpu")):
        pass
except UserError as error:
    sys.exit(f"REFUSED {error}")
"""


def try_kernels(names: Sequence[str]) -> None:
    """Try kernels of other packages in a child process. Raises UserError if this machine cannot use them.

    The trial also compiles the kernels, so that ranks do not wait for each other to compile them.
    """
    if not names:
        return
    done = subprocess.run([sys.executable, "-c", _TRY, *names], capture_output=True, text=True, check=False)
    if not done.returncode:
        return
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    said = next((line.removeprefix("REFUSED ") for line in lines if line.startswith("REFUSED ")), None)
    raise UserError(said or f"kernels=[{', '.join(names)}] cannot be used here: {lines[-1][:300]}")
