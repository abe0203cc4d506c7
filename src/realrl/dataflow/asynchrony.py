"""Steps whose calls overlap: calls that sample run ahead of training, or hand on their samples in portions."""

from dataclasses import replace

from realrl.dataflow.call import Call, Kind
from realrl.dataflow.graph import DataflowGraph


def run_ahead(graph: DataflowGraph, steps: int, span: int = 1) -> DataflowGraph:
    """Let generate calls sample the batch that is trained on `steps` steps later, each batch over `span` steps.

    The oldest tokens of a batch then come from parameters that are `steps` + `span` - 1 updates old. If `steps` is
    2 or more, functions run one step later than generation, so that a slow reward delays neither generation nor
    training. All other calls run in the step that trains on the batch, because calls of trained models should use
    the latest parameters. So functions that need the outputs of such calls run in this step, too.

    A call that generates from the outputs of other calls takes these calls ahead with it, and so does a function.
    """
    ahead: dict[str, int] = {}
    # Producers come after their consumers, so they can run at least as far ahead.
    for call in reversed(graph.order):
        early = call.is_function and not _needs_trained(graph, call)
        own = steps if call.kind is Kind.GENERATE else steps - 1 if early else 0
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


def hand_on_portions(graph: DataflowGraph, portions: int) -> DataflowGraph:
    """Let generate calls hand on their samples in portions."""
    calls = [replace(call, portions=portions if call.kind is Kind.GENERATE else 1) for call in graph.calls]
    return DataflowGraph(calls, graph.keys.values(), graph.averages)


def overlap_sampling(graph: DataflowGraph) -> DataflowGraph:
    """Let sampling of the next batch overlap with all other calls, instead of handing on portions.

    A plan of a short step of this graph probably also has a short step with portions.
    """
    calls = [replace(call, portions=1) for call in graph.calls]
    return run_ahead(DataflowGraph(calls, graph.keys.values(), graph.averages), 1)


def overlap_all(graph: DataflowGraph) -> DataflowGraph:
    """Let all calls of a step overlap, each on a batch of its own, instead of handing on portions.

    Under the same plan, the devices of a step with portions do the same work, and some of it must wait. So a step
    with portions is not shorter than a step of this graph, apart from the time to send rows.
    """
    ahead: dict[str, int] = {}
    for call in reversed(graph.order):
        readers = [ahead[other.name] + 1 for other in graph.calls if _reads(graph, other, call)]
        ahead[call.name] = 0 if call.kind is Kind.TRAIN else max(readers, default=1)
    calls = [replace(call, portions=1, ahead=ahead[call.name]) for call in graph.calls]
    return DataflowGraph(calls, graph.keys.values(), graph.averages)


def find_portion_problem(graph: DataflowGraph) -> str | None:
    """Say why the calls of a graph cannot work on portions of a batch; None if they can."""
    samplers = [call for call in graph.calls if call.kind is Kind.GENERATE]
    if len(samplers) != 1:
        return (
            f"{' and '.join(call.name for call in samplers)} sample, and only one call can hand on portions"
        )
    (sampler,) = samplers
    for call in (call for call in graph.calls if call != sampler):
        if _reads(graph, sampler, call):
            return f"{sampler.name} needs outputs of {call.name} first"
        lengths = [graph.length_key(key) for key in call.inputs]
        if not any(key is not None and graph.producer(key) == sampler for key in lengths):
            return f"{call.name} reads no samples, so it does not know which of them have ended"
        if call.minibatches > 1:
            return f"{call.name} makes {call.minibatches} optimizer steps, which need the whole batch"
    return None


def _needs_trained(graph: DataflowGraph, call: Call) -> bool:
    """Check whether a call needs, directly or not, what a trained model infers."""
    producers = [other for other in graph.calls if _reads(graph, call, other)]
    return any(
        (other.kind is Kind.INFERENCE and graph.trained(other.model_role)) or _needs_trained(graph, other)
        for other in producers
    )


def _reads(graph: DataflowGraph, call: Call, producer: Call) -> bool:
    return any(graph.producer(key) == producer for key in call.inputs)
