"""Check a recipe as a whole against the description of its algorithm."""

from collections.abc import Iterator, Mapping, Sequence

from realrl.config.errors import UserError, join
from realrl.config.explain import join_mistakes, nearest
from realrl.config.hardware import choose_products, computes_on_gpus
from realrl.dataflow.asynchrony import find_portion_problem
from realrl.dataflow.call import Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.algorithm import SCORE, AlgorithmSpec
from realrl.recipe.evaluation import EvaluationConfig
from realrl.recipe.experiment import Experiment
from realrl.recipe.generation import GenerationConfig
from realrl.recipe.model import ModelConfig, TrainedModelConfig


def complete(experiment: Experiment, spec: AlgorithmSpec) -> Experiment:
    """Connect a recipe with its algorithm, and fill in the source of each role's weights.

    Raises UserError with all mistakes in the recipe. Mistakes in its graphs are only reported if it has no others.
    """
    models, filled = experiment.models, {}
    for role, of in spec.roles_of(experiment).items():
        model, update = getattr(models, role), {}
        weights_from = of.weights_from
        if weights_from is not None and getattr(models, weights_from) is None:
            weights_from = of.weights_else
        if weights_from is not None and not model.has_source:
            source = getattr(models, weights_from)
            update = {
                name: getattr(source, name) for name in ("path", "family", "shape", "tokenizer", "vocab_size")
            }
        dtype_from = of.dtype_from or weights_from
        if dtype_from is not None and "dtype" not in model.model_fields_set:
            source = getattr(models, dtype_from)
            # Quantisation is a setting of one role only; other roles do not inherit it.
            update["dtype"] = "auto" if source.quantised else source.dtype
        filled[role] = model.model_copy(update=update)
    bound = experiment.model_copy(update={"models": models.model_copy(update=filled)})
    bound._spec = spec
    _refuse(_spec_problems(bound))
    _refuse(_problems(bound))
    graph = bound.graph
    bound = _settle_dtypes(bound, graph)
    _refuse(_graph_problems(bound, graph))
    eval_graph = bound.eval_graph
    if eval_graph is not None:
        _refuse(_headline_problems(spec, (graph, eval_graph)))
        _refuse(find_metric_problems(bound, eval_graph))
    return bound


def _refuse(problems: Iterator[str]) -> None:
    """Raise UserError with all problems, if there are any."""
    if found := list(problems):
        raise UserError(join_mistakes(found))


def _settle_dtypes(experiment: Experiment, graph: DataflowGraph) -> Experiment:
    """Replace `auto` by a type: on GPUs bfloat16, on CPUs float32, or mixed if it is clearly faster on the
    processor.

    On GPUs, roles that follow other roles by a moving average use float32, because they need its precision.
    Quantised roles compute in the type that `auto` would have.
    """
    models = experiment.models
    fields = {
        role: "dtype" if model.dtype == "auto" else "computes_in"
        for role in type(models).model_fields
        if isinstance(model := getattr(models, role), ModelConfig)
        and (model.dtype == "auto" or model.quantised)
    }
    if not fields:
        return experiment
    averaged = {average.role for average in graph.averages if average.factor < 1}
    gpu = computes_on_gpus(experiment.device, experiment.cluster)
    full = "float32" if gpu or not choose_products().bfloat16 else "mixed"
    settled = {
        role: getattr(models, role).model_copy(
            update={field: "bfloat16" if gpu and role not in averaged else full}
        )
        for role, field in fields.items()
    }
    return experiment.model_copy(update={"models": models.model_copy(update=settled)})


_DRAWN = {"greedy=true": "greedy=false", "top_k=1": "top_k=0 or above 1"}
"""For each setting that always takes the likeliest token: the setting that samples tokens instead."""

_READ_BY_FORMS: Mapping[str, tuple[str, ...]] = {
    "train_on": ("answer",),
    "max_pairs_per_prompt": ("pair",),
    "pair_weight": ("pair",),
}
"""Settings of `data` that apply only to these forms of records."""


