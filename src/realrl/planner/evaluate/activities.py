"""Activities of a step in program order, vectorised over plans."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from realrl.dataflow.call import Kind
from realrl.planner.arrays.arrays import Bools, Floats, Ints
from realrl.planner.evaluate.tables import Columns, EmaUpdate, Refresh, Tables


class WavePhase(IntEnum):
    """Phases of a wave, in the order of programs (`program.lower`)."""

    START = 0
    """A function is started on the host."""
    LOAD = 1
    REALLOCATE = 2
    OFFLOAD_SOURCE = 3
    RUN = 4
    SHARE_LENGTHS = 5
    COLLECT = 6
    """Outputs of a function are waited for, in the wave before the first call that needs them."""
    SHARE_COLLECTED_LENGTHS = 7
    LOAD_EMA = 8
    UPDATE_EMA = 9
    REFRESH = 10
    """Copies that are kept get what a call has changed of its role."""
    OFFLOAD_CHANGED = 11
    REFRESH_EMA = 12
    """The same of a role that follows."""
    OFFLOAD_EMA = 13
    RELEASE = 14
    OFFLOAD = 15


_BLOCKS = {
    WavePhase.REALLOCATE: WavePhase.LOAD,
    WavePhase.SHARE_COLLECTED_LENGTHS: WavePhase.COLLECT,
} | dict.fromkeys(range(WavePhase.LOAD_EMA, WavePhase.OFFLOAD), WavePhase.LOAD_EMA)
"""First phase of the block of phases that is executed call by call."""
_STAGES = {
    WavePhase.UPDATE_EMA: WavePhase.LOAD_EMA,
    WavePhase.OFFLOAD_CHANGED: WavePhase.REFRESH,
    WavePhase.OFFLOAD_EMA: WavePhase.REFRESH_EMA,
}
"""First phase of the stage of a block that is executed role by role."""
_RENDEZVOUS = (
    WavePhase.REALLOCATE,
    WavePhase.RUN,
    WavePhase.UPDATE_EMA,
    WavePhase.REFRESH,
    WavePhase.REFRESH_EMA,
)
"""Phases that start on all ranks at once; ranks execute the others independently."""


@dataclass(frozen=True)
class ActivityKind:
    """Kind of activity that plans may contain."""

    phase: WavePhase
    call: int
    """Index of the call whose wave contains the activity; a later wave contains what is collected of a function."""
    ema: EmaUpdate | None = None
    number: int = 0
    """Index of `ema`, or of that of the role that is refreshed."""
    refresh: Refresh | None = None

    @property
    def place(self) -> tuple[int, ...]:
        """Sort key among the activities of a wave."""
        stage = _STAGES.get(self.phase, self.phase)
        copy = self.refresh.copy if self.refresh else 0
        return _BLOCKS.get(self.phase, self.phase), self.call, stage, self.number, self.phase, copy

    @property
    def rendezvous(self) -> bool:
        """Whether all participating ranks start together."""
        return self.phase in _RENDEZVOUS

    @property
    def collects(self) -> bool:
        """Whether it belongs to the wave in which outputs of a function are collected."""
        return self.phase in (WavePhase.COLLECT, WavePhase.SHARE_COLLECTED_LENGTHS)


def list_activities(tables: Tables) -> list[ActivityKind]:
    """List all kinds of activities; runs of calls come first, in the order of the graph."""
    calls = range(len(tables.calls))
    kinds = [ActivityKind(WavePhase.START if c in tables.functions else WavePhase.RUN, c) for c in calls]
    for c in calls:
        if c in tables.functions:
            shares = bool(tables.length_receivers[c])
            kinds.append(ActivityKind(WavePhase.COLLECT, c))
            kinds += [ActivityKind(WavePhase.SHARE_COLLECTED_LENGTHS, c)] * shares
            continue
        home = tables.home[c]
        offloaded = bool(tables.candidates(home).offloaded.any())
        borrows = home != c
        changes = tables.calls[c].kind is Kind.TRAIN
        back = WavePhase.OFFLOAD_CHANGED if changes else WavePhase.OFFLOAD
        kinds += [ActivityKind(WavePhase.LOAD, c), ActivityKind(back, c)] * offloaded
        kinds += [ActivityKind(WavePhase.REALLOCATE, c), ActivityKind(WavePhase.RELEASE, c)] * borrows
        kinds += [ActivityKind(WavePhase.OFFLOAD_SOURCE, c)] * (offloaded and borrows)
        kinds += [ActivityKind(WavePhase.SHARE_LENGTHS, c)] * bool(tables.length_receivers[c])
    for number, ema in enumerate(tables.ema_updates):
        f = ema.after, ema, number
        kinds.append(ActivityKind(WavePhase.UPDATE_EMA, *f))
        if tables.candidates(ema.home).offloaded.any():
            kinds += [ActivityKind(WavePhase.LOAD_EMA, *f), ActivityKind(WavePhase.OFFLOAD_EMA, *f)]
    following = {(ema.after, ema.home): number for number, ema in enumerate(tables.ema_updates)}
    for refresh in tables.refreshes:
        ema_number = following.get((refresh.after, refresh.home))
        phase = WavePhase.REFRESH if ema_number is None else WavePhase.REFRESH_EMA
        kinds.append(ActivityKind(phase, refresh.after, number=ema_number or 0, refresh=refresh))
    return kinds


def takes_time(tables: Tables, kind: ActivityKind) -> bool:
    """Return whether an activity may take time."""
    if kind.phase in (WavePhase.OFFLOAD_SOURCE, WavePhase.OFFLOAD, WavePhase.OFFLOAD_CHANGED):
        return bool(tables.candidates(tables.home[kind.call]).unload.any())
    return kind.phase is not WavePhase.RELEASE


def stores(kind: ActivityKind) -> bool:
    """Return whether an activity changes the memory in use."""
    return kind.phase not in (
        WavePhase.START,
        WavePhase.SHARE_LENGTHS,
        WavePhase.COLLECT,
        WavePhase.SHARE_COLLECTED_LENGTHS,
        WavePhase.UPDATE_EMA,
        WavePhase.REFRESH,
        WavePhase.REFRESH_EMA,
    )


@dataclass(frozen=True, kw_only=True)
class Activities:
    """Activities of plans: [activities, plans], or [activities, points, plans] by location.

    A point is the first device of a call's mesh. For every device there is a point that lies on all meshes of that
    device, so that the latest end and the peak memory occur at points. Where rows wait for lengths (`LateRows`),
    the first devices behind meshes follow, so that every device is on the meshes of just the last point that is not
    behind it. Activities that a plan does not contain are nowhere.
    """

    where: Bools
    """Whether a point participates."""
    seconds: Floats
    """That points take part for; a function does not keep them."""
    grows: Bools
    """Whether an activity changes the memory of a point."""
    bytes: Floats
    """Bytes allocated from its start on, or, if negative, freed at its end."""
    needs: Floats
    """Further bytes allocated only while it runs."""


class Facts:
    """Properties of plans that determine their activities."""

    def __init__(self, tables: Tables, columns: Columns) -> None:
        self.tables = tables
        self.columns = columns
        self.point = point = columns.first
        """Device of each point, [points, plans]."""
        if tables.late_lengths:
            self.point = point = np.concatenate([columns.first, columns.end])
        first = columns.first[:, None]
        end = columns.end[:, None]
        self.inside: Bools = (first <= point) & (point < end)
        """Whether a point lies on the mesh of a call, [calls, points, plans]."""
        self.wave = self._waves()
        """Wave of each call, [calls, plans]."""
        self.away = np.array([columns.code[c] != columns.code[h] for c, h in enumerate(tables.home)])
        """Whether a call runs in another layout than its role lives in, [calls, plans]."""
        self.borrowed = self.away & ~columns.keeps[tables.home]
        """Whether a call uses a transient replica, [calls, plans]."""
        moved = self.borrowed | ~self.away & columns.offloaded[tables.home]
        self.seconds = columns.seconds + np.where(moved, columns.captures, 0.0)
        """Seconds of each call, [calls, plans]. It captures graphs again if its parameters have moved."""

    def activities(self, kinds: list[ActivityKind]) -> Activities:
        """Evaluate the given kinds of activities."""
        where, seconds, grows, change = zip(*(self._row(kind) for kind in kinds), strict=True)
        working = self.columns.working
        needs = [working[k.call] if k.phase is WavePhase.RUN else np.zeros(working.shape[1]) for k in kinds]
        return Activities(
            where=np.array(where),
            seconds=np.array(seconds),
            grows=np.array(grows),
            bytes=np.array(change),
            needs=np.array(needs),
        )

    def waves_of(self, kinds: list[ActivityKind]) -> Ints:
        """Find the wave that each activity belongs to, [activities, plans] (`order.collecting_wave`)."""
        collecting = {}
        for f, needing in self.tables.dependents.items():
            # After all waves where nothing needs what a function puts out.
            first = self.wave[needing].min(axis=0) if needing else self.wave.max(axis=0) + 2
            collecting[f] = np.maximum(self.wave[f], first - 1)
        return np.array([collecting[k.call] if k.collects else self.wave[k.call] for k in kinds])

    def _waves(self) -> Ints:
        columns, functions = self.columns, self.tables.functions
        wave = np.zeros_like(columns.first)
        for c in range(1, len(wave)):
            meets = (columns.first[:c] < columns.end[c]) & (columns.first[c] < columns.end[:c])
            # Functions use no device.
            meets[range(c) if c in functions else [f for f in functions if f < c]] = False
            after = meets | self.tables.ordered[c, :c, None]
            wave[c] = np.where(after, wave[:c] + 1, 0).max(axis=0)
        return wave

    def uses_first(self, copy: int) -> Bools:
        """Tell whether a call uses a kept copy that no earlier call of its role uses, [plans]."""
        earlier = [p for p in self.tables.same_role[copy] if p < copy]
        return self.away[copy] & ~self.borrowed[copy] & ~self._meets(copy, earlier)

    def _row(self, kind: ActivityKind) -> tuple[Bools, Floats, Bools, Floats]:
        """Participating points, seconds, points whose memory changes, and bytes of that change."""
        columns = self.columns
        c = kind.call
        home = self.tables.home[kind.call]
        nothing = np.zeros(columns.first.shape[1])
        if kind.refresh is not None:
            home, copy = kind.refresh.home, kind.refresh.copy
            there = (self.inside[home] | self.inside[copy]) & self.uses_first(copy)
            return there, kind.refresh.table(columns.layout[home], columns.layout[copy]), there, nothing
        if kind.ema is not None:
            return self._ema_row(kind.phase, kind.ema)
        match kind.phase:
            case WavePhase.RUN:
                return self.inside[c], self.seconds[c], self.inside[c], nothing
            case WavePhase.START | WavePhase.COLLECT:
                return self.inside[c], nothing, np.zeros_like(self.inside[c]), nothing
            case WavePhase.SHARE_LENGTHS | WavePhase.SHARE_COLLECTED_LENGTHS:
                receivers = np.logical_or.reduce([self.inside[r] for r in self.tables.length_receivers[c]])
                return receivers, self._sharing_seconds(c), receivers, nothing
            case WavePhase.REALLOCATE:
                first = self.borrowed[c] & ~self._meets(c, self.tables.sharers[c])
                seconds = self.tables.reallocation[c](columns.layout[home], columns.layout[c])
                there = self.inside[c] & first
                return there | self.inside[home] & first, seconds, there, columns.weights[c]
            case WavePhase.RELEASE:
                last = self.borrowed[c] & ~self._meets(c, self.tables.shared_by[c])
                there = self.inside[c] & last
                return there, nothing, there, -columns.weights[c]
        there = self.inside[home] & (self._moved(kind) & columns.offloaded[home])
        loads = kind.phase is WavePhase.LOAD
        seconds = columns.load if loads else columns.unload
        weights = columns.weights[home]
        return there, seconds[home], there, weights if loads else -weights

    def _sharing_seconds(self, c: int) -> Floats:
        """Seconds in which a call's output ranks tell all ranks that need them the lengths of its rows."""
        graph, told = self.tables.problem.graph, self.tables.length_receivers[c]
        keys = sum(graph.keys[key].length == "own" for key in self.tables.calls[c].outputs)
        order = np.argsort(self.columns.first[told], axis=0)
        first = np.take_along_axis(self.columns.first[told], order, 0)
        reached = np.maximum.accumulate(np.take_along_axis(self.columns.end[told], order, 0), axis=0)
        ranks = reached[0] - first[0]
        for i in range(1, len(told)):
            ranks = ranks + np.maximum(0, reached[i] - np.maximum(first[i], reached[i - 1]))
        placed = self.tables.layouts(c)[self.columns.layout[c]]
        senders = placed.shares
        return keys * self.tables.problem.exchange.lengths_seconds(senders, ranks)

    def _moved(self, kind: ActivityKind) -> Bools:
        """Whether a role's parameters, if offloaded, are loaded or offloaded again at this point.

        Calls of the same wave share loaded parameters.
        """
        c = kind.call
        away = self.away
        same_role = {p: self.wave[p] == self.wave[c] for p in self.tables.same_role[c]}
        if kind.phase in (WavePhase.LOAD, WavePhase.OFFLOAD_SOURCE):
            moved = self._loads(c) & ~self._any(same_role[p] & self._loads(p) for p in same_role if p < c)
        if kind.phase is WavePhase.LOAD:
            return moved
        if kind.phase is WavePhase.OFFLOAD_SOURCE:
            return moved & away[c] & ~self._any(same_role[p] & ~away[p] for p in same_role)
        return ~away[c] & ~self._any(same_role[p] & ~away[p] for p in same_role if p < c)

    def _loads(self, c: int) -> Bools:
        """Whether a call needs the parameters at its role's primary placement."""
        return ~self.away[c] | self.borrowed[c] & ~self._meets(c, self.tables.sharers[c])

    def _ema_row(self, phase: WavePhase, ema: EmaUpdate) -> tuple[Bools, Floats, Bools, Floats]:
        columns = self.columns
        home = ema.home
        source = self.tables.home[ema.after]
        there = self.inside[home]
        weights = columns.weights[home]
        if phase is WavePhase.UPDATE_EMA:
            seconds = ema.table(columns.layout[source], columns.layout[home])
            return there | self.inside[source], seconds, there, np.zeros_like(weights)
        there = there & columns.offloaded[home]
        if phase is WavePhase.LOAD_EMA:
            return there, columns.load[home], there, weights
        return there, columns.unload[home], there, -weights

    def _meets(self, c: int, others: list[int]) -> Bools:
        """Whether one of `others` has the layout of call `c`."""
        code = self.columns.code
        return self._any(code[p] == code[c] for p in others)

    def _any(self, rows: Iterable[Bools]) -> Bools:
        """Element-wise or of rows, [plans]."""
        result = np.zeros(self.columns.first.shape[1], dtype=bool)
        for row in rows:
            result |= row
        return result
