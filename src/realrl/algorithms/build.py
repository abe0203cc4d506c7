"""Methods of a recipe's algorithm, checked against its description."""

from realrl.algorithms.method import Algorithm, GenerateMethod, Method
from realrl.config.errors import UserError
from realrl.dataflow.call import Call, Kind
from realrl.recipe.experiment import Experiment
from realrl.recipe.graphs import build_eval_graph, build_graph
from realrl.recipe.settings import GenerationConfig


def build_algorithm(experiment: Experiment) -> Algorithm:
    """Build graphs and methods of a recipe, with fresh state. UserError where a call has no method, or one that
    contradicts the algorithm's description."""
    spec, graph, eval_graph = experiment.spec, build_graph(experiment), build_eval_graph(experiment)
    epochs = spec.epochs(experiment)
    sampling = None if spec.generation is None else spec.generation(experiment)
    eval_sampling = spec.eval_generation(experiment)
    algorithm: Algorithm = spec.methods(experiment, graph, eval_graph)
    for call in (*graph.calls, *(eval_graph.calls if eval_graph else ())):
        try:
            method = algorithm.method(call.name)
        except KeyError:
            raise UserError(f"algorithm {spec.name}: methods: {call.name} has none") from None
        if call.kind is Kind.GENERATE:
            problem = _generate_problem(method, sampling, eval_sampling)
        else:
            problem = _problem(call, method, epochs)
        if problem is not None:
            raise UserError(f"algorithm {spec.name}: methods: {call.name} {problem}")
    return algorithm


_NEEDED = {Kind.INFERENCE: ("sequences", "outputs", "metrics"), Kind.TRAIN: ("sequences", "weight", "loss")}
"""Methods that tell one kind of call from the others."""


def _generate_problem(
    method: Method, sampling: GenerationConfig | None, eval_sampling: GenerationConfig | None
) -> str | None:
    """What is wrong with the method of a generate call; None if nothing is."""
    if not isinstance(method, GenerateMethod):
        return "needs a GenerateMethod"
    if (method.sampling, method.eval_sampling) != (sampling, eval_sampling):
        return "samples otherwise than generation and eval_generation of the description say"
    return None


def _problem(call: Call, method: Method, epochs: int) -> str | None:
    """What is wrong with the method of an inference or train call; None if nothing is."""
    lacking = [name for name in _NEEDED[call.kind] if not hasattr(method, name)]
    if lacking:
        return f"needs a method with {lacking[0]}, see algorithms/method.py"
    if call.kind is Kind.TRAIN and getattr(method, "epochs", 1) != epochs:
        return (
            f"passes {getattr(method, 'epochs', 1)} times over its items, and the description says {epochs}"
        )
    return None
