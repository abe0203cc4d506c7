"""Vectorised evaluation of plans: step time and peak memory of thousands at once."""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from realrl.dataflow.call import Kind
from realrl.planner.arrays.arrays import Floats, Ints
from realrl.planner.evaluate.activities import (
    Activities,
    Facts,
    WavePhase,
    list_activities,
    stores,
    takes_time,
)
from realrl.planner.evaluate.hosts import Hosts
from realrl.planner.evaluate.late_rows import LateRows
from realrl.planner.evaluate.offloaded_state import OffloadedState
from realrl.planner.evaluate.tables import Columns, Tables
from realrl.planner.space.problem import Assignment, Problem

Scalar = TypeVar("Scalar", bound=np.generic)

_NEVER = -np.inf
_MOVING = (WavePhase.LOAD, WavePhase.REALLOCATE, WavePhase.REFRESH, WavePhase.REFRESH_EMA)
_AT_ONCE = 512
"""Number of plans evaluated together, so that their columns stay in the caches."""


@dataclass(frozen=True, kw_only=True)
class PlanEvaluation:
    """Step time, peak memory and schedule of a plan."""

    seconds: float
    """Seconds of one step, from its start to the end of its last call."""
    peak_bytes: float
    """Peak bytes on the peak device, relative to whose memory most is used."""
    fill: float
    """Used fraction of that device's memory; more than 1 does not fit."""
    peak_rank: int
    """Rank of that device, or of the first of several."""
    by_host: bool
    """Whether these are of host memory, on that device's node, of which most is used."""
    start: dict[str, float]
    """Start of each call, in seconds after the start of the step."""
    end: dict[str, float]
    """End of each call, in seconds after the start of the step."""
    reallocation_seconds: dict[str, float]
    """Seconds of loading, reallocating and refreshing parameters, by call, if there are any."""

    @property
    def fits(self) -> bool:
        """Whether every device has enough memory."""
        return self.fill <= 1


@dataclass(frozen=True, kw_only=True)
class _Steps:
    """Schedules of plans; arrays are [calls, plans], or [points, plans]."""

    activities: Activities
    start: Floats
    end: Floats
    clock: Floats
    """End of the step at points."""
    fill: Floats
    """Largest fraction of its memory that a point uses."""
    host_points: Ints
    """Ranks on whose nodes host memory is counted (`OffloadedState`), [points, plans]."""
    host_fill: Floats
    """Fraction of host memory that offloaded state takes there, [points, plans]."""


