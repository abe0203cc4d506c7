"""Page of a plan, an HTML file that needs no network, and the picture of a step as an SVG file."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from realrl import __version__
from realrl.cli.page.bars import list_memory_parts, list_terms, make_memory_cards, make_time_bars
from realrl.cli.page.tables import (
    describe_staleness,
    list_rivals,
    make_alternatives_table,
    make_calls_table,
    make_moves_table,
    make_sizes_table,
    make_staleness_table,
    name_reason,
    place_bound,
)
from realrl.cli.page.text import (
    find_role_class,
    format_batch,
    format_count,
    format_devices,
    format_dtype,
    format_parameters,
    format_seconds,
    format_share,
    format_span,
    name_model,
)
from realrl.cli.page.timeline import draw_timeline, find_template
from realrl.config.errors import join
from realrl.config.files import write_whole
from realrl.config.values import format_bytes
from realrl.plan.plan import Plan
from realrl.planner.memory.call_memory import FRAGMENTATION
from realrl.planner.report.report import describe_gap
from realrl.planner.report.shortage_text import describe_misfit
from realrl.planner.simulate.estimate import LEVEL
from realrl.program.instructions import Load, Offload, Reallocate, Run
from realrl.program.lower import home_placements
from realrl.program.memory import find_holders, list_sharers

if TYPE_CHECKING:
    from realrl.planner.report.report import PlanReport
    from realrl.planner.simulate.scenario import Scenario


def write_page(report: "PlanReport", path: Path, title: str, *, source: str = "", command: str = "") -> None:
    """Write the HTML page of a plan.

    `source`: a note on the origin of the predicted times. `command`: the command line that made the page. An empty
    argument is left out.
    """
    page = find_template("page.html.jinja").render(
        title=title,
        version=__version__,
        command=command,
        plan=report.chosen.plan.to_text(report.scenario.graph),
        fits=report.chosen.fits,
        verdict=write_verdict(report),
        models=_list_models(report),
        devices=format_devices(report.scenario.spec),
        batch=format_batch(report.scenario),
        figures=_list_figures(report),
        timeline=draw_timeline(report),
        legend=_list_legend(report),
        time_bars=make_time_bars(report),
        terms=list_terms(report),
        memory=make_memory_cards(report),
        parts=list_memory_parts(report),
        rivals=[*list_rivals(report)],
        level=format_share(LEVEL),
        bound=place_bound(report),
        failures=describe_failures(report),
        sizes=make_sizes_table(report),
        staleness=make_staleness_table(report) if report.staleness else None,
        gain=describe_staleness(report),
        objective=f"the {name_reason(report.objective, report.sizes)}",
        calls=make_calls_table(report),
        remarks=list_remarks(report.chosen.plan, report.scenario),
        moves=make_moves_table(report),
        alternatives=make_alternatives_table(report, report.alternatives),
        notes=_write_notes(report, source),
    )
    write_whole(path, page)


def draw_timeline_svg(report: "PlanReport", title: str) -> str:
    """Draw the picture of a step alone, as the text of a self-contained SVG file."""
    picture = find_template("picture.svg.jinja")
    return picture.render(timeline=draw_timeline(report), legend=_list_legend(report), title=title)


def write_verdict(report: "PlanReport") -> str:
    """Summarize the plan in a line: its speed compared with the best preset and the proven lower bound."""
    if not report.chosen.fits:
        return f"This plan does not fit: {describe_misfit(report.chosen)}."
    proof = "optimal" if report.gap <= 5e-4 else f"within {format_share(report.gap)} of the optimum"
    if not report.presets:
        return f"One step takes {format_seconds(report.chosen.step_seconds)}, which is proven to be {proof}."
    fitting = {
        name: preset.estimate.step_seconds
        for name, preset in report.presets.items()
        if preset.estimate is not None and preset.estimate.fits
    }
    if not fitting:
        return f"No preset runs on these devices. This plan does, and is proven to be {proof}."
    name, seconds = min(fitting.items(), key=lambda item: item[1])
    ratio = seconds / report.chosen.step_seconds
    if ratio < 1.005:
        return f"As fast as {name}, the best preset, and proven to be {proof}."
    faster = f"{ratio:.1f} × as fast as" if ratio >= 1.95 else f"{format_share(ratio - 1)} faster than"
    return f"{faster} {name}, the best preset that fits, and proven to be {proof}."


def _list_figures(report: "PlanReport") -> list[tuple[str, ...]]:
    """List the figures below the headline: name, value, unit and note."""
    estimate, fullest = report.chosen, report.chosen.peak_device
    again = f"; {format_seconds(estimate.repeated_seconds)} in a row of steps"
    differs = estimate.repeated_seconds < 0.995 * estimate.step_seconds
    span = f"{format_share(LEVEL)}: {format_span(report.outlook.interval)}"
    bound = format_seconds(report.lower_bound_seconds)
    figures = [
        ("Step", format_seconds(estimate.step_seconds), span + again * differs),
        ("Proven gap", format_share(report.gap), f"no plan takes less than {bound}"),
        ("Utilisation", format_share(estimate.utilisation), "of device time at work"),
        ("MFU", format_share(estimate.mfu), "of peak arithmetic"),
        (
            "Fullest device",
            format_bytes(estimate.peak_bytes),
            f"of {format_bytes(fullest.capacity)}, {fullest.peak.during}",
        ),
    ]
    found: list[tuple[str, ...]] = [(name, *value.split(), note) for name, value, note in figures]
    rate = (format_count(estimate.tokens_per_second), "tokens/s", f"{estimate.tokens:,.0f} tokens a step")
    found.insert(1, ("Throughput", *rate))
    return found


def _list_models(report: "PlanReport") -> list[tuple[str, str, list[tuple[str, str]]]]:
    """List each model once: its name, its details, and the name and CSS class of each role that has it."""
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for role, model in report.scenario.models.items():
        detail = f"{format_parameters(model)} · {format_dtype(model)}"
        found.setdefault((name_model(model), detail), []).append((role, find_role_class(report, role)))
    return [(*key, roles) for key, roles in found.items()]


def _list_legend(report: "PlanReport") -> list[tuple[str, str]]:
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
    """List what a plan offloads, which copies it keeps, and which roles share weights."""
    away = {"parameters": plan.offload, "gradients and optimizer": plan.offload_optimizer}
    texts = [f"{what} of {join(roles)}" for what, roles in away.items() if roles]
    found = [f"In host memory while not in use: {'; '.join(texts)}."] if texts else []
    if plan.keep:
        found.append(f"Copies of {join(plan.keep)} in other layouts are kept.")
    holders = find_holders(list_sharers(scenario.models), home_placements(scenario.graph, plan))
    for holder in dict.fromkeys(holders.values()):
        others = [role for role in holders if holders[role] == holder and role != holder]
        found.append(
            f"{join([holder, *others])} share one copy of their frozen weights, which {holder} holds."
        )
    return found


def describe_failures(report: "PlanReport") -> list[str]:
    """Describe what failures cost, and which checkpoint interval is best; empty without a failure rate."""
    found = report.goodput
    if found is None:
        return []
    days = 1 / found.failures_per_day
    each = f"{found.failures_per_day:,.3g} failures a day, one in "
    each += f"{24 * days:,.3g} hours" if days < 2 else f"{days:,.3g} days"
    if math.isinf(found.step_seconds):
        return [f"With {each}, no step ever ends: a restart takes {_format_long(found.of.restart)}."]
    parts = ", ".join(f"{name} {_format_long(seconds)}" for name, seconds in found.restart.items())
    start = found.start
    return [
        f"With {each}, the expected time of a step is {format_seconds(found.step_seconds)}"
        f" ({describe_gap(report.expected_gap)}): {format_share(found.share)} of the time is useful.",
        f"Writing a checkpoint of {format_bytes(int(found.checkpoint_bytes))} takes"
        f" {format_seconds(found.of.write)}, and stops training for {format_seconds(found.of.stop)}."
        f" The best interval is checkpoint.every={found.every}, or"
        f" {_format_long(found.every * found.undisturbed_seconds)}.",
        f"A restart takes {_format_long(found.of.restart)}: {parts}. Each rank opens"
        f" {format_count(start.sockets)} gloo sockets and {start.communicators} NCCL communicators."
        " None of this was measured on many nodes.",
    ]


def _format_long(seconds: float) -> str:
    """Format a time in seconds, or in minutes from 600 seconds on."""
    return format_seconds(seconds) if seconds < 600 else f"{seconds / 60:,.3g} min"


def _write_notes(report: "PlanReport", source: str) -> list[tuple[str, str]]:
    """Write the notes on a plan's page as (heading, text). `source` describes the origin of the predicted times."""
    options = report.candidates.values()
    ways = f"{min(options):,} to {max(options):,}" if min(options) < max(options) else f"{min(options):,}"
    return [
        (
            "The picture.",
            "dp, cp, tp, pp and ep are degrees of data, context, tensor, pipeline and expert parallelism. A mesh is"
            " a number of whole nodes, or a part of one node. Calls on different devices run at the same time if"
            " neither needs the output of the other. Functions run on hosts, in parallel with the devices.",
        ),
        (
            "Seconds.",
            "The simulator runs the same programs as the workers, instruction by instruction. The time of a call is"
            f" the sum of its terms{f': {source}' if source else ''}.",
        ),
        (
            "Bytes.",
            "Parameters, gradients and optimizer state follow from the layout of each role. Activations, logits and"
            " caches follow from the largest micro-batch. On CPUs, generation may use a packed copy of the weights;"
            f" the plan always counts this copy. {format_share(FRAGMENTATION)} of temporary memory is added for"
            " fragmentation, and NCCL's buffers for each group of ranks. The capacity leaves room for drivers and"
            " message buffers.",
        ),
        (
            "Search.",
            f"{format_count(report.evaluations)} plans were costed in {format_seconds(report.search_seconds)}, made"
            f" of {ways} ways to run each call. Branch and bound proves that no plan made of them has a shorter"
            f" step than {format_seconds(report.lower_bound_seconds)}. The proof is about predicted times, not"
            " about a real machine.",
        ),
        (
            "Utilisation and MFU.",
            "Utilisation is the share of time in which devices compute a call or move parameters. MFU is the"
            " arithmetic of the models, without recomputation, relative to the peak of all devices.",
        ),
    ]
