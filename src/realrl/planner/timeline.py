"""When the calls of a step run under a plan: thousands of plans at once."""

from dataclasses import dataclass

import numpy as np

from realrl.planner.problem import Choice, Problem
from realrl.planner.residency import fill
from realrl.planner.tables import NEVER, Bools, Columns, Tables
from realrl.planner.transfers import Floats, Ints

_NOWHERE = 1 << 40
"""First and end of an interval of ranks that no other meets."""
_BRING, _RUN, _FOLLOW = range(3)


@dataclass(frozen=True)
class Evaluation:
    """What a plan costs."""

    seconds: float
    """Of one step, from its start to the end of its last call."""
    peak_bytes: float
    """On the device that is fullest in relation to its memory."""
    fill: float
    """The part of that device's memory; more than 1 does not fit."""
    fullest_rank: int
    """That device, or the first of several."""
    start: dict[str, float]
    """Call -> when it starts, in seconds after the step."""
    end: dict[str, float]
    bring_seconds: dict[str, float]
    """Call -> seconds of bringing its parameters, for those that need it."""

    @property
    def fits(self) -> bool:
        """Whether no device has to hold more than it can."""
        return self.fill <= 1


@dataclass(frozen=True)
class _Activities:
    """What occupies devices, [activities, plans]: first each call, then each bringing, then each following."""

    wave: Ints
    seconds: Floats
    spans: tuple[tuple[Ints, Ints], tuple[Ints, Ints]]
    """First and end of two intervals of ranks; the second may be nowhere."""

    def sorted(self, order: Ints) -> "_Activities":
        """In another order, per plan."""

        def taken(rows: Ints) -> Ints:
            return np.take_along_axis(rows, order, 0)

        (a, b), (c, d) = self.spans
        seconds = np.take_along_axis(self.seconds, order, 0)
        return _Activities(taken(self.wave), seconds, ((taken(a), taken(b)), (taken(c), taken(d))))

    def meets_earlier(self, k: int) -> Bools:
        """Whether each activity before the k-th shares a device with it."""
        (a, b), (c, d) = self.spans
        return (
            (a[:k] < b[k]) & (a[k] < b[:k])
            | (c[:k] < b[k]) & (a[k] < d[:k])
            | (a[:k] < d[k]) & (c[k] < b[:k])
            | (c[:k] < d[k]) & (c[k] < d[:k])
        )


