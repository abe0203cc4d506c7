"""Compile a dataflow graph and a plan into one program per rank."""

from collections.abc import Collection, Mapping, Sequence

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
    changes,
    collecting_wave,
    dividing_keys,
    keys_between,
    length_readers,
    producers,
    set_names,
    sharing,
    trained_sets,
    waves,
)

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
    """Find the placements of the copies that a plan keeps, by role.

    A role has one for each layout that its calls use outside its home, in the order of these calls. `graph` must
    be that of the training step.
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
) -> list[Program]:
    """Compile one step into one program per rank of the plan's cluster.

    `homes` and `kept` locate each role's parameters when the step starts; see `home_placements` and `kept_copies`.
    A copy in another layout is made before the first call that needs it and released after the last. A kept copy
    stays; the parameter sets that a call changed are refreshed in it. `parts` says which parameter sets roles have
    that are trained in part.

    All programs are parts of one global order of instructions, and nothing waits for a later instruction, so they
    cannot deadlock. `validate` proves this again for any programs.

    `done` are calls that have already run, with outputs on their output ranks (see `SampledStep`). The programs
    send these outputs and run the other calls.
    """
    step = _Lowering(graph, plan, homes, kept or {}, parts or {}, done)
    step.emit(tuple(range(plan.cluster.size)), Feed(graph.sources))
    for call in graph.order:
        if call.name in done:
            step.share_outputs(call)
    collected = {f: collecting_wave(graph, step.waves, f) for f in graph.functions if f.name not in done}
    # Collective steps of a wave come before its long calls, so that the calls run side by side on their meshes.
    for number, wave in enumerate(step.waves):
        models = [call for call in wave if not call.is_function]
        for call in wave:
            if call.is_function:  # first, so that they run while everything else goes on
                step.run(call)
        step.bring_parameters(models)
        for call in models:
            step.run(call)
        for call in (*models, *(f for f in collected if collected[f] == number)):
            step.share_outputs(call)
        step.put_parameters_back(models)
    for function in (f for f in collected if collected[f] == len(step.waves)):
        step.share_outputs(function)
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
    for role in kept:
        if kept[role]:
            start.load(role)
            start.refresh(role, set_names(role, start.parts))
            start.unload(role)
    return start.programs()


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
    ) -> None:
        self.graph, self.plan, self.homes, self.kept = graph, plan, homes, kept
        self.parts, self.done = parts, frozenset(done)
        left = (tuple(call for call in wave if call.name not in done) for wave in waves(graph, plan))
        self.waves = tuple(wave for wave in left if wave)
        pairs = [(p.name, c.name) for c in graph.order for p in producers(graph, c)]
        self.numbers = {pair: number for number, pair in enumerate(pairs)}
        self._loaded: set[str] = set()
        """Roles of `plan.offload` whose parameters are in device memory now."""
        self._shared: set[str] = set(graph.sources)
        """Keys whose lengths are known on all ranks that need them."""
        self._unsent: list[tuple[Call, Call]] = []
        """Producer and consumer of rows that cannot be sent yet, because the consumer's items are divided by
        unknown lengths."""
        self._programs: list[list[Instruction]] = [[] for _ in range(plan.cluster.size)]

    def programs(self) -> list[Program]:
        return [Program(rank, tuple(instructions)) for rank, instructions in enumerate(self._programs)]

    def emit(self, ranks: tuple[int, ...], instruction: Instruction) -> None:
        """Append an instruction to the programs of `ranks`."""
        for rank in ranks:
            self._programs[rank].append(instruction)

    def load(self, role: str) -> None:
        """Load the role's parameters into device memory at home, unless they are there."""
        if role in self.plan.offload and role not in self._loaded:
            home = self.homes[role]
            for name in set_names(role, self.parts):
                self.emit(home.ranks, Load(role, home, "parameters", name))
            self._loaded.add(role)

    def unload(self, role: str) -> None:
        """Offload the role's parameters again, if the plan keeps them in host memory between uses."""
        if role in self._loaded:
            home = self.homes[role]
            for name in set_names(role, self.parts):
                self.emit(home.ranks, Offload(role, home, "parameters", name))
            self._loaded.remove(role)

    def refresh(self, role: str, names: Sequence[str]) -> None:
        """Reallocate parameter sets of the role, loaded at home, into its kept copies."""
        for placement in self.kept.get(role, ()):
            self._reallocate(role, placement, names)

    def bring_parameters(self, models: Sequence[Call]) -> None:
        """Load and reallocate the parameters of the models of a wave, and offload all others."""
        at_home = {call.model_role for call in models if not self._is_copy(call)}
        for call in models:
            role = call.model_role
            if role in at_home:
                self.load(role)
            if self._borrowed(call) and sharing(self.graph, self.plan, self.waves, call)[0] == call:
                self.load(role)
                self._reallocate(role, self.plan[call.name], set_names(role, self.parts))
        for role in {call.model_role: None for call in models}:
            if role not in at_home:
                self.unload(role)

    def run(self, call: Call) -> None:
        """Emit the call itself, with its inputs."""
        placement, role = self.plan[call.name], call.role
        for producer in producers(self.graph, call):
            keys = keys_between(self.graph, producer, call)
            number = self.numbers[producer.name, call.name]
            receive = Receive(number, keys, producer.name, call.name, self.plan[producer.name].output_ranks)
            self.emit(placement.ranks, receive)
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

    def share_outputs(self, call: Call) -> None:
        """Emit what follows a call: lengths, then the rows its consumers need.

        Rows of earlier calls follow too, if their senders needed these lengths to know which ranks work on which
        items.
        """
        output_ranks = self.plan[call.name].output_ranks
        for key in call.outputs:
            if self.graph.keys[key].length == "own":
                readers = length_readers(self.graph, self.plan, key)
                self.emit(_union(output_ranks, readers), ShareLengths(key, call.name, output_ranks, readers))
                self._shared.add(key)
        left = [consumer for consumer in self.graph.order if consumer.name not in self.done]
        self._unsent += [(call, consumer) for consumer in left if call in producers(self.graph, consumer)]
        ready = [pair for pair in self._unsent if self._shared.issuperset(dividing_keys(self.graph, pair[1]))]
        for producer, consumer in ready:
            keys = keys_between(self.graph, producer, consumer)
            number, ranks = self.numbers[producer.name, consumer.name], self.plan[consumer.name].ranks
            send = Send(number, keys, producer.name, consumer.name, ranks)
            self.emit(self.plan[producer.name].output_ranks, send)
        self._unsent = [pair for pair in self._unsent if pair not in ready]

    def put_parameters_back(self, models: Sequence[Call]) -> None:
        """Refresh copies after the calls of models in a wave, release borrowed ones and offload."""
        for call in models:
            for average in self.graph.averages if changes(self.graph, call) else ():
                if average.source == call.role:
                    self.load(average.role)
                    self._mix(call, average)
            for role in changes(self.graph, call):
                self.refresh(role, changed_sets(self.graph, call, role, self.parts))
                self.unload(role)
            if self._borrowed(call) and sharing(self.graph, self.plan, self.waves, call)[-1] == call:
                for name in set_names(call.model_role, self.parts):
                    release = Release(call.model_role, self.plan[call.name], name)
                    self.emit(release.placement.ranks, release)
        for call in models:
            self.unload(call.model_role)

    def report(self) -> None:
        """Send the metrics of all calls to the writer, at the end, when it has nothing else to do."""
        for call in (call for wave in self.waves for call in wave if call.kind is not Kind.GENERATE):
            output_ranks = self.plan[call.name].output_ranks
            # Ranks of a model have added up their metrics; ranks of a function know only those of their own
            # items.
            having = output_ranks if call.is_function else output_ranks[:1]
            senders = tuple(rank for rank in having if rank != WRITER)
            if senders:
                self.emit(_union(senders, (WRITER,)), Report(call.name, senders, WRITER))

    def _is_copy(self, call: Call) -> bool:
        return self.plan[call.name].layout != self.homes[call.model_role].layout

    def _borrowed(self, call: Call) -> bool:
        """Check whether the call uses a copy that is made for this step."""
        layout = self.plan[call.name].layout
        return self._is_copy(call) and layout not in [p.layout for p in self.kept.get(call.model_role, ())]

    def _reallocate(self, role: str, target: Placement, names: Sequence[str]) -> None:
        home = self.homes[role]
        for name in names:
            move = Reallocate(role, home, target, parameter_set=name)
            self.emit(_union(home.ranks, target.ranks), move)

    def _mix(self, call: Call, average: MovingAverage) -> None:
        """Update a moving average of the role that the call trained."""
        source, into = self.homes[average.source], self.homes[average.role]
        for name in changed_sets(self.graph, call, average.role, self.parts):
            mixing = Reallocate(average.source, source, into, average.role, average.factor, name)
            self.emit(_union(source.ranks, into.ranks), mixing)


def _union(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted({*a, *b}))
