"""Asynchronous steps: calls that sample run ahead of training."""

from dataclasses import replace

from realrl.dataflow.call import Call, Kind
from realrl.dataflow.graph import DataflowGraph


def run_ahead(graph: DataflowGraph, steps: int, span: int = 1) -> DataflowGraph:
    """Let generate calls sample the batch that is trained on `steps` steps later, each batch over `span` steps.

    The oldest tokens of a batch then come from parameters that are `steps` + `span` - 1 updates old. If `steps` is
    2 or more, functions run one step later than generation, so that a slow reward delays neither generation nor
    training. All other calls run in the step that trains on the batch. Calls of trained models should use the
    latest parameters, and the outputs of frozen models do not depend on the step.

    A call that generates from the outputs of other calls takes these calls ahead with it.
    """
    ahead: dict[str, int] = {}
    # Producers come after their consumers, so they can run at least as far ahead.
    for call in reversed(graph.order):
        own = steps if call.kind is Kind.GENERATE else steps - 1 if call.is_function and steps > 1 else 0
        readers = [ahead[other.name] for other in graph.calls if _reads(graph, other, call)]
        ahead[call.name] = max(own, *readers, 0)
    for call in graph.order:
        # A call cannot run further ahead than the calls whose outputs it reads.
        producers = [ahead[other.name] for other in graph.calls if _reads(graph, call, other)]
        if call.kind is not Kind.GENERATE:
            ahead[call.name] = min([ahead[call.name], *producers])
    calls = [
        replace(call, ahead=ahead[call.name], span=span if call.kind is Kind.GENERATE else 1)
        for call in graph.calls
    ]
    return DataflowGraph(calls, graph.keys.values(), graph.averages)


def _reads(graph: DataflowGraph, call: Call, producer: Call) -> bool:
    return any(graph.producer(key) == producer for key in call.inputs)
