"""Vectorised evaluation of plans: step seconds and peak memory of thousands at once.

`Timeline`, at the end of this file, schedules the activities of a step (`program.step`) under each plan. The
classes before it are its parts. `Facts` computes the seconds and bytes of activities, `Hosts` runs functions,
`LateRows` delays rows that wait for lengths, and `OffloadedState` counts host memory.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from realrl.dataflow.call import Kind
from realrl.planner.moves.transfers import find_nodes
from realrl.planner.search.tables import Columns, Tables
from realrl.planner.space.problem import Assignment, Problem
from realrl.program.arrays import Bools, Floats, Ints
from realrl.program.step import Activity, Decisions, Phase, StepFacts, find_places

Scalar = TypeVar("Scalar", bound=np.generic)
Shared = tuple[int, ...]
"""Indices of the activities that share row lengths."""

_NEVER = -np.inf
_AT_ONCE = 512
"""Number of plans evaluated together, so that their columns stay in the caches."""
_SHARING = (Phase.HAND_ON, Phase.HAND_ON_COLLECTED)
_BRINGING = (Phase.LOAD, Phase.REALLOCATE, Phase.REFRESH, Phase.REFRESH_FOLLOWER)
"""Phases that bring parameters to the devices of a call."""


@dataclass(frozen=True, kw_only=True)
class PlanEvaluation:
    """Step time, peak memory and schedule of a plan."""

    seconds: float
    """Seconds of one step, from its start to the end of its last call."""
    peak_bytes: float
    """Peak bytes on the peak device, which is the device that uses the largest fraction of its memory."""
    fill: float
    """Used fraction of the peak device's memory. A plan with more than 1 does not fit."""
    peak_rank: int
    """Rank of the peak device. If several points (`Activities`) are equally full, the first one counts."""
    by_host: bool
    """Whether a host uses a larger fraction of its memory than any device. If so, `peak_bytes` and `fill` describe
    this host, and `peak_rank` is a rank on its node."""
    start: dict[str, float]
    """Start of each call, in seconds after the start of the step."""
    end: dict[str, float]
    """End of each call, in seconds after the start of the step."""
    reallocation_seconds: dict[str, float]
    """Seconds of loading, reallocating and refreshing parameters, by call. Calls with 0 seconds are left out."""

    @property
    def fits(self) -> bool:
        """Whether every device and every host has enough memory."""
        return self.fill <= 1


@dataclass(frozen=True, kw_only=True)
class Activities:
    """Devices, seconds and bytes of activities under each plan.

    A point is the first device of a call's mesh. For every device, there is a point that lies on all meshes of this
    device. The latest end and the peak memory therefore occur at points, and no other device needs a clock. If rows
    wait for lengths (`LateRows`), the first device after each mesh is also a point. Every device then lies on
    exactly the meshes of the last point at or before it.
    """

    where: Bools
    """Whether a point takes part in an activity, [activities, points, plans]. False if the plan does not contain
    the activity."""
    seconds: Floats
    """Seconds for which points take part in an activity, [activities, plans]."""
    grows: Bools
    """Whether an activity allocates or frees memory at a point, [activities, points, plans]."""
    bytes: Floats
    """Bytes that an activity allocates at its start, or, if negative, frees at its end, [activities, plans]."""
    needs: Floats
    """Further bytes that an activity allocates only while it runs, [activities, plans]."""


