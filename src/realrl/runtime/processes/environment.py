"""Environment variables for ranks, set by launchers."""

import os
import sys
import threading
from typing import NoReturn

STORE_VARIABLE = "REALRL_STORE"
"""Path of the file store for the rendezvous of local ranks."""
LAUNCHER_VARIABLE = "REALRL_LAUNCHER"
"""Process id of our launcher, or of its actor on a node of a Ray cluster."""
PLAN_VARIABLE = "REALRL_PLAN"
"""Path of the plan that the local launcher has found by a search."""
SLOT_VARIABLE = "REALRL_SLOT"
"""Number of a rank's device on this machine. It stays when the run continues without other devices."""
OBJECTS_VARIABLE = "REALRL_OBJECTS"
"""Path of the functions that a script has handed to its run."""
RESTART_VARIABLE = "REALRL_RESTART"
"""How often our launcher has restarted the run. torchrun and Slurm have their own variables."""

_RESTARTS = (RESTART_VARIABLE, "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
_JOBS = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", LAUNCHER_VARIABLE)


def restart_count() -> int:
    """Count how often a launcher has restarted this run after it failed or was preempted."""
    return max(int(os.environ.get(name) or 0) for name in _RESTARTS)


def find_job() -> str | None:
    """Find the name of this process's launch, the same after restarts; None without a launcher."""
    return next((f"{name}={os.environ[name]}" for name in _JOBS if os.environ.get(name)), None)


ABANDONED = "realrl-background"
"""Beginning of the names of threads that may wait forever. Nobody waits for them."""


def has_abandoned_threads() -> bool:
    """Check whether such a thread still runs."""
    return any(thread.name.startswith(ABANDONED) for thread in threading.enumerate())


ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Settings of torch's allocator on GPUs; the second one is deprecated, and still read."""

_DEFAULTS = {
    "KINETO_LOG_LEVEL": "6",
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
}
"""Variables that libraries read when they are loaded. torch's profiler, which counts allocations on a CPU, is
silent. NCCL (from 2.26 on) starts kernels of different communicators in the order in which the host posts them."""


def set_library_defaults() -> None:
    """Set environment variables that libraries read, unless the user has. Call before torch is loaded.

    torch's allocator maps memory into segments that grow. So another call can use the tens of gigabytes that one
    call has freed, even for blocks of other sizes.
    """
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        os.environ[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"


def under_launcher() -> bool:
    """Check whether this process is a rank that torchrun, or a launcher of ours, has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_debugged() -> bool:
    """Check whether a debugger or profiler follows this process, as after `python -m pdb -m realrl train ...`."""
    monitoring = getattr(sys, "monitoring", None)
    tools = [] if monitoring is None else [monitoring.get_tool(number) for number in range(3)]
    return sys.gettrace() is not None or sys.getprofile() is not None or any(tools)


def is_writer() -> bool:
    """Check whether this process prints and writes: rank 0, or the only one."""
    return int(os.environ.get("RANK", 0)) == 0


def leave(status: int) -> NoReturn:
    """End a rank's process without tearing the interpreter down.

    Threads of gloo may still be letting go of tensors; when the interpreter is already on its way out, that
    aborts a process that has done its work.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
