"""Environment variables that launchers set for ranks."""

import os
import sys
import threading
from collections.abc import Mapping
from typing import NoReturn

STORE_VARIABLE = "REALRL_STORE"
"""Path of the file store for the rendezvous of local ranks."""
LAUNCHER_VARIABLE = "REALRL_LAUNCHER"
"""Process id of realrl's launcher, or of its actor on a node of a Ray cluster."""
PLAN_VARIABLE = "REALRL_PLAN"
"""Path of the plan that the local launcher has found in a search."""
SLOT_VARIABLE = "REALRL_SLOT"
"""Number of a rank's device on this machine. It stays the same if the run continues without other devices."""
PROGRESS_VARIABLE = "REALRL_PROGRESS"
"""Path of the file in which the first rank keeps its progress line, for the notebook that has started the run."""
RESTART_VARIABLE = "REALRL_RESTART"
"""Number of times that realrl's launcher has restarted the run. torchrun and Slurm have their own variables."""

_RESTARTS = (RESTART_VARIABLE, "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
_JOBS = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", LAUNCHER_VARIABLE)


def restart_count() -> int:
    """Return how often a launcher has restarted this run after it failed or was preempted."""
    return max(int(os.environ.get(name) or 0) for name in _RESTARTS)


def find_job() -> str | None:
    """Return the name of the launch of this process, which stays the same after restarts; None without a
    launcher."""
    return next((f"{name}={os.environ[name]}" for name in _JOBS if os.environ.get(name)), None)


ABANDONED = "realrl-background"
"""Prefix of the names of threads that may wait forever. No other thread waits for them."""


def has_abandoned_threads() -> bool:
    """Return whether a thread whose name begins with ABANDONED is still running."""
    return any(thread.name.startswith(ABANDONED) for thread in threading.enumerate())


ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables with settings of torch's allocator on GPUs. torch still reads the second one, which is deprecated."""

_DEFAULTS = {
    "KINETO_LOG_LEVEL": "6",
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
}
"""Variables that libraries read when they are loaded. The first one silences torch's profiler, which counts
allocations on a CPU. With the second one, NCCL (from 2.26 on) starts kernels of different communicators in the
order in which the host posts them."""


def set_library_defaults() -> None:
    """Set environment variables that libraries read, unless the user has set them.

    Call this before torch is loaded.

    torch's allocator then maps memory into segments that grow. If a call frees tens of gigabytes, another call can
    use them, even for blocks of other sizes.
    """
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        os.environ[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"


def under_launcher(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is a rank that torchrun, srun or a launcher of realrl has started.

    For a process of srun, `join_slurm_step` sets the variables first.
    """
    return "RANK" in environment and "WORLD_SIZE" in environment


def is_debugged() -> bool:
    """Return whether a debugger or profiler traces this process, as after `python -m pdb -m realrl train ...`."""
    monitoring = getattr(sys, "monitoring", None)
    tools = [] if monitoring is None else [monitoring.get_tool(number) for number in range(3)]
    return sys.gettrace() is not None or sys.getprofile() is not None or any(tools)


def is_writer() -> bool:
    """Return whether this process is the one that prints and writes: rank 0, or the only rank."""
    return int(os.environ.get("RANK", 0)) == 0


def leave(status: int) -> NoReturn:
    """End the process of a rank without shutting the interpreter down.

    Threads of gloo may still release tensors. If the interpreter is already shutting down, such a release would
    abort a process that has finished its work.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
