"""What a launcher tells its processes through environment variables."""

import os
import sys
from typing import NoReturn

STORE_VARIABLE = "REALRL_STORE"
"""The file through which processes of the local launcher find each other."""

LAUNCHER_VARIABLE = "REALRL_LAUNCHER"
"""The process id of the local launcher."""

SCRATCH_VARIABLE = "REALRL_SCRATCH"
"""The directory where processes of the local launcher leave how they ended, and what they print."""

PLAN_VARIABLE = "REALRL_PLAN"
"""The file with the plan that the local launcher has searched for."""


def quiet_profiler() -> None:
    """Keep torch's profiler, which counts allocations on a CPU, from printing when it starts and ends. Only
    before torch is loaded."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")


def under_launcher() -> bool:
    """Whether torchrun, or our own launcher, started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_writer() -> bool:
    """Whether this process is the one that prints and writes: rank 0, or the only one."""
    return int(os.environ.get("RANK", 0)) == 0


def leave(status: int) -> NoReturn:
    """End a rank's process without tearing the interpreter down.

    Threads of gloo may still be letting go of tensors; when the interpreter is already on its way out, that
    aborts a process that has done its work.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
