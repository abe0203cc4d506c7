"""The prediction for a run beside what it measured. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from realrl.dataflow.call import Call
from realrl.families.shape import ModelShape
from realrl.planner.calibration.comparison import (
    CallCosts,
    Comparison,
    MoveCosts,
    Seconds,
    waiting_for,
)
from realrl.planner.cluster.spec import ClusterSpec
from realrl.planner.cost.model import CostModel
from realrl.planner.memory.model import MemoryModel
from realrl.planner.profile.profile import Profile
from realrl.planner.simulate.estimate import Estimate
from realrl.planner.simulate.predict import estimate
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.workload.workload import Workload
from realrl.program.instructions import Program, Reallocate
from realrl.program.text import format_instruction
from realrl.recipe.experiment import Experiment
from realrl.runtime.prepare.compile import Compiled, stored_models

if TYPE_CHECKING:
    from realrl.runtime.measure.ledger import Ledger


@dataclass(frozen=True)
class Facts:
    """A run, as far as its costs depend on it."""

    experiment: Experiment
    compiled: Compiled
    shapes: Mapping[str, ModelShape]
    """By role."""
    spec: ClusterSpec | None
    """The devices; None where the planner does not know their kind."""
    software: Mapping[str, str]
    prompts: Sequence[int]
    answers: Sequence[int]
    """Lengths that occurred, in tokens."""
    reserved: int
    """Most bytes that torch's allocator held on a GPU."""


def compare(facts: Facts, profile: Profile | None, ledger: "Ledger") -> Comparison:
    """What the training steps took, and what they were to take with the lengths that occurred."""
    graph, plan = facts.compiled.train.graph, facts.compiled.train.plan
    stored = stored_models(facts.experiment, graph, facts.shapes)
    workload = Workload.of(facts.experiment, prompts=facts.prompts, answers=facts.answers)
    expected: Estimate | None = None
    if facts.spec is not None:
        cost, memory = CostModel(facts.spec, profile), MemoryModel(facts.spec)
        expected = estimate(Scenario(graph, stored, facts.spec, workload, cost, memory), plan)
    return Comparison(
        cluster=str(plan.cluster),
        spec=facts.spec,
        software=dict(facts.software),
        models=stored,
        workload=workload,
        step=Seconds.of(ledger.step.counted),
        predicted_step_seconds=expected.repeated_seconds if expected else None,
        calls=tuple(_call(call, facts, expected, ledger) for call in graph.order),
        reallocations=tuple(
            _move(text, expected, ledger) for text in _reallocations(facts.compiled.train.programs)
        ),
        reserved_bytes=facts.reserved or None,
    )


def _call(call: Call, facts: Facts, expected: Estimate | None, ledger: "Ledger") -> CallCosts:
    placement, measured = facts.compiled.train.plan[call.name], ledger.spans[call.name]
    terms = expected.calls[call.name].terms if expected else {}
    return CallCosts(
        call=call,
        placement=str(placement),
        seconds=Seconds.of(measured.counted),
        waited=Seconds.of(ledger.spans[waiting_for(call.name)].counted) if call.is_function else None,
        predicted_seconds=sum(terms.values()) or None,
        terms=dict(terms),
        bytes=measured.bytes,
        predicted_bytes=_peak(expected, call.name) if expected and not call.is_function else None,
    )


def _peak(expected: Estimate, call: str) -> int:
    """Bytes on the fullest device. What an allocator wastes is no tensor's."""
    footprints = (f for device in expected.memory for f in device.footprints if f.during == call)
    return max(f.bytes - f.parts.get("fragmentation", 0) for f in footprints)


def _move(text: str, expected: Estimate | None, ledger: "Ledger") -> MoveCosts:
    seconds = None
    if expected is not None:
        seconds = sum(m.seconds for m in expected.moves if format_instruction(m.instruction) == text)
    return MoveCosts(
        instruction=text, seconds=Seconds.of(ledger.spans[text].counted), predicted_seconds=seconds
    )


def _reallocations(programs: Sequence[Program]) -> list[str]:
    """Their texts, in the order in which the first rank that takes part does them."""
    moves = (i for program in programs for i in program.instructions if isinstance(i, Reallocate))
    return list(dict.fromkeys(map(format_instruction, moves)))
