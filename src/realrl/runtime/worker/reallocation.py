"""Execute a reallocation on one rank: copies, and packed messages of bounded size."""

import hashlib
import zlib
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from realrl.engine.buffers import FlatBuffer
from realrl.layout.limits import MessageLimits, message_limits
from realrl.layout.region import Region
from realrl.layout.routing.chunks import PackedTransfer, RankSchedule, RankScheduler, Span, group_messages
from realrl.layout.routing.routes import Reallocation
from realrl.runtime.processes.process import Process

# Tags above those of `Exchange`, which uses the same control group.
_DIGEST_TAG, _PAIR_TAG, CHECKSUM_TAG = 1 << 22, 1 << 23, 1 << 24


class ReallocationError(Exception):
    """Ranks disagree on the messages, or data has arrived damaged. This is a bug, or a hardware fault."""


def agree(
    process: Process, label: str, ranks: Sequence[int], schedule: str, pairs: Mapping[int, str]
) -> None:
    """Check that `schedule` is equal on all `ranks`, and that each pair of ranks agrees on its messages.

    `pairs`: text that identifies the messages with each peer. All ranks call this together. Raises
    ReallocationError if not.
    """
    mine, first = _digest(schedule), ranks[0]
    everyone = torch.empty(len(ranks), len(mine), dtype=torch.uint8)
    if process.rank == first:
        rows = dict(zip(ranks, everyone, strict=True))
        rows.pop(first).copy_(mine)
        swap(process, {}, rows, _DIGEST_TAG)
        swap(process, dict.fromkeys(rows, everyone), {}, _DIGEST_TAG + 1)
    else:
        swap(process, {first: mine}, {}, _DIGEST_TAG)
        swap(process, {}, {first: everyone}, _DIGEST_TAG + 1)
    other = [rank for rank, row in zip(ranks, everyone, strict=True) if not torch.equal(row, mine)]
    if other:
        names = ", ".join(map(str, other))
        raise ReallocationError(f"{label}: rank {process.rank} and ranks {names} have different schedules")
    own = {peer: _digest(text) for peer, text in pairs.items()}
    theirs = swap(process, own, {peer: torch.empty_like(row) for peer, row in own.items()}, _PAIR_TAG)
    for peer, row in own.items():
        if not torch.equal(row, theirs[peer]):
            raise ReallocationError(
                f"{label}: rank {process.rank} and rank {peer} cut what they exchange into different messages"
            )


def swap(
    process: Process, sent: Mapping[int, Tensor], received: Mapping[int, Tensor], tag: int
) -> Mapping[int, Tensor]:
    """Send the small CPU tensors in `sent`, and receive into those in `received`. Returns `received`.

    Keys are the ranks to which tensors are sent, or from which they are received.
    """
    works = [dist.isend(tensor, peer, group=process.control, tag=tag) for peer, tensor in sent.items()]
    for peer, tensor in received.items():
        dist.recv(tensor, peer, group=process.control, tag=tag)
    for work in works:
        assert work is not None, "every rank is part of the control group"
        work.wait()
    return received


def _digest(text: str) -> Tensor:
    return torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)


@dataclass(frozen=True, eq=False)
class _Flight:
    """A message in flight: the tensor that is sent or received (`wire`), and the flat buffer on this rank
    (`data`)."""

    message: PackedTransfer
    wire: Tensor
    data: Tensor
    packed: Tensor | None
    """Buffer that contains `wire`; None if `wire` is a part of `data`."""


