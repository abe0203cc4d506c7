"""Search problem as arrays, for vectorised evaluation."""

from dataclasses import dataclass, fields

import numpy as np

from realrl.dataflow.call import Call, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.planner.arrays.arrays import Floats, Ints
from realrl.planner.moves.transfers import Layouts, TransferTable, name_mixing, name_refreshing
from realrl.planner.space.costs import CandidateCosts
from realrl.planner.space.problem import Problem
from realrl.program.order import changes, dependents, dividing_keys, length_calls, producers


@dataclass(frozen=True, kw_only=True)
class Columns(CandidateCosts):
    """Meshes and costs of candidates, one entry per candidate, or [calls, plans] once they are assigned."""

    first: Ints
    """First rank of the mesh, whose ranks are `first` to `end` - 1."""
    end: Ints
    code: Ints
    """Code of the layout; equal codes mean equal layouts."""
    layout: Ints
    """Index of the layout among those of the call."""
    limit: Floats
    """Usable bytes of a device."""


@dataclass(frozen=True)
class EmaUpdate:
    """EMA update of a role after training of its source role; calls are indices in graph order."""

    after: int
    """Training call of the source role."""
    home: int
    """Call whose candidate decides the primary placement of the averaged role."""
    table: TransferTable


@dataclass(frozen=True)
class Refresh:
    """Refresh of the kept copy that a call uses, after another one has changed its role; calls are indices."""

    after: int
    """Training call that changes the role."""
    home: int
    copy: int
    """Call that uses the copy: the first one of its role and layout."""
    table: TransferTable


class Tables:
    """Search problem as arrays: calls are indices in graph order, candidates are columns."""

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
        self._transfers: dict[tuple[str, int, int], TransferTable] = {}
        self._of_call = [self._columns(call) for call in self.calls]
        names = [field.name for field in fields(Columns)]
        self.columns = Columns(
            **{name: np.concatenate([getattr(of, name) for of in self._of_call]) for name in names}
        )
        self.reallocation = {c: self._table(h, c) for c, h in enumerate(self.home) if h != c}
        indices = range(len(self.calls))
        self.sharers = [
            [p for p in range(c) if _shares(graph, self.calls[p], self.calls[c])] for c in indices
        ]
        """Earlier calls that can share a call's replica of their role's parameters."""
        self.shared_by = [[q for q in indices if c in self.sharers[q]] for c in indices]
        """Later calls that can share a call's replica."""
        self.same_role = [[p for p in indices if p != c and self.home[p] == self.home[c]] for c in indices]
        """Other calls of a call's role."""
        self.sharing_homes = [
            tuple(self.number[problem.home(role).name] for role in roles) for roles in problem.sharers
        ]
        """Calls at home whose roles have the same frozen weights, by group of such roles."""
        self.ema_updates = [
            EmaUpdate(
                c,
                self.home[r],
                self._table(self.home[c], self.home[r], name_mixing(average.role, average.source)),
            )
            for c, call in enumerate(self.calls)
            for average in graph.averages
            if average.source == call.role and call.kind is Kind.TRAIN
            for r in [self.number[graph.role_calls(average.role)[0].name]]
        ]
        self.refreshes = self._refreshes(graph)
        """Refreshes that plans may contain, those of one call by role, then in the order of the graph."""
        self._order(graph)

    def gather(self, assignment: Ints) -> Columns:
        """Gather the columns of plans. `assignment`: [calls, plans], the candidate index of each call."""
        return self.columns[assignment + self.offsets]

    def _columns(self, call: Call) -> Columns:
        table = self.problem.table(call)
        layouts = table.layouts
        code = layouts.codes
        _, some, layout = np.unique(code, return_index=True, return_inverse=True)
        self._layouts.append(layouts[some])
        return Columns(
            first=layouts.first,
            end=layouts.first + layouts.size,
            code=code,
            layout=layout,
            limit=self.problem.limits(call),
            **vars(table.costs),
        )

    def candidates(self, call: int) -> Columns:
        """Return the columns of one call's candidates."""
        return self._of_call[call]

    def layouts(self, call: int) -> Layouts:
        """Return the distinct layouts of a call's candidates, which `Columns.layout` indexes."""
        return self._layouts[call]

    def _table(self, source: int, target: int, moving: str | None = None) -> TransferTable:
        """Transfers of the role of `source`, or of what else moves."""
        name = moving or self.calls[source].model_role
        key = name, source, target
        if key not in self._transfers:
            self._transfers[key] = TransferTable(
                self.problem.transfers, name, self._layouts[source], self._layouts[target]
            )
        return self._transfers[key]

    def _refreshes(self, graph: DataflowGraph) -> list[Refresh]:
        found = []
        for c, call in enumerate(self.calls):
            for role in changes(graph, call):
                home = self.number[self.problem.home(role).name]
                if self.candidates(home).keeps.any():
                    name = name_refreshing(graph, call, role, self.problem.parts)
                    copies = sorted(self.same_role[home])
                    found += [Refresh(c, home, copy, self._table(home, copy, name)) for copy in copies]
        return found

    def _order(self, graph: DataflowGraph) -> None:
        """Build the dependencies between calls: matrices are [call, earlier call]."""
        n = len(self.calls)
        self.ordered = np.zeros((n, n), dtype=bool)
        """Whether a call follows another in every plan."""
        self.feeds = [tuple(self.number[p.name] for p in producers(graph, call)) for call in self.calls]
        """Producers of each call's inputs, in the order in which it receives them."""
        self.late_lengths = self._late_lengths(graph)
        """(consumer, producer) -> calls whose row lengths may come after the producer's rows, which then wait for
        them: the consumer's items are divided by these lengths."""
        self.length_receivers = [self._length_receivers(graph, call) for call in self.calls]
        """Calls whose ranks receive row lengths from a call."""
        self.knows_lengths = np.zeros((n, n), dtype=bool)
        """Whether a call receives row lengths from an earlier one that it depends on."""
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

    def _late_lengths(self, graph: DataflowGraph) -> dict[tuple[int, int], list[int]]:
        known: list[set[int]] = []
        earliest: list[int] = []  # wave that a call is in, at least; at most it is its place in the order
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
            dividing = [self.number[other.name] for other in made if other is not None]
            for p in self.feeds[c]:
                if found := [q for q in dividing if may_be_late(q, p)]:
                    late[c, p] = found
        return late

    def exchanged(self, columns: Columns, c: int) -> list[Floats]:
        """Compute the seconds of receiving the outputs of each of a call's `feeds`, per plan."""
        target = self._layouts[c][columns.layout[c]]
        return [
            self.problem.exchange.seconds(
                self.calls[p].name, self.calls[c].name, self._layouts[p][columns.layout[p]], target
            )
            for p in self.feeds[c]
        ]


def _shares(graph: DataflowGraph, first: Call, second: Call) -> bool:
    """Whether two calls, in order, can share one replica of the same parameters."""
    between = graph.order[graph.order.index(first) : graph.order.index(second)]
    same = first.role == second.role and not first.is_function
    return same and not any(first.role in changes(graph, call) for call in between)