class Facts(StepFacts):
    """Facts about a step under some plans, with the seconds and bytes of its activities."""

    step: Tables

    def __init__(self, tables: Tables, columns: Columns) -> None:
        decisions = Decisions(
            first=columns.first,
            end=columns.end,
            code=columns.code,
            kept=columns.keep[tables.home],
            offloaded=columns.offload,
        )
        super().__init__(tables, decisions)
        self.tables, self.columns = tables, columns
        self.point = point = columns.first
        """Rank of each point, [points, plans]."""
        if tables.late_lengths:
            self.point = point = np.concatenate([columns.first, columns.end])
        self.inside: Bools = (columns.first[:, None] <= point) & (point < columns.end[:, None])
        """Whether a point lies on the mesh of a call, [calls, points, plans]."""
        moved = self.borrowed | ~self.away & columns.offload[tables.home]
        self.seconds = columns.seconds + np.where(moved, columns.capture_seconds, 0.0)
        """Seconds of each call, [calls, plans]. A call captures its CUDA graphs again if its parameters have
        moved."""

    def evaluate(self, activities: Iterable[Activity]) -> Activities:
        """Compute the devices, seconds and bytes of activities."""
        where, seconds, grows, change, needs = zip(*map(self._evaluate, activities), strict=True)
        return Activities(
            where=np.array(where),
            seconds=np.array(seconds),
            grows=np.array(grows),
            bytes=np.array(change),
            needs=np.array(needs),
        )

    def _evaluate(self, activity: Activity) -> tuple[Bools, Floats, Bools, Floats, Floats]:
        nothing = np.zeros(self.columns.first.shape[1])
        present, weights = self.present(activity), self.columns.weights_bytes
        where = reduce(np.logical_or, (self.inside[row] for row in self.tables.rows(activity))) & present
        if activity.phase is Phase.RUN:
            return where, self._seconds(activity), where, nothing, self.columns.working_bytes[activity.call]
        row, sign = (activity.allocates, 1) if activity.frees is None else (activity.frees, -1)
        grows = np.zeros_like(where) if row is None else self.inside[row] & present
        change = nothing if row is None else sign * weights[row]
        return where, self._seconds(activity), grows, change, nothing

    def _seconds(self, activity: Activity) -> Floats:
        columns = self.columns
        match activity.phase:
            case Phase.RUN:
                return self.seconds[activity.call]
            case Phase.HAND_ON | Phase.HAND_ON_COLLECTED:
                return self._sharing_seconds(activity.call)
            case Phase.DELIVER:
                return self._delivery_seconds(activity.call)
            case Phase.START | Phase.COLLECT | Phase.RELEASE:
                return np.zeros(columns.first.shape[1])
        if activity.target != activity.home:
            return self.tables.transfers(activity)(
                columns.layout[activity.home], columns.layout[activity.target]
            )
        return (columns.load_seconds if activity.frees is None else columns.unload_seconds)[activity.home]

    def _delivery_seconds(self, c: int) -> Floats:
        """Seconds to hand on rows at the end of a step, for a later step, [plans]."""
        tables, layout = self.tables, self.columns.layout
        seconds = np.zeros(layout.shape[1])
        if tables.later_receivers[c]:
            seconds = self._sharing_seconds(c, [c, *tables.later_receivers[c]])
        for producer, consumer in tables.deliveries.get(c, ()):
            source, target = (tables.layouts(call)[layout[call]] for call in (producer, consumer))
            names = tables.calls[producer].name, tables.calls[consumer].name
            seconds = seconds + tables.problem.exchange.seconds(*names, source, target)
        return seconds

    def _sharing_seconds(self, c: int, told: list[int] | None = None) -> Floats:
        """Seconds to send the lengths of a call's rows from its output ranks to all ranks that need them,
        [plans]. `told`: the calls of these ranks; by default, the calls that need the lengths at once."""
        graph = self.tables.graph
        told = self.tables.length_receivers[c] if told is None else told
        keys = sum(graph.keys[key].length == "own" for key in self.tables.calls[c].outputs)
        # Count the ranks in the union of the receivers' meshes, from left to right.
        order = np.argsort(self.columns.first[told], axis=0)
        first = np.take_along_axis(self.columns.first[told], order, 0)
        reached = np.maximum.accumulate(np.take_along_axis(self.columns.end[told], order, 0), axis=0)
        ranks = reached[0] - first[0]
        for i in range(1, len(told)):
            ranks = ranks + np.maximum(0, reached[i] - np.maximum(first[i], reached[i - 1]))
        placed = self.tables.layouts(c)[self.columns.layout[c]]
        return keys * self.tables.problem.exchange.lengths_seconds(placed.shares, ranks)


