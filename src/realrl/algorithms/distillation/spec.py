"""Descriptions of distillation, on samples and on records. No torch."""

from realrl.algorithms.distillation.config import DistillationExperiment, OfflineDistillationExperiment
from realrl.algorithms.distillation.graph import (
    make_distillation_eval_graph,
    make_distillation_graph,
    make_offline_eval_graph,
    make_offline_graph,
)
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.algorithm import AlgorithmSpec, RoleSpec, SummaryMetric

_ROLES = {"actor": RoleSpec("lm"), "teacher": RoleSpec("lm")}
_CURVE = {"divergence": "divergence from the teacher per token (nats)"}
_SUMMARY = (
    SummaryMetric("divergence_before", "divergence", "divergence from the teacher, before", at="first"),
    SummaryMetric("divergence_after", "divergence", "divergence from the teacher, after"),
)


def _methods(
    experiment: DistillationExperiment, graph: DataflowGraph, eval_graph: DataflowGraph | None
) -> object:
    from realrl.algorithms.distillation.method import distillation_algorithm

    sampling = DISTILLATION.eval_generation(experiment)
    return distillation_algorithm(experiment, graph, eval_graph, sampling)


def _offline_methods(
    experiment: OfflineDistillationExperiment, graph: DataflowGraph, eval_graph: DataflowGraph | None
) -> object:
    from realrl.algorithms.distillation.method import offline_algorithm

    return offline_algorithm(experiment.distillation, graph, eval_graph)


DISTILLATION = AlgorithmSpec(
    name="distillation",
    recipe=DistillationExperiment,
    roles=_ROLES,
    form="prompt",
    train_graph=make_distillation_graph,
    eval_graph=make_distillation_eval_graph,
    generation=lambda experiment: experiment.generation,
    samples_per_prompt=lambda experiment: experiment.distillation.samples,
    epochs=lambda experiment: experiment.distillation.epochs,
    methods=_methods,
    # Either of them gives the divergence in evaluations.
    optional_calls=("actor.inference", "teacher.inference"),
    optional_metrics=("teacher_mass", "teacher_kl"),
    headlines=(
        "actor.train/divergence",
        "actor.train/teacher_mass",
        "actor.train/teacher_kl",
        "actor.train/response_tokens",
        "actor.inference/divergence",
        "teacher.inference/divergence",
        "judge",
    ),
    curves={
        **_CURVE,
        "teacher_kl": "KL to the teacher per answer (nats)",
        "judge": "independent judge",
    },
    summary=(
        *_SUMMARY,
        SummaryMetric("judge_before", "judge", "independent judge, before", at="first"),
        SummaryMetric("judge_after", "judge", "independent judge, after"),
    ),
)

OFFLINE_DISTILLATION = AlgorithmSpec(
    name="offline_distillation",
    recipe=OfflineDistillationExperiment,
    roles=_ROLES,
    form="answer",
    train_graph=make_offline_graph,
    eval_graph=make_offline_eval_graph,
    generation=None,
    methods=_offline_methods,
    headlines=("actor.train/divergence", "actor.train/teacher_mass", "actor.inference/divergence"),
    curves=_CURVE,
    summary=_SUMMARY,
)
