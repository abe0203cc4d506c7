"""Methods of a recipe's algorithm, checked against its description."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from realrl.algorithms.method import (
    Algorithm,
    FunctionMethod,
    GenerateMethod,
    InferenceMethod,
    Method,
    TrainMethod,
)
from realrl.algorithms.user_methods import UserAlgorithm, guard_method
from realrl.config.errors import UserError
from realrl.config.user_code import UserCode, find_definition, is_own_module
from realrl.dataflow.call import Call, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.algorithm import get_spec
from realrl.recipe.experiment import Experiment
from realrl.recipe.generation import GenerationConfig
from realrl.recipe.graphs import build_eval_graph, build_graph
from realrl.recipe.registry import find_user_code


def build_algorithm(experiment: Experiment) -> Algorithm:
    """Build graphs and methods of a recipe, with fresh state. UserError where a call has no method, or one that
    contradicts the algorithm's description."""
    spec, graph, eval_graph = get_spec(experiment), build_graph(experiment), build_eval_graph(experiment)
    epochs = spec.epochs(experiment)
    sampling = None if spec.generation is None else spec.generation(experiment)
    eval_sampling = spec.eval_generation(experiment)
    algorithm: Algorithm = spec.methods(experiment, graph, eval_graph)
    where = _describe_place(spec.methods)
    if (absent := _find_missing(algorithm, Algorithm)) is not None:
        raise UserError(
            f"algorithm {spec.name}: methods{where} gave {_describe(algorithm)}; it must give an"
            f" algorithms.method.Algorithm, which has {absent}"
        )
    graphs = [of for of in (graph, eval_graph) if of is not None]
    methods: dict[str, Method] = {}
    for call in (call for of in graphs for call in of.calls):
        try:
            method = methods[call.name] = algorithm.method(call.name)
        except KeyError:
            raise UserError(f"algorithm {spec.name}: methods{where}: {call.name} has none") from None
        if call.kind is Kind.GENERATE:
            problem = _find_generate_problem(call, method, sampling, eval_sampling)
        else:
            problem = _find_problem(call, method, epochs)
        if problem is not None:
            raise UserError(f"algorithm {spec.name}: methods{where}: {call.name} {problem}")
    code = find_user_code(experiment.algorithm)
    return algorithm if code is None else _guard(code, algorithm, spec.name, methods, graphs)


def _guard(
    code: UserCode,
    algorithm: Algorithm,
    name: str,
    methods: Mapping[str, Method],
    graphs: Sequence[DataflowGraph],
) -> Algorithm:
    """Guard what a user's algorithm computes, call by call."""
    guarded = {}
    for call, method in methods.items():
        declared = [(of.call(call), of) for of in graphs if any(other.name == call for other in of.calls)]
        guarded[call] = guard_method(code, method, declared)
    return UserAlgorithm(code, algorithm, name, guarded)


def _describe_place(function: Callable[..., Any]) -> str:
    """Describe where a user's function is defined, for error messages."""
    place = None if is_own_module(function.__module__) else find_definition(function)
    return "" if place is None else f" ({place[0]}:{place[1]})"


def _describe(value: Any) -> str:
    """Describe a wrong value by its type."""
    return "None" if value is None else f"a {type(value).__name__}"


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


def _find_generate_problem(
    call: Call, method: Method, sampling: GenerationConfig | None, eval_sampling: GenerationConfig | None
) -> str | None:
    """Find the first mistake of a generate call's method, in words; None if there is none."""
    if not isinstance(method, GenerateMethod):
        return "needs a GenerateMethod"
    greedy = method.sampling.greedy and method.eval_sampling.greedy
    if not greedy and (method.sampling, method.eval_sampling) != (sampling, eval_sampling):
        return "samples otherwise than generation and eval_generation of the description say"
    if method.prompts not in call.inputs:
        return f"has prompts={method.prompts!r}, which is none of its inputs {', '.join(call.inputs)}"
    return None


def _find_problem(call: Call, method: Method, epochs: int) -> str | None:
    """Find the first mistake of the method of any other call, in words; None if there is none."""
    protocol = _PROTOCOLS[call.kind]
    missing = _find_missing(method, protocol)
    if missing is not None:
        return f"has no {missing}, which algorithms.method.{protocol.__name__} needs"
    if call.kind is Kind.TRAIN:
        passes = cast(TrainMethod, method).epochs
        if passes != epochs:
            return f"passes {passes} times over its items, and the description says {epochs}"
    return None