class Timeline:
    """Costs plans by a list schedule of the step.

    It follows what programs do (`program.lower`). Calls are put into waves; those of one share no device and do
    not wait for each other. A device does what concerns it in the order of waves, and in a wave first brings
    parameters, then runs calls, then changes roles that follow others. A call starts when those it depends on
    have ended and its inputs have come; bringing parameters occupies the devices of both meshes, and waits
    for row lengths that its ranks have to learn before. Steps do not overlap.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.tables = tables = Tables(problem)
        calls = range(len(tables.calls))
        loads = [bool(tables.options(c).load.any()) for c in calls]
        self._moving = [c for c in calls if tables.home[c] != c or loads[c]]
        phases = [_RUN] * len(calls) + [_BRING] * len(self._moving) + [_FOLLOW] * len(tables.followers)
        owner = [*calls, *self._moving, *(f.after for f in tables.followers)]
        self._rank = np.array([p * len(calls) + c for p, c in zip(phases, owner, strict=True)])[:, None]
        self._owner = np.array(owner)
        lengths = np.where(tables.informed, 0.0, NEVER)
        itself = np.where(np.eye(len(calls), dtype=bool), 0.0, NEVER)
        rows = {_RUN: tables.wait, _BRING: lengths, _FOLLOW: itself}
        # Column a: when each call's end, moved by that many seconds, lets activity a start.
        self._wait = np.array([rows[p][c] for p, c in zip(phases, owner, strict=True)]).T.copy()

    def __call__(self, choice: Ints) -> tuple[Floats, Floats]:
        """Seconds of plans, and the largest part of a device's memory that they use: more than 1 does not fit.

        choice: [calls, plans], for each call in the order of the graph the number of its option.
        """
        columns = self.tables.gather(choice)
        _, end, _ = self._schedule(columns)
        return end.max(axis=0), fill(self.tables, columns).max(axis=0)

    def evaluate(self, choice: Choice) -> Evaluation:
        """One plan in detail."""
        names = [call.name for call in self.tables.calls]
        columns = self.tables.gather(np.array([[choice[name]] for name in names]))
        start, end, brought = self._schedule(columns)
        parts = fill(self.tables, columns)[:, 0]
        fullest = int(parts.argmax())
        return Evaluation(
            float(end.max()),
            float(parts[fullest] * columns.limit[fullest, 0]),
            float(parts[fullest]),
            int(columns.first[fullest, 0]),
            {name: float(start[c, 0]) for c, name in enumerate(names)},
            {name: float(end[c, 0]) for c, name in enumerate(names)},
            {names[c]: float(s[0]) for c, s in zip(self._moving, brought, strict=True) if s[0] > 0},
        )

    def _schedule(self, columns: Columns) -> tuple[Floats, Floats, list[Floats]]:
        """Start and end of every activity, [activities, plans], and seconds of the bringings."""
        brought = [self._bring_seconds(columns, c) for c in self._moving]
        activities = self._activities(columns, brought)
        key = activities.wave * (3 * len(self.tables.calls)) + self._rank
        order = np.argsort(key.T, axis=1).T
        step = activities.sorted(order)
        starts, ends = np.zeros(key.shape), np.zeros(key.shape)
        end = np.zeros(key.shape)
        """Of the activities in the order they take place."""
        n, plans = len(self.tables.calls), np.arange(key.shape[1])
        for k in range(len(key)):
            which = order[k]
            start = np.maximum((ends[:n] + self._wait[:, which]).max(axis=0), 0.0)
            if k:
                busy = np.where(step.meets_earlier(k), end[:k], 0.0).max(axis=0)
                start = np.maximum(start, busy)
            end[k] = start + step.seconds[k]
            ends[which, plans], starts[which, plans] = end[k], start
        return starts, ends, brought

    def _activities(self, columns: Columns, brought: list[Floats]) -> _Activities:
        """All of them; what does not take place is nowhere."""
        tables, wave = self.tables, self._waves(columns)
        seconds = [*columns.seconds, *brought]
        first, end = [*columns.first], [*columns.end]
        second = [(np.full_like(first[0], _NOWHERE),) * 2] * len(first)
        for c, s in zip(self._moving, brought, strict=True):
            home = tables.home[c]
            first.append(np.where(s > 0, columns.first[c], _NOWHERE))
            end.append(np.where(s > 0, columns.end[c], _NOWHERE))
            nowhere = np.full_like(first[0], _NOWHERE)
            second.append(
                (np.where(s > 0, columns.first[home], nowhere), np.where(s > 0, columns.end[home], nowhere))
            )
        for f in tables.followers:
            source = tables.home[f.after]
            mixing = f.table(columns.layout[source], columns.layout[f.home])
            seconds.append(mixing + columns.load[f.home])
            first.append(columns.first[source])
            end.append(columns.end[source])
            second.append((columns.first[f.home], columns.end[f.home]))
        spans = (
            (np.array(first), np.array(end)),
            (
                np.array([a for a, _ in second]),
                np.array([b for _, b in second]),
            ),
        )
        return _Activities(wave[self._owner], np.array(seconds), spans)

    def _waves(self, columns: Columns) -> Ints:
        """[calls, plans]"""
        wave = np.zeros_like(columns.first)
        for c in range(1, len(wave)):
            meets = (columns.first[:c] < columns.end[c]) & (columns.first[c] < columns.end[:c])
            after = meets | self.tables.ordered[c, :c, None]
            wave[c] = np.where(after, wave[:c] + 1, 0).max(axis=0)
        return wave

    def _bring_seconds(self, columns: Columns, c: int) -> Floats:
        """Of reallocating, or loading from host memory, what call `c` needs; 0 where it finds a copy."""
        home = self.tables.home[c]
        seconds = columns.load[home]
        if home != c:
            seconds = seconds + self.tables.bring[c](columns.layout[home], columns.layout[c])
        away = columns.code[c] != columns.code[home]
        for p in self.tables.sharers[c]:
            seconds = np.where(away & (columns.code[p] == columns.code[c]), 0.0, seconds)
        return seconds
