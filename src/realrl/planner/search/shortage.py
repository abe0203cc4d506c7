"""Memory shortage of a problem for which no plan fits."""

from dataclasses import dataclass

from realrl.dataflow.call import Call
from realrl.planner.search.many_plans import PlanEvaluation
from realrl.planner.space.candidate import Candidate, count_bytes_alone
from realrl.planner.space.problem import Assignment, Problem
from realrl.program.lower import home_placements, kept_copies


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """Memory shortage on one device, or on the host of one node, under the plan nearest to fitting."""

    rank: int
    """Rank of the device, or of a device on the node."""
    limit_bytes: float
    needed_bytes: float
    call: str
    """Call during which memory peaks."""
    candidate: Candidate
    """Candidate of that call."""
    resident_bytes: dict[str, float]
    """Resident bytes on the device, by role; kept copies are included."""
    assignment: Assignment | None
    """Assignment of the plan; None if the call alone does not fit on any device."""
    node: int | None = None
    """Node whose host has too little memory for offloaded state; None if a device has too little memory."""
    proven: bool = True
    """Whether it is proven that no plan fits; otherwise the search found none within its effort."""

    @property
    def factor(self) -> float:
        """Ratio of needed to usable memory of the device or host."""
        return self.needed_bytes / self.limit_bytes


class DoesNotFit(Exception):
    """No plan of a problem is known to fit into memory; `shortage` has the details."""

    def __init__(self, shortage: Shortage) -> None:
        self.shortage = shortage
        where = f"device {shortage.rank}" if shortage.node is None else f"the host of node {shortage.node}"
        super().__init__(f"{shortage.call} needs {shortage.factor:.3g} times the memory of {where}")


def explain_call_shortage(problem: Problem, call: Call, number: int) -> Shortage:
    """Describe the shortage of a call that does not even fit alone; `number`: index of its leanest candidate."""
    candidate = problem.candidates[call.name][number]
    is_home = problem.is_home(call)
    resident = {call.model_role: candidate.resident_bytes} if is_home else {}
    needed = count_bytes_alone(candidate, is_home=is_home)
    rank = candidate.placement.mesh.first
    return Shortage(
        rank=rank,
        limit_bytes=problem.limit(candidate.placement),
        needed_bytes=needed,
        call=call.name,
        candidate=candidate,
        resident_bytes=resident,
        assignment=None,
    )


def explain_plan_shortage(problem: Problem, assignment: Assignment, evaluation: PlanEvaluation) -> Shortage:
    """Describe the shortage on the peak device of a plan, or on that device's host."""
    candidates = problem.chosen_candidates(assignment)
    rank = evaluation.peak_rank
    homes = {role: candidates[problem.home(role).name] for role in problem.graph.roles}
    resident = {role: o.resident_bytes for role, o in homes.items() if rank in o.placement.ranks}
    for role, copies in _kept(problem, assignment).items():
        for copy in (copy for copy in copies if rank in copy.placement.ranks):
            resident[role] = resident.get(role, 0.0) + copy.weights_bytes
    models = {call.name: candidates[call.name] for call in problem.graph.calls if not call.is_function}
    here = {name: o for name, o in models.items() if rank in o.placement.ranks}
    node = problem.cluster.node(rank)
    biggest = max(here, key=lambda name: here[name].working_bytes + _copy(problem, candidates, name))
    return Shortage(
        rank=rank,
        node=node if evaluation.by_host else None,
        limit_bytes=problem.host_memory_bytes[node] if evaluation.by_host else problem.memory_bytes[node],
        needed_bytes=evaluation.peak_bytes,
        call=biggest,
        candidate=candidates[biggest],
        resident_bytes=resident,
        assignment=assignment,
    )


def _copy(problem: Problem, candidates: dict[str, Candidate], name: str) -> float:
    """Return the bytes of the temporary replica of its parameters that a call needs."""
    home = candidates[problem.home(problem.graph.call(name).model_role).name]
    if candidates[name].layout != home.layout:
        return 0.0 if home.keep else candidates[name].weights_bytes
    return candidates[name].weights_bytes if home.offload else 0.0


def _kept(problem: Problem, assignment: Assignment) -> dict[str, list[Candidate]]:
    """Find one candidate per kept copy of the plan that uses this copy, by role."""
    plan, candidates = problem.plan(assignment), problem.chosen_candidates(assignment)
    copies = kept_copies(problem.graph, plan, home_placements(problem.graph, plan))
    return {
        role: [
            next(
                o
                for call in problem.graph.role_calls(role)
                if (o := candidates[call.name]).placement == place
            )
            for place in places
        ]
        for role, places in copies.items()
    }
