"""Why a problem has no plan: what does not fit where."""

from dataclasses import dataclass

from realrl.dataflow.call import Call
from realrl.planner.evaluate.timeline import PlanEvaluation
from realrl.planner.space.problem import Assignment, Candidate, Problem


@dataclass(frozen=True)
class Shortage:
    """A device that cannot hold what the plan nearest to fitting needs there."""

    rank: int
    limit_bytes: float
    needed_bytes: float
    call: str
    """During which the device is fullest."""
    candidate: Candidate
    """How that call runs."""
    resident_bytes: dict[str, float]
    """Role -> what it keeps on the device all the time."""
    assignment: Assignment | None
    """The plan; None where the call alone fits no device."""
    proven: bool = True
    """Whether no plan fits at all; if not, none was found in the time there was."""

    @property
    def factor(self) -> float:
        """How many times its memory the device would need."""
        return self.needed_bytes / self.limit_bytes


class DoesNotFit(Exception):
    """No plan of a problem is known that fits the memory of its devices. Commands make a sentence of `shortage`."""

    def __init__(self, shortage: Shortage) -> None:
        self.shortage = shortage
        super().__init__(
            f"{shortage.call} needs {shortage.factor:.3g} times the memory of device {shortage.rank}"
        )


def explain_call_shortage(problem: Problem, call: Call, number: int) -> Shortage:
    """Of a call that fits no device, which no function is; `number`: of the option that comes nearest."""
    candidate = problem.candidates[call.name][number]
    is_home = problem.is_home(call)
    resident = {call.model_role: candidate.resident_bytes} if is_home else {}
    needed = candidate.bytes_alone(is_home=is_home)
    rank = candidate.placement.mesh.first
    return Shortage(rank, problem.limit(candidate.placement), needed, call.name, candidate, resident, None)


def explain_plan_shortage(problem: Problem, assignment: Assignment, evaluation: PlanEvaluation) -> Shortage:
    """Of a whole plan."""
    candidates = problem.chosen_candidates(assignment)
    rank = evaluation.peak_rank
    homes = {role: candidates[problem.home(role).name] for role in problem.graph.roles}
    resident = {role: o.resident_bytes for role, o in homes.items() if rank in o.placement.ranks}
    models = {call.name: candidates[call.name] for call in problem.graph.calls if not call.is_function}
    here = {name: o for name, o in models.items() if rank in o.placement.ranks}
    biggest = max(here, key=lambda name: here[name].working_bytes + _copy(problem, candidates, name))
    limit, needed = problem.limit(candidates[biggest].placement), evaluation.peak_bytes
    return Shortage(rank, limit, needed, biggest, candidates[biggest], resident, assignment)


def _copy(problem: Problem, candidates: dict[str, Candidate], name: str) -> float:
    """Bytes of the parameters that a call brings to its devices."""
    home = candidates[problem.home(problem.graph.call(name).model_role).name]
    borrowed = candidates[name].layout != home.layout
    return candidates[name].weights_bytes if borrowed or home.offload else 0.0
