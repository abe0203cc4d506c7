"""Description of expert iteration. No torch."""

from realrl.algorithms.expert_iteration.config import ExpertIterationExperiment
from realrl.algorithms.expert_iteration.graph import make_expert_iteration_graph
from realrl.algorithms.policy.graph import make_eval_graph
from realrl.algorithms.policy.report import CURVES, HEADLINES, OPTIONAL_CALLS, OPTIONAL_METRICS, SUMMARY
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.algorithm import AlgorithmSpec, RoleSpec


def _methods(
    experiment: ExpertIterationExperiment, graph: DataflowGraph, eval_graph: DataflowGraph | None
) -> object:
    from realrl.algorithms.expert_iteration.method import ExpertIterationAlgorithm

    sampling = ALGORITHM.eval_generation(experiment)
    return ExpertIterationAlgorithm(experiment, graph=graph, eval_graph=eval_graph, eval_generation=sampling)


ALGORITHM = AlgorithmSpec(
    name="expert_iteration",
    recipe=ExpertIterationExperiment,
    roles={
        "actor": RoleSpec("lm"),
        "ref": RoleSpec("lm", weights_from="actor", optional=True),
        "reward": RoleSpec("scalar", optional=True),
    },
    form="prompt",
    train_graph=make_expert_iteration_graph,
    eval_graph=lambda experiment: make_eval_graph(
        reward=experiment.reward, reference=experiment.models.ref is not None
    ),
    generation=lambda experiment: experiment.generation,
    samples_per_prompt=lambda experiment: experiment.expert_iteration.samples,
    epochs=lambda experiment: experiment.expert_iteration.epochs,
    methods=_methods,
    optional_calls=OPTIONAL_CALLS,
    optional_metrics=OPTIONAL_METRICS,
    headlines=(*HEADLINES, "actor.train/loss", "actor.train/kept_score", "actor.train/kept", "judge"),
    sample_keys=("score",),
    curves={**CURVES, "kept_score": "score of what is learnt", "kept": "fraction of answers learnt"},
    summary=SUMMARY,
)
