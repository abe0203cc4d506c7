"""`realrl eval`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from realrl.cli.recipe import Overrides, Recipe, launch_ranks, resolve_recipe

if TYPE_CHECKING:
    from realrl.recipe.experiment import Experiment
    from realrl.runtime.evaluation.answers import EvaluationReport


def eval(
    recipe: Recipe,
    overrides: Overrides = None,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Directory for metrics.json and samples.jsonl; default: RUN_DIR/eval.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Evaluate the models of a recipe on `data.eval` without training: metrics, and samples with their scores.

    It reads the weights from `models.ROLE.path`; for the directory of a run, it takes the run's final models. It
    uses the recipe's cluster, its plan and its section `evaluation`. See docs/evaluation.md.
    """
    from realrl.config.files import check_directory
    from realrl.config.paths import local_path
    from realrl.recipe.load import load_experiment
    from realrl.runtime.output.rundir import EVALUATIONS
    from realrl.runtime.processes.environment import set_library_defaults, under_launcher

    set_library_defaults()
    run, given = local_path(recipe), overrides or []
    recipe, overrides = resolve_recipe(recipe, given)
    if run.is_dir():
        overrides = [*_use_final_models(run, given), *overrides]
    experiment = load_experiment(recipe, overrides)
    name = f"run_dir={experiment.run_dir}" if out is None else f"--out {out}"
    directory = local_path(experiment.run_dir) / EVALUATIONS if out is None else local_path(out)
    if not under_launcher():
        check_directory(name, directory)
        _check_evaluation(experiment)
        where = [] if out is None else ["--out", out]
        launch_ranks(experiment, ["eval", *where])
    from realrl.runtime.evaluation.run import evaluate_recipe, write_evaluation

    report = evaluate_recipe(experiment, lambda text: typer.echo(f"note: {text}", err=True))
    if report is not None:
        files = write_evaluation(directory, experiment, report)
        _print_metrics(report)
        typer.echo(f"results: {', '.join(map(str, files))}")


def _use_final_models(run_dir: Path, overrides: Sequence[str]) -> list[str]:
    """List overrides that give trained roles the final weights of a run, except roles with a `path` in `overrides`.

    Raises UserError if the run has not saved final weights.
    """
    from realrl.checkpoint.saved import checkpoint_path
    from realrl.config.errors import UserError
    from realrl.runtime.output.algorithm_record import AlgorithmRecord

    found = []
    for number, role in enumerate(AlgorithmRecord.load(run_dir).trained):
        if any(override.strip().startswith(f"models.{role}.path=") for override in overrides):
            continue
        path = checkpoint_path(run_dir, None, role if number else "")
        if not path.is_dir():
            raise UserError(
                f"{run_dir} has no final models yet; name the weights to evaluate with models.{role}.path=DIR;"
                f" `realrl export {run_dir} --out DIR` writes those of a checkpoint"
            )
        found += [f"models.{role}.{name}=null" for name in ("shape", "tokenizer")]
        found.append(f"models.{role}.path={json.dumps(str(path))}")
    return found


def _check_evaluation(experiment: "Experiment") -> None:
    """Check a recipe before any process starts, without reading data or weights. Raises UserError."""
    from realrl.huggingface.directory import check_directories
    from realrl.plan.presets import SEARCH
    from realrl.runtime.prepare.job import make_evaluation_job
    from realrl.runtime.start import find_cluster

    check_directories(experiment)
    if experiment.plan != SEARCH:
        make_evaluation_job(experiment, find_cluster(experiment))


def _print_metrics(report: "EvaluationReport") -> None:
    """Print the table of metrics."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE, show_header=False)
    table.add_column(overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    for name, value in report.result.metrics.items():
        table.add_row(name, f"{value:.4g}")
    what = f"{len(report.origins)} records"
    if report.result.rows:
        what = f"{len(report.result.rows)} answers to {len(report.origins)} prompts"
    table.add_section()
    table.add_row(what, f"{report.seconds:.1f} s")
    Console(highlight=False).print(table)
