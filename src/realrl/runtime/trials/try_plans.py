"""Trial of the best plans of a report on this machine, and what is remembered of it. No torch."""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, inf
from pathlib import Path

from realrl.config.errors import UserError
from realrl.huggingface.directory import check_directories
from realrl.plan.plan import Plan
from realrl.planner.calibration.calibrate import calibrate_profile
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.profile.profile import Profile
from realrl.planner.report.report import Contender, PlanReport
from realrl.recipe.algorithm import get_spec
from realrl.recipe.experiment import Experiment
from realrl.runtime.launcher.launch import check_local
from realrl.runtime.prepare.devices import check_kind
from realrl.runtime.prepare.gpu import ask_machine
from realrl.runtime.processes.signals import Interrupted
from realrl.runtime.trials.halving import PlanTrials, Trial
from realrl.runtime.trials.local_runs import LocalRuns

_LEAST_STEPS, _MOST_STEPS = 3, 20
_ENOUGH_SECONDS = 5.0
"""Seconds of steps that a first measurement takes at least, if that is not more than the most steps."""


@dataclass(frozen=True, kw_only=True)
class TrialSettings:
    """Settings of `realrl plan --try`."""

    count: int
    """Most plans to try."""
    minutes: float
    """Time of all runs."""
    arguments: Sequence[str]
    """Recipe and overrides of the command."""
    cluster: str | None
    """The cluster that the command names."""
    profile: str | None
    """Profile that predictions are made with."""


def check_trials(experiment: Experiment, spec: ClusterSpec, *, minutes: float, chooses_nodes: bool) -> None:
    """Check that a recipe can be run on this machine as it is going to be planned; else UserError.

    `chooses_nodes`: whether the planner chooses the cluster, too.
    """
    if not 0 < minutes < inf:
        raise UserError(f"--try-minutes: {minutes:g} must be above 0")
    if chooses_nodes:
        raise UserError(
            "--try runs plans on this machine; leave out --nodes, --objective, --target-step and --budget"
        )
    if not get_spec(experiment).trains:
        raise UserError(
            f"--try: algorithm={experiment.algorithm} trains nothing, so there are no steps to measure"
        )
    if experiment.launch.by != "local":
        raise UserError(f"--try runs plans on this machine; leave launch.by={experiment.launch.by} out")
    cpu = all(group.device.cpu for group in spec.groups)
    here = ask_machine("cpu" if cpu else "cuda")
    named = experiment.model_copy(update={"cluster": spec.name, "device": "cpu" if cpu else "cuda"})
    try:
        check_local(spec.cluster)
        check_kind(named, spec.cluster, here)
    except UserError as error:
        raise UserError(f"--try runs plans on this machine: {error}") from None
    check_directories(experiment)


def choose_contenders(report: PlanReport, count: int) -> dict[str, Contender]:
    """Choose the plans to try: those that are most probably the fastest, each plan once."""
    chosen: dict[str, Contender] = {}
    ordered = sorted(report.contenders.values(), key=lambda c: (-c.outlook.fastest, c.estimate.step_seconds))
    for contender in ordered:
        if all(contender.estimate.plan != other.estimate.plan for other in chosen.values()):
            chosen[contender.name] = contender
    return dict(list(chosen.items())[:count])


def try_plans(report: PlanReport, settings: TrialSettings, say: Callable[[Trial], None]) -> PlanTrials:
    """Try the best plans of a report for a few steps each, and keep the fastest by successive halving.

    `say` is called after each run. An interruption ends it with what is known. UserError where no plan runs.
    """
    contenders = choose_contenders(report, settings.count)
    plans = {name: contender.estimate.plan for name, contender in contenders.items()}
    trials = PlanTrials.of(plans)
    shortest = min(contender.estimate.step_seconds for contender in contenders.values())
    steps = min(_MOST_STEPS, max(_LEAST_STEPS, ceil(_ENOUGH_SECONDS / shortest)))
    with tempfile.TemporaryDirectory(prefix="realrl-try-") as scratch:
        arguments = [*settings.arguments, *_name_devices(report.scenario.spec, settings)]
        runs = LocalRuns(
            arguments, plans, report.scenario.graph, scratch=Path(scratch), minutes=settings.minutes
        )
        try:
            trials.run(runs, steps, say)
        except Interrupted as interruption:
            interruption.saved = "before all plans were tried"
    failed = [trial for trial in trials.tried.values() if trial.failure]
    if len(failed) == len(trials.tried):
        raise UserError(f"--try: no plan runs here: {failed[0].name}: {failed[0].failure}")
    return trials


def find_fastest_plan(report: PlanReport, trials: PlanTrials) -> Plan:
    """Find the plan that was the fastest as measured; the chosen one where none was measured."""
    fastest = trials.fastest
    return report.chosen.plan if fastest is None else report.contenders[fastest.name].estimate.plan


def remember_trials(trials: PlanTrials, path: Path) -> None:
    """Correct the profile in a file by what was measured, so that following predictions know of it."""
    profile = Profile.load(path)
    for trial in trials.tried.values():
        for run in trial.runs:
            profile = calibrate_profile(profile, run)
    profile.save(path)


def _name_devices(spec: ClusterSpec, settings: TrialSettings) -> list[str]:
    """Overrides that name the devices that were planned for, and the profile."""
    found = [f"device={'cpu' if spec.groups[0].device.cpu else 'cuda'}"]
    found.append(f"cluster={json.dumps(settings.cluster or str(spec.cluster))}")
    if settings.profile is not None:
        found.append(f"profile={json.dumps(settings.profile)}")
    return found
