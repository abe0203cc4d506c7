"""Process that runs generated Python under tests. It runs as a script, and imports nothing from this package.

It reads one JSON object from its input, and answers with another one. Before it runs the code, it isolates itself
as far as the machine allows. Linux namespaces remove the network, write access to files and the view of other
processes. CPU seconds, memory, files and processes are limited.
"""

import ctypes
import json
import os
import resource
import sys
from collections.abc import Callable
from typing import Any

NEW_USER, NEW_MOUNTS, NEW_PIDS, NEW_NET, NEW_IPC = 0x10000000, 0x00020000, 0x20000000, 0x40000000, 0x08000000
SYS_MOUNT_SETATTR = 442  # on every architecture of Linux
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
READ_ONLY, PRIVATE = 1, 1 << 18
PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG, SIGKILL = 38, 1, 9


def isolate() -> dict[str, bool]:
    """Enter new namespaces as far as the machine allows. Returns what is isolated."""
    done = dict.fromkeys(("network", "files", "processes"), False)
    if not sys.platform.startswith("linux"):
        return done
    libc = ctypes.CDLL(None, use_errno=True)
    everything = NEW_USER | NEW_MOUNTS | NEW_PIDS | NEW_NET | NEW_IPC
    if libc.unshare(everything) == 0:
        done["network"] = done["processes"] = True
        # struct mount_attr: attr_set, attr_clr, propagation, userns_fd
        attributes = (ctypes.c_uint64 * 4)(READ_ONLY, 0, PRIVATE, 0)
        result = libc.syscall(
            SYS_MOUNT_SETATTR,
            AT_FDCWD,
            b"/",
            AT_RECURSIVE,
            ctypes.byref(attributes),
            ctypes.sizeof(attributes),
        )
        done["files"] = result == 0
    elif libc.unshare(NEW_USER | NEW_NET) == 0:
        done["network"] = True
    return done


def die_with_parent() -> None:
    """End this process together with its parent, if the machine supports that."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)


def give_up_privileges() -> None:
    """Drop all capabilities, also in the new namespaces, so that the code cannot undo the isolation."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc.capset(ctypes.byref(header), ctypes.byref(nothing))


def limit(job: dict[str, Any]) -> None:
    """Limit CPU seconds, memory, written files and processes. Limits that the machine refuses are skipped."""
    seconds = int(job["cpu_seconds"])
    wanted = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: int(job["memory_bytes"]),
        resource.RLIMIT_FSIZE: int(job["output_bytes"]),
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,
    }
    for kind, most in wanted.items():
        try:
            resource.setrlimit(kind, (most, most))
        except (OSError, ValueError):
            continue


def run_tests(code: str, tests: list[str]) -> list[bool]:
    """Run the code, then each test in the same namespace. Returns whether each test passes."""
    names: dict[str, Any] = {"__name__": "solution", "__builtins__": __builtins__}
    if not _passes(lambda: exec(compile(code, "solution.py", "exec"), names)):
        return [False] * len(tests)
    return [_passes(lambda t=test: exec(compile(t, "test.py", "exec"), names)) for test in tests]  # type: ignore[misc]


def _passes(run: Callable[[], None]) -> bool:
    try:
        run()
    except BaseException:  # whatever the code does
        return False
    return True


def run_job() -> None:
    """Read a job from standard input, and run it in a child. Only children enter the new process namespace."""
    job = json.load(sys.stdin)
    # Only this process knows where the answer goes.
    answers = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(nowhere, stream)
    die_with_parent()
    isolated = isolate()
    child = os.fork()
    if child:
        os.close(answers)
        os.waitpid(child, 0)
        os._exit(0)
    os.dup2(nowhere, 2)
    die_with_parent()
    give_up_privileges()
    limit(job)
    passed = run_tests(job["code"], job["tests"])
    os.write(answers, json.dumps({"token": job["token"], "passed": passed, "isolated": isolated}).encode())
    os._exit(0)


if __name__ == "__main__":
    run_job()
