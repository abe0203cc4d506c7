"""Reference search: cost every plan of a small problem with loops over calls and devices."""

import itertools
import math
from collections.abc import Iterable

from realrl.dataflow.call import Call, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.plan.plan import Plan
from realrl.planner.moves.transfers import Layouts, name_mixing, name_refreshing
from realrl.planner.space.candidate import Candidate
from realrl.planner.space.problem import Problem
from realrl.program.order import changes, dependents, length_calls, length_readers, producers

Waves = tuple[tuple[Call, ...], ...]


def cheapest(problem: Problem) -> float:
    """Return the seconds of the fastest plan that fits; infinite if none does."""
    names = [call.name for call in problem.graph.calls]
    transfers: dict[tuple, float] = {}
    best = math.inf
    for numbers in itertools.product(*(range(len(problem.candidates[name])) for name in names)):
        seconds, fill = cost(problem, dict(zip(names, numbers, strict=True)), transfers)
        if fill <= 1:
            best = min(best, seconds)
    return best


def cost(problem: Problem, assignment: dict[str, int], transfers: dict[tuple, float]) -> tuple[float, float]:
    """Return the seconds of a plan, and the largest used fraction of device memory. `transfers`: a cache."""
    return _Step(problem, assignment, transfers).run()


def connected(problem: Problem, candidates: dict[str, Candidate], rank: int) -> float:
    """Bytes of a rank's communicators: those of each layout once."""
    models = [candidates[call.name] for call in problem.graph.calls if not call.is_function]
    return sum({o.layout: o.communicator_bytes for o in models if rank in o.placement.ranks}.values())


def shared(problem: Problem, homes: dict[str, Candidate], rank: int) -> float:
    """Bytes that several roles of a rank count, and which it has once; minus infinity where one offloads them."""
    saved = 0.0
    for group in problem.sharers:
        here = [homes[role] for role in group if rank in homes[role].placement.ranks]
        for layout in {home.layout for home in here}:
            alike = [home for home in here if home.layout == layout]
            if len(alike) > 1 and any(home.offload for home in alike):
                return -math.inf
            sizes = [home.base_bytes for home in alike]
            saved += sum(sizes) - max(sizes)
    return saved


def host_fill(problem: Problem, homes: dict[str, Candidate]) -> float:
    """Largest fraction of a node's host memory that offloaded state takes."""
    fills = [0.0]
    for node, limit in enumerate(problem.host_memory_bytes):
        offloaded = [(rank, home.host_bytes) for home in homes.values() for rank in home.placement.ranks]
        fills.append(sum(size for rank, size in offloaded if problem.cluster.node(rank) == node) / limit)
    return max(fills)


def waves(graph: DataflowGraph, plan: Plan) -> Waves:
    """Sort calls into waves: those of one wave share no device and do not wait for each other.

    A function uses no device: it is in the first wave in which its inputs are there, before the others.
    """
    number: dict[Call, int] = {}
    for call in graph.order:
        before = [number[other] for other in number if _ordered(graph, plan, other, call)]
        number[call] = 1 + max(before, default=-1)
    found: list[list[Call]] = [[] for _ in range(1 + max(number.values(), default=-1))]
    for call, wave in sorted(number.items(), key=lambda item: not item[0].is_function):
        found[wave].append(call)
    return tuple(map(tuple, found))


def sharing(graph: DataflowGraph, plan: Plan, order: Waves, call: Call) -> tuple[Call, ...]:
    """List the calls that can use the same copy of parameters as `call`, in the order they run.

    These are the calls of its role in its layout between two changes of the role, itself included; `call` is no
    function.
    """

    def version(wave: int) -> int:
        return sum(call.role in changes(graph, other) for calls in order[:wave] for other in calls)

    own = next(version(i) for i, calls in enumerate(order) if call in calls)
    return tuple(
        other
        for i, calls in enumerate(order)
        for other in calls
        if other.role == call.role and plan[other.name].layout == plan[call.name].layout and version(i) == own
    )


def _ordered(graph: DataflowGraph, plan: Plan, first: Call, second: Call) -> bool:
    """Check whether `second`, which comes later in the graph's order, must wait for `first`."""
    if first.is_function or second.is_function:
        # Functions use no device, and change no parameters.
        needed = first.is_function and second in dependents(graph, first)
        return needed or first in graph.dependencies(second)
    return (
        first in graph.dependencies(second)
        or plan[first.name].mesh.overlaps(plan[second.name].mesh)
        or second.role in changes(graph, first)
        or first.role in changes(graph, second)
    )


