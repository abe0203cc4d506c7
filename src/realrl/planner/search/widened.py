"""Initial plan of a search on many nodes: that of few nodes and few records, with more data-parallel ranks."""

from dataclasses import replace

from realrl.plan.cluster import Cluster
from realrl.plan.placement import Mesh, Placement
from realrl.plan.plan import Plan
from realrl.planner.simulate.scenario import Scenario

_FEW_NODES = range(8, 17)
"""Numbers of nodes for which nearly every plan is enumerated, and found soon."""


def shrink_scenario(scenario: Scenario) -> tuple[Scenario, int] | None:
    """Return a scenario of few nodes with as many records for each, and how many times it goes into the given one.

    Of the numbers of nodes that are tried, the one which leaves the fewest idle. None where nodes differ, where
    there are few of them already, or where each has less than a record.
    """
    spec, workload = scenario.spec, scenario.workload
    if len(spec.groups) > 1 or spec.nodes < 2 * max(_FEW_NODES):
        return None
    few = min(reversed(_FEW_NODES), key=lambda nodes: spec.nodes % nodes)
    by = spec.nodes // few
    prompts = workload.items // workload.samples // by
    if prompts == 0:
        return None
    small = replace(workload, items=prompts * workload.samples)
    return replace(scenario.on(spec.with_nodes(few)), workload=small), by


def widen_plan(plan: Plan, by: int, cluster: Cluster) -> Plan:
    """Return a plan for more nodes, with `by` times as many data-parallel ranks on as many devices."""
    placements = {
        name: Placement(
            Mesh(by * place.mesh.first, by * place.mesh.size),
            place.strategy.with_degrees(dp=by * place.strategy.dp),
        )
        for name, place in plan.placements.items()
    }
    return replace(plan, cluster=cluster, placements=placements)
