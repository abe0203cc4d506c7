"""Bands of a plan's picture: groups of devices that have the same activity during a step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.simulate.estimate import Estimate, Slice
from realrl.program.instructions import (
    Instruction,
    Load,
    Offload,
    Reallocate,
    Receive,
    Run,
    Send,
    ShareLengths,
)

WORK = (Run, Reallocate, Load, Offload)
"""Instructions that are drawn one by one. Between them, devices wait or exchange data."""
_NEGLIGIBLE = 1e-3
"""Fraction of a step. Shorter gaps are not drawn, and times this close to each other count as equal."""


@dataclass(frozen=True)
class Block:
    """An activity of a band's devices. Times are in seconds."""

    start: float
    end: float
    instruction: Instruction | None
    """Instruction that the devices execute; None if they wait or exchange data."""
    reason: str = ""
    """What the devices wait for, in words."""

    def like(self, other: "Block", tolerance: float) -> bool:
        """Return whether two blocks have the same activity at the same time, within `tolerance` seconds."""
        near = abs(self.start - other.start) <= tolerance and abs(self.end - other.end) <= tolerance
        return near and (self.instruction, self.reason) == (other.instruction, other.reason)


@dataclass(frozen=True)
class Band:
    """Consecutive devices of one group of nodes with the same activity."""

    ranks: range
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Area:
    """Block that several neighbouring bands share."""

    block: Block
    bands: range
    """Indices of the bands."""


def find_bands(estimate: Estimate, spec: ClusterSpec) -> tuple[Band, ...]:
    """Group all devices into bands, in order.

    There are few bands, at most 2 * meshes + 1, because activity changes only at the ends of meshes and of groups
    of nodes.
    """
    found = []
    for _, group in groupby(range(len(estimate.slices)), key=lambda rank: _work(estimate, spec, rank)):
        ranks = list(group)
        blocks = tuple(_blocks(estimate.slices[ranks[0]], estimate.step_seconds * _NEGLIGIBLE))
        found.append(Band(range(ranks[0], ranks[-1] + 1), blocks))
    return tuple(found)


def find_areas(bands: Sequence[Band], step_seconds: float) -> list[Area]:
    """Merge equal blocks of neighbouring bands into areas."""
    done: list[Area] = []
    growing: list[Area] = []
    for number, band in enumerate(bands):
        grown = []
        for block in band.blocks:
            above = next((a for a in growing if a.block.like(block, step_seconds * _NEGLIGIBLE)), None)
            first = number if above is None else above.bands.start
            grown.append(Area(block if above is None else above.block, range(first, number + 1)))
        kept = {id(area.block) for area in grown}
        done += [area for area in growing if id(area.block) not in kept]
        growing = grown
    return sorted([*done, *growing], key=lambda area: (area.block.start, area.bands.start))


def _work(estimate: Estimate, spec: ClusterSpec, rank: int) -> tuple[object, ...]:
    instructions = (
        s.instruction for s in estimate.slices[rank] if isinstance(s.instruction, WORK) and not s.host
    )
    return spec.group_index(rank), *instructions


def _blocks(slices: Sequence[Slice], shortest: float) -> Iterator[Block]:
    """List the blocks of a device from the start of a step until its last work ends."""
    work = [s for s in slices if isinstance(s.instruction, WORK) and s.seconds > s.waiting and not s.host]
    blocks = [Block(s.start + s.waiting, s.start + s.seconds, s.instruction) for s in work]
    for before, block in pairwise([Block(0.0, 0.0, None), *blocks]):
        if block.start - before.end > shortest:
            yield Block(before.end, block.start, None, _reason(slices, before.end, block.start))
        yield block


def _reason(slices: Sequence[Slice], start: float, end: float) -> str:
    """Describe the longest wait of a device between two moments."""
    waits = {s: min(end, s.start + s.waiting) - max(start, s.start) for s in slices if s.waiting > 0}
    waits = {s: seconds for s, seconds in waits.items() if seconds > 0}
    if sum(waits.values()) < (end - start) / 2:
        return "exchange of data"
    match max(waits, key=lambda s: waits[s]).instruction:
        case Receive(_, _, producer, consumer, _):
            return f"waits for data from {producer} to {consumer}"
        case Run(call, _, _):
            return f"waits for the other devices of {call}"
        case Send(producer=function) | ShareLengths(call=function):
            return f"waits for {function} on the host"
        case Reallocate(role, _, target, _, _):
            return f"waits until parameters of {role} can be moved to devices {target.mesh}"
    return "waits for other devices"
