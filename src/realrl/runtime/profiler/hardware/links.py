"""Times of communication: collectives, and messages between two ranks."""

import math
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from realrl.engine.pipeline import Pipeline, prefetch_receives
from realrl.model.group import Group, all_gather, reduce_scatter
from realrl.plan.communicators import RankSets
from realrl.planner.profile.profile import CollectiveKind
from realrl.runtime.processes.process import Process
from realrl.runtime.profiler.points.clock import Clock

_ELEMENT = 4  # all of it is measured with float32
_MOMENT = 0.5e-3
"""Approximate seconds that ranks compute before they communicate.

On a CPU, threads that have waited for so long sleep, and take a while to wake up.
"""
_SQUARE = torch.ones(64, 64)
_ROUNDS, _AT_ONCE = 8, 2
"""Number of messages of a measurement, and how many are in flight while ranks compute."""


class GroupLinks:
    """Links of one group of ranks, as this rank uses them together with the others."""

    def __init__(self, group: Group, reverse_group: Group, clock: Clock, products: int) -> None:
        """`products`: number of matrix products that each rank computes before it communicates."""
        self._group = group
        self._clock = clock
        self._pair = Pipeline(group, reverse_group, hidden_size=1, dtype=torch.float32, device=clock.device)
        self._products = products

    def collectives(self, number_bytes: int) -> Mapping[CollectiveKind, float]:
        """Measure the seconds of collectives on a tensor of `number_bytes` bytes."""
        clock = self._clock
        group = self._group
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
        """Measure the seconds that a message from one rank to the other adds to the computation of both.

        On a CPU both ranks compute while messages are under way, as the stages of a pipeline do; a GPU sends beside
        what it computes.
        """
        clock = self._clock
        rows = max(1, number_bytes // _ELEMENT)
        message = torch.zeros(rows, 1, device=clock.device)
        if not self._products:
            begin = clock.now()
            self._go_round(message, 1)
            (seconds,) = clock.between(begin, clock.now())
            return {"send": seconds / _ROUNDS / 2}
        begin = clock.now()
        for _ in range(_ROUNDS):
            self._compute()
        middle = clock.now()
        self._go_round(message, _AT_ONCE)
        computed, seconds = clock.between(begin, middle, clock.now())
        # The second rank cannot begin before the first one has computed for the first time.
        return {"send": (seconds - computed * (_ROUNDS + 1) / _ROUNDS) / _ROUNDS}

    def _go_round(self, message: Tensor, at_once: int) -> None:
        """Send messages to the second rank and back; both compute before they send."""
        pair = self._pair
        send: Callable[[Tensor], None] = pair.send if pair.first else pair.send_gradient
        received = prefetch_receives(
            pair.post_recv_gradient if pair.first else pair.post_recv, [len(message)] * _ROUNDS
        )
        for round_number in range(_ROUNDS):
            if round_number >= at_once or not pair.first:
                next(received)
            self._compute()
            send(message)
        for _ in received:
            pass
        pair.wait_sends()

    def _compute(self) -> None:
        """Compute for a moment, as ranks do between collectives."""
        for _ in range(self._products):
            _SQUARE @ _SQUARE


def _moment(process: Process) -> int:
    """Calibrate the number of matrix products in a moment, on the fastest rank; 0 on GPUs.

    All ranks call this together.
    """
    if process.device.type != "cpu":
        return 0
    begin = time.perf_counter()
    products = 0
    while time.perf_counter() < begin + 20 * _MOMENT:
        _SQUARE @ _SQUARE
        products += 1
    return max(process.gather(-(-products // 20)))


def connect_groups(process: Process, size: int, clock: Clock) -> GroupLinks:
    """Connect groups of `size` consecutive ranks; `size` divides their number.

    All ranks call this together.
    """
    found = _links(process, [tuple(range(i, i + size)) for i in range(0, process.world, size)], clock)
    assert found is not None, "every rank is in a group"
    return found


def connect_pairs(process: Process, distance: int, clock: Clock) -> GroupLinks | None:
    """Connect pairs of ranks at this distance; None for a rank that is left over.

    All ranks call this together.
    """
    firsts = [r for r in range(process.world - distance) if r // distance % 2 == 0]
    return _links(process, [(first, first + distance) for first in firsts], clock)


def _links(process: Process, rank_sets: list[tuple[int, ...]], clock: Clock) -> GroupLinks | None:
    products = _moment(process)
    forward: RankSets = {ranks: frozenset({"tensor", "data", "pipeline"}) for ranks in rank_sets}
    # A connection of its own for what flows back.
    backward: RankSets = {ranks[::-1]: frozenset({"reverse_pipeline"}) for ranks in rank_sets}
    groups = process.groups({**forward, **backward})
    own = next((ranks for ranks in rank_sets if ranks in groups), None)
    if own is None:
        return None
    return GroupLinks(groups[own], groups[own[::-1]], clock, products)


def measure_message(links: GroupLinks | None, number_bytes: int) -> Mapping[CollectiveKind, float]:
    """Measure the seconds from rank to rank; below any time on a rank without a pair."""
    return {"send": -math.inf} if links is None else links.message(number_bytes)
