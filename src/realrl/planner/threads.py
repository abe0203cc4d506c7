"""Work on many plans on all cores: numpy lets go of the interpreter while it computes."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Scalar = TypeVar("Scalar", bound=np.generic)
Part = TypeVar("Part")
Result = TypeVar("Result")


def each(work: Callable[[Part], Result], parts: Iterable[Part]) -> list[Result]:
    """What `work` says of each part, in their order."""
    waiting = list(parts)
    if len(waiting) < 2 or cores() < 2:
        return [work(part) for part in waiting]
    return list(_pool().map(work, waiting))


def in_parts(columns: NDArray[Scalar], size: int) -> list[NDArray[Scalar]]:
    """So many columns of a matrix at a time; one part without any if there are none."""
    return [columns[:, i : i + size] for i in range(0, max(1, columns.shape[1]), size)]


@cache
def cores() -> int:
    """Cores that this process may use, as far as they help."""
    available = getattr(os, "sched_getaffinity", None)
    return min(4, len(available(0)) if available else os.cpu_count() or 1)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(cores(), "plans")
