"""Notes on metrics that an algorithm's description names and no call gives."""

from collections.abc import Iterator, Mapping

from realrl.config.explain import nearest
from realrl.dataflow.call import Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.algorithm import AlgorithmSpec
from realrl.recipe.evaluation import JUDGE


def list_metric_notes(
    spec: AlgorithmSpec,
    graph: DataflowGraph,
    trained: Mapping[str, float],
    evaluated: Mapping[str, float] | None,
) -> Iterator[str]:
    """Yield a note on every metric that the description names and the first step and evaluation do not have.

    graph: the calls of a training step. trained, evaluated: metrics by `call/name`; None for a run without
    evaluation, whose missing metrics say nothing where evaluations might give them.
    """
    given = {*trained, *(evaluated or ())}
    for field, name in _named_metrics(spec):
        call, _, last = name.rpartition("/")
        if last in (JUDGE, *spec.optional_metrics) or not _is_expected(
            spec, graph, call, evaluated is not None
        ):
            continue
        # Summaries are of evaluations.
        found = given if field != "summary" else {*(evaluated or ())}
        if any(metric == name or metric.endswith(f"/{name}") for metric in found):
            continue
        hint = nearest(name, found) or nearest(last, {metric.rpartition("/")[2] for metric in found})
        source = "no evaluation has" if field == "summary" else "no call has given"
        yield (
            f"algorithm {spec.name}: {field}: {source} a metric {name}"
            + (f"; did you mean {hint}?" if hint is not None and hint != name else "")
        )


def _named_metrics(spec: AlgorithmSpec) -> list[tuple[str, str]]:
    """List (field, metric), each once."""
    named = [
        *(("headlines", name) for name in spec.headlines),
        *(("curves", name) for name in spec.curves),
        *(("summary", summary.metric) for summary in spec.summary),
    ]
    return list(dict.fromkeys(named))


def _is_expected(spec: AlgorithmSpec, graph: DataflowGraph, call: str, evaluates: bool) -> bool:
    """Tell whether a metric of a call, `""` for one of any call, must have been given by now."""
    if call in spec.optional_calls:  # which this recipe may not have
        return False
    if evaluates or spec.eval_graph is None:
        return True
    return any(c.name == call and c.kind is Kind.TRAIN for c in graph.calls)