class Hosts:
    """Hosts of the points. Each host runs the functions of its rank one after the other, while the device
    continues.

    Times are [points, plans].
    """

    def __init__(self, functions: Mapping[int, int], seconds: Floats, points: int) -> None:
        """Create idle hosts. `functions`: index of a function's call -> index of the activity that collects its
        outputs. The activity that starts a function has the index of its call. `seconds`: seconds of all calls,
        [calls, plans].
        """
        self._functions, self._seconds = functions, seconds
        self._free = np.zeros((points, seconds.shape[1]))
        self._ends = {call: np.zeros_like(self._free) for call in functions}

    def advance(self, activity: Ints, where: Bools, clock: Floats) -> Floats:
        """Start or collect functions, and return the clocks of points afterwards.

        `activity`: index of the activity that each plan has just executed, [plans]. `where`: the points that took
        part, [points, plans]. `clock`: clocks of points after the activity, as if functions took no time, [points,
        plans].
        """
        for call, collecting in self._functions.items():
            started = where & (activity == call)
            if started.any():
                end = np.maximum(self._free, clock) + self._seconds[call]
                self._free = np.where(started, end, self._free)
                self._ends[call] = np.where(started, end, self._ends[call])
            collected = where & (activity == collecting)
            if collected.any():
                clock = np.where(collected, np.maximum(clock, self._ends[call]), clock)
        return clock

    def handed_on(self, activity: Ints, where: Bools, clock: Floats) -> Iterator[tuple[int, Bools, Floats]]:
        """Yield each function that some plans have just collected. Also yield which plans these are, and the time
        at which their last point has collected its outputs, [plans] each.

        The arguments are those of `advance`, except that `clock` is the result of `advance`.
        """
        for call, collecting in self._functions.items():
            plans = activity == collecting
            if plans.any():
                yield call, plans, (clock * where).max(axis=0)

    def end(self, call: int) -> Floats:
        """Return the time at which a function has ended on all ranks, [plans]."""
        return self._ends[call].max(axis=0)


class LateRows:
    """Send times of rows that wait for lengths. Rows wait if these lengths decide how the items of their reader are
    divided.

    A device has the clock of the last point at or before it (`Activities`). Times are [plans].
    """

    def __init__(self, facts: Facts, sharing: Mapping[int, int]) -> None:
        """Start with no lengths shared. `sharing`: index of an activity that shares the lengths of a call's rows ->
        index of the call."""
        late = facts.tables.late_lengths
        activities = {call: activity for activity, call in sharing.items()}
        plans = facts.columns.first.shape[1]
        self._sent: dict[tuple[int, Shared], Floats] = {}
        """Producer and the activities after which it sends its rows -> send time."""
        self._readers: defaultdict[int, list[tuple[int, Shared]]] = defaultdict(list)
        for (reader, producer), calls in late.items():
            rows = producer, tuple(activities[call] for call in calls)
            self._sent[rows] = np.zeros(plans)
            self._readers[reader].append(rows)
        self._senders = {producer: _find_senders(facts, producer) for producer, _ in self._sent}
        self._sharing = {activity for _, shared in self._sent for activity in shared}

    def advance(self, activity: Ints, clock: Floats) -> None:
        """Record when each plan shares lengths. `activity`: index of the activity that each plan has just executed,
        [plans]. `clock`: clocks of points, [points, plans]."""
        for number in self._sharing:
            known = activity == number
            if not known.any():
                continue
            for (producer, shared), sent in self._sent.items():
                if number in shared:
                    senders = self._senders[producer]
                    clocks = np.where(senders, clock, 0.0)
                    np.copyto(sent, clocks.max(axis=0), where=known)

    def delay(self, activity: Ints, arrival: Floats, waits: Floats) -> Floats:
        """Return the time at which all inputs of an activity's call have arrived, [plans].

        `arrival`: time at which all inputs except the late rows have arrived. `waits`: seconds from the moment at
        which a producer's rows can be sent until they have arrived, [calls, plans].
        """
        for reader, inputs in self._readers.items():
            reads = activity == reader
            if reads.any():
                for producer, shared in inputs:
                    late = np.maximum(arrival, self._sent[producer, shared] + waits[producer])
                    arrival = np.where(reads, late, arrival)
        return arrival


