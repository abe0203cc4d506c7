"""A problem as arrays, for the evaluation of many plans at once."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from realrl.dataflow.call import Call, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.planner.moves.transfers import Floats, Ints, Layouts, TransferTable
from realrl.planner.space.problem import Candidate, Problem
from realrl.program.order import changes, dependents, length_calls, producers

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Columns:
    """What options cost, an entry per option; or per call and plan, [calls, plans], once they are chosen."""

    first: Ints
    """Of the mesh: its ranks are `first` to `end` - 1."""
    end: Ints
    code: Ints
    """Equal exactly where layouts are."""
    layout: Ints
    """Number of the layout among those of the call."""
    seconds: Floats
    load: Floats
    unload: Floats
    weights: Floats
    resident: Floats
    working: Floats
    sequence_parallel: Bools
    """Whether tensor ranks divide tokens, which changes what the ranks of a layout hold."""
    offloaded: Bools
    """Whether parameters wait in host memory."""
    limit: Floats
    """Bytes of a device."""

    def __getitem__(self, index: Ints) -> "Columns":
        return Columns(*(column[index] for column in self.__dict__.values()))


@dataclass(frozen=True)
class EmaUpdate:
    """A role that follows a trained one: calls are numbers in the graph's order."""

    after: int
    """The training."""
    home: int
    """Where the role lives that follows."""
    table: TransferTable


class Tables:
    """A problem whose calls are numbers in the order of the graph, and whose options are columns."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        graph = problem.graph
        self.calls = graph.order
        self.number = {call.name: i for i, call in enumerate(self.calls)}
        self.home = [
            c if call.role is None else self.number[problem.home(call.role).name]
            for c, call in enumerate(self.calls)
        ]
        """Of each call, that where its role lives; of a function, which has none, itself."""
        self.functions = [c for c, call in enumerate(self.calls) if call.is_function]
        self.dependents = {
            c: [self.number[other.name] for other in dependents(graph, self.calls[c])] for c in self.functions
        }
        """Of each function, the calls that need its outputs."""
        self.sizes = np.array([len(problem.candidates[call.name]) for call in self.calls])
        self.offsets = np.concatenate([[0], np.cumsum(self.sizes)[:-1]])[:, None]
        self._layouts: list[Layouts] = []
        columns = [self._columns(problem.candidates[call.name]) for call in self.calls]
        joined = zip(*(c.__dict__.values() for c in columns), strict=True)
        self.columns = Columns(*(np.concatenate(parts) for parts in joined))
        self.reallocation = {c: self._table(h, c) for c, h in enumerate(self.home) if h != c}
        n = range(len(self.calls))
        self.sharers = [[p for p in range(c) if _shares(graph, self.calls[p], self.calls[c])] for c in n]
        """Of each call, earlier ones that can use the same copy of their role's parameters."""
        self.shared_by = [[q for q in n if c in self.sharers[q]] for c in n]
        """The same, later ones."""
        self.same_role = [[p for p in n if p != c and self.home[p] == self.home[c]] for c in n]
        """Of each call, the others of its role."""
        self.ema_updates = [
            EmaUpdate(c, self.home[r], self._table(self.home[c], self.home[r]))
            for c, call in enumerate(self.calls)
            for average in graph.averages
            if average.source == call.role and call.kind is Kind.TRAIN
            for r in [self.number[graph.role_calls(average.role)[0].name]]
        ]
        self._order(graph)

    def gather(self, assignment: Ints) -> Columns:
        """Columns of plans. choice: [calls, plans], the option of each call."""
        return self.columns[assignment + self.offsets]

    def _columns(self, candidates: tuple[Candidate, ...]) -> Columns:
        layouts = list(dict.fromkeys(candidate.layout for candidate in candidates))
        number = {layout: i for i, layout in enumerate(layouts)}
        placements = {candidate.layout: candidate.placement for candidate in candidates}
        self._layouts.append(Layouts.of(placements[layout] for layout in layouts))
        first, size, tp, pp = np.array([candidate.layout for candidate in candidates], dtype=np.int64).T
        return Columns(
            first,
            first + size,
            Layouts(first, size, tp, pp).codes,
            np.array([number[candidate.layout] for candidate in candidates]),
            np.array([candidate.seconds for candidate in candidates], dtype=np.float64),
            np.array([candidate.load_seconds if candidate.offload else 0.0 for candidate in candidates]),
            np.array([candidate.unload_seconds if candidate.offload else 0.0 for candidate in candidates]),
            np.array([candidate.weights_bytes for candidate in candidates], dtype=np.float64),
            np.array([candidate.resident_bytes for candidate in candidates], dtype=np.float64),
            np.array([candidate.working_bytes for candidate in candidates], dtype=np.float64),
            np.array([candidate.placement.strategy.sequence_parallel for candidate in candidates]),
            np.array([candidate.offload for candidate in candidates]),
            np.array([self.problem.limit(candidate.placement) for candidate in candidates], dtype=np.float64),
        )

    def candidates(self, call: int) -> Columns:
        """Columns of one call's options."""
        start = int(self.offsets[call, 0])
        return self.columns[np.arange(start, start + int(self.sizes[call]))]

    def layouts(self, call: int) -> Layouts:
        """The different layouts of a call's options; `Columns.layout` numbers them."""
        return self._layouts[call]

    def _table(self, source: int, target: int) -> TransferTable:
        role = self.calls[source].model_role
        return TransferTable(self.problem.transfers, role, self._layouts[source], self._layouts[target])

    def _order(self, graph: DataflowGraph) -> None:
        """Matrices [call, earlier call]: what waits for what."""
        n = len(self.calls)
        self.ordered = np.zeros((n, n), dtype=bool)
        """Whether a call comes after another in every plan."""
        self.feeds = [tuple(self.number[p.name] for p in producers(graph, call)) for call in self.calls]
        """Of each call, those that it receives its inputs from, one after the other."""
        self.length_receivers = [self._length_receivers(graph, call) for call in self.calls]
        """Of each call, those whose ranks learn row lengths from it."""
        self.knows_lengths = np.zeros((n, n), dtype=bool)
        """Whether ranks of a call have learnt row lengths from another, on which it depends, before it begins."""
        for c, call in enumerate(self.calls):
            for p, earlier in enumerate(self.calls[:c]):
                changing = call.role in changes(graph, earlier) or earlier.role in changes(graph, call)
                depends = earlier in graph.dependencies(call)
                needed = p in self.dependents and c in self.dependents[p]
                self.ordered[c, p] = depends or changing or needed
                self.knows_lengths[c, p] = depends and c in self.length_receivers[p]

    def _length_receivers(self, graph: DataflowGraph, call: Call) -> list[int]:
        own = [key for key in call.outputs if graph.keys[key].length == "own"]
        names = {name for key in own for name in length_calls(graph, key)}
        return sorted({self.number[name] for name in names} | ({self.number[call.name]} if own else set()))

    def exchanged(self, columns: Columns, c: int) -> list[Floats]:
        """Seconds of receiving what each of a call's `feeds` puts out, per plan."""
        target = self._layouts[c][columns.layout[c]]
        return [
            self.problem.exchange.seconds(
                self.calls[p].name, self.calls[c].name, self._layouts[p][columns.layout[p]], target
            )
            for p in self.feeds[c]
        ]


def _shares(graph: DataflowGraph, first: Call, second: Call) -> bool:
    """Whether two calls, in order, can use one copy of the same parameters."""
    between = graph.order[graph.order.index(first) : graph.order.index(second)]
    same = first.role == second.role and not first.is_function
    return same and not any(first.role in changes(graph, call) for call in between)
