"""`realrl plan`."""

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from realrl.cli.planning.input import FailuresPerDay, RestartSeconds, parse_failures
from realrl.cli.planning.trials import TRY_MINUTES, TryMinutes, TryOption
from realrl.cli.recipe import Overrides, resolve_recipe
from realrl.config.errors import UserError
from realrl.config.files import reason_of

if TYPE_CHECKING:
    from realrl.plan.plan import Plan
    from realrl.planner.report.report import Objective, PlanReport, Wanted
    from realrl.planner.search.plan_search import UserConstraints
    from realrl.planner.simulate.scenario import Scenario
    from realrl.recipe.training import AsynchronyConfig
    from realrl.runtime.prepare.fit.changes import Draft
    from realrl.runtime.try_plans import PlanTrials, TrialSettings

PlanRecipe = Annotated[
    str | None,
    typer.Argument(
        help="A recipe or the directory of a run; may be left out with --calibrate.", show_default=False
    ),
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        metavar="C",
        help="Devices as KIND:NODESxDEVICES, such as a100-80g:16x8, or a YAML file; see docs/planning.md. Default:"
        " the recipe's cluster, on the CPUs of this machine if it names no kind.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Out = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Write the plan to a .yaml file, for plan=FILE in a recipe."),
]
Html = Annotated[str | None, typer.Option(metavar="FILE", help="Write the whole report as one HTML page.")]
TraceOption = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Write the predicted timeline for ui.perfetto.dev."),
]
Nodes = Annotated[
    str | None,
    typer.Option(metavar="N,N,..", help="Compare these numbers of nodes, for example 1,2,4,8."),
]
StalenessOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        max=8,
        help="Compare synchronous training with asynchrony.staleness of 1 to N, for whole and for partial answers,"
        " and plan for the smallest staleness that is within 1 % of the fastest; see docs/asynchrony.md.",
    ),
]
ObjectiveText = Annotated[
    str,
    typer.Option(
        metavar="time|cost",
        help="time: plan for the fastest step. cost: for the cheapest one; see docs/planning.md.",
    ),
]
TargetStep = Annotated[
    str | None,
    typer.Option(
        metavar="SECONDS",
        help="Choose the cheapest cluster whose step is at most this long; see docs/planning.md.",
    ),
]
Budget = Annotated[
    float | None,
    typer.Option(
        metavar="PRICE",
        help="Choose the fastest cluster that costs at most this much per hour.",
    ),
]
EffortOption = Annotated[
    float | None,
    typer.Option(
        help="How long to search, as a number of plans; default: 800000. See docs/planning.md.",
        show_default=False,
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the search.")]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Times that `realrl profile` measured; default: the recipe's profile.",
    ),
]
LengthsOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help='File with measured lengths in tokens, {"prompts": [..], "answers": [..]}, or the directory of a run.'
        " Default: the maximum lengths.",
    ),
]
Calibrate = Annotated[
    str | None,
    typer.Option(
        metavar="RUN_DIR",
        help="Correct the profile with the times that this run measured, then plan; see docs/planning.md.",
    ),
]


