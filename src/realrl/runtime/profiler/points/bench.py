"""Repeated measurements, on all ranks at the same time."""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TypeVar

import torch
import torch.distributed as dist

from realrl.runtime.processes.process import Process
from realrl.runtime.profiler.points.clock import Clock

Kind = TypeVar("Kind")


AverageFunction = Callable[[Sequence[float]], float]


def trimmed_mean(times: Sequence[float]) -> float:
    """Average the times without the slowest twentieth.

    For events that follow each other the sum counts, hence no median.
    """
    kept = sorted(times)[: max(1, len(times) * 19 // 20)]
    return sum(kept) / len(kept)


class Bench:
    """Repeated measurements, until enough time has passed."""

    def __init__(self, process: Process, *, patience: float, repetitions: tuple[int, int]) -> None:
        """`patience`: seconds for one measurement, within (minimum, maximum) `repetitions`."""
        self.process = process
        self.clock = Clock(process.device)
        self._patience = patience
        self._repetitions = repetitions

    def measure(
        self, work: Callable[[], Mapping[Kind, float]], average: AverageFunction = median
    ) -> dict[Kind, float] | None:
        """Average the times of the parts of `work`, each time on the slowest rank; None where memory is too small.

        The slowest rank counts, since the others have to wait for it.

        All ranks call this together, with work of the same parts.
        """
        if not self._warm_up(work):
            return None
        start = time.perf_counter()
        found = [work()]
        once = max(self.process.gather(time.perf_counter() - start))
        low, high = self._repetitions
        self.wait()
        found += [work() for _ in range(max(low, min(high, int(self._patience / once))) - 1)]
        everyone = self.process.gather(found)
        return {
            kind: average([max(times[kind] for times in ranks) for ranks in zip(*everyone, strict=True)])
            for kind in found[0]
        }

    def _warm_up(self, work: Callable[[], object]) -> bool:
        """Run the work once; return whether all ranks have enough memory."""
        fits = True
        try:
            work()
        except torch.OutOfMemoryError:
            fits = False
        if not fits:
            torch.cuda.empty_cache()
        return all(self.process.gather(fits))

    def wait(self) -> None:
        """Wait until all ranks are here."""
        if self.process.control is not None:
            dist.barrier(group=self.process.control)