def _spec_problems(experiment: Experiment) -> Iterator[str]:
    spec = experiment.spec
    for field in ("epochs", "samples_per_prompt", "sampling_rounds"):
        number = getattr(spec, field)(experiment)
        if not isinstance(number, int) or number < 1:
            yield f"algorithm {spec.name}: {field}: {number} is not a whole number above 0"
    sampling = None if spec.generation is None else spec.generation(experiment)
    if spec.generation is not None and not isinstance(sampling, GenerationConfig):
        yield f"algorithm {spec.name}: generation: {type(sampling).__name__} is not a GenerationConfig"


def _asynchrony_problems(experiment: Experiment) -> Iterator[str]:
    settings, spec = experiment.asynchrony, experiment.spec
    if not settings.active:
        return
    name = "portions" if settings.portions > 1 else "staleness"
    field = f"asynchrony.{name}={getattr(settings, name)}"
    if spec.generation is None or not spec.trains:
        missing = "sample" if spec.trains else "train"
        yield f"{field}: steps of {spec.name} do not {missing}; leave it out"
        return
    rounds = spec.sampling_rounds(experiment)
    if rounds > 1:
        yield (
            f"{field}: training cannot overlap with sampling if a step samples in up to {rounds} rounds; set"
            f" policy.sampling_rounds=1, or {name}={type(settings).model_fields[name].default}"
        )
    if settings.portions > 1:
        yield from _portion_problems(experiment, field)
    if settings.partial and experiment.environment_config is not None:
        yield "asynchrony.partial=true: trajectories in an environment are not interrupted; set partial=false"
    record = experiment.debug.record
    if record.steps or record.every is not None:
        yield f"{field}: steps of asynchronous runs cannot be replayed; leave debug.record out"


def _portion_problems(experiment: Experiment, field: str) -> Iterator[str]:
    spec = experiment.spec
    if (reason := spec.needs_whole_batch(experiment)) is not None:
        yield f"{field}: {reason}; set portions=1"
    if (epochs := spec.epochs(experiment)) > 1:
        yield f"{field}: {epochs} passes over a batch begin when it is complete; set portions=1, or one pass"
    if experiment.data.batch < experiment.asynchrony.portions:
        yield f"{field}: a batch has only {experiment.data.batch} prompts (data.batch); set fewer portions"
    for role in spec.roles_of(experiment):
        model = getattr(experiment.models, role)
        if isinstance(model, TrainedModelConfig) and model.router_loss:
            yield (
                f"{field}: models.{role}.router_loss={model.router_loss:g} is a mean over the whole batch; set it"
                " to 0, or portions=1"
            )


def _problems(experiment: Experiment) -> Iterator[str]:
    spec, data = experiment.spec, experiment.data
    for field, forms in _READ_BY_FORMS.items():
        value = getattr(data, field)
        if spec.form not in forms and value != type(data).model_fields[field].default:
            yield (
                f"data.{field}={value} is about records of the form {join(forms, 'or')}, and those of {spec.name}"
                f" have the form {spec.form}; leave it out"
            )
    sampling = None if spec.generation is None else spec.generation(experiment)
    yield from _asynchrony_problems(experiment)
    if experiment.checkpoint.keep_best and experiment.evaluation.best is None:
        yield "checkpoint.keep_best needs a metric; give evaluation.best, or set checkpoint.keep_best=0"
    yield from find_evaluation_problems(experiment, sampling)
    if sampling is None:
        return
    samples = spec.samples_per_prompt(experiment)
    if spec.trains and samples > 1 and sampling.certain is not None:
        yield (
            f"generation.{sampling.certain} always takes the likeliest token, and so gives {samples} equal answers"
            f" to each prompt; set generation.{_DRAWN[sampling.certain]}"
        )
    most = sampling.max_new_tokens
    if data.max_prompt_tokens + most > data.max_tokens:
        yield (
            f"data.max_prompt_tokens={data.max_prompt_tokens} and generation.max_new_tokens={most} together are"
            f" above data.max_tokens={data.max_tokens}"
        )