class _Step:
    def __init__(self, problem: Problem, assignment: dict[str, int], transfers: dict[tuple, float]) -> None:
        self.problem, self.graph, self.transfers = problem, problem.graph, transfers
        self.candidates = problem.chosen_candidates(assignment)
        self.plan = problem.plan(assignment)
        self.homes = {role: self.candidates[problem.home(role).name] for role in self.graph.roles}
        self.free = [0.0] * problem.cluster.size
        self.end: dict[Call, float] = {}
        self.kept = [
            sum(home.resident_bytes for home in self.homes.values() if rank in home.placement.ranks)
            - shared(problem, self.homes, rank)
            + sum(copy.weights_bytes for copy in self.permanent() if rank in copy.placement.ranks)
            + connected(problem, self.candidates, rank)
            for rank in range(problem.cluster.size)
        ]
        self.hosts = [0.0] * problem.cluster.size
        self.called: dict[Call, dict[int, float]] = {}
        """Function -> rank -> when it has ended there."""
        self.copies: dict[tuple, Candidate] = {}
        self.loaded: set[str] = set()
        self.fill = 0.0

    def permanent(self, role: str | None = None) -> list[Candidate]:
        """Candidates that use kept copies (of a role), one for each copy, in the order of their calls."""
        found: dict[tuple, Candidate] = {}
        for call in (c for c in self.graph.order if not c.is_function and role in (None, c.role)):
            home, candidate = self.homes[call.role], self.candidates[call.name]
            if home.keep and candidate.layout != home.layout:
                found.setdefault((call.role, candidate.layout), candidate)
        return list(found.values())

    def run(self) -> tuple[float, float]:
        order = waves(self.graph, self.plan)
        models = [call for call in self.graph.calls if not call.is_function]
        sequence_parallel = {(c.role, self.candidates[c.name].layout): set() for c in models}
        for call in models:
            candidate = self.candidates[call.name]
            sequence_parallel[call.role, candidate.layout].add(candidate.placement.strategy.sequence_parallel)
        if any(len(ways) > 1 for ways in sequence_parallel.values()):
            self.fill = math.inf
        late = {f: self.needed(f, order) for f in self.called_somewhere()}
        for number, everything in enumerate(order):
            wave = tuple(call for call in everything if not call.is_function)
            for call in everything:
                if call.is_function:
                    self.call(call)
            self.bring(wave, order)
            for call in wave:
                self.work(call)
            for call in wave:
                self.tell(call)
            for function in late:
                if late[function] == number:
                    self.collect(function)
            for call in wave:
                self.follow(call)
                group = sharing(self.graph, self.plan, order, call)
                if group[-1] == call:
                    self.copies.pop((call.role, self.candidates[call.name].layout), None)
            for role in {call.role: None for call in wave}:
                self.unload(role)
        for function in late:
            if late[function] >= len(order):
                self.collect(function)
        return max(self.free), max(self.fill, host_fill(self.problem, self.homes))

    def called_somewhere(self) -> list[Call]:
        return [call for call in self.graph.order if call.is_function]

    def needed(self, function: Call, order: Waves) -> int:
        """The wave before the first call that reads, or learns lengths of, what a function puts out."""
        readers = {c for c in self.graph.calls if {*c.inputs} & {*function.outputs}}
        for key in function.outputs:
            if self.graph.keys[key].length == "own":
                names = length_calls(self.graph, key)
                readers |= {self.graph.call(name) for name in names if name != function.name}
        first = min((i for i, wave in enumerate(order) if readers & {*wave}), default=len(order) + 1)
        return max(first - 1, next(i for i, wave in enumerate(order) if function in wave))

    def call(self, function: Call) -> None:
        """Every rank receives the inputs, then its host begins when it has ended what was before."""
        option, ended = self.candidates[function.name], {}
        target = Layouts.of([option.placement])
        for rank in option.placement.ranks:
            for other in producers(self.graph, function):
                source = Layouts.of([self.candidates[other.name].placement])
                seconds = float(self.problem.exchange.seconds(other.name, function.name, source, target)[0])
                self.free[rank] = max(self.free[rank], self.end[other]) + seconds
            ended[rank] = max(self.free[rank], self.hosts[rank]) + option.seconds
            self.hosts[rank] = ended[rank]
        self.called[function] = ended

    def collect(self, function: Call) -> None:
        """Every rank waits for its own share, then hands it on."""
        for rank, ended in self.called[function].items():
            self.free[rank] = max(self.free[rank], ended)
        self.end[function] = max(self.free[rank] for rank in self.called[function])
        self.tell(function)

    def bring(self, wave: tuple[Call, ...], order: Waves) -> None:
        at_home = {c.role for c in wave if self.candidates[c.name].layout == self.homes[c.role].layout}
        for call in wave:
            candidate, home = self.candidates[call.name], self.homes[call.role]
            if call.role in at_home:
                self.load(call.role)
            if candidate.layout == home.layout:
                continue
            if call.kind is Kind.TRAIN:
                self.fill = math.inf
            if not home.keep and sharing(self.graph, self.plan, order, call)[0] == call:
                self.load(call.role)
                ranks = {*home.placement.ranks, *candidate.placement.ranks}
                self.move(ranks, self.transfer(call.role, home, candidate))
                self.copies[call.role, candidate.layout] = candidate
                self.hold(candidate.placement.ranks)
        for role in {call.role: None for call in wave if call.role not in at_home}:
            self.unload(role)

    def load(self, role: str) -> None:
        home = self.homes[role]
        if home.offload and role not in self.loaded:
            self.loaded.add(role)
            self.each(home, home.load_seconds)
            self.hold(home.placement.ranks)

    def unload(self, role: str) -> None:
        if role in self.loaded:
            self.loaded.remove(role)
            self.each(self.homes[role], self.homes[role].unload_seconds)

    def each(self, candidate: Candidate, seconds: float) -> None:
        for rank in candidate.placement.ranks:
            self.free[rank] += seconds

    def hold(self, ranks: Iterable[int], working: float = 0.0) -> None:
        """Record the memory in use on ranks."""
        loaded = [self.homes[role] for role in self.loaded]
        for rank in ranks:
            there = sum(
                o.weights_bytes for o in (*self.copies.values(), *loaded) if rank in o.placement.ranks
            )
            self.note(rank, self.kept[rank] + there + working)

    def work(self, call: Call) -> None:
        candidate = self.candidates[call.name]
        ready = max(self.free[rank] for rank in candidate.placement.ranks)
        target = Layouts.of([candidate.placement])
        for other in producers(self.graph, call):
            source = Layouts.of([self.candidates[other.name].placement])
            seconds = float(self.problem.exchange.seconds(other.name, call.name, source, target)[0])
            ready = max(ready, self.end[other]) + seconds
        home = self.homes[call.role]
        moved = home.offload if candidate.layout == home.layout else not home.keep
        seconds = candidate.seconds + candidate.capture_seconds * moved
        self.end[call] = self.occupy(set(candidate.placement.ranks), seconds, ready)
        self.hold(candidate.placement.ranks, candidate.working_bytes)

    def tell(self, call: Call) -> None:
        for key in call.outputs:
            if self.graph.keys[key].length == "own":
                readers = length_readers(self.graph, self.plan, key)
                senders = self.plan[call.name].output_ranks
                told = len({*senders, *readers}) - 1
                links, items = self.problem.exchange.links, self.problem.exchange.items
                seconds = (len(senders) - 1 + told) * links.latency_s
                seconds += 8 * items * told / links.node_bytes_per_s
                for rank in readers:
                    self.free[rank] = max(self.free[rank], self.end[call]) + seconds

    def follow(self, call: Call) -> None:
        for average in self.graph.averages if changes(self.graph, call) else ():
            if average.source != call.role:
                continue
            self.load(average.role)
            source, target = self.homes[average.source], self.homes[average.role]
            ranks = {*source.placement.ranks, *target.placement.ranks}
            name = name_mixing(average.role, average.source)
            self.move(ranks, self.transfer(name, source, target))
            self.hold(ranks)
        for role in changes(self.graph, call):
            for copy in self.permanent(role):
                ranks = {*self.homes[role].placement.ranks, *copy.placement.ranks}
                name = name_refreshing(self.graph, call, role, self.problem.parts)
                self.move(ranks, self.transfer(name, self.homes[role], copy))
            self.unload(role)

    def transfer(self, role: str, source: Candidate, target: Candidate) -> float:
        key = (role, source.layout, target.layout)
        if key not in self.transfers:
            layouts = Layouts.of([source.placement]), Layouts.of([target.placement])
            self.transfers[key] = float(self.problem.transfers.seconds(role, *layouts)[0])
        return self.transfers[key]

    def move(self, ranks: set[int], seconds: float) -> None:
        if seconds:  # else each rank has all that it needs
            self.occupy(ranks, seconds)

    def occupy(self, ranks: set[int], seconds: float, ready: float = 0.0) -> float:
        end = max(ready, *(self.free[rank] for rank in ranks)) + seconds
        for rank in ranks:
            self.free[rank] = end
        return end

    def note(self, rank: int, held: float) -> None:
        self.fill = max(self.fill, held / self.problem.memory_bytes[self.problem.cluster.node(rank)])
