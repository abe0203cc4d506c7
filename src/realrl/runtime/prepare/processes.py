"""Choice of the number of processes on a machine that computes on CPUs. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from realrl.config.errors import UserError
from realrl.plan.cluster import Cluster
from realrl.plan.presets import PRESETS, SEARCH, load_plan
from realrl.planner.profile.profile import Profile
from realrl.planner.search.plan_search import find_best_plan
from realrl.planner.search.shortage import DoesNotFit
from realrl.planner.simulate.estimate import Estimate
from realrl.planner.simulate.estimator import estimate_plan
from realrl.recipe.experiment import Experiment
from realrl.recipe.graphs import build_graph
from realrl.runtime.prepare.compile import make_written_plan
from realrl.runtime.prepare.devices import spec_of
from realrl.runtime.prepare.host import count_cores, count_threads
from realrl.runtime.prepare.scenarios import Measured, make_scenario, read_constraints

WORTH_IT = 0.15
"""Share of a step's time that further processes must be predicted to save.

Steps of two processes with data parallelism took 8 to 17 % longer than predicted, those of one 1 to 7 %
(`bench/reality.py --sizes small`, 2-core Intel Xeon), and each process takes memory of its own.
"""
_EFFORT = 200_000
"""Effort of a search for each number of processes."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """Division of a machine's cores among processes."""

    processes: int
    threads: int
    """Threads of each process."""
    seconds: float | None = None
    """Predicted seconds of a step; None where a step cannot run so, or nobody asked."""

    @property
    def cluster(self) -> Cluster:
        """Cluster of these processes."""
        return Cluster(1, self.processes)

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        if self.processes == 1:
            return f"1 process with {threads}"
        return f"{self.processes} processes with {threads} each"


@dataclass(frozen=True)
class ProcessChoice:
    """Chosen division of the cores, and all that were compared, by number of processes."""

    chosen: Split
    compared: Sequence[Split]
    reason: str
    """Why it was chosen, in words that follow it."""

    def __str__(self) -> str:
        return f"{self.chosen}{self.reason}"


def choose_processes(experiment: Experiment, measured: Measured | None = None) -> ProcessChoice:
    """Choose how many processes of this machine, with how many threads each, train a recipe that leaves it open.

    A plan file is for a number of processes. Else it is that of the fastest predicted step under the recipe's plan,
    or the smallest that is hardly slower. `measured`: what to predict with, else the recipe's profile. One process
    where nothing can be predicted, as of models whose sizes are unknown.
    """
    if experiment.plan not in (*PRESETS, SEARCH):
        return _take_from_file(experiment)
    splits = list_splits()
    if len(splits) == 1:
        return ProcessChoice(splits[0], splits, ", since there is no other way to divide the cores")
    if measured is None:
        path = experiment.profile
        measured = Measured(None if path is None else Profile.load(path))
    compared = [_predict(split, experiment, measured) for split in splits]
    known = [(split, split.seconds) for split in compared if split.seconds is not None]
    if not known:
        return ProcessChoice(compared[0], compared, ", since no step could be predicted")
    best = min(seconds for _, seconds in known)
    chosen = next(split for split, seconds in known if seconds * (1 - WORTH_IT) <= best)
    return ProcessChoice(chosen, compared, _explain(chosen, compared, measured))


def list_splits() -> list[Split]:
    """List the divisions of this machine's cores into equal parts, by number of processes."""
    cores = count_cores()
    counts = [n for n in range(1, cores + 1) if cores % n == 0]
    splits = [Split(processes=n, threads=count_threads(n)) for n in counts]
    # Where OMP_NUM_THREADS says the number of threads, it does so for any number of processes.
    return [split for split in splits if split.processes == 1 or split.processes * split.threads <= cores]


def _take_from_file(experiment: Experiment) -> ProcessChoice:
    """Take the number of processes that the recipe's plan file is for, if it is for one machine."""
    plan = load_plan(experiment.plan, build_graph(experiment), experiment.micro_batch_tokens)
    processes = plan.cluster.size if plan.cluster.nodes == 1 else 1
    split = Split(processes=processes, threads=count_threads(processes))
    return ProcessChoice(split, [split], f", which {experiment.plan} is for")


def _predict(split: Split, experiment: Experiment, measured: Measured) -> Split:
    """Predict the seconds of a step; none where a step cannot run so."""
    try:
        estimate = _estimate(experiment, split.cluster, measured)
    except (UserError, DoesNotFit):
        return split
    return replace(split, seconds=estimate.repeated_seconds) if estimate.fits else split


def _estimate(experiment: Experiment, cluster: Cluster, measured: Measured) -> Estimate:
    """Estimate a step under the recipe's plan; UserError or DoesNotFit where there is none."""
    spec = spec_of(experiment, cluster, "cpu")
    assert spec is not None, "a CPU is known"
    scenario = make_scenario(experiment, spec, measured)
    if experiment.plan != SEARCH:
        return estimate_plan(scenario, make_written_plan(experiment, cluster))
    constraints = read_constraints(experiment, spec)
    return find_best_plan(scenario, effort=_EFFORT, constraints=constraints).estimate


def _explain(chosen: Split, compared: Sequence[Split], measured: Measured) -> str:
    """Explain a choice by the predicted seconds of a step with it and with the others."""
    others = [split for split in compared if split.processes != chosen.processes]
    known = [split.seconds for split in compared if split.seconds is not None]
    texts = "; ".join(f"{split}: {_format(split.seconds)}" for split in others)
    rule = (
        "" if chosen.seconds == min(known) else f"; more processes would have to save {WORTH_IT * 100:.0f} %"
    )
    lengths = " of full length" if measured.prompts is None and measured.answers is None else ""
    return f": a step{lengths} is predicted to take {_format(chosen.seconds)} ({texts}{rule})"


def _format(seconds: float | None) -> str:
    return "impossible" if seconds is None else f"{seconds:.3g} s"
