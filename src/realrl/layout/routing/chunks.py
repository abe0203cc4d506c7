"""What one rank sends, receives and copies in a reallocation: bounded messages, and their places in flat
buffers."""

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from realrl.layout.layout import Layout
from realrl.layout.limits import CPU_MESSAGES, MessageLimits
from realrl.layout.local_tensors import LocalTensor
from realrl.layout.region import Region
from realrl.layout.routing.routes import Reallocation, Transfer


@dataclass(frozen=True)
class Span:
    """Strided elements of a flat buffer: `rows` runs of `width` elements each. The first run begins at `start`,
    each further run `stride` elements after the one before."""

    start: int
    rows: int
    width: int
    stride: int

    @property
    def numel(self) -> int:
        return self.rows * self.width

    @property
    def contiguous(self) -> bool:
        return self.rows == 1

    def precedes(self, other: "Span") -> bool:
        """Check that both spans are contiguous, and that `other` starts where this one ends."""
        return self.contiguous and other.contiguous and self.start + self.width == other.start


@dataclass(frozen=True)
class PackedTransfer:
    """One send or one receive of a rank. Several spans are packed in order."""

    stage: int
    number: int
    """Index among the messages from this sender to this receiver in the stage."""
    peer: int
    sends: bool
    numel: int
    spans: tuple[Span, ...]
    """Where the elements are: in the source buffer for sends of stage 0, otherwise in the target buffer."""
    regions: tuple[Region, ...]
    """Regions of the elements, in the same order."""


@dataclass(frozen=True)
class RankSchedule:
    """What one rank does in a reallocation. Messages are in one global order, so that they cannot deadlock however
    few may be in flight."""

    copies: tuple[tuple[Span, Span], ...]
    """(Span in the source buffer, span in the target buffer) of each copy."""
    messages: tuple[PackedTransfer, ...]
    digests: dict[str, str]
    """`SENDER-RECEIVER` -> hash of everything that the two ranks exchange. Both ranks compute the same hash."""


class Storage:
    """Offsets of a rank's local tensors in a flat buffer."""

    def __init__(self, *runs: tuple[Sequence[LocalTensor], int]) -> None:
        """`runs` has tensors that are stored back to back, and the elements that they and the padding after them
        take."""
        self._tensors: dict[str, tuple[int, Region]] = {}
        start = 0
        for tensors, size in runs:
            at = start
            for tensor in tensors:
                self._tensors[tensor.region.tensor] = (at, tensor.region)
                at += tensor.numel
            start += size

    @classmethod
    def of_rank(cls, layout: Layout, rank: int) -> "Storage":
        """Find the offsets of all tensors that a rank stores."""
        return cls(*((run.tensors, run.size) for run in layout.runs(rank)))

    def span(self, region: Region) -> Span:
        """Locate a region that the rank holds."""
        start, held = self._tensors[region.tensor]
        first = region.offset[0] - held.offset[0]
        assert first >= 0 and region.end[0] <= held.end[0], f"{region} is not held: {held}"
        row = prod(held.size[1:])
        if region.size[1:] == held.size[1:]:
            return _contiguous_span(start + first * row, region.numel)
        column = region.offset[1] - held.offset[1]
        assert column >= 0 and region.end[1] <= held.end[1], f"{region} is not held: {held}"
        at = start + first * row + column
        rows, width = region.size
        return Span(at, rows, width, row) if rows > 1 else _contiguous_span(at, width)