def plan(
    recipe: PlanRecipe = None,
    overrides: Overrides = None,
    cluster: ClusterOption = None,
    as_json: Json = False,
    out: Out = None,
    html: Html = None,
    trace: TraceOption = None,
    nodes: Nodes = None,
    objective: ObjectiveText = "time",
    target_step: TargetStep = None,
    budget: Budget = None,
    staleness: StalenessOption = None,
    failures_per_day: FailuresPerDay = None,
    restart_seconds: RestartSeconds = None,
    effort: EffortOption = None,
    seed: Seed = 0,
    profile: ProfileOption = None,
    lengths: LengthsOption = None,
    calibrate: Calibrate = None,
    tried: TryOption = None,
    try_minutes: TryMinutes = None,
) -> None:
    """Find the fastest plan for a recipe on any cluster, and predict its time and memory. Needs no GPU.

    It prints how long a step takes and why, what fills the memory, how close to the optimum the plan is proven to
    be, and how presets compare. See docs/planning.md.
    """
    from realrl.cli.planning import input as plan_input
    from realrl.recipe.load import load_experiment
    from realrl.runtime.prepare.scenarios import read_constraints
    from realrl.runtime.try_plans import TrialSettings, check_trials, find_fastest_plan

    if recipe is None and calibrate is None:
        raise UserError("name a recipe (a YAML file) to plan for")
    experiment = None
    if recipe is not None:
        recipe, overrides = resolve_recipe(recipe, overrides)
        experiment = load_experiment(recipe, [*plan_input.list_device_overrides(cluster), *overrides])
    if calibrate is not None:
        from realrl.cli.planning.calibrate import calibrate_file

        profile = calibrate_file(calibrate, profile or (experiment.profile if experiment else None))
    if experiment is None:
        return
    files = plan_input.files_to_write(recipe, cluster, profile, lengths, out=out, html=html, trace=trace)
    counts = plan_input.parse_nodes(nodes)
    goal = plan_input.parse_objective(objective)
    wanted = plan_input.parse_wanted(target_step, budget, others=nodes is not None or objective != "time")
    plan_input.check_effort(effort)
    draft, scenario, source = plan_input.read_scenario(experiment, cluster, profile, lengths)
    failures = parse_failures(failures_per_day, restart_seconds, scenario.spec.size, experiment)
    scenario = replace(scenario, failures=failures)
    ahead: list[tuple[AsynchronyConfig, Scenario]] = []
    if staleness is not None:
        if counts or goal != "time" or wanted is not None or tried is not None:
            raise UserError(
                "--staleness compares plans for the whole cluster; leave out --nodes, --objective, --target-step,"
                " --budget and --try"
            )
        arguments = [*plan_input.list_device_overrides(cluster), *(overrides or [])]
        replays = plan_input.replays_routers(experiment)
        partial = experiment.environment_config is None and not replays
        for settings in plan_input.list_asynchrony(staleness, partial=partial, portions=not replays):
            given = [f"asynchrony.{name}={str(value).lower()}" for name, value in settings]
            try:
                asked = load_experiment(str(recipe), [*arguments, *given])
            except UserError as error:
                if settings.portions == 1:
                    raise
                typer.echo(f"note: not compared: {error}", err=True)
                continue
            _, of_settings, _ = plan_input.read_scenario(asked, cluster, profile, lengths)
            ahead.append((asked.asynchrony, replace(of_settings, failures=failures)))
    constraints = read_constraints(experiment, scenario.spec, files.get("out"))
    trial = None
    if tried is None and try_minutes is not None:
        raise UserError("--try-minutes limits --try: give --try N too")
    if tried is not None:
        minutes = TRY_MINUTES if try_minutes is None else try_minutes
        chooses = bool(counts) or goal != "time" or wanted is not None
        check_trials(experiment, scenario.spec, minutes=minutes, chooses_nodes=chooses)
        trial = TrialSettings(
            count=tried,
            minutes=minutes,
            arguments=[str(recipe), *(overrides or [])],
            cluster=cluster,
            profile=profile or experiment.profile,
        )
    report = _report(
        draft,
        scenario,
        constraints,
        nodes=counts,
        objective=goal,
        wanted=wanted,
        ahead=ahead,
        effort=effort,
        seed=seed,
    )
    trials = _print(report, source, trial, as_json=as_json)
    plan = report.chosen.plan if trials is None else find_fastest_plan(report, trials)
    title = f"{experiment.spec.name.upper()} on {report.scenario.spec.name}"
    for name, file in files.items():
        try:
            _write(report, name, file, title, source, plan)
        except OSError as error:
            raise UserError(f"--{name} {file} cannot be written: {reason_of(error)}") from None
        typer.echo(f"{name}: {file}", err=as_json)


def _print(
    report: "PlanReport", source: str, trial: "TrialSettings | None", *, as_json: bool
) -> "PlanTrials | None":
    """Print the report, and run the trials of `--try` if there are any."""
    from realrl.cli.planning.tables import print_report
    from realrl.cli.planning.trials import run_trials, trials_to_json
    from realrl.planner.report.to_json import report_to_json

    if not as_json:
        print_report(report, source)
    trials = None if trial is None else run_trials(report, trial, quiet=as_json)
    if as_json:
        more = {} if trials is None else {"tried": trials_to_json(trials)}
        typer.echo(json.dumps({**report_to_json(report), "source": source, **more}, allow_nan=False))
    return trials


def _write(report: "PlanReport", name: str, file: Path, title: str, source: str, plan: "Plan") -> None:
    """Write the file of one option. `plan`: the chosen plan, or the plan that `--try` measured as the fastest."""
    if name == "out":
        plan.save(file, report.scenario.graph)
    elif name == "html":
        from realrl.cli.page.plan_page import write_page

        write_page(report, file, title, source=source, command=shlex.join(["realrl", *sys.argv[1:]]))
    else:
        from realrl.planner.simulate.predicted_trace import predict_trace
        from realrl.program.trace_file import write_trace

        write_trace(file, predict_trace(report.scenario, report.chosen.plan), "predicted")


def _report(
    draft: "Draft",
    scenario: "Scenario",
    constraints: "UserConstraints",
    *,
    nodes: Sequence[int],
    objective: "Objective",
    wanted: "Wanted | None",
    ahead: "Sequence[tuple[AsynchronyConfig, Scenario]]",
    effort: float | None,
    seed: int,
) -> "PlanReport":
    from rich.console import Console

    from realrl.planner.report.make import make_report
    from realrl.planner.search.shortage import DoesNotFit
    from realrl.runtime.prepare.fit.search import explain_no_plan

    try:
        with Console(stderr=True).status("planning"):
            return make_report(
                scenario,
                nodes=nodes,
                objective=objective,
                wanted=wanted,
                ahead=ahead,
                effort=effort,
                seed=seed,
                constraints=constraints,
            )
    except DoesNotFit as error:
        if nodes:
            draft = replace(draft, spec=draft.spec.with_nodes(max(nodes)))
        raise explain_no_plan(draft, scenario.on(draft.spec), error.shortage, constraints) from None
