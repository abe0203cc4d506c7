"""Text form of a dataflow graph."""

from collections.abc import Collection

from realrl.dataflow.call import Call, Kind
from realrl.dataflow.graph import DataflowGraph


def format_graph(graph: DataflowGraph, trained: Collection[str]) -> str:
    """Format the calls in the order they run, each with its inputs, outputs and dependencies.

    `trained` are the roles that training updates, whether this graph does or not.
    """
    lines = [f"data set -> {', '.join(graph.sources)}"]
    for number, call in enumerate(graph.order, 1):
        lines += ["", f"{number}. {call.name}  ({_about(call, trained)})"]
        inputs = _inputs(graph, call)
        labels = ("in", *[""] * (len(inputs) - 1))
        lines += [f"   {label:<6} {line}" for label, line in zip(labels, inputs, strict=True)]
        lines += [f"   out    {', '.join(call.outputs)}"] if call.outputs else []
        for average in graph.averages if call.kind is Kind.TRAIN else ():
            if average.source == call.role:
                moves = f"moves by {average.factor:g} towards" if average.factor < 1 else "becomes"
                every = f" every {average.period} steps" if average.period > 1 else ""
                lines.append(f"   then   {average.role} {moves} {call.role}{every}")
        after = ", ".join(other.name for other in graph.dependencies(call))
        lines += [f"   after  {after}"] if after else []
    return "\n".join(lines) + "\n"


def _about(call: Call, trained: Collection[str]) -> str:
    if call.role is None:
        return f"{call.kind} {call.function} on the host"
    frozen = "" if call.role in trained else " frozen"
    split = f" in {call.minibatches} mini-batches" if call.minibatches > 1 else ""
    candidates = call.candidates
    tokens = ""
    if candidates is not None:
        tokens = (
            f", {candidates.count} {'likeliest ' if candidates.ids is None else ''}tokens at each position"
        )
    return f"{call.kind}{split}{tokens},{frozen} role {call.role}"


def _inputs(graph: DataflowGraph, call: Call) -> list[str]:
    """Format a line per source of keys."""
    places: dict[str, list[str]] = {}
    for key in call.inputs:
        producer = graph.producer(key)
        places.setdefault(producer.name if producer else "data set", []).append(key)
    lines = [f"{', '.join(keys)}  <- {place}" for place, keys in places.items()]
    return lines + ["further fields of the records  <- data set"] * call.record_fields