class RankScheduler:
    """Makes the schedule of one rank in a reallocation, for all tensors or for some at a time."""

    def __init__(
        self,
        reallocation: Reallocation,
        rank: int,
        element_bytes: int,
        *,
        limits: MessageLimits = CPU_MESSAGES,
    ) -> None:
        """`element_bytes` is the width of an element in messages."""
        self._source, self._target = reallocation.source, reallocation.target
        self._rank, self._ranks = rank, reallocation.cluster.size
        self._element_bytes, self._limits = element_bytes, limits
        self._transfers: defaultdict[str, list[Transfer]] = defaultdict(list)
        for transfer in reallocation.transfers:
            if rank in (transfer.sender, transfer.receiver):
                self._transfers[transfer.region.tensor].append(transfer)
        self._copies: defaultdict[str, list[Region]] = defaultdict(list)
        for copy in reallocation.copies:
            if copy.rank == rank:
                self._copies[copy.region.tensor].append(copy.region)
        self._before: dict[int, Storage] = {}

    def schedule(self, tensors: Collection[str] | Mapping[str, Region] | None = None) -> RankSchedule:
        """List the messages and copies of the rank, by default for all tensors.

        `tensors` selects tensors by name, or maps names to regions. The target buffer then holds only these tensors
        or regions. The source buffer always holds everything that the source layout gives the rank.
        """
        names = [spec.name for spec in self._source.specs if tensors is None or spec.name in tensors]
        parts = tensors if isinstance(tensors, Mapping) else {}
        after: dict[int, Storage] = {}

        def storage(of: int, stage: int) -> Storage:
            if stage == 0:
                return self._find_source(of)
            if of not in after:
                after[of] = (
                    Storage.of_rank(self._target, of)
                    if tensors is None
                    else Storage(([*_clip_tensors(self._target.tensors(of), {*names}, parts)], 0))
                )
            return after[of]

        exchanged: defaultdict[tuple[int, int, int], list[Region]] = defaultdict(list)
        for transfer in (transfer for name in names for transfer in self._transfers.get(name, ())):
            pair = (transfer.stage, transfer.sender, transfer.receiver)
            exchanged[pair] += _clip(transfer.region, parts)
        ordered: list[tuple[tuple[int, int, int, int], PackedTransfer]] = []
        hashes: defaultdict[str, list[str]] = defaultdict(list)
        for (stage, sender, receiver), regions in sorted(exchanged.items()):
            ends = storage(sender, stage), storage(receiver, 1)
            chunks = list(_chunks(regions, *ends, self._element_bytes, self._limits))
            hashes[f"{sender}-{receiver}"].append(repr((stage, chunks)))
            for number, chunk in enumerate(chunks):
                peer = receiver if sender == self._rank else sender
                mine = ends[0] if sender == self._rank else ends[1]
                spans = _merge(mine.span(region) for region in chunk)
                numel = sum(span.numel for span in spans)
                message = PackedTransfer(
                    stage=stage,
                    number=number,
                    peer=peer,
                    sends=sender == self._rank,
                    numel=numel,
                    spans=spans,
                    regions=tuple(chunk),
                )
                # Sort by the distance between peers: at each distance, a rank sends to one peer and receives from
                # one.
                ordered.append(((stage, number, (receiver - sender) % self._ranks, sender), message))
        ordered.sort(key=lambda item: item[0])
        copies = [
            part for name in names for region in self._copies.get(name, ()) for part in _clip(region, parts)
        ]
        return RankSchedule(
            copies=tuple(_copies(copies, storage(self._rank, 0), storage(self._rank, 1))),
            messages=tuple(message for _, message in ordered),
            digests={pair: hashlib.sha256("".join(h).encode()).hexdigest() for pair, h in hashes.items()},
        )

    def _find_source(self, of: int) -> Storage:
        if of not in self._before:
            self._before[of] = Storage.of_rank(self._source, of)
        return self._before[of]


def _clip(region: Region, parts: Mapping[str, Region]) -> tuple[Region, ...]:
    """Clip a region to the part of its tensor that is moved; empty if nothing is left."""
    part = parts.get(region.tensor)
    common = region if part is None else region.intersect(part)
    return () if common is None else (common,)


def _clip_tensors(
    held: Iterable[LocalTensor], wanted: Collection[str], parts: Mapping[str, Region]
) -> Iterator[LocalTensor]:
    for tensor in held:
        if tensor.region.tensor in wanted:
            for part in _clip(tensor.region, parts):
                yield tensor if part == tensor.region else LocalTensor(tensor.spec, part, part.size)


