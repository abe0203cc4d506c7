"""Build the dataflow graphs of a recipe, and check them against the description of its algorithm."""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from realrl.config.errors import UserError
from realrl.dataflow.asynchrony import hand_on_portions, run_ahead
from realrl.dataflow.call import ROUTED_EXPERTS, Kind
from realrl.dataflow.environment import OUTPUTS as ENVIRONMENT_KEYS
from realrl.dataflow.environment import add_environment
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.algorithm import SCORE
from realrl.recipe.experiment import Experiment
from realrl.recipe.forms import FORMS
from realrl.recipe.model import TrainedModelConfig

GENERATED = ("sequences", "logprobs", "prompt_length", "finished")
"""Keys that a generate call can produce."""
SAMPLED = ("sequences", "prompt_length", "finished")
"""Keys that are needed to write the samples of evaluations."""


def build_graph(experiment: Experiment) -> DataflowGraph:
    """Build the calls of one training step. Raises UserError if they contradict the algorithm's description."""
    graph = _build(experiment, experiment.spec.train_graph, "train_graph", _train_problems)
    settings = experiment.asynchrony
    if settings.portions > 1:
        return hand_on_portions(graph, settings.portions)
    return run_ahead(graph, settings.ahead, settings.span)


def build_eval_graph(experiment: Experiment) -> DataflowGraph | None:
    """Build the calls of one evaluation step; None without evaluation records.

    Raises UserError like `build_graph`.
    """
    if experiment.data.eval is None:
        return None
    function = experiment.spec.eval_graph
    if function is None:
        raise UserError(f"data.eval: {experiment.spec.name} has no evaluation; set data.eval=null")
    return _build(experiment, function, "eval_graph", _eval_problems)


def _build(
    experiment: Experiment,
    function: Callable[[Any], DataflowGraph],
    field: str,
    problems: Callable[[Experiment, DataflowGraph], Iterator[str]],
) -> DataflowGraph:
    spec = experiment.spec
    try:
        graph = function(experiment)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"algorithm {spec.name}: {field}: {error}") from error
    if not isinstance(graph, DataflowGraph):
        raise UserError(f"algorithm {spec.name}: {field}: {type(graph).__name__} is not a DataflowGraph")
    for problem in chain(_problems(experiment, graph), problems(experiment, graph)):
        raise UserError(f"algorithm {spec.name}: {field}: {problem}")
    return graph if experiment.environment_config is None else add_environment(graph)


def _problems(experiment: Experiment, graph: DataflowGraph) -> Iterator[str]:
    spec = experiment.spec
    roles = spec.roles_of(experiment)
    for role in graph.roles:
        if role not in roles:
            yield f"role {role} is not one of {', '.join(roles)}"
    missing = [key for key in graph.sources if key not in FORMS[spec.form].keys]
    if missing:
        yield f"no call produces {', '.join(missing)}, and records of form {spec.form!r} yield no such key"
    for key in graph.keys:
        if key.endswith(ROUTED_EXPERTS):
            yield f"key {key} has a name that is kept for router replay, which adds its keys by itself"
        if experiment.environment_config is not None and key.endswith(ENVIRONMENT_KEYS):
            yield f"key {key} has a name that is kept for environments, which add their keys by themselves"
    for call in graph.calls:
        if call.kind is not Kind.GENERATE:
            continue
        if spec.generation is None:
            yield f"{call.name} generates, and the description has generation=None"
        if roles[call.model_role].head != "lm":
            yield f"{call.name} needs a language-model head for {call.role}"
        offered = [f"{call.prefix}{key}" for key in GENERATED]
        if offered[0] not in call.outputs:
            yield f"{call.name} must produce {offered[0]}"
        unknown = [key for key in call.outputs if key not in offered]
        if unknown:
            yield f"{call.name} cannot produce {unknown[0]}; a generate call has {', '.join(offered)}"


def _train_problems(experiment: Experiment, graph: DataflowGraph) -> Iterator[str]:
    spec = experiment.spec
    kinds = {call.kind for call in graph.calls}
    if spec.trains and Kind.TRAIN not in kinds:
        yield "no call trains"
    if not spec.trains and Kind.TRAIN in kinds:
        yield "a call trains, and the description has trains=False"
    if spec.generation is not None and Kind.GENERATE not in kinds:
        yield "no call generates, and the description says how to"
    if spec.sampling_rounds(experiment) > 1:
        yield from _rounds_problems(graph)
    for role in spec.roles_of(experiment):
        if role not in graph.roles:
            yield f"no call uses role {role}"
        elif graph.trained(role) is not isinstance(getattr(experiment.models, role), TrainedModelConfig):
            kind = "TrainedModelConfig" if graph.trained(role) else "ModelConfig"
            yield f"models.{role} must be a {kind}, to go with the calls of {role}"


def _rounds_problems(graph: DataflowGraph) -> Iterator[str]:
    if SCORE not in graph.keys or graph.producer(SCORE) is None or graph.length_key(SCORE) is not None:
        yield f"no call produces {SCORE}, one number per item, by which samples are taken in rounds"
        return
    kinds = [call.kind for call in graph.upstream(SCORE).calls]
    if Kind.GENERATE not in kinds:
        yield f"{SCORE} depends on no samples, which would be taken in rounds"
    if Kind.TRAIN in kinds:
        yield f"{SCORE} depends on a call that trains, which must not run in every round"


def _eval_problems(experiment: Experiment, graph: DataflowGraph) -> Iterator[str]:
    for call in graph.calls:
        if call.kind is Kind.TRAIN:
            yield f"{call.name} trains"
        lacking = [key for key in SAMPLED if key not in call.outputs]
        if call.kind is Kind.GENERATE and lacking:
            yield f"{call.name} must produce {lacking[0]} too, for the samples of evaluations"
    for key in experiment.spec.sample_keys:
        if graph.producer(key) is None or graph.length_key(key) is not None:
            yield f"no call produces {key}, one number per item, which sample_keys names"
