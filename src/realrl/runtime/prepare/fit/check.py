"""Check that a plan fits into memory. If not, the error message names a change that helps.

Does not import torch.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from realrl.config.errors import UserError
from realrl.config.values import format_bytes
from realrl.plan.presets import PRESETS, SEARCH
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.report.shortage_text import describe_full_host
from realrl.planner.simulate.estimate import DeviceMemory, NodeMemory, find_full_host
from realrl.planner.simulate.plan_memory import compute_footprints, compute_host_memory
from realrl.recipe.experiment import Experiment
from realrl.runtime.prepare.devices import host_is_device, memory_spec, spec_of
from realrl.runtime.prepare.fit.changes import (
    Attempts,
    Draft,
    in_order,
    list_plan_changes,
    list_smaller_batches,
    set_fields,
)
from realrl.runtime.prepare.fit.search import Outcome, Remedy, Trials, describe_remedies, search_plan
from realrl.runtime.prepare.gpu import Here
from realrl.runtime.prepare.job import Job, make_job
from realrl.runtime.prepare.scenarios import phase_scenarios, read_constraints


@dataclass(frozen=True)
class PeakDevice:
    """The device with the least free memory, and the kind of step in which this occurs."""

    phase: str
    """Kind of step, as in `Job.phases`."""
    device: DeviceMemory

    @property
    def shortfall(self) -> int:
        """Bytes by which the peak exceeds the capacity; negative if memory is left."""
        return self.device.peak.bytes - self.device.capacity


def compute_device_memory(job: Job, spec: ClusterSpec) -> dict[str, tuple[DeviceMemory, ...]]:
    """Compute the memory of every device in each kind of step. Keys are the names in `Job.phases`.

    Raises UserError if a call has fewer records than data-parallel ranks.
    """
    scenarios, memory = phase_scenarios(job, spec), job.memory
    if host_is_device(job.experiment, spec):
        memory = memory.in_host_memory()
    return {
        name: compute_footprints(scenarios[name], memory, phase.programs)
        for name, phase in job.phases.items()
    }


def find_short_host(job: Job, spec: ClusterSpec) -> NodeMemory | None:
    """Find the host that lacks the most memory for offloaded state; None if all hosts have enough."""
    scenario = next(iter(phase_scenarios(job, spec).values()))
    return find_full_host(compute_host_memory(scenario, job.memory))


def find_peak_device(job: Job, spec: ClusterSpec) -> PeakDevice:
    """Find the device with the least free memory in any kind of step."""
    found = compute_device_memory(job, spec)
    devices = (PeakDevice(phase, device) for phase, devices in found.items() for device in devices)
    return max(devices, key=lambda one: one.shortfall)


_NAMED = 3
"""Number of memory parts that the message names."""
_SECONDS, _EFFORT = 5.0, 400_000
"""`_SECONDS` limits the trials of single changes, and then the trials of combinations. With a thousand devices,
assessing one change takes seconds. `_EFFORT` limits the search for another plan that fits."""


def check_fit(job: Job, here: Here | None = None) -> None:
    """Check that devices and hosts have enough memory. Raises UserError with the peak and a change that helps.

    `here`: the devices of this machine, if known.
    """
    experiment, cluster = job.experiment, job.plan.cluster
    known = spec_of(experiment, cluster, here)
    spec = known or memory_spec(experiment, cluster, here)
    full = find_short_host(job, spec)
    if full is not None:
        raise UserError(
            f"plan {experiment.plan}: {describe_full_host(full)}; offload less, or set host_memory if a node's host"
            " has more"
        )
    worst = find_peak_device(job, spec)
    if worst.shortfall <= 0:
        return
    draft = Draft(experiment, spec, None if experiment.plan in PRESETS else job.plan)
    searchable = known is not None and experiment.plan != SEARCH and not job.unknown
    helps = _find_help(draft, _outcome(worst, job), searchable=searchable)
    raise UserError(f"plan {experiment.plan}: {_shortage(experiment, spec, worst)}; {helps}")


def _shortage(experiment: Experiment, spec: ClusterSpec, worst: PeakDevice) -> str:
    """Describe the device that lacks memory, the call during which it does, and the largest parts of its memory."""
    device, peak = worst.device, worst.device.peak
    biggest = sorted(peak.parts, key=lambda name: -peak.parts[name])
    parts = ", ".join(f"{name} {format_bytes(peak.parts[name])}" for name in biggest[:_NAMED])
    rest = f" and {len(biggest) - _NAMED} more" if len(biggest) > _NAMED else ""
    when = f"the evaluation's {peak.during}" if worst.phase == "eval" else peak.during
    return (
        f"device {device.rank} needs {format_bytes(peak.bytes)} of"
        f" {format_bytes(max(0, device.capacity))}{_source(experiment, spec)} during {when} ({parts}{rest})"
    )


def _source(experiment: Experiment, spec: ClusterSpec) -> str:
    """Explain the size of a device's memory if it is a share of the host memory; otherwise return an empty text."""
    if not host_is_device(experiment, spec):
        return ""
    return (
        f" (this machine's memory over {spec.cluster.largest_node} processes, as device_memory is not given)"
    )


