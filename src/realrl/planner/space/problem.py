"""What a search decides: for each call of a step, one of its options."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from realrl.config.errors import UserError
from realrl.dataflow.call import Call
from realrl.dataflow.graph import DataflowGraph
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Placement
from realrl.plan.plan import Plan
from realrl.planner.moves.exchange import ExchangeModel
from realrl.planner.moves.transfers import Transfers


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to run a call, and what it costs. Bytes are those of the fullest device of the mesh."""

    placement: Placement
    seconds: float
    """Of the call alone: its parameters and inputs are there."""
    weights_bytes: float
    """A copy of the role's parameters in this layout."""
    resident_bytes: float
    """What the role keeps in device memory all the time if its home is here."""
    working_bytes: float
    """What the call needs while it runs, besides what its role keeps and a copy of the parameters."""
    offload: bool = False
    """Whether the role's parameters wait in host memory between uses; only where the call is the role's home."""
    offload_optimizer: bool = False
    """The same for gradients and optimizer."""
    load_seconds: float = 0.0
    """Time to bring parameters that wait in host memory here."""
    unload_seconds: float = 0.0
    """Time to bring them back: none where they are never changed."""

    def bytes_alone(self, *, is_home: bool) -> float:
        """What a device needs at least while the call runs; `is_home`: whether its role lives here."""
        if not is_home:
            return self.working_bytes + self.weights_bytes
        return self.resident_bytes + self.working_bytes + self.weights_bytes * self.offload

    @property
    def layout(self) -> tuple[int, int, int, int]:
        """Equal for two options exactly when parameters lie alike."""
        p = self.placement
        return p.mesh.first, p.mesh.size, p.strategy.tp, p.strategy.pp


Assignment = Mapping[str, int]
"""Call -> number of the option it runs with."""


@dataclass(frozen=True)
class Problem:
    """A step to plan. Its mappings must not be changed.

    A role's home, where its parameters stay between steps, is the option of its training call, or of its first
    call where it is not trained. Calls in another layout need a reallocation before them.
    """

    graph: DataflowGraph
    cluster: Cluster
    candidates: Mapping[str, tuple[Candidate, ...]]
    """Call -> what to choose from."""
    transfers: Transfers
    memory_bytes: tuple[float, ...]
    """Per node, what a plan may use of each of its devices. A mesh lies on nodes of which this is the same."""
    exchange: ExchangeModel
    """What bringing its inputs to a call takes."""

    def __post_init__(self) -> None:
        if len(self.memory_bytes) != self.cluster.nodes:
            raise ValueError(f"{len(self.memory_bytes)} memory sizes for {self.cluster.nodes} nodes")
        for call in self.graph.calls:
            candidates = self.candidates.get(call.name, ())
            if not candidates:
                raise UserError(f"call {call.name} has no option to run with on cluster {self.cluster}")
            if not self.is_home(call) and any(o.offload or o.offload_optimizer for o in candidates):
                raise ValueError(
                    f"{call.name} is not the home of a role, so it cannot decide what to offload"
                )
            for candidate in candidates:
                if (
                    candidate.seconds < 0
                    or candidate.placement.mesh.first + candidate.placement.mesh.size > self.cluster.size
                ):
                    raise ValueError(f"{call.name} cannot run with {candidate}")

    def home(self, role: str) -> Call:
        """The call whose option says where a role lives."""
        return self.graph.home(role)

    def is_home(self, call: Call) -> bool:
        """Whether a role lives where the call runs; never where a function does."""
        return call.role is not None and self.home(call.role) == call

    def limit(self, placement: Placement) -> float:
        """Bytes a plan may use of each device of a placement."""
        return self.memory_bytes[self.cluster.node(placement.mesh.first)]

    def chosen_candidates(self, assignment: Assignment) -> dict[str, Candidate]:
        """The option of each call."""
        return {call.name: self.candidates[call.name][assignment[call.name]] for call in self.graph.calls}

    def find_assignment(self, plan: Plan) -> Assignment | None:
        """The choice that a plan stands for; None if a call has no such option, or the plan keeps copies, which
        options do not."""
        if plan.keep:
            return None
        found = {}
        for call in self.graph.calls:
            home = self.is_home(call)
            flags = (home and call.role in plan.offload, home and call.role in plan.offload_optimizer)
            alike = (
                number
                for number, candidate in enumerate(self.candidates[call.name])
                if candidate.placement == plan[call.name]
                and (candidate.offload, candidate.offload_optimizer) == flags
            )
            number = next(alike, None)
            if number is None:
                return None
            found[call.name] = number
        return found

    def restricted(self, nodes: int) -> "Problem | None":
        """The same on the first `nodes` nodes; None if some call has no option there."""
        cluster = Cluster(nodes, self.cluster.devices_per_node)
        candidates = {
            name: tuple(o for o in given if o.placement.mesh.first + o.placement.mesh.size <= cluster.size)
            for name, given in self.candidates.items()
        }
        if not all(candidates.values()):
            return None
        return replace(self, cluster=cluster, candidates=candidates, memory_bytes=self.memory_bytes[:nodes])

    def plan(self, assignment: Assignment) -> Plan:
        """The plan a choice stands for."""
        candidates = self.chosen_candidates(assignment)
        homes = {role: candidates[self.home(role).name] for role in self.graph.roles}
        return Plan(
            self.cluster,
            {name: candidate.placement for name, candidate in candidates.items()},
            offload=tuple(role for role, candidate in homes.items() if candidate.offload),
            offload_optimizer=tuple(role for role, candidate in homes.items() if candidate.offload_optimizer),
        )
