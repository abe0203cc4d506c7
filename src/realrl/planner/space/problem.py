"""Search problem: the candidates of every call of a step. An assignment selects one candidate per call."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from realrl.config.errors import UserError
from realrl.dataflow.call import Call
from realrl.dataflow.graph import DataflowGraph
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Placement
from realrl.plan.plan import Plan
from realrl.planner.moves.exchange import ExchangeModel
from realrl.planner.moves.links import LinkTransfers
from realrl.planner.moves.transfers import find_nodes
from realrl.planner.space.candidate import Candidate, CandidateTable
from realrl.program.arrays import Floats, Ints
from realrl.program.lower import home_placements, kept_copies
from realrl.program.order import TrainableParts

Assignment = Mapping[str, int]
"""Index of the selected candidate, by call."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Search problem of one step. Its mappings must not be modified.

    A role's home (primary placement) holds its parameters between steps. The home is the candidate of the role's
    training call, or of its first call if it is not trained. A call in another layout needs a reallocation before
    it, or a kept copy.
    """

    graph: DataflowGraph
    cluster: Cluster
    candidates: Mapping[str, tuple[Candidate, ...]]
    """Candidates by call."""
    transfers: LinkTransfers
    memory_bytes: tuple[float, ...]
    """Usable bytes per device, by node. They are equal on all nodes of a mesh."""
    exchange: ExchangeModel
    """Time model of data exchange between calls."""
    sharers: tuple[tuple[str, ...], ...] = ()
    """Groups of roles with the same frozen weights. Roles of a group whose homes have equal layouts hold one copy
    together. These roles must not offload their parameters."""
    host_memory_bytes: tuple[float, ...] = ()
    """Bytes of host memory for offloaded state, by node. Empty means no limit."""
    apart: str | None = None
    """A generate call that must share no device with another call; None if there is none."""
    parts: TrainableParts = field(default_factory=dict)
    """Parts that training updates, by role. Roles that train all their parameters are left out."""

    def __post_init__(self) -> None:
        if len(self.memory_bytes) != self.cluster.nodes:
            raise ValueError(f"{len(self.memory_bytes)} memory sizes for {self.cluster.nodes} nodes")
        tables = {name: CandidateTable.of(given) for name, given in self.candidates.items()}
        object.__setattr__(self, "candidates", tables)
        for call in self.graph.calls:
            if not self.candidates.get(call.name):
                raise UserError(f"call {call.name} has no option to run with on cluster {self.cluster}")
            table = self.table(call)
            costs = table.costs
            if not self.is_home(call) and (costs.offload | costs.offload_optimizer | costs.keep).any():
                raise ValueError(
                    f"{call.name} is not the home of a role, so it cannot decide what to offload or keep"
                )
            outside = table.layouts.first + table.layouts.size > self.cluster.size
            for number in np.flatnonzero((costs.seconds < 0) | outside):
                raise ValueError(f"{call.name} cannot run with {table[number]}")

    def table(self, call: Call) -> CandidateTable:
        """Return the candidates of a call with their columns."""
        table = self.candidates[call.name]
        assert isinstance(table, CandidateTable), "__post_init__ makes tables"
        return table

    def select(self, numbers: Mapping[str, Ints]) -> "Problem":
        """Restrict the problem to some candidates. `numbers`: indices of these candidates, by call."""
        candidates = {call.name: self.table(call).select(numbers[call.name]) for call in self.graph.calls}
        return replace(self, candidates=candidates)

    def home(self, role: str) -> Call:
        """Return the call whose candidate decides the primary placement of a role."""
        return self.graph.home(role)

    def is_home(self, call: Call) -> bool:
        """Check whether the call's placement is the home of its role. Returns False for a function."""
        return call.role is not None and self.home(call.role) == call

    def limit(self, placement: Placement) -> float:
        return self.memory_bytes[self.cluster.node(placement.mesh.first)]

    def limits(self, call: Call) -> Floats:
        """Return the usable bytes per device of each candidate of a call, [candidates]."""
        return np.array(self.memory_bytes)[find_nodes(self.cluster)[self.table(call).layouts.first]]

    def chosen_candidates(self, assignment: Assignment) -> dict[str, Candidate]:
        return {call.name: self.candidates[call.name][assignment[call.name]] for call in self.graph.calls}

    def find_assignment(self, plan: Plan) -> Assignment | None:
        """Find the assignment of a plan. Returns None if a call has no such candidate."""
        kept = kept_copies(self.graph, plan, home_placements(self.graph, plan))
        assignment = {}
        for call in self.graph.calls:
            chosen = (plan.offload, plan.offload_optimizer, [role for role in kept if kept[role]])
            flags = tuple(self.is_home(call) and call.role in roles for roles in chosen)
            alike = (
                number
                for number, candidate in enumerate(self.candidates[call.name])
                if candidate.placement == plan[call.name]
                and (candidate.offload, candidate.offload_optimizer, candidate.keep) == flags
            )
            number = next(alike, None)
            if number is None:
                return None
            assignment[call.name] = number
        return assignment

    def restricted(self, nodes: int) -> "Problem | None":
        """Restrict the problem to the first `nodes` nodes. Returns None if some call has no candidate on them."""
        cluster = self.cluster.part(0, self.cluster.bounds[nodes])
        candidates = {}
        for call in self.graph.calls:
            layouts = self.table(call).layouts
            inside = np.flatnonzero(layouts.first + layouts.size <= cluster.size)
            candidates[call.name] = self.table(call).select(inside)
        if not all(candidates.values()):
            return None
        return replace(
            self,
            cluster=cluster,
            candidates=candidates,
            memory_bytes=self.memory_bytes[:nodes],
            host_memory_bytes=self.host_memory_bytes[:nodes],
        )

    def plan(self, assignment: Assignment) -> Plan:
        """Build the plan of an assignment. `Plan.keep` names only roles that have copies."""
        candidates = self.chosen_candidates(assignment)
        homes = {role: candidates[self.home(role).name] for role in self.graph.roles}
        away = {
            call.role
            for call in self.graph.calls
            if call.role is not None and candidates[call.name].layout != homes[call.role].layout
        }
        return Plan(
            self.cluster,
            {name: candidate.placement for name, candidate in candidates.items()},
            offload=tuple(role for role, candidate in homes.items() if candidate.offload),
            offload_optimizer=tuple(role for role, candidate in homes.items() if candidate.offload_optimizer),
            keep=tuple(role for role, candidate in homes.items() if candidate.keep and role in away),
        )
