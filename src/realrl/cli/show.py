"""`realrl show`."""

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from realrl.cli.recipe import Overrides, Recipe, resolve_recipe

if TYPE_CHECKING:
    from realrl.recipe.experiment import Experiment
    from realrl.runtime.prepare.job import Job


def show(
    recipe: Recipe,
    overrides: Overrides = None,
    plan: Annotated[
        str | None,
        typer.Option("--plan", metavar="P", help="A preset or a plan file in place of the recipe's plan."),
    ] = None,
    programs: Annotated[
        bool, typer.Option("--programs", help="Also print the program of every rank.")
    ] = False,
) -> None:
    """Print a recipe with every default filled in, its dataflow graphs and its plan. Runs nothing.

    It draws the work of each device over a step, and lists the bytes of each reallocation and the memory of each
    device. See docs/plans.md.
    """
    from realrl.recipe.load import load_experiment

    recipe, overrides = resolve_recipe(recipe, overrides)
    experiment = load_experiment(recipe, overrides)
    if plan is not None:
        experiment = experiment.model_copy(update={"plan": plan})
    show_experiment(experiment, programs=programs)


def show_experiment(experiment: "Experiment", *, programs: bool) -> None:
    """Print a recipe, its graphs and its plan. With `programs`, also print the program of every rank."""
    from realrl.plan.presets import SEARCH
    from realrl.recipe.load import dump_experiment
    from realrl.runtime.prepare.devices import search_spec
    from realrl.runtime.prepare.fit.check import check_fit
    from realrl.runtime.prepare.fit.plan_cache import cached_plan
    from realrl.runtime.prepare.gpu import ask_machine
    from realrl.runtime.prepare.job import make_job
    from realrl.runtime.start import find_training_cluster

    cluster = find_training_cluster(experiment, partial(typer.echo, err=True))
    found = None
    if experiment.plan == SEARCH:
        spec = search_spec(experiment, cluster, ask_machine(experiment.device))
        found = cached_plan(experiment, spec, partial(typer.echo, err=True))
    job = make_job(experiment, cluster, found)
    if experiment.device_memory is not None:
        check_fit(job)
    _section("Recipe", dump_experiment(experiment))
    for phase in job.phases:
        _show_phase(job, phase)
    if programs:
        from realrl.program.text import format_program

        for name, ranks in job.programs.items():
            _section(f"Programs: {name}", "\n".join(map(format_program, ranks)))


def _show_phase(job: "Job", name: str) -> None:
    from realrl.cli.planning import drawing
    from realrl.dataflow.graph import format_graph
    from realrl.runtime.prepare.devices import memory_spec, spec_of
    from realrl.runtime.prepare.fit.check import compute_device_memory
    from realrl.runtime.prepare.trained_parts import list_trained_parts

    phase = job.phases[name]
    title = _TITLES[name]
    cluster = phase.plan.cluster
    _section(f"{title}: dataflow graph", format_graph(phase.graph, job.trained))
    texts = [drawing.explain_plan(job.experiment.plan)] if name == "train" else []
    texts += [drawing.format_plan(phase.plan, phase.graph), drawing.draw_phase(phase, job)]
    texts.append(drawing.format_reallocations(phase.programs, job.memory, cluster))
    devices = compute_device_memory(job, memory_spec(job.experiment, cluster))[name]
    limited = job.experiment.device_memory is not None or spec_of(job.experiment, cluster) is not None
    texts.append(drawing.format_memory(devices, limited=limited))
    if name == "train":
        texts += [f"{line}\n" for line in list_trained_parts(job.models.stored)]
        texts.append(drawing.describe_unknown_sizes(job))
    _section(f"{title}: plan on cluster {cluster}", "\n".join(filter(None, texts)))


_TITLES = {"train": "Training step", "eval": "Evaluation"}


def _section(title: str, text: str) -> None:
    typer.echo(typer.style(f"── {title} " + "─" * max(2, 76 - len(title)), bold=True))
    typer.echo(text)
