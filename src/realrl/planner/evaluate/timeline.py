"""When the calls of a step run under a plan: thousands of plans at once."""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from realrl.dataflow.call import Kind
from realrl.planner.evaluate.activities import (
    Activities,
    Facts,
    WavePhase,
    list_activities,
    stores,
    takes_time,
)
from realrl.planner.evaluate.hosts import Hosts
from realrl.planner.evaluate.tables import Columns, Tables
from realrl.planner.moves.transfers import Floats, Ints
from realrl.planner.space.problem import Assignment, Problem

Scalar = TypeVar("Scalar", bound=np.generic)

_NEVER = -np.inf
_AT_ONCE = 512
"""Plans whose columns stay in the caches."""


@dataclass(frozen=True)
class PlanEvaluation:
    """What a plan costs."""

    seconds: float
    """Of one step, from its start to the end of its last call."""
    peak_bytes: float
    """On the device that is fullest in relation to its memory."""
    fill: float
    """The part of that device's memory; more than 1 does not fit."""
    peak_rank: int
    """That device, or the first of several."""
    start: dict[str, float]
    """Call -> when it starts, in seconds after the step."""
    end: dict[str, float]
    reallocation_seconds: dict[str, float]
    """Call -> seconds of bringing its parameters, for those that need it."""

    @property
    def fits(self) -> bool:
        """Whether no device has to hold more than it can."""
        return self.fill <= 1


@dataclass(frozen=True)
class _Steps:
    """Plans' steps; of calls, [calls, plans], of points, [points, plans]."""

    activities: Activities
    start: Floats
    end: Floats
    clock: Floats
    """When points have ended the step."""
    fill: Floats
    """The largest part of its memory that a point ever uses."""


