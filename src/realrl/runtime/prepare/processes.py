"""Choose the number of processes on a machine that computes on CPUs. Does not import torch."""

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
from realrl.runtime.prepare.devices import spec_of
from realrl.runtime.prepare.host import count_cores, count_threads
from realrl.runtime.prepare.job import make_written_plan, open_models
from realrl.runtime.prepare.scenarios import Measured, make_scenario, read_constraints

WORTH_IT = 0.15
"""Minimum share of a step's time that more processes must save in the prediction.

Each process needs memory. Predictions are also too low for several processes. Steps of two data-parallel processes
took 8 to 17 % longer than predicted, those of one process 1 to 7 % (`bench/reality.py --sizes small`, 2-core Intel
Xeon).
"""
_EFFORT = 200_000
"""Effort of the search for a plan, for each number of processes."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """A division of a machine's cores among processes."""

    processes: int
    threads: int
    """Number of threads of each process."""
    seconds: float | None = None
    """Predicted seconds of a step; None if a step cannot run this way, or if it was not predicted."""

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
    """The chosen division of the cores, and all compared divisions in order of their processes."""

    chosen: Split
    compared: Sequence[Split]
    reason: str
    """The reason for the choice, as text to append to the choice."""

    def __str__(self) -> str:
        return f"{self.chosen}{self.reason}"


def choose_processes(experiment: Experiment, measured: Measured | None = None) -> ProcessChoice:
    """Choose how many processes run on this machine, with how many threads, for a recipe that sets neither.

    A plan file determines the number of processes. Without a plan file, the smallest number is chosen whose
    predicted step time exceeds the shortest one only slightly (see `WORTH_IT`). If no step can be predicted, for
    example because the size of a model is unknown, there is one process. `measured` replaces the recipe's profile.
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
    """List the divisions of this machine's cores into equal parts, in order of the number of processes."""
    cores = count_cores()
    counts = [n for n in range(1, cores + 1) if cores % n == 0]
    splits = [Split(processes=n, threads=count_threads(n)) for n in counts]
    # OMP_NUM_THREADS may fix the threads of each process, so some splits would have more threads than cores.
    return [split for split in splits if split.processes == 1 or split.processes * split.threads <= cores]


def _take_from_file(experiment: Experiment) -> ProcessChoice:
    """Return the number of processes in the recipe's plan file, or one if the plan is for several machines."""
    plan = load_plan(experiment.plan, experiment.graph, experiment.micro_batch_tokens)
    processes = plan.cluster.size if plan.cluster.nodes == 1 else 1
    split = Split(processes=processes, threads=count_threads(processes))
    return ProcessChoice(split, [split], f", which {experiment.plan} is for")


def _predict(split: Split, experiment: Experiment, measured: Measured) -> Split:
    """Return the division with the predicted seconds of a step, or unchanged if a step cannot run this way."""
    try:
        estimate = _estimate(experiment, split.cluster, measured)
    except (UserError, DoesNotFit):
        return split
    return replace(split, seconds=estimate.repeated_seconds) if estimate.fits else split


def _estimate(experiment: Experiment, cluster: Cluster, measured: Measured) -> Estimate:
    """Estimate a step under the recipe's plan. Raises UserError or DoesNotFit if no plan can run."""
    spec = spec_of(experiment, cluster, "cpu")
    assert spec is not None, "a CPU is known"
    scenario = make_scenario(experiment, spec, measured)
    if experiment.plan != SEARCH:
        return estimate_plan(scenario, make_written_plan(experiment, cluster, open_models(experiment)))
    constraints = read_constraints(experiment, spec)
    return find_best_plan(scenario, effort=_EFFORT, constraints=constraints).estimate


def _explain(chosen: Split, compared: Sequence[Split], measured: Measured) -> str:
    """Explain a choice by its predicted seconds per step and those of the other choices."""
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
