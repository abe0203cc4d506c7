"""What a recipe must fulfil besides the types of its fields, by the description of its algorithm."""

from collections.abc import Iterator

from realrl.config.errors import UserError
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.algorithm import AlgorithmSpec
from realrl.recipe.experiment import Experiment
from realrl.recipe.graphs import build_eval_graph, build_graph


def complete(experiment: Experiment, spec: AlgorithmSpec) -> Experiment:
    """A recipe bound to its algorithm, in which every role says where its weights come from. UserError for the
    first mistake."""
    models, filled = experiment.models, {}
    for role, of in spec.roles_of(experiment).items():
        model, update = getattr(models, role), {}
        weights_from = of.weights_from
        if weights_from is not None and getattr(models, weights_from) is None:
            weights_from = of.weights_else
        if weights_from is not None and not model.has_source:
            source = getattr(models, weights_from)
            update = {name: getattr(source, name) for name in ("path", "shape", "tokenizer")}
        dtype_from = of.dtype_from or weights_from
        if dtype_from is not None and "dtype" not in model.model_fields_set:
            update["dtype"] = getattr(models, dtype_from).dtype
        filled[role] = model.model_copy(update=update)
    bound = experiment.model_copy(update={"models": models.model_copy(update=filled)})
    bound._spec = spec
    for problem in _problems(bound):
        raise UserError(problem)
    graph = build_graph(bound)
    for problem in _graph_problems(bound, graph):
        raise UserError(problem)
    build_eval_graph(bound)
    return bound


def _problems(experiment: Experiment) -> Iterator[str]:
    spec, data, training = experiment.spec, experiment.data, experiment.training
    if spec.generation is None:
        if training.eval_min_new_tokens is not None:
            yield (
                f"training.eval_min_new_tokens is about generated text, and {spec.name} generates none;"
                " leave it out"
            )
        if training.judge is not None:
            yield f"training.judge scores generated text, and {spec.name} generates none; leave it out"
        return
    most = spec.generation(experiment).max_new_tokens
    if training.eval_min_new_tokens is not None and training.eval_min_new_tokens > most:
        yield (
            f"training.eval_min_new_tokens={training.eval_min_new_tokens} is above"
            f" generation.max_new_tokens={most}"
        )
    if training.judge is not None and data.eval is None:
        yield "training.judge scores what evaluations generate; give data.eval or set training.judge=null"
    if data.max_prompt_tokens + most > data.max_tokens:
        yield (
            f"data.max_prompt_tokens={data.max_prompt_tokens} and generation.max_new_tokens={most} together are"
            f" above data.max_tokens={data.max_tokens}"
        )
    samples = spec.samples_per_prompt(experiment)
    if samples < 1:
        yield f"algorithm {spec.name}: samples_per_prompt: {samples} must be at least 1"


def _graph_problems(experiment: Experiment, graph: DataflowGraph) -> Iterator[str]:
    batch = experiment.data.batch
    for call in graph.calls:
        # In prompts, so that all samples of a prompt are in one mini-batch.
        if batch % call.minibatches:
            yield (
                f"data.batch={batch} is not divisible by the {call.minibatches} mini-batches of {call.name};"
                f" make it a multiple of {call.minibatches}, or choose another number of mini-batches"
            )
    for average in graph.averages:
        dtype = getattr(experiment.models, average.role).dtype
        if dtype != "float32":
            yield (
                f"models.{average.role}.dtype={dtype}: {average.role} follows {average.source} by a moving average,"
                " which needs float32; in bfloat16 small steps are rounded away"
            )
