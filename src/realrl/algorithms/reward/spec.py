"""Description of reward modelling. No torch."""

from realrl.algorithms.reward.config import RewardExperiment
from realrl.algorithms.reward.graph import eval_graph, train_graph
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.algorithm import AlgorithmSpec, RoleSpec, SummaryMetric


def _methods(experiment: RewardExperiment, graph: DataflowGraph, eval_graph: DataflowGraph | None) -> object:
    from realrl.algorithms.reward.method import reward_algorithm

    return reward_algorithm(graph, eval_graph)


ALGORITHM = AlgorithmSpec(
    name="reward",
    recipe=RewardExperiment,
    roles={"reward": RoleSpec("scalar")},
    form="pair",
    train_graph=lambda experiment: train_graph(),
    eval_graph=lambda experiment: eval_graph(),
    generation=None,
    methods=_methods,
    headlines=("reward.train/loss", "reward.train/accuracy", "reward.inference/accuracy"),
    curves={"loss": "loss per pair (nats)", "accuracy": "pairs ranked right"},
    summary=(SummaryMetric("reward_pair_accuracy", "accuracy", "reward model: held-out pairs ranked right"),),
)
