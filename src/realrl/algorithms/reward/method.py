"""Reward modelling: the score of a sequence is the scalar head's value at its last token."""

from torch import Tensor

from realrl.algorithms.base import PlainTrain, StatelessAlgorithm
from realrl.algorithms.method import Method, Metrics, ModelOutput
from realrl.algorithms.packed import last_of_rows
from realrl.algorithms.pairs import pair_rows, pair_weights
from realrl.algorithms.reward.config import PairLossConfig
from realrl.algorithms.reward.losses import bradley_terry_loss
from realrl.data.batch import Batch, Ragged
from realrl.dataflow.graph import DataflowGraph


def _pair_scores(output: ModelOutput) -> tuple[Tensor, Tensor]:
    """Split scores into those of the chosen and of the rejected sequences, [N] each."""
    assert output.values is not None
    scores = last_of_rows(output.values, output.lengths).float()
    return scores[0::2], scores[1::2]


class ScoredPairs:
    """Rows of pairs, and the loss of their scores."""

    def __init__(self, config: PairLossConfig | None = None) -> None:
        self._config = config or PairLossConfig()

    def sequences(self, batch: Batch) -> Ragged:
        """Select two rows per pair: chosen, rejected."""
        return pair_rows(batch)

    def _losses(self, batch: Batch, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Compute the loss of each pair. chosen, rejected: [N] scores -> [N]"""
        margin = batch["margin"].values if self._config.margins else None
        losses = bradley_terry_loss(chosen=chosen, rejected=rejected, margin=margin)
        if self._config.center_rewards_coefficient > 0:
            losses = losses + self._config.center_rewards_coefficient * (chosen + rejected).square()
        return losses

    def _summarize(self, batch: Batch, chosen: Tensor, rejected: Tensor) -> Metrics:
        """Compute weighted means over pairs. chosen, rejected: [N] scores

        `loss`, `accuracy` (a tie is half right), `margin`, `chosen_score`, `rejected_score`.
        """
        metrics, weights = Metrics(), pair_weights(batch)
        per_pair = {
            "loss": self._losses(batch, chosen, rejected),
            "accuracy": (chosen > rejected).double() + 0.5 * (chosen == rejected).double(),
            "margin": chosen.double() - rejected.double(),
            "chosen_score": chosen,
            "rejected_score": rejected,
        }
        for name, values in per_pair.items():
            metrics.mean(name, (values.double() * weights).sum(), weights.sum())
        return metrics


class PairInference(ScoredPairs):
    """Scores of both sequences of each pair."""

    def outputs(self, batch: Batch, output: ModelOutput) -> dict[str, Ragged]:
        """Compute `chosen_score` and `rejected_score`: one number per pair."""
        chosen, rejected = _pair_scores(output)
        return {"chosen_score": Ragged.scalars(chosen), "rejected_score": Ragged.scalars(rejected)}

    def metrics(self, batch: Batch) -> Metrics:
        """Compute loss, accuracy, margin and mean scores."""
        return self._summarize(batch, batch["chosen_score"].values, batch["rejected_score"].values)


class RewardTrain(PlainTrain, ScoredPairs):
    """Bradley-Terry loss over pairs, each weighing one over its number of pairs."""

    def weight(self, batch: Batch) -> float:
        """Sum the weights of the pairs."""
        return float(pair_weights(batch).sum())

    def loss(self, batch: Batch, output: ModelOutput) -> tuple[Tensor, Metrics]:
        """Compute the weighted sum over pairs."""
        chosen, rejected = _pair_scores(output)
        loss = (self._losses(batch, chosen, rejected) * pair_weights(batch).float()).sum()
        return loss, self._summarize(batch, chosen.detach(), rejected.detach())


def make_algorithm(
    train: Method, inference: Method, graph: DataflowGraph, eval_graph: DataflowGraph | None
) -> StatelessAlgorithm:
    """Make the algorithm of these graphs and methods."""
    methods = {"reward.train": train, "reward.inference": inference}
    return StatelessAlgorithm(graph=graph, eval_graph=eval_graph, methods=methods)
