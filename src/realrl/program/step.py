"""The activities of a step under a plan: their order, their devices, and the parameters that they hold.

This is the only description of a step. `program.lower` makes programs from it for one plan. The planner's search
evaluates it for thousands of plans at once. So every fact that depends on a plan is an array with one entry per
plan. A new kind of activity needs a phase here, instructions in `program.lower`, and seconds in the planner.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain

import numpy as np

from realrl.dataflow.call import Call, MovingAverage
from realrl.dataflow.graph import DataflowGraph
from realrl.program.arrays import Bools, Ints
from realrl.program.order import (
    changes,
    dependents,
    dividing_keys,
    find_deliveries,
    length_calls,
    producers,
)


class Phase(IntEnum):
    """Phases of a wave (calls that share no device and do not wait for each other). Ranks execute them in this
    order. A follower is a role whose parameters are a moving average of a trained role's parameters."""

    START = 0
    """A function starts on the host. It comes first, so that it runs at the same time as the other phases."""
    LOAD = 1
    REALLOCATE = 2
    OFFLOAD_SOURCE = 3
    RUN = 4
    HAND_ON = 5
    """The lengths of a call's outputs are shared, and the outputs are sent."""
    COLLECT = 6
    """Ranks wait for a function to end, in the wave before the first call that needs its outputs."""
    HAND_ON_COLLECTED = 7
    LOAD_FOLLOWER = 8
    UPDATE_FOLLOWER = 9
    """A follower is updated after its source was trained."""
    REFRESH = 10
    """A kept copy gets the parameters that a call changed."""
    OFFLOAD_CHANGED = 11
    REFRESH_FOLLOWER = 12
    OFFLOAD_FOLLOWER = 13
    RELEASE = 14
    OFFLOAD = 15
    DELIVER = 16
    """At the end of a step, outputs of a call that runs ahead are sent to the calls of later steps."""


_BLOCKS = {Phase.REALLOCATE: Phase.LOAD, Phase.HAND_ON_COLLECTED: Phase.COLLECT} | dict.fromkeys(
    range(Phase.LOAD_FOLLOWER, Phase.OFFLOAD), Phase.LOAD_FOLLOWER
)
"""Phase -> first phase of its block. Ranks execute a whole block for one call before the next call."""
_STAGES = {
    Phase.UPDATE_FOLLOWER: Phase.LOAD_FOLLOWER,
    Phase.OFFLOAD_CHANGED: Phase.REFRESH,
    Phase.OFFLOAD_FOLLOWER: Phase.REFRESH_FOLLOWER,
}
"""Phase -> first phase of its stage. Ranks execute a whole stage for one role before the next role."""
_ALLOCATING = (Phase.LOAD, Phase.REALLOCATE, Phase.LOAD_FOLLOWER)
_FREEING = (
    Phase.OFFLOAD_SOURCE,
    Phase.OFFLOAD,
    Phase.OFFLOAD_CHANGED,
    Phase.OFFLOAD_FOLLOWER,
    Phase.RELEASE,
)
OF_OFFLOADED = (
    Phase.LOAD,
    Phase.OFFLOAD_SOURCE,
    Phase.OFFLOAD,
    Phase.OFFLOAD_CHANGED,
    Phase.LOAD_FOLLOWER,
    Phase.OFFLOAD_FOLLOWER,
)
"""Phases that exist only for roles whose parameters are in host memory between their uses."""
_TOGETHER = (
    Phase.REALLOCATE,
    Phase.RUN,
    Phase.UPDATE_FOLLOWER,
    Phase.REFRESH,
    Phase.REFRESH_FOLLOWER,
    Phase.DELIVER,
)


