"""`realrl show`."""

from typing import TYPE_CHECKING, Annotated

import typer

from realrl.cli.recipe import Overrides, Recipe, cluster_of

if TYPE_CHECKING:
    from realrl.dataflow.graph import DataflowGraph
    from realrl.plan.plan import Plan
    from realrl.runtime.compile import Phase


def show(
    recipe: Recipe,
    overrides: Overrides = None,
    programs: Annotated[bool, typer.Option("--programs", help="Print every rank's program too.")] = False,
) -> None:
    """Print a recipe with every default filled in, its dataflow graphs and its plan. Runs nothing."""
    from realrl.config.load import dump_experiment, load_experiment
    from realrl.runtime.compile import compile_recipe

    experiment = load_experiment(recipe, overrides or [])
    compiled = compile_recipe(experiment, cluster_of(experiment))
    _section("Recipe", dump_experiment(experiment))
    _show_phase("Training step", compiled.train, programs)
    if compiled.evaluation is not None:
        _show_phase("Evaluation", compiled.evaluation, programs)


def _show_phase(title: str, phase: "Phase", programs: bool) -> None:
    from realrl.dataflow.text import format_graph
    from realrl.program.text import format_program

    _section(f"{title}: dataflow graph", format_graph(phase.graph))
    _section(f"{title}: plan on cluster {phase.plan.cluster}", format_plan(phase.plan, phase.graph))
    if programs:
        _section(f"{title}: programs", "\n".join(map(format_program, phase.programs)))


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