def _find_senders(facts: Facts, call: int) -> Bools:
    """Find which points have the clock of a rank that sends the rows of a call, [points, plans].

    The senders are one rank for each share of a batch, on the last pipeline stage.
    """
    placed, point = facts.tables.layouts(call)[facts.columns.layout[call]], facts.point
    end = placed.first + placed.size
    last_stage = end - placed.size // placed.stages
    # A point stands for all devices from itself up to the next point, `behind`. `first` is the first sender among
    # these devices.
    behind = np.where(point[None] > point[:, None], point[None], end).min(axis=1)
    # Ranks that work on one share follow one another.
    apart = placed.cuts * placed.copies // placed.shares
    first = last_stage + -(-np.maximum(point - last_stage, 0) // apart) * apart
    return first < np.minimum(behind, last_stage + placed.shares * apart)


class OffloadedState:
    """Host memory of nodes that the offloaded state of roles uses.

    Only some nodes can have the largest used fraction. From one node to the next, the fraction grows only at the
    first node of a home, at its second node (the first that it may fill), and at nodes that differ from the node
    before. A point is a rank of a home on such a node.
    """

    def __init__(self, problem: Problem, homes: Iterable[int]) -> None:
        """Count host memory of `homes`, the calls in whose placements roles keep their parameters."""
        cluster = problem.cluster
        self._homes = sorted(set(homes))
        self._nodes = find_nodes(cluster)
        self._bounds = np.array(cluster.bounds)
        self._limits = np.maximum(1.0, problem.host_memory_bytes or np.full(cluster.nodes, np.inf))
        sizes = np.diff(self._bounds)
        differ = (self._limits[1:] != self._limits[:-1]) | (sizes[1:] != sizes[:-1])
        self._changes = (np.flatnonzero(differ) + 1).tolist()

    def points(self, columns: Columns) -> Ints:
        """Return the ranks of the points, [points, plans]."""
        found = []
        for home in self._homes:
            begin, end = self._nodes[columns.first[home]], self._nodes[columns.end[home] - 1]
            nodes = [begin, np.minimum(begin + 1, end), *(np.clip(n, begin, end) for n in self._changes)]
            found += [np.maximum(self._bounds[node], columns.first[home]) for node in nodes]
        return np.array(found)

    def fill(self, columns: Columns, points: Ints) -> Floats:
        """Compute the fraction of host memory in use on the node of each point, [points, plans]."""
        node = self._nodes[points]
        begin, end = self._bounds[node], self._bounds[node + 1]
        used = np.zeros(points.shape)
        for home in self._homes:
            ranks = np.minimum(end, columns.end[home]) - np.maximum(begin, columns.first[home])
            used += np.maximum(ranks, 0) * columns.host_bytes[home]
        return used / self._limits[node]

    def limit(self, rank: int) -> float:
        """Return the bytes of host memory that offloaded state may take on the node of a rank."""
        return float(self._limits[self._nodes[rank]])


@dataclass(frozen=True, kw_only=True)
class _Steps:
    """Schedules of plans. `start` and `end` are those of calls, [calls, plans], in seconds."""

    activities: Activities
    start: Floats
    end: Floats
    clock: Floats
    """End of the step at points, [points, plans], in seconds."""
    fill: Floats
    """Largest fraction of its memory that each point uses, [points, plans]."""
    host_points: Ints
    """Ranks on whose nodes host memory is counted (`OffloadedState`), [points, plans]."""
    host_fill: Floats
    """Fraction of host memory that offloaded state takes on the nodes of `host_points`, [points, plans]."""


class Timeline:
    """Vectorised evaluator of plans by a list schedule of the step.

    The schedule follows the order of programs (`program.lower`) and agrees with their simulation. Calls are grouped
    into waves. The calls of a wave share no device and do not depend on each other. A device executes its
    activities wave by wave. In a wave, it loads and reallocates parameters, runs its call, shares row lengths, and
    updates moving averages. Once its devices are free, a call receives its inputs from one producer after the
    other, and then starts. Functions run on the host of each rank while its device continues. A rank waits for a
    function only before a call that needs its outputs. Steps do not overlap.

    A device always holds the resident bytes of its roles, the kept copies of parameters and its communicators. It
    temporarily holds other replicas in use, the working memory of a running call, and parameters loaded from host
    memory. Offloaded state takes host memory of the node.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.tables = tables = Tables(problem)
        self._offloaded = OffloadedState(problem, tables.home)
        self._activities = activities = tables.possible
        self._places = find_places(activities)
        self._timed = np.array([a for a, of in enumerate(activities) if self._takes_time(of)])
        stores = (
            of.phase is Phase.RUN or of.allocates is not None or of.frees is not None for of in activities
        )
        self._storing = np.flatnonzero([*stores])
        self._together = np.array([of.together for of in activities])
        # Row lengths are shared once the call has ended. Other activities do not wait for calls in this way.
        self._sharing = {a: of.call for a, of in enumerate(activities) if of.phase in _SHARING}
        owner = np.array([of.call for of in activities])
        same = owner == np.arange(len(tables.calls))[:, None]
        hands_on = [of.phase in (*_SHARING, Phase.DELIVER) for of in activities]
        self._wait = np.where(same & hands_on, 0.0, _NEVER)
        self._functions = {of.call: a for a, of in enumerate(activities) if of.phase is Phase.COLLECT}

    def _takes_time(self, activity: Activity) -> bool:
        if activity.phase in (Phase.OFFLOAD_SOURCE, Phase.OFFLOAD, Phase.OFFLOAD_CHANGED):
            return bool(self.tables.candidates(activity.home).unload_seconds.any())
        return activity.phase is not Phase.RELEASE

    def __call__(self, assignment: Ints) -> tuple[Floats, Floats]:
        """Return the step seconds of plans, and the largest used fraction of any device's or host's memory, both
        [plans].

        A plan with a fraction above 1 does not fit. `assignment`: the candidate index of each call, [calls, plans],
        with calls in the order of the graph.
        """
        parts = (assignment[:, i : i + _AT_ONCE] for i in range(0, assignment.shape[1], _AT_ONCE))
        steps = [self._schedule(self.tables.gather(part)) for part in parts]
        seconds = [step.clock.max(axis=0) for step in steps]
        fills = [np.maximum(step.fill.max(axis=0), step.host_fill.max(axis=0)) for step in steps]
        return np.concatenate(seconds), np.concatenate(fills)

    def evaluate(self, assignment: Assignment) -> PlanEvaluation:
        names = [call.name for call in self.tables.calls]
        columns = self.tables.gather(np.array([[assignment[name]] for name in names]))
        steps = self._schedule(columns)
        by_host = bool(steps.host_fill.max() > steps.fill.max())
        fill = (steps.host_fill if by_host else steps.fill)[:, 0]
        peak = int(fill.argmax())
        rank = int((steps.host_points if by_host else columns.first)[peak, 0])
        limit = self._offloaded.limit(rank) if by_host else columns.limit[peak, 0]
        reallocation: dict[str, float] = {}
        for a, activity in enumerate(self._activities):
            if activity.phase in _BRINGING and steps.activities.where[a].any():
                name = names[activity.call]
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
        activities = facts.evaluate(self._activities)
        key = facts.sort_keys(self._activities, self._places)
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
        """Return the end of calls, [calls, plans], and the end of the step at points, [points, plans], in seconds.

        `order`: indices of activities in order of execution, [activities that take time, plans].
        """
        columns = facts.columns
        delay, wait = self._receiving(columns)
        n = len(self.tables.calls)
        plans = order.shape[1]
        places = order * plans + np.arange(plans)  # flat indices into [activities, plans]
        wait = wait.reshape(n, -1)
        everywhere = _along(activities.where, order)
        delays = delay.take(places)
        seconds = activities.seconds.take(places)
        # Reallocations that send nothing do not synchronise ranks. The first `n` activities are the runs of calls.
        together = self._together[order] & ((order < n) | (seconds > 0))
        points = facts.inside.shape[1]
        hosts = Hosts(self._functions, facts.seconds, points)
        late = LateRows(facts, self._sharing)
        clock = np.zeros((points, plans))
        end = np.zeros((len(self._activities), plans))
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
                    # Other calls receive the outputs only after this moment, so for them the function ends at this
                    # moment.
                    end[call, among] = last[among]
        for call in self._functions:
            end[call] = hosts.end(call)
        return end[:n], clock

    def _peak_bytes(self, facts: Facts, activities: Activities, order: Ints) -> Floats:
        """Return the peak bytes of the first device of each call's mesh, [calls, plans]. They are infinite if a
        plan is infeasible."""
        columns = facts.columns
        tables = self.tables
        held = np.zeros(facts.inside.shape[1:])
        for home in dict.fromkeys(tables.home):
            held += facts.inside[home] * columns.resident_bytes[home]
        held += self._communicator_bytes(facts) - self._shared_bytes(facts)
        for c, home in enumerate(tables.home):
            if c != home:
                held += facts.inside[c] * np.where(facts.uses_first(c), columns.weights_bytes[c], 0.0)
        peak = held.copy()
        change = _along(activities.bytes, order)
        needs = _along(activities.needs, order)
        gains = np.maximum(change, 0.0)
        losses = np.minimum(change, 0.0)
        for k, grows in enumerate(_along(activities.grows, order)):
            held += grows * gains[k]
            np.maximum(peak, held + grows * needs[k], out=peak)
            held += grows * losses[k]
        return np.where(self._infeasible(facts), np.inf, peak[: len(tables.calls)])

    def _infeasible(self, facts: Facts) -> Bools:
        """Find the plans that no program can execute, [plans].

        Such plans train a role outside its home, or let calls that share parameters differ in sequence parallelism,
        or offload weights that several roles share, or place another call on the devices of the call that must be
        apart.
        """
        columns, tables = facts.columns, self.tables
        found = np.zeros(columns.first.shape[1], dtype=bool)
        alone = None if tables.problem.apart is None else tables.number[tables.problem.apart]
        for c in range(len(tables.calls)) if alone is not None else ():
            if c != alone:
                found |= (columns.first[c] < columns.end[alone]) & (columns.first[alone] < columns.end[c])
        for c, home in enumerate(tables.home):
            if home != c and tables.calls[c].kind is Kind.TRAIN:
                found |= facts.away[c]
            for p in (p for p in tables.same_role[c] if p < c):
                alike = columns.code[p] == columns.code[c]
                found |= alike & (columns.sequence_parallel[p] != columns.sequence_parallel[c])
        for homes in tables.sharing_homes:
            for i, second in enumerate(homes):
                for first in homes[:i]:
                    alike = columns.code[first] == columns.code[second]
                    found |= alike & (columns.offload[first] | columns.offload[second])
        return found

    def _shared_bytes(self, facts: Facts) -> Floats:
        """Bytes of frozen weights that a point holds once although several roles count them, [points, plans]."""
        columns, found = facts.columns, np.zeros(facts.inside.shape[1:])
        for homes in self.tables.sharing_homes:
            for i, second in enumerate(homes):
                saved = np.zeros(columns.first.shape[1])
                for first in homes[:i]:
                    alike = columns.code[first] == columns.code[second]
                    common = np.minimum(columns.base_bytes[first], columns.base_bytes[second])
                    saved = np.maximum(saved, np.where(alike, common, 0.0))
                found += facts.inside[second] * saved
        return found

    def _communicator_bytes(self, facts: Facts) -> Floats:
        """Bytes of the NCCL communicators of points, [points, plans]. Calls of one layout share communicators."""
        columns, found = facts.columns, np.zeros(facts.inside.shape[1:])
        models = [c for c, call in enumerate(self.tables.calls) if not call.is_function]
        for i, c in enumerate(models):
            known = (columns.code[models[:i]] == columns.code[c]).any(axis=0)
            found += facts.inside[c] * np.where(known, 0.0, columns.communicator_bytes[c])
        return found

    def _receiving(self, columns: Columns) -> tuple[Floats, Floats]:
        """Compute two delays of activities that receive inputs.

        The first counts from the moment at which the devices are free, [activities, plans]. The second counts from
        the end of a producer, [calls, activities, plans]. It includes the inputs received after those of that
        producer.
        """
        shape = (len(self._activities), columns.first.shape[1])
        delay = np.zeros(shape)
        wait = np.repeat(self._wait[:, :, None], shape[1], axis=2)
        for c, feeds in enumerate(self.tables.feeds):
            parts = self.tables.exchanged(columns, c)
            for p, seconds in zip(reversed(feeds), reversed(parts), strict=True):
                delay[c] += seconds
                wait[p, c] = delay[c]
        return delay, wait


def _ordered(key: Ints, rows: Ints) -> Ints:
    """Sort the indices `rows` by their keys for each plan, [rows, plans]."""
    return rows[np.argsort(key[rows].T, axis=1).T]


def _along(values: NDArray[Scalar], order: Ints) -> NDArray[Scalar]:
    """Permute the rows of values, [rows, plans] or [rows, points, plans], by the order of each plan."""
    return np.take_along_axis(values, order if values.ndim == order.ndim else order[:, None, :], 0)
