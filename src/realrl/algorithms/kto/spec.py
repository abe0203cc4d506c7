"""Description of KTO. No torch."""

from realrl.algorithms.kto.config import KTOExperiment
from realrl.algorithms.kto.graph import make_kto_eval_graph, make_kto_graph
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.algorithm import AlgorithmSpec, RoleSpec, SummaryMetric


def _methods(experiment: KTOExperiment, graph: DataflowGraph, eval_graph: DataflowGraph | None) -> object:
    from realrl.algorithms.kto.method import kto_algorithm

    return kto_algorithm(experiment.kto, graph, eval_graph)


ALGORITHM = AlgorithmSpec(
    name="kto",
    recipe=KTOExperiment,
    roles={"actor": RoleSpec("lm"), "ref": RoleSpec("lm", weights_from="actor")},
    form="label",
    train_graph=lambda experiment: make_kto_graph(experiment.kto),
    eval_graph=lambda experiment: make_kto_eval_graph(experiment.kto),
    generation=None,
    methods=_methods,
    optional_metrics=("kl",),
    headlines=(
        "actor.train/loss",
        "actor.train/accuracy",
        "actor.train/kl",
        "actor.train/chosen_reward",
        "actor.train/rejected_reward",
        "actor.inference/accuracy",
    ),
    curves={
        "loss": "loss",
        "chosen_reward": "reward of good answers",
        "rejected_reward": "reward of bad answers",
        "kl": "KL to the reference (nats)",
    },
    summary=(
        SummaryMetric("kto_accuracy", "accuracy", "held-out answers whose reward has the right sign"),
        SummaryMetric("kto_chosen_reward", "chosen_reward", "reward of held-out good answers"),
        SummaryMetric("kto_rejected_reward", "rejected_reward", "reward of held-out bad answers"),
    ),
)
