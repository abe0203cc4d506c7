"""Loads begin during the call before them where the device has room, and the peak stays what it was."""

from collections.abc import Mapping
from itertools import pairwise

import pytest

from realrl.algorithms.ppo import train_graph
from realrl.dataflow.call import MovingAverage
from realrl.families.shape import Head, ModelShape
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.plan.plan import Plan
from realrl.program.instructions import Load, Program, Run
from realrl.program.lower import home_placements, kept_copies, lower, offloaded
from realrl.program.memory import HeldState, Memory, StoredModel, find_early_loads

GRAPH = train_graph(minibatches=2, averages=[MovingAverage("ref", "actor", 0.125)])
ALL, HALF = Placement(Mesh(0, 4), Strategy(dp=2, tp=2)), Placement(Mesh(0, 2), Strategy(tp=2))
PLAN = Plan(
    Cluster(1, 4),
    {call.name: HALF if call.name in ("actor.generate", "ref.inference") else ALL for call in GRAPH.calls},
    offload=("actor", "ref", "reward"),
    offload_optimizer=("actor", "critic"),
)
SHAPE = ModelShape(
    vocab_size=1000, hidden_size=64, intermediate_size=128, layers=4, heads=4, kv_heads=4, head_dim=16
)
HEADS: dict[str, Head] = {"actor": "lm", "ref": "lm", "critic": "scalar", "reward": "scalar"}


def lowered() -> tuple[list[Program], Memory]:
    homes = home_placements(GRAPH, PLAN)
    kept = kept_copies(GRAPH, PLAN, homes)
    stored = {role: StoredModel(SHAPE, HEADS[role], "bfloat16", GRAPH.trained(role)) for role in GRAPH.roles}
    return lower(GRAPH, PLAN, homes, kept), Memory(stored, homes, offloaded(PLAN), kept)


def needs(program: Program, memory: Memory) -> dict[str, int]:
    """Bytes during each call of a rank, of which a tenth is its own, moves before it included."""
    found, moving = {}, 0
    for instruction, holdings in memory.timeline(program):
        moving = max(moving, sum(holdings.values()))
        if isinstance(instruction, Run):
            found[instruction.call] = max(moving, sum(holdings.values()) * 11 // 10)
            moving = 0
    return found


def peak_with(
    program: Program, memory: Memory, needed: Mapping[str, int], early: Mapping[int, tuple[Load, ...]]
) -> int:
    """Peak bytes where loads take memory from the beginning of the call before them."""
    ahead: dict[HeldState, int] = {}
    most = 0
    moments = list(memory.timeline(program))
    for position, (instruction, holdings) in enumerate(moments):
        for load in early.get(position, ()):
            state = HeldState(load.role, load.placement.layout, load.state, parameter_set=load.parameter_set)
            ahead[state] = max(h.get(state, 0) for _, h in moments)
        ahead = {state: size for state, size in ahead.items() if state not in holdings}
        own = needed[instruction.call] if isinstance(instruction, Run) else sum(holdings.values())
        most = max(most, own + sum(ahead.values()))
    return most


@pytest.mark.parametrize("rank", range(4))
def test_early_loads_keep_the_peak(rank: int) -> None:
    programs, memory = lowered()
    program, needed = programs[rank], needs(programs[rank], memory)
    limit = max(needed.values())
    early = find_early_loads(program, memory, needed, limit)
    assert early and peak_with(program, memory, needed, early) <= limit
    for run, loads in early.items():
        assert isinstance(program.instructions[run], Run)
        following = [i for i, x in enumerate(program.instructions) if i > run and isinstance(x, Run)]
        assert {*loads} <= {*program.instructions[run : min(following)]}


def test_more_room_lets_more_loads_begin_early_and_no_room_none() -> None:
    programs, memory = lowered()
    program, needed = programs[0], needs(programs[0], memory)
    limits = [0, max(needed.values()), 10 * max(needed.values())]
    counts = [sum(map(len, find_early_loads(program, memory, needed, limit).values())) for limit in limits]
    assert counts[0] == 0 and all(a <= b for a, b in pairwise(counts))
    first_run = next(i for i, x in enumerate(program.instructions) if isinstance(x, Run))
    assert counts[-1] <= sum(isinstance(x, Load) for x in program.instructions[first_run:])
