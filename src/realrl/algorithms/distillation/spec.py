"""Description of on-policy distillation. No torch."""

from realrl.algorithms.distillation.config import DistillationExperiment
from realrl.algorithms.distillation.graph import make_distillation_eval_graph, make_distillation_graph
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.algorithm import AlgorithmSpec, RoleSpec, SummaryMetric


def _methods(
    experiment: DistillationExperiment, graph: DataflowGraph, eval_graph: DataflowGraph | None
) -> object:
    from realrl.algorithms.distillation.method import distillation_algorithm

    sampling = ALGORITHM.eval_generation(experiment)
    return distillation_algorithm(experiment, graph, eval_graph, sampling)


ALGORITHM = AlgorithmSpec(
    name="distillation",
    recipe=DistillationExperiment,
    roles={"actor": RoleSpec("lm"), "teacher": RoleSpec("lm")},
    form="prompt",
    train_graph=make_distillation_graph,
    eval_graph=make_distillation_eval_graph,
    generation=lambda experiment: experiment.generation,
    samples_per_prompt=lambda experiment: experiment.distillation.samples,
    epochs=lambda experiment: experiment.distillation.epochs,
    methods=_methods,
    headlines=(
        "actor.train/divergence",
        "actor.train/teacher_kl",
        "actor.train/response_tokens",
        "teacher.inference/divergence",
        "judge",
    ),
    curves={
        "divergence": "divergence from the teacher per token (nats)",
        "teacher_kl": "KL to the teacher per answer (nats)",
        "judge": "independent judge",
    },
    summary=(
        SummaryMetric("divergence_before", "divergence", "divergence from the teacher, before", at="first"),
        SummaryMetric("divergence_after", "divergence", "divergence from the teacher, after"),
        SummaryMetric("judge_before", "judge", "independent judge, before", at="first"),
        SummaryMetric("judge_after", "judge", "independent judge, after"),
    ),
)