class Timeline:
    """Vectorised evaluator of plans by a list schedule of the step.

    It follows the order of programs (`program.lower`) and agrees with their simulation. Calls are grouped into
    waves; those of one wave share no device and do not depend on each other. A device executes its activities
    in the order of waves, and in a wave first loads and reallocates parameters, then runs calls, receives row
    lengths, and updates moving averages. A call starts once it has received its inputs, one producer after the
    other, for which its devices must be free. Functions run on hosts beside that, on each rank by itself, until
    calls that need their outputs are next. Steps do not overlap.

    A device always holds the resident bytes of its roles, the copies of parameters that are kept and its
    communicators, and temporarily the other replicas in use, the working memory of a running call, and parameters
    loaded from host memory; what is offloaded takes memory of its node's host. Infeasible plans use infinite
    memory: those that train a role outside its primary placement, those whose calls share parameters but differ in
    sequence parallelism, and those that offload weights which several roles share.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.tables = tables = Tables(problem)
        self._offloaded = OffloadedState(problem, tables.home)
        self._kinds = list_activities(tables)
        self._owner = np.array([kind.call for kind in self._kinds])
        self._timed = np.array([a for a, kind in enumerate(self._kinds) if takes_time(tables, kind)])
        self._storing = np.array([a for a, kind in enumerate(self._kinds) if stores(kind)])
        self._together = np.array([kind.rendezvous for kind in self._kinds])
        places = sorted(range(len(self._kinds)), key=lambda a: self._kinds[a].place)
        self._place = np.argsort(places)[:, None]
        # Row lengths are shared when the call has ended.
        sharing = (WavePhase.SHARE_LENGTHS, WavePhase.SHARE_COLLECTED_LENGTHS)
        sharing_lengths = [kind.phase in sharing for kind in self._kinds]
        self._sharing = {a: kind.call for a, kind in enumerate(self._kinds) if kind.phase in sharing}
        same = self._owner == np.arange(len(tables.calls))[:, None]
        self._wait = np.where(same & sharing_lengths, 0.0, _NEVER)
        self._functions = {k.call: a for a, k in enumerate(self._kinds) if k.phase is WavePhase.COLLECT}

    def __call__(self, assignment: Ints) -> tuple[Floats, Floats]:
        """Evaluate plans: step seconds, and the largest used fraction of device memory; more than 1 does not fit.

        `assignment`: [calls, plans], the candidate index of each call, in the order of the graph.
        """
        parts = (assignment[:, i : i + _AT_ONCE] for i in range(0, assignment.shape[1], _AT_ONCE))
        steps = [self._schedule(self.tables.gather(part)) for part in parts]
        seconds = [step.clock.max(axis=0) for step in steps]
        fills = [np.maximum(step.fill.max(axis=0), step.host_fill.max(axis=0)) for step in steps]
        return np.concatenate(seconds), np.concatenate(fills)

    def evaluate(self, assignment: Assignment) -> PlanEvaluation:
        """Evaluate one plan in detail."""
        names = [call.name for call in self.tables.calls]
        columns = self.tables.gather(np.array([[assignment[name]] for name in names]))
        steps = self._schedule(columns)
        by_host = bool(steps.host_fill.max() > steps.fill.max())
        fill = (steps.host_fill if by_host else steps.fill)[:, 0]
        peak = int(fill.argmax())
        rank = int((steps.host_points if by_host else columns.first)[peak, 0])
        limit = self._offloaded.limit(rank) if by_host else columns.limit[peak, 0]
        reallocation: dict[str, float] = {}
        for a, kind in enumerate(self._kinds):
            if kind.phase in _MOVING and steps.activities.where[a].any():
                name = names[kind.call]
                reallocation[name] = reallocation.get(name, 0.0) + float(steps.activities.seconds[a, 0])
        return PlanEvaluation(
            seconds=float(steps.clock.max()),
            peak_bytes=float(fill[peak] * limit),
            fill=float(fill[peak]),
            peak_rank=rank,
            by_host=by_host,
            start={name: float(steps.start[c, 0]) for c, name in enumerate(names)},
            end={name: float(steps.end[c, 0]) for c, name in enumerate(names)},
            reallocation_seconds={name: seconds for name, seconds in reallocation.items() if seconds > 0},
        )

    def _schedule(self, columns: Columns) -> "_Steps":
        facts = Facts(self.tables, columns)
        activities = facts.activities(self._kinds)
        key = facts.waves_of(self._kinds) * len(self._kinds) + self._place
        end, clock = self._times(facts, activities, _ordered(key, self._timed))
        fill = self._peak_bytes(facts, activities, _ordered(key, self._storing)) / columns.limit
        host_points = self._offloaded.points(columns)
        return _Steps(
            activities=activities,
            start=end - facts.seconds,
            end=end,
            clock=clock,
            fill=fill,
            host_points=host_points,
            host_fill=self._offloaded.fill(columns, host_points),
        )

    def _times(self, facts: Facts, activities: Activities, order: Ints) -> tuple[Floats, Floats]:
        """End of calls, [calls, plans], and end of the step at points, [points, plans].

        `order`: indices of activities in order of execution, [numbers, plans].
        """
        columns = facts.columns
        delay, wait = self._receiving(columns)
        n = len(self.tables.calls)
        plans = order.shape[1]
        places = order * plans + np.arange(plans)
        wait = wait.reshape(n, -1)
        everywhere = _along(activities.where, order)
        delays = delay.take(places)
        seconds = activities.seconds.take(places)
        # Reallocations that send nothing do not synchronise ranks.
        together = self._together[order] & ((order < n) | (seconds > 0))
        points = facts.inside.shape[1]
        hosts = Hosts(self._functions, facts.seconds, points)
        late = LateRows(facts, self._sharing)
        clock = np.zeros((points, plans))
        end = np.zeros((len(self._kinds), plans))
        for k, place in enumerate(places):
            where = everywhere[k]
            waits = wait.take(place, axis=1)
            arrival = late.delay(order[k], (end[:n] + waits).max(axis=0), waits)
            ready = np.maximum((clock * where).max(axis=0) + delays[k], arrival) + seconds[k]
            alone = np.maximum(clock + delays[k], arrival) + seconds[k]
            clock = np.where(where, np.where(together[k], ready, alone), clock)
            end.put(place, ready)
            late.advance(order[k], clock)
            if self._functions:
                clock = hosts.advance(order[k], where, clock)
                for call, among, last in hosts.handed_on(order[k], where, clock):
                    # For those who wait for it, it ends when its outputs are handed on.
                    end[call, among] = last[among]
        for call in self._functions:
            end[call] = hosts.end(call)
        return end[:n], clock

    def _peak_bytes(self, facts: Facts, activities: Activities, order: Ints) -> Floats:
        """Peak bytes of the first device of each call's mesh, [calls, plans]."""
        columns = facts.columns
        tables = self.tables
        held = np.zeros(facts.inside.shape[1:])
        for home in dict.fromkeys(tables.home):
            held += facts.inside[home] * columns.resident[home]
        held += self._communicator_bytes(facts) - self._shared_bytes(facts)
        for c, home in enumerate(tables.home):
            if c != home:
                held += facts.inside[c] * np.where(facts.uses_first(c), columns.weights[c], 0.0)
        peak = held.copy()
        change = _along(activities.bytes, order)
        needs = _along(activities.needs, order)
        gains = np.maximum(change, 0.0)
        losses = np.minimum(change, 0.0)
        for k, grows in enumerate(_along(activities.grows, order)):
            held += grows * gains[k]
            np.maximum(peak, held + grows * needs[k], out=peak)
            held += grows * losses[k]
        for c, home in enumerate(tables.home):
            if home != c and tables.calls[c].kind is Kind.TRAIN:
                peak += np.where(facts.away[c], np.inf, 0.0)
            for p in (p for p in tables.same_role[c] if p < c):
                alike = columns.code[p] == columns.code[c]
                peak += np.where(
                    alike & (columns.sequence_parallel[p] != columns.sequence_parallel[c]), np.inf, 0.0
                )
        for homes in tables.sharing_homes:
            for i, second in enumerate(homes):
                for first in homes[:i]:
                    alike = columns.code[first] == columns.code[second]
                    offloaded = columns.offloaded[first] | columns.offloaded[second]
                    peak += np.where(alike & offloaded, np.inf, 0.0)
        return peak[: len(tables.calls)]

    def _shared_bytes(self, facts: Facts) -> Floats:
        """Bytes that points have once although several roles count them, [points, plans]: frozen weights."""
        columns, found = facts.columns, np.zeros(facts.inside.shape[1:])
        for homes in self.tables.sharing_homes:
            for i, second in enumerate(homes):
                saved = np.zeros(columns.first.shape[1])
                for first in homes[:i]:
                    alike = columns.code[first] == columns.code[second]
                    common = np.minimum(columns.base[first], columns.base[second])
                    saved = np.maximum(saved, np.where(alike, common, 0.0))
                found += facts.inside[second] * saved
        return found

    def _communicator_bytes(self, facts: Facts) -> Floats:
        """Bytes of the NCCL communicators of points, [points, plans]: those of each layout once."""
        columns, found = facts.columns, np.zeros(facts.inside.shape[1:])
        models = [c for c, call in enumerate(self.tables.calls) if not call.is_function]
        for i, c in enumerate(models):
            known = (columns.code[models[:i]] == columns.code[c]).any(axis=0)
            found += facts.inside[c] * np.where(known, 0.0, columns.communicators[c])
        return found

    def _receiving(self, columns: Columns) -> tuple[Floats, Floats]:
        """Delays from receiving inputs.

        [activities, plans] seconds after the devices are free, and [calls, activities, plans] seconds after the end
        of a call.
        """
        shape = (len(self._kinds), columns.first.shape[1])
        delay = np.zeros(shape)
        wait = np.repeat(self._wait[:, :, None], shape[1], axis=2)
        for c, feeds in enumerate(self.tables.feeds):
            parts = self.tables.exchanged(columns, c)
            for p, seconds in zip(reversed(feeds), reversed(parts), strict=True):
                delay[c] += seconds
                wait[p, c] = delay[c]
        return delay, wait


def _ordered(key: Ints, rows: Ints) -> Ints:
    """Row indices sorted by key for each plan, [rows, plans]."""
    return rows[np.argsort(key[rows].T, axis=1).T]


def _along(values: NDArray[Scalar], order: Ints) -> NDArray[Scalar]:
    """Rows of values, [rows, plans] or [rows, points, plans], permuted by the order of each plan."""
    return np.take_along_axis(values, order if values.ndim == order.ndim else order[:, None, :], 0)
