"""Methods of a recipe's algorithm, checked against its description."""

import inspect
from collections.abc import Mapping
from typing import cast

from realrl.algorithms.method import (
    Algorithm,
    FunctionMethod,
    GenerateMethod,
    InferenceMethod,
    Method,
    TrainMethod,
)
from realrl.config.errors import UserError
from realrl.dataflow.call import Call, Kind
from realrl.recipe.algorithm import get_spec
from realrl.recipe.experiment import Experiment
from realrl.recipe.graphs import build_eval_graph, build_graph
from realrl.recipe.settings import GenerationConfig


def build_algorithm(experiment: Experiment) -> Algorithm:
    """Build graphs and methods of a recipe, with fresh state. UserError where a call has no method, or one that
    contradicts the algorithm's description."""
    spec, graph, eval_graph = get_spec(experiment), build_graph(experiment), build_eval_graph(experiment)
    epochs = spec.epochs(experiment)
    sampling = None if spec.generation is None else spec.generation(experiment)
    eval_sampling = spec.eval_generation(experiment)
    algorithm: Algorithm = spec.methods(experiment, graph, eval_graph)
    if (absent := _find_missing(algorithm, Algorithm)) is not None:
        raise UserError(f"algorithm {spec.name}: methods: {type(algorithm).__name__} has no {absent}")
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


_PROTOCOLS: Mapping[Kind, type] = {
    Kind.INFERENCE: InferenceMethod,
    Kind.TRAIN: TrainMethod,
    Kind.FUNCTION: FunctionMethod,
}


def _find_missing(implementation: object, protocol: type) -> str | None:
    """Find the first member of a protocol that an object lacks, in the order of definition; None if it has all."""
    members = [*inspect.get_annotations(protocol), *(name for name in vars(protocol) if name[0] != "_")]
    # Properties may be asked only later, so most are found without: `head_scale` needs `prepare`.
    present = dir(implementation)
    return next((m for m in members if m not in present and not hasattr(implementation, m)), None)


def _generate_problem(
    method: Method, sampling: GenerationConfig | None, eval_sampling: GenerationConfig | None
) -> str | None:
    """What is wrong with the method of a generate call; None if nothing is."""
    if not isinstance(method, GenerateMethod):
        return "needs a GenerateMethod"
    greedy = method.sampling.greedy and method.eval_sampling.greedy
    if not greedy and (method.sampling, method.eval_sampling) != (sampling, eval_sampling):
        return "samples otherwise than generation and eval_generation of the description say"
    return None


def _problem(call: Call, method: Method, epochs: int) -> str | None:
    """What is wrong with the method of any other call; None if nothing is."""
    protocol = _PROTOCOLS[call.kind]
    missing = _find_missing(method, protocol)
    if missing is not None:
        return f"has no {missing}, which algorithms.method.{protocol.__name__} needs"
    if call.kind is Kind.TRAIN:
        passes = cast(TrainMethod, method).epochs
        if passes != epochs:
            return f"passes {passes} times over its items, and the description says {epochs}"
    return None
