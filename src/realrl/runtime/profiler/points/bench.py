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


Average = Callable[[Sequence[float]], float]


def trimmed_mean(times: Sequence[float]) -> float:
    """Without the slowest twentieth. Of many that follow each other, what they take together counts, not what most
    of them take."""
    kept = sorted(times)[: max(1, len(times) * 19 // 20)]
    return sum(kept) / len(kept)


class Bench:
    """Repeats work until enough time has passed."""

    def __init__(self, process: Process, *, patience: float, repetitions: tuple[int, int]) -> None:
        """`patience`: seconds that one measurement may take if that gives at least the first and at most the
        second number of repetitions."""
        self.process, self.clock = process, Clock(process.device)
        self._patience, self._repetitions = patience, repetitions

    def measure(
        self, work: Callable[[], Mapping[Kind, float]], average: Average = median
    ) -> dict[Kind, float] | None:
        """Averages of what `work` says of its parts, each time on the rank where they are highest, since the others
        will have to wait for it; None where some GPU has too little memory.

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
        """Whether all ranks have memory enough."""
        fits = True
        try:
            work()
        except torch.OutOfMemoryError:
            fits = False
        if not fits:
            torch.cuda.empty_cache()
        return all(self.process.gather(fits))

    def wait(self) -> None:
        """Until all ranks are here."""
        if self.process.control is not None:
            dist.barrier(group=self.process.control)
