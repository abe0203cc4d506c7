"""Output of `realrl plan --try`: measured and predicted times of plans on this machine."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from realrl.planner.report.report import PlanReport
    from realrl.runtime.try_plans import PlanTrials, Trial, TrialSettings

TryOption = Annotated[
    int | None,
    typer.Option(
        "--try",
        min=2,
        max=16,
        metavar="N",
        help="Run the N best plans for a few steps on this machine, and keep the fastest one. After each round, the"
        " slower half is dropped, and the rest run twice as long. Needs the models and data of the recipe.",
    ),
]
TRY_MINUTES = 10.0
"""Default minutes for all runs of `--try` together."""
TryMinutes = Annotated[
    float | None,
    typer.Option(
        "--try-minutes",
        metavar="M",
        help=f"Minutes for all runs of --try together; default: {TRY_MINUTES:g}.",
        show_default=False,
    ),
]


def run_trials(report: "PlanReport", settings: "TrialSettings", *, quiet: bool) -> "PlanTrials":
    """Try the best plans of a report, print their times unless `quiet`, and correct the profile with them."""
    from realrl.config.paths import local_path
    from realrl.runtime.try_plans import remember_trials, try_plans

    trials = try_plans(report, settings, _say_trial)
    if not quiet:
        _print_trials(trials)
    if settings.profile is not None:
        remember_trials(trials, local_path(settings.profile))
        typer.echo(f"profile: {settings.profile}, corrected with these measurements", err=True)
    return trials


def _say_trial(trial: "Trial") -> None:
    from realrl.cli.page.text import format_seconds

    if trial.failure:
        typer.echo(f"try: {trial.name} failed: {trial.failure}", err=True)
        return
    run = trial.runs[-1]
    typer.echo(f"try: {trial.name}: {format_seconds(run.step.median)} a step, of {run.step.steps}", err=True)


def _print_trials(trials: "PlanTrials") -> None:
    from rich.console import Console
    from rich.text import Text

    from realrl.cli.page.text import format_seconds, format_share, format_span
    from realrl.cli.planning.tables import make_table
    from realrl.planner.simulate.estimate import LEVEL

    rows = make_table("plan", "measured>", "steps>", "predicted>", f"{format_share(LEVEL)}>", "")
    fastest = trials.fastest
    for trial in sorted(trials.tried.values(), key=lambda trial: (trial is not fastest, trial.seconds)):
        figures = ["-"] * 4
        if trial.runs:
            seconds, span = trial.runs[-1].predicted_step_seconds, trial.runs[-1].predicted_interval
            figures = [
                format_seconds(trial.seconds),
                str(trial.steps),
                "-" if seconds is None else format_seconds(seconds),
                "-" if span is None else format_span(span),
            ]
        remark = "" if trial.runs else "not tried"
        if trial.failure or trial is fastest:
            remark = f"failed: {trial.failure}" if trial.failure else "the fastest"
        rows.add_row(trial.name, *figures, remark)
    console = Console(highlight=False)
    console.print(Text("Tried on this machine", style="bold"))
    console.print(rows)
    if not trials.complete:
        console.print("The trials ended early: --try-minutes was over, or Ctrl-C came.")
    console.print()


def trials_to_json(trials: "PlanTrials") -> dict[str, Any]:
    """Convert the measurements to JSON values."""
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
