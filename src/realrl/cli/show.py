"""`realrl show`."""

from typing import TYPE_CHECKING, Annotated

import typer

from realrl.cli.recipe import Overrides, Recipe, cluster_of

if TYPE_CHECKING:
    from realrl.runtime.compile import Compiled, Phase


def show(
    recipe: Recipe,
    overrides: Overrides = None,
    plan: Annotated[
        str | None, typer.Option("--plan", metavar="P", help="A preset or plan file instead of the recipe's.")
    ] = None,
    programs: Annotated[bool, typer.Option("--programs", help="Print every rank's program too.")] = False,
) -> None:
    """Print a recipe with every default filled in, its dataflow graphs and its plan. Runs nothing.

    Of the plan it draws which device does what in the course of a step, and tells the bytes that each reallocation
    moves and what every device holds.
    """
    from realrl.config.load import dump_experiment, load_experiment
    from realrl.runtime.compile import compile_recipe

    experiment = load_experiment(recipe, overrides or [])
    if plan is not None:
        experiment = experiment.model_copy(update={"plan": plan})
    compiled = compile_recipe(experiment, cluster_of(experiment))
    _section("Recipe", dump_experiment(experiment))
    _show_phase("Training step", experiment.plan, compiled, compiled.train)
    if compiled.evaluation is not None:
        _show_phase("Evaluation", experiment.plan, compiled, compiled.evaluation)
    if programs:
        from realrl.program.text import format_program

        for name, ranks in compiled.programs.items():
            _section(f"Programs: {name}", "\n".join(map(format_program, ranks)))


def _show_phase(title: str, plan: str, compiled: "Compiled", phase: "Phase") -> None:
    from realrl.cli import drawing
    from realrl.dataflow.text import format_graph

    training, cluster = phase is compiled.train, phase.plan.cluster
    _section(f"{title}: dataflow graph", format_graph(phase.graph))
    texts = [drawing.explain_plan(plan)] if training else []
    texts += [drawing.format_plan(phase.plan, phase.graph), drawing.draw_phase(phase, compiled)]
    texts.append(drawing.format_reallocations(phase.programs, compiled.memory, cluster))
    if training:
        texts.append(drawing.format_memory(compiled.memory, phase.programs))
        texts.append(drawing.unknown_sizes(compiled.memory, compiled.homes))
    _section(f"{title}: plan on cluster {cluster}", "\n".join(filter(None, texts)))


def _section(title: str, text: str) -> None:
    typer.echo(typer.style(f"── {title} " + "─" * max(2, 76 - len(title)), bold=True))
    typer.echo(text)
