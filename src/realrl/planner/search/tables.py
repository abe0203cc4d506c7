"""Search problem as arrays, for vectorised evaluation."""

from dataclasses import dataclass, fields

import numpy as np

from realrl.dataflow.call import Call
from realrl.planner.moves.links import TransferTable
from realrl.planner.moves.transfers import Layouts, name_mixing, name_refreshing
from realrl.planner.space.candidate import Costs
from realrl.planner.space.problem import Problem
from realrl.program.arrays import Floats, Ints
from realrl.program.step import OF_OFFLOADED, Activity, Phase, StepGraph


@dataclass(frozen=True, kw_only=True)
class Columns(Costs):
    """Meshes and costs of candidates: one entry per candidate, or [calls, plans] for the candidates of plans."""

    first: Ints
    """First rank of the mesh. Its ranks are `first` to `end` - 1."""
    end: Ints
    code: Ints
    """Code of the layout. Equal codes mean equal layouts."""
    layout: Ints
    """Index of the layout among the distinct layouts of the call."""
    limit: Floats
    """Usable bytes of a device."""


class Tables(StepGraph):
    """Search problem as arrays. Calls are numbers in the order of the graph."""

    def __init__(self, problem: Problem) -> None:
        graph = problem.graph
        number = {call.name: i for i, call in enumerate(graph.order)}
        super().__init__(graph, {role: number[problem.home(role).name] for role in graph.roles})
        self.problem = problem
        self.sizes = np.array([len(problem.candidates[call.name]) for call in self.calls])
        self.offsets = np.concatenate([[0], np.cumsum(self.sizes)[:-1]])[:, None]
        self._layouts: list[Layouts] = []
        self._transfers: dict[tuple[str, int, int], TransferTable] = {}
        self._of_call = [self._columns(call) for call in self.calls]
        names = [field.name for field in fields(Columns)]
        self.columns = Columns(
            **{name: np.concatenate([getattr(of, name) for of in self._of_call]) for name in names}
        )
        self.possible = tuple(filter(self._is_possible, self.activities))
        """Activities that plans with these candidates may contain."""
        self.reallocation = {a.call: self.transfers(a) for a in self.possible if a.phase is Phase.REALLOCATE}
        """Call -> table of the seconds of the reallocation before it. Only calls that are not the home of their
        role have an entry."""
        self.refreshes = [a for a in self.possible if a.phase in (Phase.REFRESH, Phase.REFRESH_FOLLOWER)]
        self.sharing_homes = [
            tuple(self.number[problem.home(role).name] for role in roles) for roles in problem.sharers
        ]
        """Groups of home calls whose roles have the same frozen weights."""

    def _is_possible(self, activity: Activity) -> bool:
        match activity.phase:
            case Phase.HAND_ON | Phase.HAND_ON_COLLECTED:
                return bool(self.length_receivers[activity.call])
            case Phase.REFRESH | Phase.REFRESH_FOLLOWER:
                return bool(self.candidates(activity.home).keep.any())
            case phase if phase in OF_OFFLOADED:
                return bool(self.candidates(activity.home).offload.any())
        return True

    def transfers(self, activity: Activity) -> TransferTable:
        """Return the table of the seconds in which an activity moves parameters from its home's to its target's
        layout."""
        call, average = self.calls[activity.call], activity.average
        match activity.phase:
            case Phase.UPDATE_FOLLOWER:
                assert average is not None, "a follower has a moving average"
                name = name_mixing(average.role, average.source)
            case Phase.REFRESH | Phase.REFRESH_FOLLOWER:
                role = call.model_role if average is None else average.role
                name = name_refreshing(self.graph, call, role, self.problem.parts)
            case _:
                name = call.model_role
        key = name, activity.home, activity.target
        if key not in self._transfers:
            self._transfers[key] = TransferTable(
                self.problem.transfers, name, self._layouts[activity.home], self._layouts[activity.target]
            )
        return self._transfers[key]

    def gather(self, assignment: Ints) -> Columns:
        """Gather the columns of plans, [calls, plans]. `assignment`: candidate index of each call, [calls,
        plans]."""
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

    def exchanged(self, columns: Columns, c: int) -> list[Floats]:
        """Return the seconds to receive the outputs of each producer in a call's `feeds`, [plans] each."""
        target = self._layouts[c][columns.layout[c]]
        return [
            self.problem.exchange.seconds(
                self.calls[p].name, self.calls[c].name, self._layouts[p][columns.layout[p]], target
            )
            for p in self.feeds[c]
        ]
