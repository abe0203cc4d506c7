"""From a recipe to its algorithm."""

from realrl.algorithms.method import Algorithm, GenerateMethod, Method
from realrl.config.errors import UserError
from realrl.dataflow.call import Call, Kind
from realrl.recipe.experiment import Experiment
from realrl.recipe.graphs import build_eval_graph, build_graph


def build_algorithm(experiment: Experiment) -> Algorithm:
    """Graphs and methods of the experiment, with fresh state. UserError where a call has no method, or one that
    contradicts the algorithm's description."""
    spec, graph, eval_graph = experiment.spec, build_graph(experiment), build_eval_graph(experiment)
    algorithm: Algorithm = spec.methods(experiment, graph, eval_graph)
    for call in (*graph.calls, *(eval_graph.calls if eval_graph else ())):
        try:
            method = algorithm.method(call.name)
        except KeyError:
            raise UserError(f"algorithm {spec.name}: methods: {call.name} has none") from None
        problem = _problem(call, method, spec.epochs(experiment))
        if problem is not None:
            raise UserError(f"algorithm {spec.name}: methods: {call.name} {problem}")
    return algorithm


_NEEDED = {
    Kind.INFERENCE: ("sequences", "outputs", "metrics"),
    Kind.TRAIN: ("sequences", "weight", "loss"),
    Kind.FUNCTION: ("load", "wants", "check_fields", "call"),
}
"""What the method of a call must be able to do, of which the other kinds cannot do some."""


def _problem(call: Call, method: Method, epochs: int) -> str | None:
    """What is wrong with the method of a call; None if nothing is."""
    if call.kind is Kind.GENERATE:
        return None if isinstance(method, GenerateMethod) else "needs a GenerateMethod"
    lacking = [name for name in _NEEDED[call.kind] if not hasattr(method, name)]
    if lacking:
        return f"needs a method with {lacking[0]}, see algorithms/method.py"
    if call.kind is Kind.TRAIN and getattr(method, "epochs", 1) != epochs:
        return (
            f"passes {getattr(method, 'epochs', 1)} times over its items, and the description says {epochs}"
        )
    return None
