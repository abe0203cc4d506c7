"""Environment variables by which launchers configure their processes."""

import os
import sys
import threading
from typing import NoReturn

STORE_VARIABLE = "REALRL_STORE"
"""Path of the file store by which processes of the local launcher rendezvous."""

LAUNCHER_VARIABLE = "REALRL_LAUNCHER"
"""Process id of the local launcher."""

SCRATCH_VARIABLE = "REALRL_SCRATCH"
"""Directory in which processes of the local launcher leave failures and logs."""

PLAN_VARIABLE = "REALRL_PLAN"
"""Path of the plan that the local launcher has searched for."""


ABANDONED = "realrl-background"
"""Start of the names of threads that may wait for ever, and are then left alone."""


def has_abandoned_threads() -> bool:
    """Check whether a thread still runs that nobody waits for any more."""
    return any(thread.name.startswith(ABANDONED) for thread in threading.enumerate())


def quiet_profiler() -> None:
    """Silence torch's profiler, which counts allocations on a CPU. Call before torch is loaded."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")


def under_launcher() -> bool:
    """Check whether torchrun, or our own launcher, started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


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
