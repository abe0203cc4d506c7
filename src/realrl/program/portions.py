"""Steps whose samples are handed on in portions, while other samples go on.

Such a step consists of smaller steps: one that samples, and one for each portion that does everything else. In all
but the last portion, training only adds its gradients. The smaller steps are validated. This proves the whole step:
ranks execute the instructions of all of them in one global order, in which nothing waits for a later instruction,
and sampling shares no device with the other calls.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from realrl.config.errors import UserError
from realrl.dataflow.call import Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.plan.placement import Placement
from realrl.plan.plan import Plan
from realrl.program.instructions import (
    Feed,
    Instruction,
    OfPortion,
    Program,
    Receive,
    Report,
    Run,
    Send,
    ShareLengths,
)
from realrl.program.lower import lower, offloaded
from realrl.program.order import TrainableParts
from realrl.program.validate import Kept, validate


def lower_step(
    graph: DataflowGraph,
    plan: Plan,
    homes: Mapping[str, Placement],
    kept: Kept,
    parts: TrainableParts,
) -> list[Program]:
    """Compile a training step, with or without portions, into one program per rank. The arguments are those of
    `lower`. Raises UserError if the plan cannot hand on portions."""
    if graph.streaming is None:
        return lower(graph, plan, homes, kept, parts)
    check_portions(graph, plan)
    sampling, *portions = _list_steps(graph, plan, homes, kept, parts)
    return [
        _join(program, [step.programs[rank] for step in portions])
        for rank, program in enumerate(sampling.programs)
    ]


def validate_portions(
    graph: DataflowGraph,
    plan: Plan,
    homes: Mapping[str, Placement],
    kept: Kept,
    parts: TrainableParts,
) -> None:
    """Validate the steps that `lower_step` joins. Raises ProgramError if they cannot run."""
    steps = {id(step): step for step in _list_steps(graph, plan, homes, kept, parts)}
    for step in steps.values():
        validate(step.programs, step.graph, step.homes, offloaded(plan), step.kept, parts, step.done)


def check_portions(graph: DataflowGraph, plan: Plan) -> None:
    """Raise UserError if the graph hands on portions, and the plan does not allow this."""
    call = graph.streaming
    if call is None:
        return
    field, there = f"asynchrony.portions={call.portions}", plan[call.name].mesh
    for other in graph.calls:
        # A rank that waits for a function does not sample meanwhile.
        if other is not call and plan[other.name].mesh.overlaps(there):
            raise UserError(
                f"{field}: {call.name} goes on while {other.name} works on its first answers, so they need"
                f" different devices; the plan places them on {there} and {plan[other.name].mesh}"
            )
    for role in plan.offload_optimizer:
        raise UserError(
            f"{field}: the gradients of {role} stay in device memory from portion to portion, but the plan offloads"
            " them with its optimizer state (offload_optimizer)"
        )


@dataclass(frozen=True, eq=False)
class _Step:
    """A part of a step with portions, as a step of its own. The fields are the arguments of `validate`."""

    graph: DataflowGraph
    homes: Mapping[str, Placement]
    kept: Kept
    done: Mapping[str, Placement]
    programs: list[Program]


def _list_steps(
    graph: DataflowGraph,
    plan: Plan,
    homes: Mapping[str, Placement],
    kept: Kept,
    parts: TrainableParts,
) -> list[_Step]:
    """Compile the step that samples, and one for each portion."""
    call = graph.streaming
    assert call is not None, "the graph hands on portions"

    def compile_step(graph: DataflowGraph, done: Mapping[str, Placement]) -> _Step:
        own = {role: homes[role] for role in graph.roles}
        copies = {role: kept[role] for role in graph.roles if role in kept}
        return _Step(graph, own, copies, done, lower(graph, plan, own, copies, parts, done))

    whole = [replace(other, portions=1) for other in graph.calls]
    updating = DataflowGraph(whole, graph.keys.values(), graph.averages)
    adding = [replace(other, accumulates=other.kind is Kind.TRAIN) for other in whole]
    done = {call.name: plan[call.name]}
    return [
        compile_step(updating.upstream(call.outputs[0]), {}),
        *[compile_step(DataflowGraph(adding, graph.keys.values()), done)] * (call.portions - 1),
        compile_step(updating, done),
    ]


def _join(sampling: Program, portions: Sequence[Program]) -> Program:
    """Make a rank's program of a step with portions from its programs for sampling, and for each portion."""
    opening: list[Instruction] = []
    runs: list[Run] = []
    closing: list[Instruction] = []
    reports: list[Instruction] = []
    for instruction in sampling.instructions:
        match instruction:
            case Run():
                runs.append(instruction)
            case Report():
                reports.append(instruction)
            case ShareLengths():
                pass  # each portion shares its own lengths
            case _:
                (closing if runs else opening).append(instruction)
    joined = [*opening]
    for number, program in enumerate(portions, 1):
        last = number == len(portions)
        # Ranks that sample hand on a portion, and go on with the next one.
        joined += [replace(run, portion=number) for run in runs]
        joined += closing if last else []
        joined += [
            _name_portion(instruction, number, len(portions))
            for instruction in program.instructions
            # Records arrive once, and the metrics of all portions are reported together.
            if not isinstance(instruction, Feed) and (last or not isinstance(instruction, Report))
        ]
    return Program(sampling.rank, (*joined, *reports))


def _name_portion(instruction: Instruction, number: int, portions: int) -> Instruction:
    """Let an instruction work on a portion. Messages of different portions get different numbers."""
    if isinstance(instruction, Send | Receive):
        return replace(instruction, portion=number, number=instruction.number * portions + number - 1)
    return replace(instruction, portion=number) if isinstance(instruction, OfPortion) else instruction
