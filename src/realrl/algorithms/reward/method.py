"""Reward modelling: the score of a sequence is the scalar head's value at its last token."""

from torch import Tensor

from realrl.algorithms.base import PlainTrain, StatelessAlgorithm
from realrl.algorithms.method import Method, Metrics, ModelOutput
from realrl.algorithms.packed import last_of_rows
from realrl.algorithms.pairs import pair_rows, pair_weights
from realrl.algorithms.reward.losses import bradley_terry_loss
from realrl.data.batch import Batch, Ragged
from realrl.dataflow.graph import DataflowGraph


def _pair_scores(output: ModelOutput) -> tuple[Tensor, Tensor]:
    """Split scores into those of the chosen and of the rejected sequences, [N] each."""
    assert output.values is not None
    scores = last_of_rows(output.values, output.lengths).float()
    return scores[0::2], scores[1::2]


def _compute_metrics(*, chosen: Tensor, rejected: Tensor, weights: Tensor) -> Metrics:
    """Compute weighted means over pairs. All arguments: [N]

    `loss`, `accuracy` (a tie is half right), `margin`, `chosen_score`, `rejected_score`.
    """
    metrics, total = Metrics(), weights.sum()
    per_pair = {
        "loss": bradley_terry_loss(chosen=chosen, rejected=rejected),
        "accuracy": (chosen > rejected).double() + 0.5 * (chosen == rejected).double(),
        "margin": chosen.double() - rejected.double(),
        "chosen_score": chosen,
        "rejected_score": rejected,
    }
    for name, values in per_pair.items():
        metrics.mean(name, (values.double() * weights).sum(), total)
    return metrics


class PairInference:
    """Scores of both sequences of each pair."""

    def sequences(self, batch: Batch) -> Ragged:
        """Select two rows per pair: chosen, rejected."""
        return pair_rows(batch)

    def outputs(self, batch: Batch, output: ModelOutput) -> dict[str, Ragged]:
        """Compute `chosen_score` and `rejected_score`: one number per pair."""
        chosen, rejected = _pair_scores(output)
        return {"chosen_score": Ragged.scalars(chosen), "rejected_score": Ragged.scalars(rejected)}

    def metrics(self, batch: Batch) -> Metrics:
        """Compute loss, accuracy, margin and mean scores."""
        chosen, rejected = batch["chosen_score"].values, batch["rejected_score"].values
        return _compute_metrics(chosen=chosen, rejected=rejected, weights=pair_weights(batch))


class RewardTrain(PlainTrain):
    """Bradley-Terry loss over pairs, each weighing one over its number of pairs."""

    def sequences(self, batch: Batch) -> Ragged:
        """Select two rows per pair: chosen, rejected."""
        return pair_rows(batch)

    def weight(self, batch: Batch) -> float:
        """Sum the weights of the pairs."""
        return float(pair_weights(batch).sum())

    def loss(self, batch: Batch, output: ModelOutput) -> tuple[Tensor, Metrics]:
        """Compute the weighted sum over pairs."""
        (chosen, rejected), weights = _pair_scores(output), pair_weights(batch)
        loss = (bradley_terry_loss(chosen=chosen, rejected=rejected) * weights.float()).sum()
        return loss, _compute_metrics(chosen=chosen.detach(), rejected=rejected.detach(), weights=weights)


def reward_algorithm(graph: DataflowGraph, eval_graph: DataflowGraph | None) -> StatelessAlgorithm:
    """Make the algorithm of these graphs."""
    methods: dict[str, Method] = {"reward.train": RewardTrain(), "reward.inference": PairInference()}
    return StatelessAlgorithm(graph=graph, eval_graph=eval_graph, methods=methods)