class Timeline:
    """Costs plans by a list schedule of the step.

    It follows what programs do (`program.lower`), and agrees with their simulation. Calls are put into waves;
    those of one share no device and do not wait for each other. A device does what concerns it in the order of
    waves, and in a wave first loads and brings parameters, then runs calls, learns row lengths, and changes
    roles that follow others. A call starts when it has received its inputs, one producer's after the other's, for
    which its devices must be free. Functions run beside that, on hosts, each rank by itself, until calls that need
    what they put out are next. Steps do not overlap.

    A device always holds what the roles that live on it keep, and besides, at a time: the copies in use, what a
    running call needs, and what is loaded from host memory. What cannot be done is infinitely full: training of a
    role outside its home, and calls that share parameters of which only one divides tokens.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.tables = tables = Tables(problem)
        self._kinds = list_activities(tables)
        self._owner = np.array([kind.call for kind in self._kinds])
        self._timed = np.array([a for a, kind in enumerate(self._kinds) if takes_time(tables, kind)])
        self._storing = np.array([a for a, kind in enumerate(self._kinds) if stores(kind)])
        self._together = np.array([kind.rendezvous for kind in self._kinds])
        places = sorted(range(len(self._kinds)), key=lambda a: self._kinds[a].place)
        self._place = np.argsort(places)[:, None]
        # Row lengths are told when the call has ended.
        sharing = (WavePhase.SHARE_LENGTHS, WavePhase.SHARE_COLLECTED_LENGTHS)
        sharing_lengths = [kind.phase in sharing for kind in self._kinds]
        same = self._owner == np.arange(len(tables.calls))[:, None]
        self._wait = np.where(same & sharing_lengths, 0.0, _NEVER)
        self._functions = {k.call: a for a, k in enumerate(self._kinds) if k.phase is WavePhase.COLLECT}

    def __call__(self, assignment: Ints) -> tuple[Floats, Floats]:
        """Seconds of plans, and the largest part of a device's memory that they use: more than 1 does not fit.

        choice: [calls, plans], for each call in the order of the graph the number of its option.
        """
        parts = (assignment[:, i : i + _AT_ONCE] for i in range(0, assignment.shape[1], _AT_ONCE))
        steps = [self._schedule(self.tables.gather(part)) for part in parts]
        seconds = [step.clock.max(axis=0) for step in steps]
        return np.concatenate(seconds), np.concatenate([step.fill.max(axis=0) for step in steps])

    def evaluate(self, assignment: Assignment) -> PlanEvaluation:
        """One plan in detail."""
        names = [call.name for call in self.tables.calls]
        columns = self.tables.gather(np.array([[assignment[name]] for name in names]))
        steps = self._schedule(columns)
        parts = steps.fill[:, 0]
        fullest = int(parts.argmax())
        brought: dict[str, float] = {}
        for a, kind in enumerate(self._kinds):
            if kind.phase in (WavePhase.LOAD, WavePhase.REALLOCATE) and steps.activities.where[a].any():
                name = names[kind.call]
                brought[name] = brought.get(name, 0.0) + float(steps.activities.seconds[a, 0])
        return PlanEvaluation(
            float(steps.clock.max()),
            float(parts[fullest] * columns.limit[fullest, 0]),
            float(parts[fullest]),
            int(columns.first[fullest, 0]),
            {name: float(steps.start[c, 0]) for c, name in enumerate(names)},
            {name: float(steps.end[c, 0]) for c, name in enumerate(names)},
            {name: seconds for name, seconds in brought.items() if seconds > 0},
        )

    def _schedule(self, columns: Columns) -> "_Steps":
        facts = Facts(self.tables, columns)
        activities = facts.activities(self._kinds)
        key = facts.waves_of(self._kinds) * len(self._kinds) + self._place
        end, clock = self._times(columns, activities, _ordered(key, self._timed))
        fill = self._most(facts, activities, _ordered(key, self._storing)) / columns.limit
        return _Steps(activities, end - columns.seconds, end, clock, fill)

    def _times(self, columns: Columns, activities: Activities, order: Ints) -> tuple[Floats, Floats]:
        """When calls have ended, [calls, plans], and points the step, [points, plans]. `order`: activities in the
        order they take place, [numbers, plans]."""
        delay, wait = self._receiving(columns)
        n, plans = len(self.tables.calls), order.shape[1]
        places = order * plans + np.arange(plans)
        wait, everywhere = wait.reshape(n, -1), _along(activities.where, order)
        delays, seconds = delay.take(places), activities.seconds.take(places)
        # Where a reallocation sends nothing, nobody waits.
        together = self._together[order] & ((order < n) | (seconds > 0))
        hosts = Hosts(self._functions, columns.seconds)
        clock, end = np.zeros((n, plans)), np.zeros((len(self._kinds), plans))
        for k, place in enumerate(places):
            where = everywhere[k]
            come = (end[:n] + wait.take(place, axis=1)).max(axis=0)
            ready = np.maximum((clock * where).max(axis=0) + delays[k], come) + seconds[k]
            alone = np.maximum(clock + delays[k], come) + seconds[k]
            clock = np.where(where, np.where(together[k], ready, alone), clock)
            end.put(place, ready)
            if self._functions:
                clock = hosts.advance(order[k], where, clock)
                for call, among, last in hosts.handed_on(order[k], where, clock):
                    # For those who wait for it, it ends when its outputs are handed on.
                    end[call, among] = last[among]
        for call in self._functions:
            end[call] = hosts.end(call)
        return end[:n], clock

    def _most(self, facts: Facts, activities: Activities, order: Ints) -> Floats:
        """Bytes that each point ever holds at once, [points, plans]."""
        columns, tables = facts.columns, self.tables
        held = np.zeros(columns.first.shape)
        for home in dict.fromkeys(tables.home):
            held += facts.inside[home] * columns.resident[home]
        most = held.copy()
        change, needs = _along(activities.bytes, order), _along(activities.needs, order)
        gains, losses = np.maximum(change, 0.0), np.minimum(change, 0.0)
        for k, grows in enumerate(_along(activities.grows, order)):
            held += grows * gains[k]
            np.maximum(most, held + grows * needs[k], out=most)
            held += grows * losses[k]
        for c, home in enumerate(tables.home):
            if home != c and tables.calls[c].kind is Kind.TRAIN:
                most += np.where(facts.borrowed[c], np.inf, 0.0)
            for p in (p for p in tables.same_role[c] if p < c):
                alike = columns.code[p] == columns.code[c]
                most += np.where(
                    alike & (columns.sequence_parallel[p] != columns.sequence_parallel[c]), np.inf, 0.0
                )
        return most

    def _receiving(self, columns: Columns) -> tuple[Floats, Floats]:
        """What receiving inputs adds: [activities, plans] seconds after the devices are free, and
        [calls, activities, plans] seconds after a call has ended."""
        shape = (len(self._kinds), columns.first.shape[1])
        delay, wait = np.zeros(shape), np.repeat(self._wait[:, :, None], shape[1], axis=2)
        for c, feeds in enumerate(self.tables.feeds):
            parts = self.tables.exchanged(columns, c)
            for p, seconds in zip(reversed(feeds), reversed(parts), strict=True):
                delay[c] += seconds
                wait[p, c] = delay[c]
        return delay, wait


def _ordered(key: Ints, rows: Ints) -> Ints:
    """Numbers of rows, for each plan by their keys, [rows, plans]."""
    return rows[np.argsort(key[rows].T, axis=1).T]


def _along(values: NDArray[Scalar], order: Ints) -> NDArray[Scalar]:
    """Rows of values, [rows, plans] or [rows, points, plans], in an order of each plan's own."""
    return np.take_along_axis(values, order if values.ndim == order.ndim else order[:, None, :], 0)
