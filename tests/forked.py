"""Ranks of a test, in processes that need not import torch first."""

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

from realrl.testing.ranks import PRELOADED


def run_forked(function: Callable[..., None], ranks: int, *args: Any) -> None:
    """Call function(rank, *args) in a process for each rank; raises what one of them raises.

    Arguments are plain values: each tensor would need a file descriptor.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOADED])
    mp.start_processes(function, args=args, nprocs=ranks, start_method="forkserver")
