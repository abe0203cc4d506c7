"""Measure times that do not depend on models: memory, optimizer updates, collectives and messages."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from realrl.engine.buffers import FlatBuffer
from realrl.engine.offload import Offloadable
from realrl.engine.pipeline import Pipeline, prefetch_receives
from realrl.engine.training.optimizer import ShardedAdamW
from realrl.families.tensors import TensorSpec
from realrl.layout.limits import bucket_count
from realrl.model.group import Group, all_gather, make_single_rank_group, reduce_scatter
from realrl.plan.communicators import RankSets
from realrl.planner.profile.profile import CollectiveKind, CollectiveTime
from realrl.recipe.optimizer import OptimizerConfig
from realrl.runtime.processes.process import Process
from realrl.runtime.profiler.points import UNKNOWN, Clock, Point, trimmed_mean
from realrl.runtime.profiler.sizes import copy_sizes, transfer_sizes

_FLOAT_BYTES = 4  # size of an element, because measurements use float32


def measure_copies(number_bytes: int, clock: Clock) -> Mapping[CollectiveKind, float]:
    """Measure the seconds to copy, clear and allocate memory of a rank's device, and to copy to or from the
    host."""
    source = torch.zeros(max(1, number_bytes // _FLOAT_BYTES), device=clock.device)
    target = torch.zeros_like(source)
    begin = clock.now()
    target.copy_(source)
    copied = clock.now()
    source.zero_()
    cleared = clock.now()
    fresh = torch.zeros_like(source)
    allocated = clock.now()
    copy, clear, allocate = clock.between(begin, copied, cleared, allocated)
    del source, fresh
    moving = Offloadable([target])
    moving.offload()  # the first offload allocates host memory
    moving.load()
    begin = clock.now()
    moving.offload()
    moving.load()
    (both,) = clock.between(begin, clock.now())
    return {"copy": copy, "clear": clear, "allocate": allocate, "host": both / 2}


class Update:
    """Measures the optimizer update of unsharded tensors."""

    def __init__(self, tensors: Sequence[TensorSpec], dtype: torch.dtype, clock: Clock) -> None:
        count = bucket_count(sum(tensor.numel for tensor in tensors))
        self._clock = clock
        parameters = FlatBuffer(tensors, dtype, clock.device, multiple_of=count)
        self._gradients = FlatBuffer(tensors, torch.float32, clock.device, multiple_of=count)
        self._optimizer = ShardedAdamW(
            parameters, self._gradients, OptimizerConfig(), make_single_rank_group()
        )

    def seconds(self) -> float:
        """Measure the seconds of an update after the reduction of gradients, without clearing them."""
        clock = self._clock
        gradients = self._gradients.data
        gradients.fill_(1.0)
        for bucket in self._optimizer.buckets:
            self._optimizer.start_reduce(bucket)
        begin = clock.now()
        self._optimizer.step(1e-6)
        stepped = clock.now()
        gradients.zero_()
        step, clear = clock.between(begin, stepped, clock.now())
        return step - clear


_MOMENT = 0.5e-3
"""Approximate number of seconds that ranks compute before they communicate.

On a CPU, threads that wait this long fall asleep and need time to wake up.
"""
_SQUARE = torch.ones(64, 64)
_ROUNDS, _AT_ONCE = 8, 2
"""Number of messages in a measurement, and number of messages in flight while ranks compute."""


class GroupLinks:
    """The links of one group of ranks. All of its ranks use them together."""

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
        part = max(1, number_bytes // _FLOAT_BYTES // group.size)
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
        """Measure how many seconds a message between two ranks adds to the computation of these ranks.

        On a CPU, both ranks compute while messages are in flight, like the stages of a pipeline. A GPU sends
        without slowing its computation, so there the ranks do not compute.
        """
        clock = self._clock
        rows = max(1, number_bytes // _FLOAT_BYTES)
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
        # The second rank waits for the first computation of the first rank.
        return {"send": (seconds - computed * (_ROUNDS + 1) / _ROUNDS) / _ROUNDS}

    def _go_round(self, message: Tensor, at_once: int) -> None:
        """Send messages to the second rank and back. Both ranks compute before they send."""
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
    """Find the number of matrix products that the fastest rank computes in `_MOMENT` seconds; 0 on GPUs.

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
    """Connect groups of `size` consecutive ranks. The number of all ranks must be divisible by `size`.

    All ranks call this together.
    """
    found = _links(process, [tuple(range(i, i + size)) for i in range(0, process.world, size)], clock)
    assert found is not None, "every rank is in a group"
    return found


