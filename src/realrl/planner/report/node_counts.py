"""Comparison of plans on different numbers of nodes."""

from collections.abc import Sequence

from realrl.config.errors import UserError
from realrl.planner.reliability.goodput import predict_goodput
from realrl.planner.report.report import SizeReport
from realrl.planner.report.shortage_text import describe_shortage
from realrl.planner.search.nodes import ClusterSize, search_node_counts
from realrl.planner.search.plan_search import UserConstraints, find_plan
from realrl.planner.search.shortage import DoesNotFit
from realrl.planner.simulate.estimate import Estimate
from realrl.planner.simulate.estimator import estimate_plan
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.space.build import build_problem


def compare_sizes(
    scenario: Scenario, nodes: Sequence[int], *, effort: float, seed: int, constraints: UserConstraints
) -> tuple[SizeReport, ...]:
    """Find the best plan on the first nodes of the cluster, for each number in `nodes`.

    `nodes` are ascending, up to all of the scenario's. `effort`: that of each search. DoesNotFit if no plan
    fits even on all nodes.
    """
    spec = scenario.spec
    problem = build_problem(scenario, search_space=constraints.search_space)
    sizes = search_node_counts(problem, nodes, effort=effort, seed=seed)
    if sizes[-1].shortage is not None:
        raise DoesNotFit(sizes[-1].shortage)
    return tuple(
        _part_report(scenario.on(spec.with_nodes(size.nodes)), size, constraints=constraints, effort=effort)
        for size in sizes
    )


def make_size_report(
    scenario: Scenario, found: Estimate | None, gap: float | None, refused: str | None = None
) -> SizeReport:
    """Build the report of a scenario's number of nodes."""
    spec = scenario.spec
    return SizeReport(
        cluster=spec.name,
        kind=spec.groups[0].device.name,
        nodes=spec.nodes,
        devices=spec.size,
        estimate=found,
        gap=gap,
        refused=refused,
        price_per_hour=spec.price_per_hour,
        goodput=None if found is None else predict_goodput(scenario, found),
    )


def _part_report(
    scenario: Scenario, size: ClusterSize, *, constraints: UserConstraints, effort: float
) -> SizeReport:
    if size.problem is not None and size.result is not None:
        plan = size.problem.plan(size.result.assignment)
        return make_size_report(scenario, estimate_plan(scenario, plan), size.result.gap)
    shortage = size.shortage
    if shortage is None:
        # Candidates for a large cluster leave out small meshes: search anew on these few nodes.
        try:
            found = find_plan(scenario, effort=effort, constraints=constraints)
        except DoesNotFit as error:
            shortage = error.shortage
        except UserError as error:
            return make_size_report(scenario, None, None, str(error))
        else:
            return make_size_report(scenario, estimate_plan(scenario, found.plan), found.result.gap)
    unsure = "" if shortage.proven else "; this is the plan nearest to fitting of those that were tried"
    return make_size_report(scenario, None, None, describe_shortage(scenario, shortage) + unsure)
