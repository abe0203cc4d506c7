"""Checks of the settings of evaluations, by the description of the algorithm."""

from collections.abc import Iterator

from realrl.config.explain import nearest
from realrl.config.words import join
from realrl.dataflow.call import Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.algorithm import SCORE, get_spec
from realrl.recipe.evaluation import EvaluationConfig
from realrl.recipe.experiment import Experiment
from realrl.recipe.settings import GenerationConfig


def find_evaluation_problems(experiment: Experiment, sampling: GenerationConfig | None) -> Iterator[str]:
    """Yield what is wrong with the section `evaluation` of a recipe, without its graphs.

    `sampling` is that of training, None where nothing is generated.
    """
    spec, settings = get_spec(experiment), experiment.evaluation
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
    """Yield the metrics that a recipe asks for and its evaluation `graph` cannot give."""
    spec, settings = get_spec(experiment), experiment.evaluation
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