def connect_pairs(process: Process, distance: int, clock: Clock) -> GroupLinks | None:
    """Connect pairs of ranks at this distance; None for a rank without a partner.

    All ranks call this together.
    """
    firsts = [r for r in range(process.world - distance) if r // distance % 2 == 0]
    return _links(process, [(first, first + distance) for first in firsts], clock)


def _links(process: Process, rank_sets: list[tuple[int, ...]], clock: Clock) -> GroupLinks | None:
    products = _moment(process)
    forward: RankSets = {ranks: frozenset({"tensor", "data", "pipeline"}) for ranks in rank_sets}
    # Messages in the other direction have their own connection.
    backward: RankSets = {ranks[::-1]: frozenset({"reverse_pipeline"}) for ranks in rank_sets}
    groups = process.groups({**forward, **backward})
    own = next((ranks for ranks in rank_sets if ranks in groups), None)
    if own is None:
        return None
    return GroupLinks(groups[own], groups[own[::-1]], clock, products)


def measure_message(links: GroupLinks | None, number_bytes: int) -> Mapping[CollectiveKind, float]:
    """Measure the seconds of a message from rank to rank.

    On a rank without a partner, the result is minus infinity, so that it never counts as the slowest rank.
    """
    return {"send": -math.inf} if links is None else links.message(number_bytes)


MachineRow = list[Point[CollectiveTime]]

_COPIES: tuple[CollectiveKind, ...] = ("copy", "clear", "allocate", "host")
_COLLECTIVES: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter")


def make_rows(process: Process, per_node: int, clock: Clock, *, thin: bool) -> Iterator[MachineRow]:
    """Yield series of points of increasing size. All ranks measure them together.

    Within a node, groups have every size that divides its number of ranks. Across nodes, groups are whole nodes.
    """
    copied = copy_sizes(thin=thin)
    yield [Point(_blanks(_COPIES, 1, 1, size), partial(measure_copies, size, clock), size) for size in copied]
    nodes = process.world // per_node
    sizes = transfer_sizes(thin=thin)
    degrees = [n for n in range(2, per_node + 1) if per_node % n == 0]
    degrees += [n * per_node for n in range(2, nodes + 1) if nodes % n == 0]
    for ranks in degrees:
        links = connect_groups(process, ranks, clock)
        crossed = max(1, ranks // per_node)
        yield [
            Point(blanks, partial(links.collectives, size), size, average=trimmed_mean)
            for size in sizes
            for blanks in [_blanks(_COLLECTIVES, ranks, crossed, size)]
        ]
    for crossed, distance in ((1, 1), (2, per_node)):
        if (per_node if crossed == 1 else nodes) > 1:
            pair = connect_pairs(process, distance, clock)
            yield [
                Point(
                    _blanks(("send",), 2, crossed, size),
                    partial(measure_message, pair, size),
                    size,
                    average=trimmed_mean,
                )
                for size in sizes
            ]


def _blanks(
    kinds: tuple[CollectiveKind, ...], ranks: int, nodes: int, number_bytes: int
) -> tuple[CollectiveTime, ...]:
    return tuple(
        CollectiveTime(kind=kind, ranks=ranks, nodes=nodes, bytes=number_bytes, seconds=UNKNOWN)
        for kind in kinds
    )
