"""Ranks of a test, in processes that need not import torch first: they are forked from one that has."""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from multiprocessing import reduction
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from realrl.runtime.processes.environment import LAUNCHER_VARIABLE
from realrl.testing.ranks import PRELOADED


def run_forked(function: Callable[..., None], ranks: int, *args: Any) -> None:
    """Call function(rank, *args) in a process for each rank; raises what one of them raises.

    Arguments are plain values: each tensor would need a file descriptor.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOADED])
    mp.start_processes(function, args=args, nprocs=ranks, start_method="forkserver")


class ForkedRank:
    """A rank that the local launcher starts: of `subprocess.Popen`, what the launcher uses.

    Its process is none of the launcher's own, and does not see it go.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], output: Path | None) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOADED])
        with nullcontext() if output is None else output.open("ab") as log:
            screen = (1, 2) if log is None else (log.fileno(), log.fileno())
            outputs = [_Output(file) for file in screen]
            self._process = context.Process(
                target=_be_rank, args=([*arguments], {**environment}, os.getcwd(), *outputs)
            )
            self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None, "it has been started"
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked rank", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


class _Output:
    """A file descriptor that a process gets as an argument."""

    def __init__(self, file: int) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return _receive, (reduction.DupFd(self.file),)


def _receive(sent: Any) -> _Output:
    return _Output(sent.detach())


def _be_rank(
    arguments: Sequence[str], environment: Mapping[str, str], directory: str, out: _Output, error: _Output
) -> None:
    """Do what `realrl ARGUMENTS` does in a process of its own, and end."""
    from realrl.__main__ import main

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    os.chdir(directory)
    os.environ.clear()
    os.environ |= {**environment, LAUNCHER_VARIABLE: str(os.getppid())}
    for file, number in ((os.open(os.devnull, os.O_RDONLY), 0), (out.file, 1), (error.file, 2)):
        os.dup2(file, number)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.argv = ["realrl", *arguments]
    main()