@dataclass(frozen=True)
class Activity:
    """An activity that a step may contain. `call`, `home` and `target` are indices of rows of `Decisions`."""

    phase: Phase
    call: int
    """The call in whose wave the activity takes place. But outputs of a function are collected in a later wave, and
    outputs for later steps are delivered after all waves."""
    home: int
    """Row of the home placement, which holds the role's parameters between steps; for a function, the row of the
    function itself."""
    target: int
    """Row of the placement that the parameters move to; `home` if they do not move."""
    average: MovingAverage | None = None
    number: int = 0
    """Index of `average` in the graph."""

    @property
    def place(self) -> tuple[int, ...]:
        """Sort key among the activities of a wave."""
        stage = _STAGES.get(self.phase, self.phase)
        return _BLOCKS.get(self.phase, self.phase), self.call, stage, self.number, self.phase, self.target

    @property
    def allocates(self) -> int | None:
        """Row of the devices on which the activity allocates parameters, until a later activity frees them."""
        return self.target if self.phase in _ALLOCATING else None

    @property
    def frees(self) -> int | None:
        """Row of the devices on which the activity frees parameters."""
        if self.phase not in _FREEING:
            return None
        return self.call if self.phase is Phase.RELEASE else self.home

    @property
    def together(self) -> bool:
        """Whether all ranks of the activity start it together. Ranks execute other activities independently."""
        return self.phase in _TOGETHER


def find_places(activities: Sequence[Activity]) -> Ints:
    """Find the position of each activity within a wave, [activities]."""
    return np.argsort(sorted(range(len(activities)), key=lambda a: activities[a].place))


