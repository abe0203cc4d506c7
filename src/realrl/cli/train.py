"""`realrl train`."""

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import typer

from realrl.cli.recipe import Overrides, Recipe, resolve_recipe
from realrl.runtime.processes.signals import handles_signals

if TYPE_CHECKING:
    from collections.abc import Iterator

    from realrl.runtime.observer import RunObserver


def train(recipe: Recipe, overrides: Overrides = None) -> None:
    """Train a recipe, or resume the run in a directory.

    It starts one local process per device. Under torchrun, it is one of the ranks. See docs/runs.md.
    """
    from realrl.recipe.load import load_experiment
    from realrl.runtime.launcher.launch import report_outcome
    from realrl.runtime.processes.environment import set_library_defaults
    from realrl.runtime.start import start_training

    set_library_defaults()
    recipe, overrides = resolve_recipe(recipe, overrides)
    experiment = load_experiment(recipe, overrides)
    # If a notebook or a test calls this function, a single process trains in place.
    say = partial(typer.echo, err=True)
    outcome = start_training(experiment, _observe, say, here=not handles_signals())
    if outcome.cause is not None:
        raise typer.Exit(report_outcome(outcome))


@contextmanager
def _observe() -> "Iterator[RunObserver]":
    """Show the progress of the run, and call the callbacks of the script that started this rank."""
    from realrl.cli.progress import Progress, find_notebook
    from realrl.config.script_objects import find_callbacks
    from realrl.runtime.callbacks import CallbackObserver

    with Progress(find_notebook()) as progress:
        yield CallbackObserver(progress, find_callbacks())
