"""`realrl plan --try`: run the best plans for a few steps on this machine, and keep the fastest.

Successive halving measures all plans for a few steps, then the faster half for twice as many steps, and so on. Does
not import torch.

K. Jamieson and A. Talwalkar, "Non-stochastic best arm identification and hyperparameter optimization", AISTATS
2016.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from pathlib import Path

from realrl.config.errors import UserError
from realrl.dataflow.graph import DataflowGraph
from realrl.huggingface.directory import check_directories
from realrl.plan.plan import Plan
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.profile.profile import Profile
from realrl.planner.report.calibrate import calibrate_profile
from realrl.planner.report.comparison import Comparison
from realrl.planner.report.report import Contender, PlanReport
from realrl.recipe.experiment import Experiment
from realrl.runtime.launcher.launch import check_local
from realrl.runtime.prepare.devices import check_kind
from realrl.runtime.prepare.gpu import ask_machine
from realrl.runtime.processes.signals import Interrupted


class TrialFailed(Exception):
    """A plan cannot run; the message gives the reason."""


class OutOfTime(Exception):
    """The time for trials ended before the current run did."""


@dataclass
class Trial:
    """The runs of one plan so far."""

    name: str
    runs: list[Comparison] = field(default_factory=list)
    failure: str = ""
    """Why the plan failed; empty if it did not fail."""

    @property
    def steps(self) -> int:
        """Number of measured steps."""
        return sum(run.step.steps for run in self.runs)

    @property
    def seconds(self) -> float:
        """Seconds per step: the mean of the medians of all runs, weighted by their steps; infinite without runs."""
        return (
            sum(run.step.median * run.step.steps for run in self.runs) / self.steps
            if self.runs
            else float("inf")
        )


@dataclass
class PlanTrials:
    """A contest between plans: all plans that are tried, and the plans that are still in the contest."""

    tried: dict[str, Trial]
    standing: list[str]
    complete: bool = False
    """Whether the contest was decided. False if the time limit or the user ended it."""

    @classmethod
    def of(cls, names: Iterable[str]) -> "PlanTrials":
        """Begin a contest of these plans."""
        tried = {name: Trial(name) for name in names}
        return cls(tried, list(tried))

    @property
    def fastest(self) -> Trial | None:
        """The fastest measured plan that is still in the contest; None before the first measurement."""
        measured = [self.tried[name] for name in self.standing if self.tried[name].runs]
        # A plan with more runs has survived more rounds.
        return min(measured, key=lambda trial: (-len(trial.runs), trial.seconds), default=None)

    def run(
        self,
        measure: Callable[[str, int], Comparison],
        steps: int,
        say: Callable[[Trial], None] = lambda _: None,
    ) -> None:
        """Measure plans for `steps` steps, then for more, until one plan is left or `measure` raises OutOfTime.

        A plan is dropped if `measure` raises TrialFailed for it. `say` is called after each run.
        """
        try:
            while self.standing:
                for name in tuple(self.standing):
                    self._measure(self.tried[name], measure, steps)
                    say(self.tried[name])
                self.standing = self._keep_faster_half(self.standing)
                if len(self.standing) <= 1:
                    break
                steps *= 2
            self.complete = True
        except OutOfTime:
            pass

    def _measure(self, trial: Trial, measure: Callable[[str, int], Comparison], steps: int) -> None:
        try:
            trial.runs.append(measure(trial.name, steps))
        except TrialFailed as failure:
            trial.failure = str(failure)
            self.standing.remove(trial.name)

    def _keep_faster_half(self, names: Sequence[str]) -> list[str]:
        ordered = sorted(names, key=lambda name: self.tried[name].seconds)
        return ordered[: -(-len(ordered) // 2)]


_END_SECONDS = 5.0
"""Seconds that an interrupted run gets to end. This process itself must have more time to end."""
_LAST_LINES = 3
"""Number of lines of output that are quoted if a failed run gives no reason."""
MEASURE_ONLY = (
    "overwrite=true",
    "data.eval=null",
    "evaluation={}",
    "trackers={}",
    "checkpoint={minutes: null, last: false}",
    "training.spike=null",
    "launch.max_restarts=0",
    "launch.shrink=false",
    "launch.grace_seconds=0",
)
"""Overrides for a run that only measures steps."""


class LocalRuns:
    """Runs a recipe under named plans. Each run has its own directory below `scratch`."""

    def __init__(
        self,
        arguments: Sequence[str],
        plans: Mapping[str, Plan],
        graph: DataflowGraph,
        *,
        scratch: Path,
        minutes: float,
    ) -> None:
        """`arguments`: recipe and overrides, including devices. `minutes`: time for all runs, starting now."""
        self._arguments = arguments
        self._plans = plans
        self._graph = graph
        self._scratch = scratch
        self._deadline = time.monotonic() + 60 * minutes
        self._number = 0

    def __call__(self, name: str, steps: int) -> Comparison:
        """Train `steps` steps under a plan after a warm-up step, and read their costs.

        Raises TrialFailed if the run fails, and OutOfTime if it does not end in time.
        """
        self._number += 1
        directory = self._scratch / f"{self._number}"
        directory.mkdir()
        plan = directory / "plan.yaml"
        self._plans[name].save(plan, self._graph)
        run_dir = directory / "run"
        settings = {"run_dir": str(run_dir), "plan": str(plan), "training.steps": steps + 1}
        overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        self._train([*self._arguments, *MEASURE_ONLY, *overrides], directory / "output.txt")
        try:
            return Comparison.load(run_dir)
        except UserError as error:
            raise TrialFailed(str(error)) from None

    def _train(self, arguments: Sequence[str], output: Path) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise OutOfTime
        command = [sys.executable, "-m", "realrl", "train", *arguments]
        with output.open("w") as file:
            # Start a new process session, so that Ctrl-C reaches only this process, which then ends the run.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(left)
            except subprocess.TimeoutExpired:
                raise OutOfTime from None
            finally:
                _end(process)
        if status:
            raise TrialFailed(_find_reason(output.read_text(errors="replace"), status))


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a run and its ranks, if it is still running."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _find_reason(output: str, status: int) -> str:
    """Return the reason why a run failed: its error message, or its last lines of output."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = [line.removeprefix("realrl: ") for line in lines if line.startswith("realrl: ")]
    return said[-1] if said else f"exit status {status}: {' / '.join(lines[-_LAST_LINES:])}"