class StepGraph:
    """Facts about the calls of a step that hold under every plan. A call is identified by its number in the order
    of the graph."""

    def __init__(self, graph: DataflowGraph, homes: Mapping[str, int], done: Collection[str] = ()) -> None:
        """`homes` maps each role to the row of its home placement. `done` are calls that have already run."""
        self.graph = graph
        self.calls = graph.order
        self.number = {call.name: i for i, call in enumerate(self.calls)}
        self.home = [c if call.role is None else homes[call.role] for c, call in enumerate(self.calls)]
        self.done = frozenset(self.number[name] for name in done)
        self.functions = [c for c, call in enumerate(self.calls) if call.is_function]
        self.dependents = {
            c: [self.number[other.name] for other in dependents(graph, self.calls[c])] for c in self.functions
        }
        """Calls that need the outputs of each function."""
        indices = range(len(self.calls))
        self.same_role = [[p for p in indices if p != c and self.home[p] == self.home[c]] for c in indices]
        """Other calls of a call's role."""
        self.sharers = [
            [p for p in range(c) if p not in self.done and _shares(graph, self.calls[p], self.calls[c])]
            for c in indices
        ]
        """Earlier calls that can share a call's copy of its role's parameters."""
        self.shared_by = [
            [q for q in indices if q not in self.done and c in self.sharers[q]] for c in indices
        ]
        """Later calls that can share a call's copy."""
        self.feeds = [
            tuple(self.number[p.name] for p in producers(graph, call) if p.ahead == call.ahead)
            for call in self.calls
        ]
        """Producers of each call's inputs in the same step, in the order of the inputs."""
        self.length_receivers = [self._length_receivers(call) for call in self.calls]
        """Calls whose ranks receive row lengths from a call as soon as it has run."""
        self.later_receivers = [self._length_receivers(call, later=True) for call in self.calls]
        """Calls whose ranks receive row lengths from a call at the end of the step."""
        self.deliveries = {
            self.number[name]: [(self.number[p.name], self.number[c.name]) for p, c in pairs]
            for name, pairs in find_deliveries(graph).items()
        }
        """Call -> (producer, consumer) of rows that are sent at the end of the step in which the call runs."""
        self.ordered = np.array(
            [[p < c and self._follows(c, p) for p in indices] for c in indices], dtype=bool
        ).reshape(len(self.calls), len(self.calls))
        """Whether a call must wait for an earlier call under every plan, [call, earlier call]."""
        self.not_before = np.array(
            [[p < c and self._copies_first(c, p) for p in indices] for c in indices], dtype=bool
        ).reshape(self.ordered.shape)
        """Whether a call cannot be in an earlier wave than an earlier call, [call, earlier call]."""
        self.knows_lengths = np.array(
            [[p < c and self._learns(c, p) for p in indices] for c in indices], dtype=bool
        ).reshape(self.ordered.shape)
        """Whether a call depends on an earlier call and receives row lengths from it, [call, earlier call]."""
        self.late_lengths = self._late_lengths()
        """(consumer, producer) -> calls whose row lengths may be known only after the producer has run. The
        producer's rows then wait for these lengths, because they divide the consumer's items."""
        self.activities = self._activities(homes)
        """All activities that plans may contain."""

    def _follows(self, c: int, p: int) -> bool:
        call, earlier = self.calls[c], self.calls[p]
        if call.ahead != earlier.ahead:
            return False  # they work on different batches
        changing = call.role in changes(self.graph, earlier) or earlier.role in changes(self.graph, call)
        needed = p in self.dependents and c in self.dependents[p]
        return earlier in self.graph.dependencies(call) or changing or needed

    def _copies_first(self, c: int, p: int) -> bool:
        """Check whether a call changes parameters that an earlier call needs for another batch.

        Both may run at the same time, on different devices. But the copy for the earlier call must be made before,
        and a wave makes its copies before its calls run.
        """
        call, earlier = self.calls[c], self.calls[p]
        return call.ahead != earlier.ahead and earlier.role in changes(self.graph, call)

    def _learns(self, c: int, p: int) -> bool:
        return self.calls[p] in self.graph.dependencies(self.calls[c]) and c in self.length_receivers[p]

    def _length_receivers(self, call: Call, *, later: bool = False) -> list[int]:
        own = [key for key in call.outputs if self.graph.keys[key].length == "own"]
        names = {name for key in own for name in length_calls(self.graph, key)}
        found = {self.number[name] for name in names} | ({self.number[call.name]} if own else set())
        return sorted(c for c in found if (self.calls[c].ahead < call.ahead) is later)

    def _late_lengths(self) -> dict[tuple[int, int], list[int]]:
        graph = self.graph
        known: list[set[int]] = []
        earliest: list[int] = []  # lowest possible wave of each call; the highest is its place in the order
        for call in self.calls:
            before = {self.number[other.name] for other in graph.dependencies(call)}
            known.append(before.union(*(known[p] for p in before)))
            earliest.append(max((earliest[p] + 1 for p in before), default=0))

        def may_be_late(q: int, p: int) -> bool:
            in_earlier_wave = q < earliest[p] and q not in self.functions
            return q != p and q not in known[p] and not in_earlier_wave

        late = {}
        for c, call in enumerate(self.calls):
            made = [graph.producer(key) for key in dividing_keys(graph, call)]
            dividing = [
                self.number[other.name] for other in made if other is not None and other.ahead == call.ahead
            ]
            for p in self.feeds[c]:
                if found := [q for q in dividing if may_be_late(q, p)]:
                    late[c, p] = found
        return late

    def rows(self, activity: Activity) -> Sequence[int]:
        """List the rows whose devices execute an activity. For `HAND_ON`, these are the devices that get the
        lengths."""
        match activity.phase:
            case Phase.HAND_ON | Phase.HAND_ON_COLLECTED:
                return self.length_receivers[activity.call]
            case Phase.DELIVER:
                pairs = self.deliveries.get(activity.call, [])
                rows = {activity.call, *self.later_receivers[activity.call], *chain.from_iterable(pairs)}
                return sorted(rows)
            case Phase.START | Phase.RUN | Phase.COLLECT | Phase.RELEASE:
                return (activity.call,)
        return (activity.home, activity.target)

    def _activities(self, homes: Mapping[str, int]) -> tuple[Activity, ...]:
        """List activities; the runs of calls come first, in the order of the graph."""
        calls = [c for c in range(len(self.calls)) if c not in self.done]
        found = [
            Activity(Phase.START if c in self.functions else Phase.RUN, c, self.home[c], c) for c in calls
        ]
        for c in calls:
            home = self.home[c]
            if c in self.deliveries or self.later_receivers[c]:
                found.append(Activity(Phase.DELIVER, c, home, home))
            if c in self.functions:
                found += [
                    Activity(phase, c, home, home) for phase in (Phase.COLLECT, Phase.HAND_ON_COLLECTED)
                ]
                continue
            back = Phase.OFFLOAD_CHANGED if self.calls[c].updates else Phase.OFFLOAD
            found += [Activity(phase, c, home, home) for phase in (Phase.LOAD, Phase.HAND_ON, back)]
            if home != c:
                elsewhere = (Phase.REALLOCATE, c), (Phase.OFFLOAD_SOURCE, home), (Phase.RELEASE, home)
                found += [Activity(phase, c, home, target) for phase, target in elsewhere]
            for number, average in enumerate(self.graph.averages):
                if self.calls[c].updates and average.source == self.calls[c].role:
                    follower = homes[average.role]
                    found += [
                        Activity(Phase.LOAD_FOLLOWER, c, follower, follower, average, number),
                        Activity(Phase.UPDATE_FOLLOWER, c, home, follower, average, number),
                        Activity(Phase.OFFLOAD_FOLLOWER, c, follower, follower, average, number),
                    ]
                    found += self._refreshes(Phase.REFRESH_FOLLOWER, c, follower, average, number)
            if self.calls[c].updates:
                found += self._refreshes(Phase.REFRESH, c, home)
        return tuple(found)

    def _refreshes(
        self, phase: Phase, call: int, home: int, average: MovingAverage | None = None, number: int = 0
    ) -> list[Activity]:
        copies = [c for c in range(len(self.calls)) if self.home[c] == home and c != home]
        return [Activity(phase, call, home, copy, average, number) for copy in copies]