class Staging:
    """Buffers for packed messages, one per message in flight.

    They are reused, because allocating new memory is slow.
    """

    def __init__(self, device: torch.device, limits: MessageLimits | None = None) -> None:
        """`limits`: maximum sizes of messages; by default, the limits of the device."""
        self.limits = limits or message_limits(cpu=device.type == "cpu")
        self._device = device
        self._free: list[Tensor] = []
        self.used = 0
        """Number of buffers in use."""

    @property
    def nbytes(self) -> int:
        """Bytes of the free buffers."""
        return self.limits.message_bytes * len(self._free)

    def take(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Take a buffer. Returns the part of it that the elements fill, and the whole buffer."""
        self.used += 1
        size = numel * dtype.itemsize
        if size > self.limits.message_bytes:
            buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        elif self._free:
            buffer = self._free.pop()
        else:
            buffer = torch.empty(self.limits.message_bytes, dtype=torch.uint8, device=self._device)
        return buffer[:size].view(dtype), buffer

    def give_back(self, buffer: Tensor) -> None:
        """Return a buffer after use."""
        self.used -= 1
        if len(buffer) == self.limits.message_bytes:
            self._free.append(buffer)


class Reallocator:
    """Executes one reallocation of a role's parameters on this rank.

    It is compiled once, and can run many times.
    """

    def __init__(
        self,
        reallocation: Reallocation,
        process: Process,
        *,
        label: str,
        dtypes: tuple[torch.dtype, torch.dtype],
        groups: Sequence[Collection[str] | Mapping[str, Region]] | None = None,
        staging: Staging | None = None,
        verify: bool = False,
    ) -> None:
        """Compile the reallocation. All ranks of both layouts must do this together.

        `dtypes`: dtypes of source and target; data is sent in the narrower one. `groups`: sets of tensors, or of
        regions, that move together; by default, there is one group of all tensors. `staging` sets the size of
        messages, and may be shared with other reallocators. `verify`: compare checksums of sent and received data.
        `label` names the reallocation in errors. Raises ReallocationError if ranks disagree.
        """
        self._process, self._label, self._verify = process, label, verify
        self._staging = staging or Staging(process.device)
        self._wire = min(dtypes, key=lambda dtype: dtype.itemsize)
        everything = [spec.name for spec in reallocation.source.specs]
        self.groups = [everything] if groups is None else list(groups)
        scheduler = RankScheduler(
            reallocation, process.rank, self._wire.itemsize, limits=self._staging.limits
        )
        self._schedules = [scheduler.schedule(group) for group in self.groups]
        ranks = {*reallocation.source.placement.ranks, *reallocation.target.placement.ranks}
        if len(ranks) > 1:
            digest = f"{reallocation.digest()} {self._wire}"
            pairs: dict[int, str] = defaultdict(str)
            for schedule in self._schedules:
                for pair in sorted(schedule.digests):
                    peer = next(r for r in map(int, pair.split("-")) if r != process.rank)
                    pairs[peer] += schedule.digests[pair]
            agree(process, label, sorted(ranks), digest, pairs)

    @torch.no_grad()
    def run(self, source: FlatBuffer | None, target: FlatBuffer | None, group: int = 0) -> None:
        """Move one group of tensors.

        `source` has all tensors of the source layout, and `target` receives the group. Either is None if its layout
        has no tensors on this rank. Raises ReallocationError if verification fails.
        """
        schedule = self._schedules[group]
        before, after = (None if b is None else b.data for b in (source, target))
        checksums: defaultdict[tuple[int, bool], list[int]] = defaultdict(list)
        under_way: deque[tuple[list[dist.Work], list[_Flight]]] = deque()

        def finish(groups: int, staged: int) -> None:
            while len(under_way) > groups or self._staging.used > staged:
                works, flights = under_way.popleft()
                for work in works:
                    work.wait()
                for flight in flights:
                    self._finish(flight, checksums)

        stage, limits = 0, self._staging.limits
        for messages in group_messages(schedule.messages, limits):
            # Finish a stage before the next one starts, because the next stage may send data that arrives in this
            # one.
            same = messages[0].stage == stage
            finish(*(limits.posted_groups - 1, limits.staged_messages) if same else (0, 0))
            stage = messages[0].stage
            under_way.append(self._post(messages, before, after, checksums))
        for a, b in schedule.copies:
            assert before is not None and after is not None, "only ranks of both layouts copy"
            rows = max(a.rows, b.rows)
            _view(after, b, rows).copy_(_view(before, a, rows))
        finish(0, 0)
        if self._verify:
            self._compare(schedule, checksums)

    def mix(self, source: FlatBuffer | None, target: FlatBuffer | None, factor: float) -> None:
        """Update target = (1 - factor) * target + factor * incoming, group by group (EMA)."""
        for i, group in enumerate(self.groups):
            if target is None:
                self.run(source, None, i)
                continue
            data = target.data
            tensors = [tensor for tensor in target.tensors if tensor.name in group]
            incoming = FlatBuffer(tensors, data.dtype, data.device)
            self.run(source, incoming, i)
            if tensors:
                start = target.offset(tensors[0].name)
                data[start : start + incoming.data.numel()].lerp_(incoming.data, factor)

    def _post(
        self,
        messages: Sequence[PackedTransfer],
        before: Tensor | None,
        after: Tensor | None,
        checksums: defaultdict[tuple[int, bool], list[int]],
    ) -> tuple[list[dist.Work], list[_Flight]]:
        """Post a group of messages."""
        flights, operations = [], []
        for message in messages:
            data = before if message.sends and message.stage == 0 else after
            assert data is not None, "ranks have the buffers of their layouts"
            flight = self._prepare(message, data)
            if message.sends and self._verify:
                checksums[message.peer, True].append(_checksum(flight.wire))
            flights.append(flight)
            operation = dist.isend if message.sends else dist.irecv
            operations.append(dist.P2POp(operation, flight.wire, message.peer))
        return dist.batch_isend_irecv(operations), flights

    def _prepare(self, message: PackedTransfer, data: Tensor) -> _Flight:
        """Prepare the tensor to send or receive: a slice of the flat buffer, or a packed buffer."""
        first, *more = message.spans
        fits = data.dtype == self._wire and data.device == self._process.device
        if fits and first.contiguous and not more:
            return _Flight(message, data[first.start : first.start + first.width], data, None)
        wire, buffer = self._staging.take(message.numel, self._wire)
        if message.sends:
            _pack(wire, data, message.spans)
        return _Flight(message, wire, data, buffer)

    def _finish(self, flight: _Flight, checksums: defaultdict[tuple[int, bool], list[int]]) -> None:
        message = flight.message
        if flight.packed is not None and not message.sends:
            for span, part in _parts(flight.wire, message.spans):
                _view(flight.data, span, span.rows).copy_(part)
        if not message.sends and self._verify:
            # Check the parameters themselves, not only the received bytes.
            wire = torch.empty_like(flight.wire)
            _pack(wire, flight.data, message.spans)
            checksums[message.peer, False].append(_checksum(wire))
        if flight.packed is not None:
            self._staging.give_back(flight.packed)

    def _compare(self, schedule: RankSchedule, checksums: defaultdict[tuple[int, bool], list[int]]) -> None:
        """Compare the checksums of received data with the senders' checksums."""
        sent = {peer: torch.tensor(sums) for (peer, sends), sums in checksums.items() if sends}
        arrived = {peer: torch.tensor(sums) for (peer, sends), sums in checksums.items() if not sends}
        theirs = swap(
            self._process, sent, {p: torch.empty_like(sums) for p, sums in arrived.items()}, CHECKSUM_TAG
        )
        for peer, sums in arrived.items():
            wrong = (sums != theirs[peer]).nonzero().flatten().tolist()
            if wrong:
                received = [m for m in schedule.messages if m.peer == peer and not m.sends]
                regions = received[wrong[0]].regions
                more = f" and {len(regions) - 1} more regions" if len(regions) > 1 else ""
                raise ReallocationError(
                    f"{self._label}: on rank {self._process.rank}, what arrived from rank {peer} is not what"
                    f" was sent: {regions[0].tensor} at {list(regions[0].offset)}, size"
                    f" {list(regions[0].size)}{more}"
                )


def _view(data: Tensor, span: Span, rows: int) -> Tensor:
    """View a span of a flat buffer as a matrix, with one row per contiguous run of elements."""
    if span.contiguous:
        return data[span.start : span.start + span.width].view(rows, -1)
    return data.as_strided((span.rows, span.width), (span.stride, 1), span.start)


def _parts(wire: Tensor, spans: Sequence[Span]) -> list[tuple[Span, Tensor]]:
    """Pair each span with its part of a message, in the shape of its view."""
    parts = wire.split([span.numel for span in spans])
    return [(span, part.view(span.rows, -1)) for span, part in zip(spans, parts, strict=True)]


def _pack(wire: Tensor, data: Tensor, spans: Sequence[Span]) -> None:
    for span, part in _parts(wire, spans):
        part.copy_(_view(data, span, span.rows))


def _checksum(tensor: Tensor) -> int:
    # A copy, because a tensor's memory cannot be freed for offloading once numpy has seen it.
    copy = tensor.cpu().clone(memory_format=torch.contiguous_format)
    return zlib.crc32(copy.view(torch.uint8).numpy().data)
