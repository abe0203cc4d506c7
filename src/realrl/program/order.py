"""Order and sharing that follow from a graph and a plan: waves of calls, shared copies, readers of lengths."""

from collections.abc import Mapping

from realrl.dataflow.call import Call, Kind, MovingAverage
from realrl.dataflow.graph import DataflowGraph
from realrl.layout.sets import WHOLE, TrainablePart
from realrl.plan.plan import Plan

Waves = tuple[tuple[Call, ...], ...]
TrainableParts = Mapping[str, TrainablePart]
"""Role -> the part that training updates, which determines its parameter sets. Other roles are trained whole or
not at all."""


def waves(graph: DataflowGraph, plan: Plan) -> Waves:
    """Sort calls into waves: those of one wave share no device and do not wait for each other.

    A function uses no device: it is in the first wave in which its inputs are there, before the others.
    """
    number: dict[Call, int] = {}
    for call in graph.order:
        before = [number[other] for other in number if _ordered(graph, plan, other, call)]
        number[call] = 1 + max(before, default=-1)
    found: list[list[Call]] = [[] for _ in range(1 + max(number.values(), default=-1))]
    for call, wave in sorted(number.items(), key=lambda item: not item[0].is_function):
        found[wave].append(call)
    return tuple(map(tuple, found))


def dependents(graph: DataflowGraph, function: Call) -> tuple[Call, ...]:
    """List the calls that cannot run, or cannot send their outputs, before the outputs of a function exist."""
    own = [key for key in function.outputs if graph.keys[key].length == "own"]
    names = {name for key in own for name in length_calls(graph, key)} - {function.name}
    return tuple(c for c in graph.order if c.name in names or function in producers(graph, c))


def collecting_wave(graph: DataflowGraph, order: Waves, function: Call) -> int:
    """Find the wave at whose end the outputs of a function are waited for and sent on.

    It is the one before the first wave with a call that needs them, so that calls in between run meanwhile; the
    number of waves where no call does.
    """
    needing = set(dependents(graph, function))
    first = next((i for i, calls in enumerate(order) if needing & {*calls}), len(order) + 1)
    own = next(i for i, calls in enumerate(order) if function in calls)
    return max(own, first - 1)


def changes(graph: DataflowGraph, call: Call) -> tuple[str, ...]:
    """List the roles whose parameters a call changes: the one it trains, and its moving averages."""
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
    """List the parameter sets of a moving average that must be updated; sets that stay equal anyway are left
    out."""
    return (trained_sets if average.same_start else set_names)(average.role, parts)


def sharing(graph: DataflowGraph, plan: Plan, order: Waves, call: Call) -> tuple[Call, ...]:
    """List the calls that can use the same copy of parameters as `call`, in the order they run.

    These are the calls of its role in its layout between two changes of the role, itself included; `call` is no
    function.
    """

    def version(wave: int) -> int:
        return sum(call.role in changes(graph, other) for calls in order[:wave] for other in calls)

    own = next(version(i) for i, calls in enumerate(order) if call in calls)
    return tuple(
        other
        for i, calls in enumerate(order)
        for other in calls
        if other.role == call.role and plan[other.name].layout == plan[call.name].layout and version(i) == own
    )


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

    They hold or exchange rows of that length, or they exchange rows with a call whose items are divided by it.
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


def _ordered(graph: DataflowGraph, plan: Plan, first: Call, second: Call) -> bool:
    """Check whether `second`, which comes later in the graph's order, must wait for `first`."""
    if first.is_function or second.is_function:
        # Functions use no device, and change no parameters.
        needed = first.is_function and second in dependents(graph, first)
        return needed or first in graph.dependencies(second)
    return (
        first in graph.dependencies(second)
        or plan[first.name].mesh.overlaps(plan[second.name].mesh)
        or second.role in changes(graph, first)
        or first.role in changes(graph, second)
    )