def _shares(graph: DataflowGraph, first: Call, second: Call) -> bool:
    """Check whether two calls, in order, can share one copy of the same parameters."""
    between = graph.order[graph.order.index(first) : graph.order.index(second)]
    same = first.role == second.role and not first.is_function
    return same and not any(first.role in changes(graph, call) for call in between)


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """Decisions of plans, [rows, plans]. The first rows are the calls; rows of home placements may follow."""

    first: Ints
    """First rank of the mesh; its ranks are `first` to `end` - 1."""
    end: Ints
    code: Ints
    """Number of the layout; equal numbers mean equal layouts."""
    kept: Bools
    """Whether the plan keeps the copies of the call's role, or at least the copy in the call's layout."""
    offloaded: Bools
    """Whether the parameters of the row's role are in host memory between their uses."""


class StepFacts:
    """Facts about a step under some plans."""

    def __init__(self, step: StepGraph, decisions: Decisions) -> None:
        self.step, self.decisions = step, decisions
        n = len(step.calls)
        self.wave = self._waves()
        """Wave of each call, [calls, plans]. Calls of a wave share no device and do not wait for each other."""
        self.away = decisions.code[:n] != decisions.code[step.home]
        """Whether a call runs in another layout than the home layout of its role, [calls, plans]."""
        self.borrowed = self.away & ~decisions.kept[:n]
        """Whether a call uses a copy that is made for this step, [calls, plans]."""

    def sort_keys(self, activities: Sequence[Activity], places: Ints) -> Ints:
        """Compute sort keys that give each plan's order of activities, [activities, plans]. `places` come from
        `find_places`."""
        return self._waves_of(activities) * len(activities) + places[:, None]

    def present(self, activity: Activity) -> Bools:
        """Find which plans contain an activity, [plans]."""
        c = activity.call
        match activity.phase:
            case Phase.REFRESH | Phase.REFRESH_FOLLOWER:
                return self.uses_first(activity.target)
            case Phase.REALLOCATE:
                return self.borrowed[c] & ~self._meets(c, self.step.sharers[c])
            case Phase.RELEASE:
                return self.borrowed[c] & ~self._meets(c, self.step.shared_by[c])
            case Phase.LOAD_FOLLOWER | Phase.OFFLOAD_FOLLOWER:
                return self.decisions.offloaded[activity.home]
            case Phase.LOAD | Phase.OFFLOAD_SOURCE | Phase.OFFLOAD | Phase.OFFLOAD_CHANGED:
                return self._moves(activity) & self.decisions.offloaded[activity.home]
        return np.ones(self.away.shape[1], dtype=bool)

    def uses_first(self, copy: int) -> Bools:
        """Find in which plans a call uses a kept copy that no earlier call of its role uses, [plans]."""
        earlier = [p for p in self.step.same_role[copy] if p < copy]
        return self.away[copy] & ~self.borrowed[copy] & ~self._meets(copy, earlier)

    def _waves(self) -> Ints:
        first, end = self.decisions.first, self.decisions.end
        step = self.step
        wave = np.zeros_like(first[: len(step.calls)])
        for c in range(1, len(wave)):
            meets = (first[:c] < end[c]) & (first[c] < end[:c])
            # Functions use no device.
            meets[range(c) if c in step.functions else [f for f in step.functions if f < c]] = False
            after = meets | step.ordered[c, :c, None]
            beside = np.where(step.not_before[c, :c, None], wave[:c], 0)
            wave[c] = np.maximum(np.where(after, wave[:c] + 1, 0), beside).max(axis=0)
        if step.done:
            # Leave out waves whose calls have all run.
            left = np.unique(wave[[c for c in range(len(wave)) if c not in step.done]])
            wave = np.searchsorted(left, wave)
        return wave

    def _waves_of(self, activities: Iterable[Activity]) -> Ints:
        """Find the wave of each activity, [activities, plans].

        Outputs of a function are collected in the wave before the first call that needs them, so that other calls
        run meanwhile. If no call needs them, they are collected after all waves. Outputs for later steps are
        delivered last.
        """
        last = self.wave.max(axis=0, initial=0) + 3
        collecting = {}
        for f, needing in self.step.dependents.items():
            needing = [c for c in needing if c not in self.step.done]
            first = self.wave[needing].min(axis=0) if needing else self.wave.max(axis=0) + 2
            collecting[f] = np.maximum(self.wave[f], first - 1)

        def wave_of(activity: Activity) -> Ints:
            match activity.phase:
                case Phase.COLLECT | Phase.HAND_ON_COLLECTED:
                    return collecting[activity.call]
                case Phase.DELIVER:
                    return last
            return self.wave[activity.call]

        return np.array([*map(wave_of, activities)])

    def _moves(self, activity: Activity) -> Bools:
        """Find which plans load or offload a role's parameters in an activity, provided that the plans offload them
        at all.

        Calls of the same wave share loaded parameters.
        """
        c, away = activity.call, self.away
        same_wave = {
            p: self.wave[p] == self.wave[c] for p in self.step.same_role[c] if p not in self.step.done
        }
        if activity.phase in (Phase.LOAD, Phase.OFFLOAD_SOURCE):
            loads = self._loads(c) & ~self._any(same_wave[p] & self._loads(p) for p in same_wave if p < c)
            if activity.phase is Phase.LOAD:
                return loads
            return loads & away[c] & ~self._any(same_wave[p] & ~away[p] for p in same_wave)
        return ~away[c] & ~self._any(same_wave[p] & ~away[p] for p in same_wave if p < c)

    def _loads(self, c: int) -> Bools:
        """Find which plans need the parameters of call `c`'s role in its home layout."""
        return ~self.away[c] | self.borrowed[c] & ~self._meets(c, self.step.sharers[c])

    def _meets(self, c: int, others: list[int]) -> Bools:
        """Find which plans give one of `others` the layout of call `c`."""
        code = self.decisions.code
        return self._any(code[p] == code[c] for p in others)

    def _any(self, rows: Iterable[Bools]) -> Bools:
        """Combine rows by element-wise or, [plans]."""
        result = np.zeros(self.away.shape[1], dtype=bool)
        for row in rows:
            result |= row
        return result
