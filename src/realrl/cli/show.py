"""`realrl show`."""

from typing import TYPE_CHECKING, Annotated

import typer

from realrl.cli.recipe import Overrides, Recipe

if TYPE_CHECKING:
    from realrl.config.experiment import Experiment
    from realrl.dataflow.graph import DataflowGraph
    from realrl.plan.cluster import Cluster
    from realrl.plan.plan import Plan


def show(
    recipe: Recipe,
    overrides: Overrides = None,
    programs: Annotated[bool, typer.Option("--programs", help="Print every rank's program too.")] = False,
) -> None:
    """Print a recipe with every default filled in, its dataflow graph and its plan. Runs nothing."""
    from realrl.config.load import dump_experiment, load_experiment

    experiment = load_experiment(recipe, overrides or [])
    from realrl.algorithms.graphs import build_graph
    from realrl.dataflow.text import format_graph
    from realrl.plan.presets import make_plan

    graph = build_graph(experiment)
    plan = make_plan(experiment.plan, graph, _cluster(experiment), experiment.micro_batch_tokens)
    _section("Recipe", dump_experiment(experiment))
    _section("Dataflow graph", format_graph(graph))
    _section(f"Plan: {experiment.plan} on cluster {plan.cluster}", format_plan(plan, graph))
    if programs:
        _section("Programs", _programs(graph, plan))


def _cluster(experiment: "Experiment") -> "Cluster":
    """The recipe's cluster; only `auto` needs torch, to count GPUs."""
    from realrl.plan.cluster import Cluster

    if experiment.cluster != "auto":
        return Cluster.parse(experiment.cluster)
    from realrl.runtime.process import resolve_cluster

    return resolve_cluster("auto", experiment.device)


def _section(title: str, text: str) -> None:
    typer.echo(typer.style(f"── {title} " + "─" * max(2, 76 - len(title)), bold=True))
    typer.echo(text)


def format_plan(plan: "Plan", graph: "DataflowGraph") -> str:
    """A table with a line per call, in the order they run."""
    rows = [["call", "mesh", "dp", "tp", "pp", "micro-batch tokens"]]
    for call in graph.order:
        placement, s = plan[call.name], plan[call.name].strategy
        rows.append([call.name, str(placement.mesh), *map(str, (s.dp, s.tp, s.pp, s.micro_batch_tokens))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _programs(graph: "DataflowGraph", plan: "Plan") -> str:
    from realrl.program.lower import home_placements, lower
    from realrl.program.text import format_program

    programs = lower(graph, plan, home_placements(graph, plan))
    return "\n".join(map(format_program, programs))
