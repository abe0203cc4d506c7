"""What ranks tell each other: collectives and messages."""

import time
from collections.abc import Callable, Mapping

import torch

from realrl.engine.pipeline import Pipeline
from realrl.model.group import Group, all_gather, reduce_scatter
from realrl.planner.profile import CollectiveKind
from realrl.runtime.process import Process
from realrl.runtime.profiler.clock import Clock

_ELEMENT = 4  # all of it is measured with float32
_MOMENT = 0.5e-3
"""Seconds for which ranks compute before they talk: on a CPU, threads that have waited for so long sleep, and take
a while to wake up."""


class Links:
    """The links of one group of ranks, as this rank uses them together with the others."""

    def __init__(self, group: Group, backward: Group, clock: Clock) -> None:
        self._group, self._clock = group, clock
        self._pair = Pipeline(group, backward, hidden_size=1, dtype=torch.float32, device=clock.device)

    def collectives(self, number_bytes: int) -> Mapping[CollectiveKind, float]:
        """Seconds of a tensor of so many bytes among all ranks."""
        clock, group = self._clock, self._group
        part = max(1, number_bytes // _ELEMENT // group.size)
        whole = torch.zeros(part * group.size, device=clock.device)
        own = torch.zeros(part, device=clock.device)
        works: Mapping[CollectiveKind, Callable[[], object]] = {
            "all_reduce": lambda: group.sum(whole),
            "all_gather": lambda: all_gather(whole, own, group),
            "reduce_scatter": lambda: reduce_scatter(own, whole, group),
        }
        found: dict[CollectiveKind, float] = {}
        for kind, work in works.items():
            self._compute()
            begin = clock.now()
            work()
            (found[kind],) = clock.between(begin, clock.now())
        return found

    def message(self, number_bytes: int) -> Mapping[CollectiveKind, float]:
        """Seconds from the first rank to the second: half of the way there and back."""
        pair, clock = self._pair, self._clock
        rows = max(1, number_bytes // _ELEMENT)
        if not pair.first:
            received = pair.receive(rows)
            self._compute()
            pair.send_gradient(received)
            pair.finish()
            return {"send": 0.0}
        message = torch.zeros(rows, 1, device=clock.device)
        self._compute()
        begin = clock.now()
        pair.send(message)
        pair.receive_gradient(rows)
        pair.finish()
        (both,) = clock.between(begin, clock.now())
        return {"send": (both - self._moment) / 2}

    @property
    def _moment(self) -> float:
        return _MOMENT if self._clock.device.type == "cpu" else 0.0

    def _compute(self) -> None:
        """What ranks do between collectives, for a moment."""
        end, square = time.perf_counter() + self._moment, torch.ones(64, 64)
        while time.perf_counter() < end:
            square @ square


def collective_links(process: Process, size: int, clock: Clock) -> Links:
    """Where all ranks are cut into groups of `size` consecutive ones; `size` divides their number. All ranks call
    this together."""
    found = _links(process, [tuple(range(i, i + size)) for i in range(0, process.world, size)], clock)
    assert found is not None, "every rank is in a group"
    return found


def pair_links(process: Process, distance: int, clock: Clock) -> Links | None:
    """Where ranks of this distance form pairs; None for a rank that is left over. All ranks call this together."""
    firsts = [r for r in range(process.world - distance) if r // distance % 2 == 0]
    return _links(process, [(first, first + distance) for first in firsts], clock)


def _links(process: Process, rank_sets: list[tuple[int, ...]], clock: Clock) -> Links | None:
    groups = process.groups(rank_sets)
    # A connection of its own for what flows back.
    backward = process.groups([ranks[::-1] for ranks in rank_sets])
    if not groups:
        return None
    return Links(next(iter(groups.values())), next(iter(backward.values())), clock)


def message(links: Links | None, number_bytes: int) -> Mapping[CollectiveKind, float]:
    """Seconds from rank to rank; 0 on one that looks on."""
    return {"send": 0.0} if links is None else links.message(number_bytes)
