"""Compile a dataflow graph and a plan into one program per rank."""

from collections.abc import Callable, Mapping

from realrl.dataflow.call import Call
from realrl.dataflow.graph import DataflowGraph
from realrl.plan.placement import Placement
from realrl.plan.plan import Plan
from realrl.program.instructions import (
    Feed,
    Instruction,
    Program,
    Reallocate,
    Receive,
    Release,
    Report,
    Run,
    Send,
    ShareLengths,
)

WRITER = 0
"""The rank that writes figures, samples and progress."""


def home_placements(graph: DataflowGraph, plan: Plan) -> dict[str, Placement]:
    """Where each role's parameters live between steps: where it is trained, else where it is first used."""
    return {
        role: plan[max(graph.role_calls(role), key=lambda call: call.kind == "train").name]
        for role in graph.roles
    }


def lower(graph: DataflowGraph, plan: Plan, homes: Mapping[str, Placement]) -> list[Program]:
    """One program per rank of the plan's cluster.

    `homes` says where each role's parameters lie when the step starts (see `home_placements`). Every rank's
    program is a part of one global order of instructions, and nothing waits for a later one, so programs
    cannot deadlock; `validate` proves it again for any programs.
    """
    programs: list[list[Instruction]] = [[] for _ in range(plan.cluster.size)]

    def emit(ranks: tuple[int, ...], *instructions: Instruction) -> None:
        for rank in ranks:
            programs[rank].extend(instructions)

    emit(tuple(range(plan.cluster.size)), Feed(graph.sources))
    numbers = _exchange_numbers(graph)
    for call in graph.order:
        placement, home = plan[call.name], homes[call.role]
        for producer in _producers(graph, call):
            keys = _keys_between(graph, producer, call)
            number = numbers[producer.name, call.name]
            receive = Receive(number, keys, producer.name, call.name, plan[producer.name].heads)
            emit(placement.ranks, receive)
        moved = placement.layout != home.layout
        if moved:
            emit(_union(home.ranks, placement.ranks), Reallocate(call.role, home, placement))
        emit(placement.ranks, Run(call.name, call.role, placement))
        if moved:
            emit(placement.ranks, Release(call.role, placement))
        _emit_outputs(graph, plan, call, numbers, emit)
    return [Program(rank, tuple(instructions)) for rank, instructions in enumerate(programs)]


def _emit_outputs(
    graph: DataflowGraph,
    plan: Plan,
    call: Call,
    numbers: Mapping[tuple[str, str], int],
    emit: Callable[..., None],
) -> None:
    """What follows a call: lengths, then the rows its consumers need, then its figures."""
    heads = plan[call.name].heads
    for key in call.outputs:
        if graph.keys[key].length == "own":
            readers = _length_readers(graph, plan, key)
            emit(_union(heads, readers), ShareLengths(key, call.name, heads, readers))
    for consumer in graph.order:
        if call in _producers(graph, consumer):
            keys = _keys_between(graph, call, consumer)
            ranks = plan[consumer.name].ranks
            emit(heads, Send(numbers[call.name, consumer.name], keys, call.name, consumer.name, ranks))
    if call.kind != "generate" and heads[0] != WRITER:
        emit(_union(heads[:1], (WRITER,)), Report(call.name, heads[0], WRITER))


def _union(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted({*a, *b}))


def _producers(graph: DataflowGraph, consumer: Call) -> tuple[Call, ...]:
    """Calls whose outputs `consumer` reads, in the order of its inputs."""
    found = (graph.producer(key) for key in consumer.inputs)
    return tuple(dict.fromkeys(call for call in found if call is not None))


def _keys_between(graph: DataflowGraph, producer: Call, consumer: Call) -> tuple[str, ...]:
    return tuple(key for key in consumer.inputs if graph.producer(key) == producer)


def _exchange_numbers(graph: DataflowGraph) -> dict[tuple[str, str], int]:
    pairs = [(p.name, c.name) for c in graph.order for p in _producers(graph, c)]
    return {pair: number for number, pair in enumerate(pairs)}


def _length_readers(graph: DataflowGraph, plan: Plan, key: str) -> tuple[int, ...]:
    """Ranks that must know the lengths of `key`: those that hold or exchange rows of that length, and those
    that send to a call whose items are divided by it."""
    readers: set[int] = set()
    for call in graph.calls:
        touches = any(graph.length_key(k) == key for k in (*call.inputs, *call.outputs))
        feeds = any(
            key in map(graph.length_key, consumer.work)
            for consumer in graph.calls
            if call in _producers(graph, consumer)
        )
        if touches or feeds:
            readers.update(plan[call.name].ranks)
    return tuple(sorted(readers))
