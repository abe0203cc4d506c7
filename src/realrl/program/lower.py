"""Compile a dataflow graph and a plan into one program per rank."""

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from realrl.dataflow.call import Call, Kind, MovingAverage
from realrl.dataflow.graph import DataflowGraph
from realrl.plan.placement import Placement, function_placement
from realrl.plan.plan import Plan
from realrl.program.instructions import (
    Feed,
    Instruction,
    Load,
    Offload,
    Program,
    Reallocate,
    Receive,
    Release,
    Report,
    Run,
    Send,
    ShareLengths,
    StateKind,
)
from realrl.program.order import (
    TrainableParts,
    changed_sets,
    dividing_keys,
    keys_between,
    length_readers,
    list_batches,
    producers,
    set_names,
    trained_sets,
    transfer_ahead,
)
from realrl.program.step import Activity, Decisions, Phase, StepFacts, StepGraph, find_places

WRITER = 0
"""Rank that writes metrics, samples and progress."""


def home_placements(graph: DataflowGraph, plan: Plan) -> dict[str, Placement]:
    """Find the placement that holds each role's parameters between steps."""
    return {role: plan[graph.home(role).name] for role in graph.roles}


def offloaded(plan: Plan) -> set[tuple[str, StateKind]]:
    """List the (role, state kind) pairs that are in host memory between steps."""
    parameters: set[tuple[str, StateKind]] = {(role, "parameters") for role in plan.offload}
    return parameters | {(role, "optimizer") for role in plan.offload_optimizer}


def kept_copies(
    graph: DataflowGraph, plan: Plan, homes: Mapping[str, Placement]
) -> dict[str, tuple[Placement, ...]]:
    """For each role, find the placements of the copies that a plan keeps.

    A role has one copy for each layout that its calls use, except its home layout, in which its parameters stay
    between steps. Copies are in the order of these calls. `graph` must be the graph of the training step.
    """
    kept: dict[str, tuple[Placement, ...]] = {}
    for role in plan.keep:
        copies: dict[str, Placement] = {}
        for place in (plan[call.name] for call in graph.role_calls(role)):
            if place.layout != homes[role].layout:
                copies.setdefault(place.layout, place)
        kept[role] = tuple(copies.values())
    return kept


def lower(
    graph: DataflowGraph,
    plan: Plan,
    homes: Mapping[str, Placement],
    kept: Mapping[str, Sequence[Placement]] | None = None,
    parts: TrainableParts | None = None,
    done: Collection[str] = (),
    batches: Collection[int] | None = None,
) -> list[Program]:
    """Compile one step into one program per rank of the plan's cluster.

    `homes` and `kept` locate each role's parameters when the step starts; see `home_placements` and `kept_copies`.
    A copy in another layout is made before the first call that needs it, and released after the last such call. A
    kept copy is never released. After a call that changes parameters, the changed parameter sets are sent to it.
    `parts` has the trained part of each role that is trained only in part; it determines the role's parameter sets.

    All programs are parts of one global order of instructions, and nothing waits for a later instruction, so they
    cannot deadlock. `validate` checks this for any programs.

    `done` are calls that have already run, with outputs on their output ranks (see `SampledStep`). The programs
    send these outputs and run the other calls.

    If calls run ahead, a step works on several batches: on the one that it trains on, 0, and on those that are up
    to `graph.ahead` steps later. `batches` selects some of them, because the first steps of a run have no batch to
    train on yet, and the last steps have no batch to sample. None selects all.
    """
    selected = range(graph.ahead + 1) if batches is None else batches
    step = _Lowering(graph, plan, homes, kept or {}, parts or {}, done, selected)
    if graph.ahead in selected:
        step.emit(range(plan.cluster.size), Feed(graph.sources))
    for call in graph.order:
        if call.name in done:
            step.hand_on(call)
    activities, facts = step.graph.activities, step.facts
    if activities:
        for number in np.argsort(facts.sort_keys(activities, find_places(activities))[:, 0]).tolist():
            if facts.present(activities[number])[0]:
                step.perform(activities[number])
    step.report()
    return step.programs()


def lower_start(
    plan: Plan,
    homes: Mapping[str, Placement],
    kept: Mapping[str, Sequence[Placement]],
    parts: TrainableParts | None = None,
) -> list[Program]:
    """Compile one program per rank that makes the kept copies, to run before the first step."""
    start = _Lowering(DataflowGraph((), ()), plan, homes, kept, parts or {})
    for role, copies in kept.items():
        if copies:
            loads = role in plan.offload
            start.copy(Load, role) if loads else None
            for copy in copies:
                start.reallocate(role, copy, set_names(role, start.parts))
            start.copy(Offload, role) if loads else None
    return start.programs()


def waves(graph: DataflowGraph, plan: Plan) -> list[list[Call]]:
    """Sort calls into waves. Calls of one wave share no device and do not wait for each other.

    A function uses no device. It runs at the start of the first wave in which its inputs exist.
    """
    return _Lowering(graph, plan, home_placements(graph, plan), {}, {}).waves()


