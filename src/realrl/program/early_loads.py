"""Loads of offloaded state that may begin during the call before them, without a higher peak of memory."""

from collections.abc import Mapping

from realrl.program.instructions import Load, Program, Run
from realrl.program.memory import HeldState, Memory

EarlyLoads = Mapping[int, tuple[Load, ...]]
"""Position of a call in a program -> loads that begin with it."""


def find_early_loads(
    program: Program, memory: Memory, needed: Mapping[str, int], limit: int
) -> dict[int, tuple[Load, ...]]:
    """Find the loads that may begin with a call: position of the call -> loads after it, before the next call.

    `needed`: bytes of the rank's device during each call of a model, moves before it included; `limit`: bytes that
    it may use, such as the peak of the step.
    """
    moments = list(memory.timeline(program))
    held = [sum(holdings.values()) for _, holdings in moments]
    found: dict[int, tuple[Load, ...]] = {}
    run, early = None, 0
    for position, (instruction, holdings) in enumerate(moments):
        if isinstance(instruction, Run) and instruction.role is not None:
            run, early = position, 0
        elif isinstance(instruction, Load) and run is not None:
            state = _state_of(instruction)
            size = holdings.get(state, 0)
            call, during = moments[run]
            assert isinstance(call, Run)
            most = max([needed[call.call], *held[run:position]])
            if size and state not in during and most + early + size <= limit:
                found[run] = (*found.get(run, ()), instruction)
                early += size
    return found


def _state_of(load: Load) -> HeldState:
    return HeldState(load.role, load.placement.layout, load.state, parameter_set=load.parameter_set)