_LEAST_STEPS, _MOST_STEPS = 3, 20
_ENOUGH_SECONDS = 5.0
"""Minimum seconds of a first measurement, unless this would take more than the maximum number of steps."""


@dataclass(frozen=True, kw_only=True)
class TrialSettings:
    """Settings of `realrl plan --try`."""

    count: int
    """Maximum number of plans to try."""
    minutes: float
    """Time for all runs, in minutes."""
    arguments: Sequence[str]
    """Recipe and overrides of the command."""
    cluster: str | None
    """Cluster from the command line."""
    profile: str | None
    """Profile for predictions."""


def check_trials(experiment: Experiment, spec: ClusterSpec, *, minutes: float, chooses_nodes: bool) -> None:
    """Check that a recipe can run on this machine as planned. Raises UserError if not.

    `chooses_nodes`: the planner chooses the cluster too.
    """
    if not 0 < minutes < inf:
        raise UserError(f"--try-minutes: {minutes:g} must be above 0")
    if chooses_nodes:
        raise UserError(
            "--try runs plans on this machine; leave out --nodes, --objective, --target-step and --budget"
        )
    if not experiment.spec.trains:
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
    """Choose the plans that are most likely the fastest. Equal plans count once."""
    chosen: dict[str, Contender] = {}
    ordered = sorted(report.contenders.values(), key=lambda c: (-c.outlook.fastest, c.estimate.step_seconds))
    for contender in ordered:
        if all(contender.estimate.plan != other.estimate.plan for other in chosen.values()):
            chosen[contender.name] = contender
    return dict(list(chosen.items())[:count])


def try_plans(report: PlanReport, settings: TrialSettings, say: Callable[[Trial], None]) -> PlanTrials:
    """Try the best plans of a report for a few steps each, and find the fastest by successive halving.

    `say` is called after each run. An interruption ends the contest early. Raises UserError if no plan runs.
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
    """Find the plan with the fastest measured steps; the planner's choice if none was measured."""
    fastest = trials.fastest
    return report.chosen.plan if fastest is None else report.contenders[fastest.name].estimate.plan


def remember_trials(trials: PlanTrials, path: Path) -> None:
    """Calibrate the profile in a file by the measured steps, for later predictions."""
    profile = Profile.load(path)
    for trial in trials.tried.values():
        for run in trial.runs:
            profile = calibrate_profile(profile, run)
    profile.save(path)


def _name_devices(spec: ClusterSpec, settings: TrialSettings) -> list[str]:
    """Write the overrides that set the planned devices and the profile."""
    found = [f"device={'cpu' if spec.groups[0].device.cpu else 'cuda'}"]
    found.append(f"cluster={json.dumps(settings.cluster or str(spec.cluster))}")
    if settings.profile is not None:
        found.append(f"profile={json.dumps(settings.profile)}")
    return found