def _graph_problems(experiment: Experiment, graph: DataflowGraph) -> Iterator[str]:
    batch, spec = experiment.data.batch, experiment.spec
    trained = {call.name for call in graph.calls if call.kind is Kind.TRAIN}
    for name in spec.experience_calls:
        if name not in {*trained, *spec.optional_calls}:
            yield f"algorithm {spec.name}: experience_calls: {name}: train_graph has no such train call"
    for minibatches in sorted({call.minibatches for call in graph.calls}):
        # Mini-batches are counted in prompts, so that all samples of a prompt are in one mini-batch.
        if batch % minibatches:
            calls = join([call.name for call in graph.calls if call.minibatches == minibatches])
            yield (
                f"data.batch={batch} is not divisible by the {minibatches} mini-batches of {calls}; make it a"
                f" multiple of {minibatches}, or choose another number of mini-batches"
            )
    for call in graph.calls:
        kept = [f"{call.prefix}{key}" for key in ("sequences", "prompt_length", "finished")]
        missing = [key for key in kept if key not in call.outputs]
        if call.span > 1 and missing:
            yield (
                f"asynchrony.partial=true: the next step can only continue answers if {call.name} outputs"
                f" {join(kept, 'and')}; it lacks {join(missing, 'and')}"
            )
    if experiment.asynchrony.portions > 1 and (reason := find_portion_problem(graph)) is not None:
        yield f"asynchrony.portions={experiment.asynchrony.portions}: {reason}; set portions=1"
    yield from _quantisation_problems(experiment, graph)
    yield from _kernel_problems(experiment)
    for average in graph.averages:
        dtype = getattr(experiment.models, average.role).dtype
        if dtype == "bfloat16" and average.factor < 1:
            yield (
                f"models.{average.role}.dtype={dtype}: {average.role} follows {average.source} by a moving average,"
                " which needs float32; in bfloat16 small steps are rounded away"
            )


def _quantisation_problems(experiment: Experiment, graph: DataflowGraph) -> Iterator[str]:
    followed = {average.role: average.source for average in graph.averages}
    for role in experiment.spec.roles_of(experiment):
        model = getattr(experiment.models, role)
        if model.quantised is None:
            continue
        changes = None
        if isinstance(model, TrainedModelConfig):
            changes = "is trained"
        elif role in followed:
            changes = f"follows {followed[role]}"
        if changes is not None:
            yield (
                f"models.{role}.dtype={model.dtype}: {role} {changes}, and quantised weights cannot change;"
                " choose auto, float32, mixed or bfloat16"
            )


def _kernel_problems(experiment: Experiment) -> Iterator[str]:
    """Yield problems with kernels of other packages that no call would use."""
    if not experiment.kernels:
        return
    names, spec = ", ".join(experiment.kernels), experiment.spec
    if not computes_on_gpus(experiment.device, experiment.cluster):
        yield f"kernels=[{names}] is for GPUs, and this recipe computes on CPUs; leave kernels out"
    dtypes = {getattr(experiment.models, role).compute_dtype for role in spec.roles_of(experiment)}
    if "fa4" in experiment.kernels and "bfloat16" not in dtypes | set(experiment.search_dtypes):
        yield "kernels: fa4 computes in bfloat16, and all models of this recipe in float32; leave fa4 out"
    if "flashinfer" not in experiment.kernels:
        return
    samplings = (
        () if spec.generation is None else (spec.generation(experiment), spec.eval_generation(experiment))
    )
    if not any(of and not of.greedy and (of.top_k or of.top_p < 1) for of in samplings):
        yield "kernels: flashinfer computes top_k and top_p, and this recipe sets neither; leave flashinfer out"
    if experiment.exact:
        yield (
            "kernels: flashinfer does not promise that a row is restricted the same in every batch, as exact=true"
            " does; leave one of them out"
        )


