"""What takes place in a step, in the order of programs, as columns for many plans at once."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from realrl.dataflow.call import Kind as CallKind
from realrl.planner.evaluate.tables import Bools, Columns, Following, Tables
from realrl.planner.moves.transfers import Floats, Ints


class Phase(IntEnum):
    """What happens in a wave, in the order of programs (`program.lower`)."""

    START = 0
    """Of a function."""
    LOAD = 1
    BRING = 2
    UNLOAD = 3
    RUN = 4
    TELL = 5
    COLLECT = 6
    """The outputs of a function are waited for, in the wave before the first call that needs them."""
    TELL_COLLECTED = 7
    LOAD_FOLLOWER = 8
    FOLLOW = 9
    PUT_CHANGED_BACK = 10
    PUT_FOLLOWER_BACK = 11
    RELEASE = 12
    PUT_BACK = 13


_BLOCKS = {Phase.BRING: Phase.LOAD, Phase.TELL_COLLECTED: Phase.COLLECT} | dict.fromkeys(
    range(Phase.LOAD_FOLLOWER, Phase.PUT_BACK), Phase.LOAD_FOLLOWER
)
"""Of phases that are gone through call by call, the first."""
_RENDEZVOUS = (Phase.BRING, Phase.RUN, Phase.FOLLOW)
"""Begins on all ranks at once; what else there is each rank does when it comes to it."""


@dataclass(frozen=True)
class Kind:
    """An activity that plans may have."""

    phase: Phase
    call: int
    """To the wave of which it belongs; what is collected belongs to a later one."""
    following: Following | None = None
    number: int = 0
    """Of `following`."""

    @property
    def place(self) -> tuple[int, int, int, int, int]:
        """Where it comes among those of a wave."""
        follower = self.phase in (Phase.LOAD_FOLLOWER, Phase.FOLLOW)
        order = (self.number, self.phase) if follower else (self.phase, self.number)
        return _BLOCKS.get(self.phase, self.phase), self.call, not follower, *order

    @property
    def rendezvous(self) -> bool:
        """Whether ranks wait for each other."""
        return self.phase in _RENDEZVOUS

    @property
    def collects(self) -> bool:
        """Whether it belongs to the wave in which outputs of a function are collected."""
        return self.phase in (Phase.COLLECT, Phase.TELL_COLLECTED)


def kinds(tables: Tables) -> list[Kind]:
    """What can take place; the calls themselves first, in their order."""
    calls = range(len(tables.calls))
    found = [Kind(Phase.START if c in tables.functions else Phase.RUN, c) for c in calls]
    for c in calls:
        if c in tables.functions:
            found.append(Kind(Phase.COLLECT, c))
            found += [Kind(Phase.TELL_COLLECTED, c)] * bool(tables.told[c])
            continue
        home = tables.home[c]
        away, borrows = bool(tables.options(home).away.any()), home != c
        changes = tables.calls[c].kind is CallKind.TRAIN
        back = Phase.PUT_CHANGED_BACK if changes else Phase.PUT_BACK
        found += [Kind(Phase.LOAD, c), Kind(back, c)] * away
        found += [Kind(Phase.BRING, c), Kind(Phase.RELEASE, c)] * borrows
        found += [Kind(Phase.UNLOAD, c)] * (away and borrows)
        found += [Kind(Phase.TELL, c)] * bool(tables.told[c])
    for number, following in enumerate(tables.followers):
        f = following.after, following, number
        found.append(Kind(Phase.FOLLOW, *f))
        if tables.options(following.home).away.any():
            found += [Kind(Phase.LOAD_FOLLOWER, *f), Kind(Phase.PUT_FOLLOWER_BACK, *f)]
    return found


def takes_time(tables: Tables, kind: Kind) -> bool:
    """Whether ranks may be kept by an activity."""
    if kind.phase in (Phase.UNLOAD, Phase.PUT_BACK, Phase.PUT_CHANGED_BACK):
        return bool(tables.options(tables.home[kind.call]).unload.any())
    return kind.phase is not Phase.RELEASE


def stores(kind: Kind) -> bool:
    """Whether devices hold more or less from it on, or meanwhile."""
    still = (Phase.START, Phase.TELL, Phase.COLLECT, Phase.TELL_COLLECTED, Phase.FOLLOW)
    return kind.phase not in still


@dataclass(frozen=True)
class Activities:
    """What takes place in plans: [activities, plans], of places [activities, points, plans].

    A point is the first device of a call's mesh. For every device there is a point that lies on all the meshes
    that it lies on, so that points have the last end and the fullest memory. What does not take place is nowhere.
    """

    where: Bools
    """Points that take part."""
    seconds: Floats
    """That points take part for; a function does not keep them."""
    grows: Bools
    """Points that hold more meanwhile."""
    bytes: Floats
    """What they hold from its start on; or from its end on, if it is negative."""
    needs: Floats
    """What they hold besides only while it lasts."""


class Facts:
    """What of plans decides what takes place in them."""

    def __init__(self, tables: Tables, columns: Columns) -> None:
        self.tables, self.columns = tables, columns
        point, first, end = columns.first, columns.first[:, None], columns.end[:, None]
        self.inside: Bools = (first <= point) & (point < end)
        """Whether a point is on the mesh of a call, [calls, points, plans]."""
        self.wave = self._waves()
        """Of each call, [calls, plans]."""
        self.borrowed = np.array([columns.code[c] != columns.code[h] for c, h in enumerate(tables.home)])
        """Whether a call uses a copy that is made for the step."""

    def activities(self, found: list[Kind]) -> Activities:
        """All that can take place."""
        where, seconds, grows, change = zip(*(self._row(kind) for kind in found), strict=True)
        working = self.columns.working
        needs = [working[k.call] if k.phase is Phase.RUN else np.zeros(working.shape[1]) for k in found]
        return Activities(*map(np.array, (where, seconds, grows, change, needs)))

    def waves_of(self, kinds: list[Kind]) -> Ints:
        """The wave that each activity belongs to, [activities, plans] (`order.collecting_wave`)."""
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

    def _row(self, kind: Kind) -> tuple[Bools, Floats, Bools, Floats]:
        """Where it takes place, how long it takes, and what grows where by how many bytes."""
        columns, c, home = self.columns, kind.call, self.tables.home[kind.call]
        nothing = np.zeros(columns.first.shape[1])
        if kind.following is not None:
            return self._following(kind.phase, kind.following)
        match kind.phase:
            case Phase.RUN:
                return self.inside[c], columns.seconds[c], self.inside[c], nothing
            case Phase.START | Phase.COLLECT:
                return self.inside[c], nothing, np.zeros_like(self.inside[c]), nothing
            case Phase.TELL | Phase.TELL_COLLECTED:
                told = np.logical_or.reduce([self.inside[r] for r in self.tables.told[c]])
                return told, nothing, told, nothing
            case Phase.BRING:
                first = self.borrowed[c] & ~self._meets(c, self.tables.sharers[c])
                seconds = self.tables.bring[c](columns.layout[home], columns.layout[c])
                there = self.inside[c] & first
                return there | self.inside[home] & first, seconds, there, columns.weights[c]
            case Phase.RELEASE:
                last = self.borrowed[c] & ~self._meets(c, self.tables.shared_by[c])
                there = self.inside[c] & last
                return there, nothing, there, -columns.weights[c]
        there = self.inside[home] & (self._moved(kind) & columns.away[home])
        loads = kind.phase is Phase.LOAD
        seconds, weights = columns.load if loads else columns.unload, columns.weights[home]
        return there, seconds[home], there, weights if loads else -weights

    def _moved(self, kind: Kind) -> Bools:
        """Whether a role's parameters, if they wait in host memory, are loaded or put back then. Calls of the same
        wave share what has been loaded."""
        c, borrowed = kind.call, self.borrowed
        mates = {p: self.wave[p] == self.wave[c] for p in self.tables.mates[c]}
        if kind.phase in (Phase.LOAD, Phase.UNLOAD):
            moved = self._loads(c) & ~self._any(mates[p] & self._loads(p) for p in mates if p < c)
        if kind.phase is Phase.LOAD:
            return moved
        if kind.phase is Phase.UNLOAD:
            return moved & borrowed[c] & ~self._any(mates[p] & ~borrowed[p] for p in mates)
        return ~borrowed[c] & ~self._any(mates[p] & ~borrowed[p] for p in mates if p < c)

    def _loads(self, c: int) -> Bools:
        """Whether a call needs the parameters at its role's home."""
        return ~self.borrowed[c] | ~self._meets(c, self.tables.sharers[c])

    def _following(self, phase: Phase, following: Following) -> tuple[Bools, Floats, Bools, Floats]:
        columns, home, source = self.columns, following.home, self.tables.home[following.after]
        there, weights = self.inside[home], columns.weights[home]
        if phase is Phase.FOLLOW:
            seconds = following.table(columns.layout[source], columns.layout[home])
            return there | self.inside[source], seconds, there, np.zeros_like(weights)
        there = there & columns.away[home]
        if phase is Phase.LOAD_FOLLOWER:
            return there, columns.load[home], there, weights
        return there, columns.unload[home], there, -weights

    def _meets(self, c: int, others: list[int]) -> Bools:
        """Whether one of other calls has the layout of call `c`."""
        code = self.columns.code
        return self._any(code[p] == code[c] for p in others)

    def _any(self, rows: Iterable[Bools]) -> Bools:
        """Of plans, whether one of rows holds."""
        found = np.zeros(self.columns.first.shape[1], dtype=bool)
        for row in rows:
            found |= row
        return found
