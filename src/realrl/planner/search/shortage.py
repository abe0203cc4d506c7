"""Memory shortage of a problem for which no plan fits."""

from dataclasses import dataclass

from realrl.dataflow.call import Call
from realrl.plan.placement import Placement
from realrl.planner.search.many_plans import PlanEvaluation
from realrl.planner.space.candidate import count_bytes_alone
from realrl.planner.space.problem import Assignment, Problem
from realrl.program.lower import home_placements, kept_copies


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """Memory shortage on one device, or on the host of one node, under the plan nearest to fitting."""

    rank: int
    """Rank of the device, or of some device on the node."""
    limit_bytes: float
    needed_bytes: float
    call: str
    """Call during which memory peaks."""
    placement: Placement
    """Placement of that call."""
    resident_bytes: dict[str, float]
    """Resident bytes on the device, by role, including kept copies."""
    node: int | None = None
    """Node whose host has too little memory for offloaded state, or None if a device has too little memory."""
    proven: bool = True
    """Whether it is proven that no plan fits. If false, the search found none within its effort."""

    @property
    def factor(self) -> float:
        """Ratio of needed to usable memory of the device or host."""
        return self.needed_bytes / self.limit_bytes


class DoesNotFit(Exception):
    """No plan of a problem is known to fit into memory. `shortage` has the details."""

    def __init__(self, shortage: Shortage) -> None:
        self.shortage = shortage
        where = f"device {shortage.rank}" if shortage.node is None else f"the host of node {shortage.node}"
        super().__init__(f"{shortage.call} needs {shortage.factor:.3g} times the memory of {where}")


def explain_call_shortage(problem: Problem, call: Call, number: int) -> Shortage:
    """Describe the shortage of a call that does not even fit alone. `number`: index of its leanest candidate."""
    candidate, is_home = problem.candidates[call.name][number], problem.is_home(call)
    return Shortage(
        rank=candidate.placement.mesh.first,
        limit_bytes=problem.limit(candidate.placement),
        needed_bytes=count_bytes_alone(candidate, is_home=is_home),
        call=call.name,
        placement=candidate.placement,
        resident_bytes={call.model_role: candidate.resident_bytes} if is_home else {},
    )


def explain_plan_shortage(problem: Problem, assignment: Assignment, evaluation: PlanEvaluation) -> Shortage:
    """Describe the shortage on the peak device of a plan, or on that device's host."""
    rank, graph = evaluation.peak_rank, problem.graph
    plan, candidates = problem.plan(assignment), problem.chosen_candidates(assignment)
    homes = {role: candidates[problem.home(role).name] for role in graph.roles}
    resident = {role: home.resident_bytes for role, home in homes.items() if rank in home.placement.ranks}
    for role, copies in kept_copies(graph, plan, home_placements(graph, plan)).items():
        for place in (copy for copy in copies if rank in copy.ranks):
            users = (candidates[call.name] for call in graph.role_calls(role))
            weights = next(user.weights_bytes for user in users if user.placement == place)
            resident[role] = resident.get(role, 0.0) + weights

    def count_used(call: Call) -> float:
        """Count the working memory of a call, with the temporary replica of parameters that it needs."""
        own, home = candidates[call.name], homes[call.model_role]
        replica = home.offload if own.layout == home.layout else not home.keep
        return own.working_bytes + own.weights_bytes * replica

    here = [
        call for call in graph.calls if not call.is_function and rank in candidates[call.name].placement.ranks
    ]
    biggest = max(here, key=count_used).name
    node = problem.cluster.node(rank)
    return Shortage(
        rank=rank,
        node=node if evaluation.by_host else None,
        limit_bytes=problem.host_memory_bytes[node] if evaluation.by_host else problem.memory_bytes[node],
        needed_bytes=evaluation.peak_bytes,
        call=biggest,
        placement=candidates[biggest].placement,
        resident_bytes=resident,
    )