def _headline_problems(spec: AlgorithmSpec, graphs: Sequence[DataflowGraph]) -> Iterator[str]:
    calls = {*spec.optional_calls, *(call.name for graph in graphs for call in graph.calls)}
    for headline in spec.headlines:
        call, slash, _ = headline.rpartition("/")
        if slash and call not in calls:
            yield f"algorithm {spec.name}: headlines: {headline}: no graph has a call {call}"


def find_evaluation_problems(experiment: Experiment, sampling: GenerationConfig | None) -> Iterator[str]:
    """Yield the mistakes in a recipe's section `evaluation` that can be found without its graphs.

    `sampling` are the sampling settings of training; None without generation.
    """
    spec, settings = experiment.spec, experiment.evaluation
    if sampling is None:
        if settings.of_text:
            names = join([f"evaluation.{name}" for name in settings.of_text])
            one = len(settings.of_text) == 1
            yield (
                f"{names} {'is' if one else 'are'} about generated text, and {spec.name} generates none; leave"
                f" {'it' if one else 'them'} out"
            )
    else:
        yield from _find_sampling_problems(settings, sampling)
    if settings.measures and experiment.data.eval is None:
        name = settings.measures[0]
        off = "[]" if name.endswith("_at") else "null"
        yield f"evaluation.{name} is about evaluations; give data.eval or set evaluation.{name}={off}"


def _find_sampling_problems(settings: EvaluationConfig, sampling: GenerationConfig) -> Iterator[str]:
    fewest, most = settings.min_new_tokens, sampling.max_new_tokens
    if fewest is not None and fewest > most:
        yield f"evaluation.min_new_tokens={fewest} is above generation.max_new_tokens={most}"
    certain = settings.change(sampling).certain
    if settings.samples > 1 and certain is not None:
        change = "evaluation.greedy=false" if certain == "greedy=true" else "generation.top_k=0 or above 1"
        yield (
            f"evaluation.samples={settings.samples} would all be the same, since evaluation takes the likeliest"
            f" token ({certain}); set {change}, or evaluation.samples=1"
        )


def find_metric_problems(experiment: Experiment, graph: DataflowGraph) -> Iterator[str]:
    """Yield a message about each metric that a recipe requests but its evaluation `graph` cannot produce."""
    spec, settings = experiment.spec, experiment.evaluation
    for name in ("pass_at", "against"):
        if getattr(settings, name) and (graph.producer(SCORE) is None or graph.length_key(SCORE) is not None):
            yield f"evaluation.{name} compares rewards, and an evaluation of {spec.name} has none"
    if settings.majority_at and (spec.answers is None or spec.answers(experiment) is None):
        yield (
            "evaluation.majority_at needs a reward with a verifier that reads an answer out of completions:"
            " exact_match, numeric, or math with extract"
        )
    if settings.best is not None:
        yield from _find_best_problems(settings.best.metric, settings, graph)


def _find_best_problems(metric: str, settings: EvaluationConfig, graph: DataflowGraph) -> Iterator[str]:
    call, slash, _ = metric.rpartition("/")
    calls = [other.name for other in graph.calls if other.kind is not Kind.GENERATE]
    if slash and call not in calls:
        hint = nearest(call, calls)
        yield (
            f"evaluation.best.metric={metric}: evaluations have no call {call};"
            f" {f'did you mean {hint}?' if hint else f'there is {join(calls)}'}"
        )
    if not slash and metric not in settings.metrics:
        known = join([*settings.metrics, f"{calls[0]}/NAME"], "or")
        yield f"evaluation.best.metric={metric} is none of the metrics of evaluations; give {known}"