class _Lowering:
    """The programs of all ranks while they are built."""

    def __init__(
        self,
        graph: DataflowGraph,
        plan: Plan,
        homes: Mapping[str, Placement],
        kept: Mapping[str, Sequence[Placement]],
        parts: TrainableParts,
        done: Collection[str] = (),
        batches: Collection[int] = (0,),
    ) -> None:
        self.plan, self.homes, self.kept, self.parts = plan, homes, kept, parts
        rows = {role: len(graph.order) + i for i, role in enumerate(homes)}
        self.batches = batches
        # Calls whose batches are not selected do nothing in this step.
        idle = [call.name for call in graph.calls if not list_batches(call, batches)]
        self.graph = StepGraph(graph, rows, [*done, *idle])
        self.facts = StepFacts(self.graph, self._decide())
        pairs = [(p.name, c.name) for c in graph.order for p in producers(graph, c)]
        self.numbers = {pair: number for number, pair in enumerate(pairs)}
        self._shared: set[str] = set(graph.sources)
        """Keys whose lengths are known on all ranks that need them."""
        self._unsent = [
            (producer, call)
            for call in graph.order
            for producer in producers(graph, call)
            if call.name not in idle and transfer_ahead(graph, producer, call) == call.ahead < producer.ahead
        ]
        """Producer and consumer of rows that cannot be sent yet, because the lengths that divide the consumer's
        items are still unknown."""
        self._programs: list[list[Instruction]] = [[] for _ in range(plan.cluster.size)]

    def _decide(self) -> Decisions:
        """Make the arrays of the plan's decisions. Rows of calls come first; then each role has a row for its home
        placement, which holds its parameters between steps."""
        calls = self.graph.calls
        places = [*(self.plan[call.name] for call in calls), *self.homes.values()]
        numbers: dict[str, int] = {}
        roles = [*(call.role for call in calls), *self.homes]
        kept = {role: {copy.layout for copy in copies} for role, copies in self.kept.items()}
        return Decisions(
            first=np.array([[place.mesh.first] for place in places], dtype=np.int64),
            end=np.array([[place.mesh.first + place.mesh.size] for place in places], dtype=np.int64),
            code=np.array([[numbers.setdefault(place.layout, len(numbers))] for place in places]),
            kept=np.array(
                [
                    [place.layout in kept.get(role or "", ())]
                    for place, role in zip(places, roles, strict=True)
                ]
            ),
            offloaded=np.array([[role in self.plan.offload] for role in roles]),
        )

    def waves(self) -> list[list[Call]]:
        """List the calls of each wave, functions first."""
        found: dict[int, list[Call]] = {}
        for c in np.argsort(self.facts.wave[:, 0], kind="stable").tolist():
            if c not in self.graph.done:
                found.setdefault(int(self.facts.wave[c, 0]), []).append(self.graph.calls[c])
        return [sorted(calls, key=lambda call: not call.is_function) for calls in found.values()]

    def programs(self) -> list[Program]:
        return [Program(rank, tuple(instructions)) for rank, instructions in enumerate(self._programs)]

    def emit(self, ranks: Iterable[int], instruction: Instruction) -> None:
        """Append an instruction to the programs of `ranks`."""
        for rank in ranks:
            self._programs[rank].append(instruction)

    def perform(self, activity: Activity) -> None:
        """Emit the instructions of an activity."""
        call = self.graph.calls[activity.call]
        role = call.role or ""
        if activity.average is not None:
            role = activity.average.role
        match activity.phase:
            case Phase.START | Phase.RUN:
                self.run(call)
            case Phase.HAND_ON | Phase.HAND_ON_COLLECTED | Phase.DELIVER if call.ahead not in self.batches:
                pass  # the call has not ended a batch
            case Phase.HAND_ON | Phase.HAND_ON_COLLECTED:
                self.hand_on(call)
            case Phase.LOAD | Phase.LOAD_FOLLOWER:
                self.copy(Load, role)
            case Phase.OFFLOAD_SOURCE | Phase.OFFLOAD | Phase.OFFLOAD_CHANGED | Phase.OFFLOAD_FOLLOWER:
                self.copy(Offload, role)
            case Phase.REALLOCATE:
                self.reallocate(role, self.plan[call.name], set_names(role, self.parts))
            case Phase.REFRESH | Phase.REFRESH_FOLLOWER:
                layout = self.plan[self.graph.calls[activity.target].name].layout
                (copy,) = (copy for copy in self.kept[role] if copy.layout == layout)
                self.reallocate(role, copy, changed_sets(self.graph.graph, call, role, self.parts))
            case Phase.UPDATE_FOLLOWER:
                assert activity.average is not None, "a follower has a moving average"
                self._mix(call, activity.average)
            case Phase.DELIVER:
                self.deliver(call)
            case Phase.RELEASE:
                for name in set_names(role, self.parts):
                    release = Release(role, self.plan[call.name], name)
                    self.emit(release.placement.ranks, release)

    def copy(self, kind: type[Load] | type[Offload], role: str) -> None:
        """Load a role's parameters into device memory in its home layout, or offload them again."""
        home = self.homes[role]
        for name in set_names(role, self.parts):
            self.emit(home.ranks, kind(role, home, "parameters", name))

    def reallocate(self, role: str, target: Placement, names: Iterable[str]) -> None:
        """Reallocate parameter sets of a role from its home into another layout."""
        home = self.homes[role]
        for name in names:
            move = Reallocate(role, home, target, parameter_set=name)
            self.emit(_union(home.ranks, target.ranks), move)

    def run(self, call: Call) -> None:
        """Emit the call, after the receives of its inputs."""
        placement, role, graph = self.plan[call.name], call.role, self.graph.graph
        for producer in producers(graph, call):
            if transfer_ahead(graph, producer, call) == call.ahead:
                self.receive(producer, call)
        # A function has no micro-batches, even if the plan file gives their size.
        where = function_placement(placement.mesh) if call.is_function else placement
        run = Run(call.name, role, where)
        if role is None or call.kind is not Kind.TRAIN or role not in self.plan.offload_optimizer:
            self.emit(placement.ranks, run)
            return
        for name in trained_sets(role, self.parts):
            self.emit(placement.ranks, Load(role, placement, "optimizer", name))
        self.emit(placement.ranks, run)
        for name in trained_sets(role, self.parts):
            self.emit(placement.ranks, Offload(role, placement, "optimizer", name))

    def hand_on(self, call: Call) -> None:
        """Emit the instructions that follow a call: share the lengths of its outputs, then send rows to its
        consumers. Rows of earlier calls are sent too, if their senders needed these lengths to divide the items.
        """
        graph = self.graph.graph
        self.share_lengths(call)
        left = [consumer for c, consumer in enumerate(graph.order) if c not in self.graph.done]
        self._unsent += [
            (call, consumer)
            for consumer in left
            if call in producers(graph, consumer) and consumer.ahead == call.ahead
        ]
        ready = [pair for pair in self._unsent if self._knows_division(pair[1])]
        for producer, consumer in ready:
            self.send(producer, consumer)
        self._unsent = [pair for pair in self._unsent if pair not in ready]

    def _knows_division(self, consumer: Call) -> bool:
        """Check whether the lengths that divide a call's items are known, from this step or from earlier steps."""
        graph = self.graph.graph
        return all(
            key in self._shared or ((made_by := graph.producer(key)) and made_by.ahead > consumer.ahead)
            for key in dividing_keys(graph, consumer)
        )

    def share_lengths(self, call: Call, *, later: bool = False) -> None:
        """Emit the instructions that share the lengths of a call's outputs. `later`: see `length_readers`."""
        graph, output_ranks = self.graph.graph, self.plan[call.name].output_ranks
        for key in call.outputs:
            if graph.keys[key].length == "own":
                readers = length_readers(graph, self.plan, key, later=later)
                self._shared.add(key)
                if readers:
                    share = ShareLengths(key, call.name, output_ranks, readers)
                    self.emit(_union(output_ranks, readers), share)

    def send(self, producer: Call, consumer: Call) -> None:
        """Emit the sends of a producer's rows to a consumer."""
        keys = keys_between(self.graph.graph, producer, consumer)
        number, ranks = self.numbers[producer.name, consumer.name], self.plan[consumer.name].ranks
        send = Send(number, keys, producer.name, consumer.name, ranks)
        self.emit(self.plan[producer.name].output_ranks, send)

    def receive(self, producer: Call, consumer: Call) -> None:
        """Emit the receives of a producer's rows on the ranks of a consumer."""
        keys = keys_between(self.graph.graph, producer, consumer)
        number, ranks = self.numbers[producer.name, consumer.name], self.plan[producer.name].output_ranks
        receive = Receive(number, keys, producer.name, consumer.name, ranks)
        self.emit(self.plan[consumer.name].ranks, receive)

    def deliver(self, call: Call) -> None:
        """Emit the instructions that hand on rows for later steps."""
        self.share_lengths(call, later=True)
        for p, c in self.graph.deliveries.get(self.graph.number[call.name], ()):
            producer, consumer = self.graph.calls[p], self.graph.calls[c]
            self.send(producer, consumer)
            self.receive(producer, consumer)

    def report(self) -> None:
        """Send the metrics of all calls to the writer, at the end of the step, when the writer is idle."""
        ending = (call for wave in self.waves() for call in wave if call.ahead in self.batches)
        for call in (call for call in ending if call.has_metrics):
            output_ranks = self.plan[call.name].output_ranks
            # Ranks of a model have added up their metrics; ranks of a function or an environment know only the
            # metrics of their own items.
            having = output_ranks if call.record_fields or call.is_function else output_ranks[:1]
            senders = tuple(rank for rank in having if rank != WRITER)
            if senders:
                self.emit(_union(senders, (WRITER,)), Report(call.name, senders, WRITER))

    def _mix(self, call: Call, average: MovingAverage) -> None:
        """Update a moving average of the role that the call trained."""
        source, into = self.homes[average.source], self.homes[average.role]
        for name in changed_sets(self.graph.graph, call, average.role, self.parts):
            mixing = Reallocate(average.source, source, into, average.role, average.factor, name)
            self.emit(_union(source.ranks, into.ranks), mixing)


def _union(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted({*a, *b}))