def group_messages(
    messages: Iterable[PackedTransfer], limits: MessageLimits
) -> Iterator[list[PackedTransfer]]:
    """Group messages to post together. A group never spans two stages, because messages of the second stage may
    forward those of the first."""
    group: list[PackedTransfer] = []
    for message in messages:
        if group:
            first = group[0]
            later = limits.one_per_peer and message.number != first.number
            if len(group) == limits.posted_messages or message.stage != first.stage or later:
                yield group
                group = []
        group.append(message)
    if group:
        yield group


def _contiguous_span(start: int, numel: int) -> Span:
    return Span(start, 1, numel, numel)


def _merge(spans: Iterator[Span]) -> tuple[Span, ...]:
    merged: list[Span] = []
    for span in spans:
        if merged and merged[-1].precedes(span):
            merged[-1] = _contiguous_span(merged[-1].start, merged[-1].numel + span.numel)
        else:
            merged.append(span)
    return tuple(merged)


def _runs(regions: Sequence[Region], storages: Sequence[Storage]) -> Iterator[list[Region]]:
    """Group consecutive regions that are contiguous in all storages; other regions stay alone."""
    run: list[Region] = []
    ends: list[Span] = []
    for region in regions:
        spans = [storage.span(region) for storage in storages]
        if run and not all(a.precedes(b) for a, b in zip(ends, spans, strict=True)):
            yield run
            run = []
        run.append(region)
        ends = spans
    if run:
        yield run


def _copies(regions: Sequence[Region], before: Storage, after: Storage) -> Iterator[tuple[Span, Span]]:
    for run in _runs(regions, (before, after)):
        (source,), (target,) = _merge(map(before.span, run)), _merge(map(after.span, run))
        yield source, target


def _chunks(
    regions: Sequence[Region],
    sender: Storage,
    receiver: Storage,
    element_bytes: int,
    limits: MessageLimits,
) -> Iterator[list[Region]]:
    """Divide regions into messages.

    First, each long run that is contiguous on both sides gets messages of its own, which neither side packs. Next,
    each long run that is contiguous on one side gets messages of its own, which only the other side packs. All
    other regions are packed together.
    """
    for storages in ((sender, receiver), (sender,), (receiver,)):
        loose: list[Region] = []
        for run in _runs(regions, storages):
            if sum(region.numel for region in run) * element_bytes >= limits.alone_bytes:
                yield from _cut(run, limits.message_bytes // element_bytes)
            else:
                loose += run
        regions = loose
    yield from _cut(regions, limits.message_bytes // element_bytes)


def _cut(regions: Sequence[Region], limit: int) -> Iterator[list[Region]]:
    """Divide regions into lists of at most `limit` elements; large regions are divided by rows."""
    chunk: list[Region] = []
    room = limit
    for region in regions:
        row = prod(region.size[1:])
        first = 0
        rows = region.size[0]
        while first < rows:
            fits = min(room // row, rows - first)
            if fits == 0 and chunk:
                yield chunk
                chunk = []
                room = limit
                continue
            fits = max(fits, 1)
            offset = (region.offset[0] + first, *region.offset[1:])
            chunk.append(Region(region.tensor, offset, (fits, *region.size[1:])))
            room -= fits * row
            first += fits
    if chunk:
        yield chunk


def group_tensors(target: Layout, element_bytes: int, limit: int) -> list[tuple[str, ...]]:
    """Group tensors in storage order so that no target rank holds more than `limit` bytes of a group. A group with
    a single tensor may exceed the limit."""
    groups: list[list[str]] = []
    used = 0
    for spec in target.specs:
        size = max(tensor.numel for tensor in target.list_parts(spec)) * element_bytes
        if not groups or used + size > limit:
            groups.append([])
            used = 0
        groups[-1].append(spec.name)
        used += size
    return [tuple(group) for group in groups]
