"""Reward modelling on ranked answers: scores of all answers to a prompt, at their last tokens."""

import torch
from torch import Tensor

from realrl.algorithms.base import PlainTrain
from realrl.algorithms.method import Metrics, ModelOutput
from realrl.algorithms.packed import last_of_rows
from realrl.algorithms.reward.config import RankingConfig
from realrl.algorithms.reward.graph import name_answers, name_scores
from realrl.algorithms.reward.losses import plackett_luce_loss
from realrl.data.batch import Batch, Ragged


class RankedAnswers:
    """Rows of ranked answers, and their scores."""

    def __init__(self, config: RankingConfig) -> None:
        self._config = config

    def sequences(self, batch: Batch) -> Ragged:
        """Select the answers of each item one after the other, the best first."""
        answers = [batch[key].rows() for key in name_answers(self._config.answers)]
        return Ragged.of(
            (row for item in zip(*answers, strict=True) for row in item), dtype=batch["answer_0"].values.dtype
        )

    def _scores(self, output: ModelOutput) -> Tensor:
        """Select the scores of answers: [N, K]."""
        assert output.values is not None
        return last_of_rows(output.values, output.lengths).float().view(-1, self._config.answers)

    def _losses(self, scores: Tensor) -> Tensor:
        """Compute the loss of each ranking: [N]."""
        return plackett_luce_loss(scores) + self._config.center_rewards_coefficient * scores.sum(1).square()

    def _summarize(self, scores: Tensor) -> Metrics:
        """Compute means over rankings: `loss`; `accuracy`, the share of pairs of answers ranked right, of which a
        tie is half one; `margin`, the score of the best minus that of the last; `score`. scores: [N, K]"""
        count, answers = scores.shape
        differences = scores[:, :, None] - scores[:, None, :]
        pairs = differences.new_ones(answers, answers).triu(1).bool()
        above = differences[:, pairs]
        metrics = Metrics()
        metrics.mean("loss", self._losses(scores).double().sum(), count)
        right = (above > 0).double() + 0.5 * (above == 0).double()
        metrics.mean("accuracy", right.mean(1).sum(), count)
        metrics.mean("margin", (scores[:, 0] - scores[:, -1]).double().sum(), count)
        metrics.mean("score", scores.double().mean(1).sum(), count)
        return metrics


class RankingInference(RankedAnswers):
    """Scores of ranked answers."""

    def outputs(self, batch: Batch, output: ModelOutput) -> dict[str, Ragged]:
        """Compute one score per answer."""
        columns = self._scores(output).unbind(1)
        names = name_scores(self._config.answers)
        return {name: Ragged.scalars(of.contiguous()) for name, of in zip(names, columns, strict=True)}

    def metrics(self, batch: Batch) -> Metrics:
        """Compute what training reports."""
        columns = [batch[name].values for name in name_scores(self._config.answers)]
        return self._summarize(torch.stack(columns, 1))


class RankingTrain(PlainTrain, RankedAnswers):
    """Plackett-Luce loss over rankings."""

    def weight(self, batch: Batch) -> float:
        """Count the rankings."""
        return len(batch)

    def loss(self, batch: Batch, output: ModelOutput) -> tuple[Tensor, Metrics]:
        """Compute the sum over rankings."""
        scores = self._scores(output)
        return self._losses(scores).sum(), self._summarize(scores.detach())
