"""Explanations on a plan's page: how to read it, and how its numbers were computed."""

from typing import TYPE_CHECKING

from realrl.cli.page.text import format_count, format_seconds, format_share
from realrl.config.errors import join
from realrl.plan.plan import Plan
from realrl.planner.memory.memory_model import FRAGMENTATION
from realrl.program.instructions import Load, Offload, Reallocate, Run
from realrl.program.lower import home_placements
from realrl.program.memory import find_holders, list_sharers

if TYPE_CHECKING:
    from realrl.planner.report.report import PlanReport
    from realrl.planner.simulate.scenario import Scenario


def list_legend(report: "PlanReport") -> list[tuple[str, str]]:
    """List the CSS classes of the picture of a step with their meaning."""
    graph = report.scenario.graph
    instructions = {type(s.instruction) for rank in report.chosen.slices for s in rank}
    models = (call.call for call in report.chosen.calls.values() if not call.call.is_function)
    kinds = dict.fromkeys(str(call.kind) for call in models)
    found = [(f"r7 {kind}", kind) for kind in kinds if Run in instructions]
    if graph.functions:
        found.append(("function", "function on the host"))
    if Reallocate in instructions:
        found.append(("r7 move", "parameters are reallocated"))
    if {Load, Offload} & instructions:
        found.append(("r7 host", "copied from or to host memory"))
    return [*found, ("wait", "waits for others, or exchanges data")]


def list_remarks(plan: Plan, scenario: "Scenario") -> list[str]:
    """List the decisions of a plan besides the placement of calls, and what roles share."""
    away = {"parameters": plan.offload, "gradients and optimizer": plan.offload_optimizer}
    texts = [f"{what} of {join(roles)}" for what, roles in away.items() if roles]
    found = [f"In host memory while not in use: {'; '.join(texts)}."] if texts else []
    if plan.keep:
        found.append(f"Copies of {join(plan.keep)} in other layouts are kept.")
    holders = find_holders(list_sharers(scenario.models), home_placements(scenario.graph, plan))
    for holder in dict.fromkeys(holders.values()):
        others = [role for role in holders if holders[role] == holder and role != holder]
        found.append(f"{join([holder, *others])} share one copy of their frozen weights, that of {holder}.")
    return found


def write_notes(report: "PlanReport", source: str) -> list[tuple[str, str]]:
    """Write the notes on a plan's page as (heading, text). `source` says where the predicted times come from."""
    options = report.candidates.values()
    ways = f"{min(options):,} to {max(options):,}" if min(options) < max(options) else f"{min(options):,}"
    return [
        (
            "The picture.",
            "dp, tp and pp are degrees of data, tensor and pipeline parallelism. A mesh is whole nodes, or part of"
            " one. Calls on different devices run side by side when neither needs what the other produces."
            " Functions run on hosts, beside what devices do.",
        ),
        (
            "Seconds.",
            "The very programs that workers execute are simulated, instruction by instruction; what a call takes is"
            f" the sum of its terms{f': {source}' if source else ''}.",
        ),
        (
            "Bytes.",
            "Parameters, gradients and optimizer follow from the layout of each role; activations, logits and"
            " caches from the largest micro-batch. On CPUs generation may multiply by a packed copy of weights,"
            f" which always counts. {format_share(FRAGMENTATION)} of what comes and goes is added"
            " for fragmentation, and NCCL's buffers for each group of ranks. What drivers and message buffers take"
            " is not part of the capacity.",
        ),
        (
            "Search.",
            f"{format_count(report.evaluations)} plans were costed in {format_seconds(report.search_seconds)}, made"
            f" of {ways} ways to run each call. No plan that can be made of them has a step shorter than"
            f" {format_seconds(report.lower_bound_seconds)}; that is proven by branch and bound,"
            " of the times that are predicted here, not of those of a machine.",
        ),
        (
            "Utilisation and MFU.",
            "Utilisation is the share of time in which devices compute a call or move parameters. MFU relates the"
            " arithmetic of the models, without what is computed again, to the peak of all devices.",
        ),
    ]
