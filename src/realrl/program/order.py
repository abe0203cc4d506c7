"""Facts about the calls of a step that follow from the graph: parameters that change, producers, and readers of
lengths."""

from collections.abc import Mapping

from realrl.dataflow.call import Call, Kind, MovingAverage
from realrl.dataflow.graph import DataflowGraph
from realrl.layout.sets import WHOLE, TrainablePart
from realrl.plan.plan import Plan

TrainableParts = Mapping[str, TrainablePart]
"""Role -> the part that training updates, which determines its parameter sets. Other roles are trained whole or
not at all."""


def dependents(graph: DataflowGraph, function: Call) -> tuple[Call, ...]:
    """List the calls that cannot run, or cannot send their outputs, before the outputs of a function exist."""
    own = [key for key in function.outputs if graph.keys[key].length == "own"]
    names = {name for key in own for name in length_calls(graph, key)} - {function.name}
    return tuple(c for c in graph.order if c.name in names or function in producers(graph, c))


def changes(graph: DataflowGraph, call: Call) -> tuple[str, ...]:
    """List the roles whose parameters a call changes: the role that it trains, and the moving averages of that
    role."""
    if call.kind is not Kind.TRAIN or call.role is None:
        return ()
    return (call.role, *(average.role for average in graph.averages if average.source == call.role))


def set_names(role: str, parts: TrainableParts) -> tuple[str, ...]:
    """List the parameter sets of a role, in storage order."""
    return tuple(parts.get(role, WHOLE).sets)


def trained_sets(role: str, parts: TrainableParts) -> tuple[str, ...]:
    """List the parameter sets of a role that its training updates."""
    return tuple(name for name, updated in parts.get(role, WHOLE).sets.items() if updated)


def changed_sets(graph: DataflowGraph, call: Call, role: str, parts: TrainableParts) -> tuple[str, ...]:
    """List the parameter sets of a role that a call changes."""
    if call.kind is Kind.TRAIN and call.role == role:
        return trained_sets(role, parts)
    follows = [average for average in graph.averages if average.role == role and role in changes(graph, call)]
    return following_sets(follows[0], parts) if follows else ()


def following_sets(average: MovingAverage, parts: TrainableParts) -> tuple[str, ...]:
    """List the parameter sets of a moving average that must be updated; sets that stay equal without an update are
    left out."""
    return (trained_sets if average.same_start else set_names)(average.role, parts)


def producers(graph: DataflowGraph, consumer: Call) -> tuple[Call, ...]:
    """List the calls whose outputs `consumer` reads, in the order of its inputs."""
    found = (graph.producer(key) for key in consumer.inputs)
    return tuple(dict.fromkeys(call for call in found if call is not None))


def keys_between(graph: DataflowGraph, producer: Call, consumer: Call) -> tuple[str, ...]:
    """List the keys that `consumer` reads and `producer` produces."""
    return tuple(key for key in consumer.inputs if graph.producer(key) == producer)


def dividing_keys(graph: DataflowGraph, call: Call) -> tuple[str, ...]:
    """List the keys whose lengths decide how a call's items are divided among its ranks."""
    found = (graph.length_key(key) for key in call.work)
    return tuple(dict.fromkeys(key for key in found if key is not None))


def length_readers(graph: DataflowGraph, plan: Plan, key: str) -> tuple[int, ...]:
    """List the ranks that must know the lengths of `key`: the ranks of `length_calls`."""
    return tuple(sorted({rank for name in length_calls(graph, key) for rank in plan[name].ranks}))


def length_calls(graph: DataflowGraph, key: str) -> tuple[str, ...]:
    """List the calls whose ranks must know the lengths of `key`.

    These calls hold or exchange rows of that length, or they exchange rows with a call whose items are divided by
    that length.
    """

    def divided_by(call: Call) -> bool:
        return key in dividing_keys(graph, call)

    found = []
    for call in graph.calls:
        touches = any(graph.length_key(k) == key for k in (*call.inputs, *call.outputs))
        feeds = any(divided_by(other) for other in graph.calls if call in producers(graph, other))
        if touches or feeds or any(map(divided_by, producers(graph, call))):
            found.append(call.name)
    return tuple(found)
