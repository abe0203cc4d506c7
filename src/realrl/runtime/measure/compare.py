"""Compare predicted and measured time and memory of a run. Does not import torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from realrl.dataflow.call import Call
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.memory.call_memory import MemoryModel
from realrl.planner.profile.profile import Profile
from realrl.planner.report.comparison import (
    CallCosts,
    Comparison,
    MoveCosts,
    Seconds,
    waiting_for,
)
from realrl.planner.simulate.estimate import Estimate, Interval, MemoryPart, PartKind
from realrl.planner.simulate.estimator import estimate_plan
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.uncertainty.ranking import StepSampler, find_interval
from realrl.planner.workload.environment import EnvironmentTimes
from realrl.planner.workload.workload import Workload
from realrl.program.instructions import Program, Reallocate
from realrl.program.text import format_instruction
from realrl.runtime.prepare.job import Job
from realrl.runtime.processes.host_memory import HostMemory

if TYPE_CHECKING:
    from realrl.runtime.measure.timing_log import TimingLog


@dataclass(frozen=True)
class RunInfo:
    """What a comparison must know about a run, except its measured times."""

    job: Job
    spec: ClusterSpec | None
    """Devices of the run; None if the planner does not know their kind."""
    software: Mapping[str, str]
    prompts: Sequence[int]
    answers: Sequence[int]
    """Measured lengths of `prompts` and of `answers`, in tokens."""
    environment: EnvironmentTimes | None
    """Measured times of the environment; None if there is none."""
    reserved: int
    """Peak bytes that torch's allocator reserved on a GPU."""
    resident: HostMemory
    """Largest resident memory of any process."""

    @property
    def workload(self) -> Workload:
        """Workload of a step with everything that was measured."""
        return Workload.of(
            self.job.experiment, prompts=self.prompts, answers=self.answers, environment=self.environment
        )


@dataclass(frozen=True)
class Prediction:
    """Prediction of a training step."""

    estimate: Estimate
    interval: Interval
    """Likely range of the seconds per step, after the first steps."""


def predict(info: RunInfo, profile: Profile | None) -> Prediction | None:
    """Predict a training step for the measured lengths; None if the kind of the devices is unknown."""
    if info.spec is None:
        return None
    scenario = Scenario(
        graph=info.job.train.graph,
        models=info.job.models.stored,
        spec=info.spec,
        workload=info.workload,
        cost=CostModel(info.spec, profile),
        memory=MemoryModel(info.spec),
    )
    plan = info.job.plan
    return Prediction(estimate_plan(scenario, plan), find_interval(StepSampler(scenario)(plan).repeated))


def compare(info: RunInfo, prediction: Prediction | None, log: "TimingLog") -> Comparison:
    """Compare the measured times of training steps with the predicted ones."""
    expected = prediction.estimate if prediction else None
    return Comparison(
        cluster=str(info.job.plan.cluster),
        spec=info.spec,
        software=dict(info.software),
        models=info.job.models.stored,
        workload=info.workload,
        step=Seconds.of(log.step.counted),
        predicted_step_seconds=expected.repeated_seconds if expected else None,
        predicted_interval=prediction.interval if prediction else None,
        calls=tuple(
            _call(call, info, expected, log)
            for call in info.job.train.graph.order
            # The last steps of a run sample nothing if sampling runs ahead.
            if call.name in log.spans and log.spans[call.name].counted
        ),
        reallocations=tuple(
            _move(text, expected, log)
            for text in _reallocations(info.job.train.programs)
            if text in log.spans  # a moving average with a period may not have been due yet
        ),
        reserved_bytes=info.reserved or None,
        resident_bytes=info.resident.resident or None,
        peak_resident_bytes=info.resident.peak or None,
    )


def _call(call: Call, info: RunInfo, expected: Estimate | None, log: "TimingLog") -> CallCosts:
    placement = info.job.plan[call.name]
    measured = log.spans[call.name]
    terms = expected.calls[call.name].terms if expected else {}
    return CallCosts(
        call=call,
        placement=str(placement),
        seconds=Seconds.of(measured.counted),
        waited=Seconds.of(log.spans[waiting_for(call.name)].counted) if call.is_function else None,
        predicted_seconds=sum(terms.values()) or None,
        terms=dict(terms),
        bytes=measured.bytes,
        predicted_bytes=_peak(expected, call.name) if expected and not call.is_function else None,
    )


def _peak(expected: Estimate, call: str) -> int:
    """Return the predicted peak bytes of a call on the device that needs most.

    Fragmentation and the buffers of communicators do not count.
    """
    footprints = (f for device in expected.memory for f in device.footprints if f.during == call)
    # Leave out the parts that torch does not allocate.
    apart = (MemoryPart(PartKind.FRAGMENTATION), MemoryPart(PartKind.COMMUNICATORS))
    return max(f.bytes - sum(f.parts.get(part, 0) for part in apart) for f in footprints)


def _move(text: str, expected: Estimate | None, log: "TimingLog") -> MoveCosts:
    seconds = None
    if expected is not None:
        seconds = sum(m.seconds for m in expected.moves if format_instruction(m.instruction) == text)
    return MoveCosts(instruction=text, seconds=Seconds.of(log.spans[text].counted), predicted_seconds=seconds)


def _reallocations(programs: Sequence[Program]) -> list[str]:
    """List the texts of all reallocations, in the order of the programs."""
    moves = (i for program in programs for i in program.instructions if isinstance(i, Reallocate))
    return list(dict.fromkeys(map(format_instruction, moves)))
