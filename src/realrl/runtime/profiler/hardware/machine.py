"""Measurements of a machine that do not depend on a model."""

from collections.abc import Iterator
from functools import partial

from realrl.planner.profile.profile import CollectiveKind, CollectiveTime
from realrl.runtime.processes.process import Process
from realrl.runtime.profiler.hardware.links import connect_groups, connect_pairs, measure_message
from realrl.runtime.profiler.hardware.memory import measure_copies
from realrl.runtime.profiler.points.bench import trimmed_mean
from realrl.runtime.profiler.points.clock import Clock
from realrl.runtime.profiler.points.grid import copy_sizes, transfer_sizes
from realrl.runtime.profiler.points.point import UNKNOWN, Point

MachineRow = list[Point[CollectiveTime]]

_COPIES: tuple[CollectiveKind, ...] = ("copy", "clear", "allocate", "host")
_COLLECTIVES: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter")


def make_rows(process: Process, per_node: int, clock: Clock, *, thin: bool) -> Iterator[MachineRow]:
    """Yield series of points that differ in size alone, smaller ones first. All ranks go through them together.

    Ranks of one node talk in groups of every size that divides their number, those of several nodes in groups of
    whole nodes.
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