@dataclass(frozen=True)
class _Peak(Outcome):
    """Result of assessing a draft that has a plan."""

    worst: PeakDevice
    job: Job


def _outcome(worst: PeakDevice, job: Job) -> _Peak:
    needs = f"needs {format_bytes(worst.device.peak.bytes)}"
    return _Peak(worst.shortfall, needs, worst=worst, job=job)


def _assess(draft: Draft, seconds: float = 0.0) -> _Peak:
    """Assess a draft with a plan or a preset. The time limit is ignored."""
    job = make_job(draft.experiment, draft.spec.cluster, draft.plan)
    return _outcome(find_peak_device(job, draft.spec), job)


def _find_help(draft: Draft, outcome: _Peak, *, searchable: bool) -> str:
    """Describe the cheapest change that makes everything fit.

    If none does, describe a combination, or give general advice.
    """
    single = Trials(_assess, _SECONDS).find_remedies(draft, _sources(draft, outcome), most=1)
    if single:
        return describe_remedies(single)
    if searchable and (found := _search(draft)):
        return found
    presets = in_order(set_fields(f"plan={name}") for name in PRESETS)
    other = Trials(_assess, _SECONDS).find_remedies(replace(draft, plan=None), [presets], most=1)
    if other:
        return describe_remedies(other)
    several = Trials(_assess, _SECONDS).find_combination(draft, outcome, _all_sources)
    if several is not None:
        return describe_remedies([several])
    return f"spread {outcome.worst.device.peak.during} over more devices; `realrl plan` finds over how many"


def _sources(draft: Draft, outcome: _Peak) -> Iterator[Attempts]:
    """List changes that affect only the step time, the cheapest first, and changes to the dtype of frozen roles."""
    offload = not host_is_device(draft.experiment, draft.spec)
    worst, phases = outcome.worst, outcome.job.phases
    for changes in list_plan_changes(draft, phases[worst.phase].graph, worst.device.peak, offload=offload):
        yield in_order(changes)


def _all_sources(draft: Draft, outcome: _Peak) -> Iterable[Attempts]:
    """List all changes. Changes that alter the results come last."""
    yield from _sources(draft, outcome)
    yield in_order(list_smaller_batches(draft.experiment))


def _search(draft: Draft) -> str:
    """Describe the plan that a search finds, or why there is none.

    The text is empty if the plan that was found does not fit either.
    """
    change = set_fields(f"plan={SEARCH}")
    constraints = replace(read_constraints(draft.experiment, draft.spec), own={})
    try:
        found = search_plan(replace(draft, plan=None), constraints, effort=_EFFORT)
        after = _assess(replace(draft, plan=found.plan))
    except UserError as error:
        return str(error)
    figures = f"{after.figures}, step {found.step_seconds:.3g} s"
    return describe_remedies([Remedy((change,), Outcome(after.shortfall, figures))]) if after.fits else ""
