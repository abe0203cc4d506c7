"""What plans take and cost on different numbers of nodes."""

from collections.abc import Sequence

from realrl.config.errors import UserError
from realrl.planner.evaluate.shortage import DoesNotFit
from realrl.planner.report.alternatives import describe_shortage
from realrl.planner.report.report import SizeReport
from realrl.planner.search.nodes import ClusterSize, search_node_counts
from realrl.planner.search.plan_search import UserConstraints, find_plan
from realrl.planner.simulate.estimate import Estimate
from realrl.planner.simulate.estimator import estimate_plan
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.space.build import build_problem


def compare_sizes(
    scenario: Scenario, nodes: Sequence[int], *, seconds: float, seed: int, constraints: UserConstraints
) -> tuple[SizeReport, ...]:
    """The best plans on the first so many nodes, for each of `nodes`, which ascend to all of the scenario's.

    `seconds`: of the search, for each. DoesNotFit if there is none even on all nodes.
    """
    spec, problem = scenario.spec, build_problem(scenario, search_space=constraints.search_space)
    parts = search_node_counts(problem, nodes, seconds=seconds, seed=seed)
    if parts[-1].shortage is not None:
        raise DoesNotFit(parts[-1].shortage)
    return tuple(
        _part_report(scenario.on(spec.with_nodes(part.nodes)), part, constraints=constraints, seconds=seconds)
        for part in parts
    )


def make_size_report(
    scenario: Scenario, found: Estimate | None, gap: float | None, refused: str | None = None
) -> SizeReport:
    """The row of a scenario's number of nodes."""
    spec = scenario.spec
    return SizeReport(spec.nodes, spec.size, found, gap, refused, spec.price_per_hour)


def _part_report(
    scenario: Scenario, part: ClusterSize, *, constraints: UserConstraints, seconds: float
) -> SizeReport:
    if part.problem is not None and part.result is not None:
        plan = part.problem.plan(part.result.assignment)
        return make_size_report(scenario, estimate_plan(scenario, plan), part.result.gap)
    shortage = part.shortage
    if shortage is None:
        # So few nodes have no part in the candidates of so many.
        try:
            found = find_plan(scenario, seconds=seconds, constraints=constraints)
        except DoesNotFit as error:
            shortage = error.shortage
        except UserError as error:
            return make_size_report(scenario, None, None, str(error))
        else:
            return make_size_report(scenario, estimate_plan(scenario, found.plan), found.result.gap)
    unsure = "" if shortage.proven else "; this is the plan nearest to fitting of those that were tried"
    return make_size_report(scenario, None, None, describe_shortage(scenario, shortage) + unsure)
