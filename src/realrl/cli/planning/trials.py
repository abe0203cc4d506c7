"""Output of `realrl plan --try`: what plans took on this machine, beside what was predicted."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from realrl.planner.report.report import PlanReport
    from realrl.runtime.try_plans import PlanTrials, Trial, TrialSettings

TryOption = Annotated[
    int | None,
    typer.Option(
        "--try",
        min=2,
        max=16,
        metavar="N",
        help="Then run the N best plans for a few steps each on this machine, and keep the fastest: the slower half"
        " is dropped, and the others run twice as long. Needs the models and data of the recipe.",
    ),
]
TRY_MINUTES = 10.0
"""Minutes of all runs of `--try` together, if not given."""
TryMinutes = Annotated[
    float | None,
    typer.Option(
        "--try-minutes",
        metavar="M",
        help=f"Time of all runs of --try together; if not given {TRY_MINUTES:g}.",
        show_default=False,
    ),
]


def run_trials(report: "PlanReport", settings: "TrialSettings", *, quiet: bool) -> "PlanTrials":
    """Try the best plans of a report, print what they took unless `quiet`, and remember it in the profile."""
    from realrl.config.paths import local_path
    from realrl.runtime.try_plans import remember_trials, try_plans

    trials = try_plans(report, settings, say_trial)
    if not quiet:
        print_trials(trials)
    if settings.profile is not None:
        remember_trials(trials, local_path(settings.profile))
        typer.echo(f"profile: {settings.profile}, corrected by what was measured", err=True)
    return trials


def say_trial(trial: "Trial") -> None:
    """Print a line on the last run of a plan, on stderr."""
    from realrl.cli.page.text import format_seconds

    if trial.failure:
        typer.echo(f"try: {trial.name} failed: {trial.failure}", err=True)
        return
    run = trial.runs[-1]
    typer.echo(f"try: {trial.name}: {format_seconds(run.step.median)} a step, of {run.step.steps}", err=True)


def print_trials(trials: "PlanTrials", console: "Console | None" = None) -> None:
    """Print the plans that were tried, the fastest first."""
    from rich.console import Console
    from rich.text import Text

    from realrl.cli.page.text import format_share
    from realrl.cli.planning.tables import make_table
    from realrl.planner.simulate.estimate import LEVEL

    console = console or Console(highlight=False)
    rows = make_table("plan", "measured>", "steps>", "predicted>", f"{format_share(LEVEL)}>", "")
    fastest = trials.fastest
    for trial in sorted(trials.tried.values(), key=lambda trial: (trial is not fastest, trial.seconds)):
        rows.add_row(trial.name, *_figures(trial), _remark(trial, trials))
    console.print(Text("Tried on this machine", style="bold"))
    console.print(rows)
    if not trials.complete:
        console.print(
            "Not every plan was tried as long as planned: the time (--try-minutes) was up, or Ctrl-C came."
        )
    console.print()


def _figures(trial: "Trial") -> tuple[str, ...]:
    from realrl.cli.page.text import format_seconds, format_span

    if not trial.runs:
        return ("-",) * 4
    last = trial.runs[-1]
    seconds, span = last.predicted_step_seconds, last.predicted_interval
    return (
        format_seconds(trial.seconds),
        str(trial.steps),
        "-" if seconds is None else format_seconds(seconds),
        "-" if span is None else format_span(span),
    )


def _remark(trial: "Trial", trials: "PlanTrials") -> str:
    if trial.failure:
        return f"failed: {trial.failure}"
    if trial is trials.fastest:
        return "the fastest"
    return "" if trial.runs else "not tried"


def trials_to_json(trials: "PlanTrials") -> dict[str, Any]:
    """Convert what was measured to dicts, lists, text, numbers and None."""
    fastest = trials.fastest
    return {
        "fastest": None if fastest is None else fastest.name,
        "complete": trials.complete,
        "plans": [
            {
                "name": trial.name,
                "seconds": trial.seconds if trial.runs else None,
                "steps": trial.steps,
                "failure": trial.failure or None,
                "predicted_seconds": trial.runs[-1].predicted_step_seconds if trial.runs else None,
            }
            for trial in trials.tried.values()
        ],
    }
