"""Description of supervised fine-tuning. No torch."""

from realrl.algorithms.sft.config import SFTExperiment
from realrl.algorithms.sft.graph import eval_graph, train_graph
from realrl.dataflow.graph import DataflowGraph
from realrl.recipe.algorithm import AlgorithmSpec, RoleSpec, SummaryMetric


def _methods(experiment: SFTExperiment, graph: DataflowGraph, eval_graph: DataflowGraph | None) -> object:
    from realrl.algorithms.sft.method import sft_algorithm

    return sft_algorithm(graph, eval_graph)


ALGORITHM = AlgorithmSpec(
    name="sft",
    recipe=SFTExperiment,
    roles={"actor": RoleSpec("lm")},
    form="answer",
    train_graph=lambda experiment: train_graph(),
    eval_graph=lambda experiment: eval_graph(),
    generation=None,
    methods=_methods,
    headlines=("actor.train/loss", "actor.inference/loss"),
    curves={"loss": "loss per token (nats)"},
    summary=(
        SummaryMetric("sft_loss_before", "loss", "held-out loss per token, before", at="first"),
        SummaryMetric("sft_loss_after", "loss", "held-out loss per token, after"),
    ),
)
