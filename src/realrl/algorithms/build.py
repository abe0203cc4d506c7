"""Builds the algorithm of a recipe, and checks its methods against its description (`AlgorithmSpec`)."""

import inspect
from collections.abc import Mapping
from typing import Any, cast

from realrl.algorithms.base.method import (
    Algorithm,
    FunctionMethod,
    GenerateMethod,
    InferenceMethod,
    Method,
    TrainMethod,
)
from realrl.algorithms.guard import GuardedAlgorithm, guard_method
from realrl.config.errors import UserError
from realrl.config.user_code import find_definition, is_own_module
from realrl.dataflow.call import Call, Kind
from realrl.recipe.algorithm import AlgorithmSpec
from realrl.recipe.experiment import Experiment
from realrl.recipe.registry import find_user_code


def build_algorithm(experiment: Experiment) -> Algorithm:
    """Build the graphs and methods of a recipe, with fresh state.

    Raises UserError if a call has no method, or if a method contradicts the algorithm's description.
    """
    spec, graph, eval_graph = experiment.spec, experiment.graph, experiment.eval_graph
    algorithm: Any = spec.methods(experiment, graph, eval_graph)
    place = None if is_own_module(spec.methods.__module__) else find_definition(spec.methods)
    where = f"algorithm {spec.name}: methods" + (f" ({place[0]}:{place[1]})" if place is not None else "")
    if (absent := _find_missing(algorithm, Algorithm)) is not None:
        given = "None" if algorithm is None else f"a {type(algorithm).__name__}"
        raise UserError(
            f"{where} gave {given}; it must give a realrl.algorithms.Algorithm, which has {absent}"
        )
    graphs = [of for of in (graph, eval_graph) if of is not None]
    methods: dict[str, Method] = {}
    for call in (call for of in graphs for call in of.calls):
        try:
            methods[call.name] = algorithm.method(call.name)
        except KeyError:
            raise UserError(f"{where}: {call.name} has none") from None
        problem = _find_problem(spec, experiment, call, methods[call.name])
        if problem is not None:
            raise UserError(f"{where}: {call.name} {problem}")
    code = find_user_code(experiment.algorithm)
    if code is None:
        return cast(Algorithm, algorithm)
    for name, method in methods.items():
        declared = [(of.call(name), of) for of in graphs if any(call.name == name for call in of.calls)]
        methods[name] = guard_method(code, method, declared)
    guarded: Any = GuardedAlgorithm(code, algorithm, spec.name, methods)
    return cast(Algorithm, guarded)


_PROTOCOLS: Mapping[Kind, type] = {
    Kind.INFERENCE: InferenceMethod,
    Kind.TRAIN: TrainMethod,
    Kind.FUNCTION: FunctionMethod,
}


def _find_missing(implementation: object, protocol: type) -> str | None:
    """Find the first member of a protocol that an object lacks, in the order of definition."""
    members = [*inspect.get_annotations(protocol), *(name for name in vars(protocol) if name[0] != "_")]
    # Look in dir() first, because reading a property may raise: `head_scale` may do so before `prepare`.
    present = dir(implementation)
    return next((m for m in members if m not in present and not hasattr(implementation, m)), None)


def _find_problem(spec: AlgorithmSpec, experiment: Experiment, call: Call, method: Method) -> str | None:
    """Describe the first mistake of a call's method. None if it has none."""
    if call.kind is Kind.GENERATE:
        if not isinstance(method, GenerateMethod):
            return "needs a GenerateMethod"
        sampling = None if spec.generation is None else spec.generation(experiment)
        declared = (sampling, spec.eval_generation(experiment))
        greedy = method.sampling.greedy and method.eval_sampling.greedy
        if not greedy and (method.sampling, method.eval_sampling) != declared:
            return "samples otherwise than generation and eval_generation of the description say"
        if method.prompts not in call.inputs:
            return f"has prompts={method.prompts!r}, which is none of its inputs {', '.join(call.inputs)}"
        return None
    protocol = _PROTOCOLS[call.kind]
    if (missing := _find_missing(method, protocol)) is not None:
        return f"has no {missing}, which realrl.algorithms.{protocol.__name__} needs"
    if call.kind is Kind.TRAIN:
        passes, epochs = cast(TrainMethod, method).epochs, spec.epochs(experiment)
        if passes != epochs:
            return f"passes {passes} times over its items, and the description says {epochs}"
    return None
