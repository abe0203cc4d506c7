"""Facts about the calls of a step that follow from the graph: parameters that change, producers, and readers of
lengths."""

from collections.abc import Collection, Mapping

from realrl.dataflow.call import Call, MovingAverage
from realrl.dataflow.graph import DataflowGraph
from realrl.layout.sets import WHOLE, TrainablePart
from realrl.plan.plan import Plan

TrainableParts = Mapping[str, TrainablePart]
"""Role -> the part that training updates, which determines its parameter sets. Other roles are trained whole or
not at all."""


def dependents(graph: DataflowGraph, function: Call) -> tuple[Call, ...]:
    """List the calls that cannot run, or cannot send their outputs, before the outputs of a function exist.

    These are calls of the same batch. Calls of another batch do not wait (`Call.ahead`).
    """
    own = [key for key in function.outputs if graph.keys[key].length == "own"]
    names = {name for key in own for name in length_calls(graph, key)} - {function.name}
    waiting = (c for c in graph.order if c.name in names or function in producers(graph, c))
    return tuple(call for call in waiting if call.ahead == function.ahead)


def changes(graph: DataflowGraph, call: Call) -> tuple[str, ...]:
    """List the roles whose parameters a call changes: the role that it trains, and the moving averages of that
    role."""
    if not call.updates or call.role is None:
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
    if call.updates and call.role == role:
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


def list_batches(call: Call, batches: Collection[int]) -> list[int]:
    """List the batches on which a call works in a step, if the step works on `batches`. Batches are numbers of
    steps until they are trained on."""
    return [batch for batch in range(call.ahead, call.ahead + call.span) if batch in batches]


def transfer_ahead(graph: DataflowGraph, producer: Call, consumer: Call) -> int:
    """Find how many steps ahead of training the rows of `producer` are sent to `consumer`.

    They are sent in the step in which the last lengths that divide the items of either call become known. If this
    is the step of `consumer`, they arrive before it runs. Otherwise they arrive at the end of the step.
    """
    dividing = (graph.producer(key) for call in (producer, consumer) for key in dividing_keys(graph, call))
    return min([producer.ahead, *(call.ahead for call in dividing if call is not None)])


def find_deliveries(graph: DataflowGraph) -> dict[str, tuple[tuple[Call, Call], ...]]:
    """Find which rows are sent at the end of a step, for a later step: for each call, pairs of a producer and a
    consumer whose rows are sent after this call."""
    found: dict[str, tuple[tuple[Call, Call], ...]] = {}
    for consumer in graph.order:
        for producer in producers(graph, consumer):
            steps = transfer_ahead(graph, producer, consumer)
            if steps == consumer.ahead:
                continue
            dividing = [graph.producer(k) for c in (producer, consumer) for k in dividing_keys(graph, c)]
            last = max(
                (c for c in (producer, *dividing) if c is not None and c.ahead == steps),
                key=graph.order.index,
            )
            found[last.name] = (*found.get(last.name, ()), (producer, consumer))
    return found


def length_readers(graph: DataflowGraph, plan: Plan, key: str, *, later: bool = False) -> tuple[int, ...]:
    """List the ranks that must know the lengths of `key` as soon as they exist: the ranks of `length_calls`, unless
    these calls need the lengths only in a later step.

    With `later`, list the other ranks, which learn the lengths at the end of the step.
    """
    made_by = graph.producer(key)
    assert made_by is not None, "lengths of records are known everywhere"
    calls = [graph.call(name) for name in length_calls(graph, key)]
    now = {rank for call in calls if call.ahead >= made_by.ahead for rank in plan[call.name].ranks}
    everyone = {rank for call in calls for rank in plan[call.name].ranks}
    return tuple(sorted(everyone - now if later else now))


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
