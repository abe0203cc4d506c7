"""Reward modelling: losses, and the methods for pairs, ranked answers and steps.

The score of a sequence or step is the scalar head's value at its last token.
"""

import torch
from torch import Tensor
from torch.nn import functional

from realrl.algorithms.base.method import Metrics, ModelOutput, PlainTrain, StatelessAlgorithm
from realrl.algorithms.base.rows import (
    add_pair_means,
    interleave,
    last_of_rows,
    pair_rows,
    pair_weights,
    rate_order,
)
from realrl.algorithms.reward_model import (
    PairLossConfig,
    ProcessRewardExperiment,
    RankedRewardExperiment,
    RankingConfig,
    RewardExperiment,
    name_answers,
    name_scores,
)
from realrl.data.batch import Batch, Ragged, copy_numbers
from realrl.dataflow.graph import DataflowGraph


def bradley_terry_loss(*, chosen: Tensor, rejected: Tensor, margin: Tensor | None = None) -> Tensor:
    """Compute -log of the probability that `chosen` is preferred, which is the sigmoid of the difference of scores.

    Sources: Bradley and Terry 1952; Ouyang et al. 2022, equation 1; for the margin, Touvron et al. 2023, equation
    2.

    chosen, rejected: [N] scores; margin: [N], subtracted from the difference; result: [N]
    """
    difference = chosen - rejected
    return -functional.logsigmoid(difference if margin is None else difference - margin)


def plackett_luce_loss(scores: Tensor) -> Tensor:
    """Compute -log of the probability of a ranking, in which each answer is drawn from the answers that are left.

    The loss is -sum over k of (s_k - log(exp s_k + ... + exp s_K)) (Plackett 1975; Luce 1959; Xia et al. 2008). For
    two answers, it is the Bradley-Terry loss.

    scores: [N, K], the best answer first; result: [N]
    """
    left = scores.flip(1).logcumsumexp(1).flip(1)
    return (left - scores)[:, :-1].sum(1)


def step_loss(*, scores: Tensor, right: Tensor) -> Tensor:
    """Compute -log of the probability of each step's label (Lightman et al. 2023, section 2).

    The probability that a step is right is the sigmoid of its score.

    scores: [A]; right: [A] bool; result: [A]
    """
    return functional.softplus(torch.where(right, -scores, scores))


class PairMethod(PlainTrain):
    """Bradley-Terry loss over pairs. The weight of each pair is 1 / (number of pairs of its prompt)."""

    def __init__(self, config: PairLossConfig | None = None) -> None:
        self._config = config or PairLossConfig()

    def sequences(self, batch: Batch) -> Ragged:
        return pair_rows(batch)

    def _scores(self, output: ModelOutput) -> tuple[Tensor, Tensor]:
        """Select the scores of the chosen and of the rejected sequences, [N] each."""
        assert output.values is not None
        scores = last_of_rows(output.values, output.lengths).float()
        return scores[0::2], scores[1::2]

    def _losses(self, batch: Batch, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Compute the loss of each pair. chosen, rejected: [N] scores -> [N]"""
        margin = batch["margin"].values if self._config.margins else None
        losses = bradley_terry_loss(chosen=chosen, rejected=rejected, margin=margin)
        if self._config.center_rewards_coefficient > 0:
            losses = losses + self._config.center_rewards_coefficient * (chosen + rejected).square()
        return losses

    def weight(self, batch: Batch) -> float:
        return float(pair_weights(batch).sum())

    def loss(self, batch: Batch, output: ModelOutput) -> tuple[Tensor, Metrics]:
        chosen, rejected = self._scores(output)
        loss = (self._losses(batch, chosen, rejected) * pair_weights(batch).float()).sum()
        return loss, self._summarize(batch, chosen.detach(), rejected.detach())

    def outputs(self, batch: Batch, output: ModelOutput) -> dict[str, Ragged]:
        """Compute `chosen_score` and `rejected_score`, one number per pair."""
        chosen, rejected = self._scores(output)
        return {"chosen_score": Ragged.scalars(chosen), "rejected_score": Ragged.scalars(rejected)}

    def metrics(self, batch: Batch) -> Metrics:
        return self._summarize(batch, batch["chosen_score"].values, batch["rejected_score"].values)

    def _summarize(self, batch: Batch, chosen: Tensor, rejected: Tensor) -> Metrics:
        """Compute metrics as weighted means over pairs; in `accuracy`, ties count half. chosen, rejected: [N]"""
        metrics, margin = Metrics(), chosen.double() - rejected.double()
        add_pair_means(
            metrics,
            batch,
            loss=self._losses(batch, chosen, rejected),
            accuracy=rate_order(margin),
            margin=margin,
            chosen_score=chosen,
            rejected_score=rejected,
        )
        return metrics


class RankingMethod(PlainTrain):
    """Plackett-Luce loss over rankings."""

    def __init__(self, config: RankingConfig) -> None:
        self._config = config

    def sequences(self, batch: Batch) -> Ragged:
        return interleave(batch, name_answers(self._config.answers))

    def _scores(self, output: ModelOutput) -> Tensor:
        """Select the scores of answers: [N, K]."""
        assert output.values is not None
        return last_of_rows(output.values, output.lengths).float().view(-1, self._config.answers)

    def _losses(self, scores: Tensor) -> Tensor:
        """Compute the loss of each ranking: [N]."""
        return plackett_luce_loss(scores) + self._config.center_rewards_coefficient * scores.sum(1).square()

    def _summarize(self, scores: Tensor) -> Metrics:
        """Compute metrics as means over rankings. scores: [N, K]

        `accuracy` is the share of pairs of answers in the right order; ties count half. `margin` is the score of
        the best answer minus the score of the worst.
        """
        metrics, (count, answers) = Metrics(), scores.shape
        differences = scores[:, :, None] - scores[:, None, :]
        pairs = differences.new_ones(answers, answers).triu(1).bool()
        metrics.mean("loss", self._losses(scores).double().sum(), count)
        metrics.mean("accuracy", rate_order(differences[:, pairs]).mean(1).sum(), count)
        metrics.mean("margin", (scores[:, 0] - scores[:, -1]).double().sum(), count)
        metrics.mean("score", scores.double().mean(1).sum(), count)
        return metrics

    def outputs(self, batch: Batch, output: ModelOutput) -> dict[str, Ragged]:
        columns = zip(name_scores(self._config.answers), self._scores(output).unbind(1), strict=True)
        return {name: Ragged.scalars(scores.contiguous()) for name, scores in columns}

    def metrics(self, batch: Batch) -> Metrics:
        columns = [batch[name].values for name in name_scores(self._config.answers)]
        return self._summarize(torch.stack(columns, 1))

    def weight(self, batch: Batch) -> float:
        return len(batch)

    def loss(self, batch: Batch, output: ModelOutput) -> tuple[Tensor, Metrics]:
        scores = self._scores(output)
        return self._losses(scores).sum(), self._summarize(scores.detach())


class StepMethod(PlainTrain):
    """Loss over steps. All steps of the global batch have the same weight."""

    def sequences(self, batch: Batch) -> Ragged:
        return batch["tokens"]

    def _scores(self, batch: Batch, output: ModelOutput) -> Tensor:
        """Select the scores of all steps: [A]."""
        assert output.values is not None
        ends = batch["step_ends"]
        starts = copy_numbers(batch["tokens"].offsets[:-1], ends.values.device)
        counts = copy_numbers(ends.lengths, ends.values.device)
        starts = starts.repeat_interleave(counts, output_size=len(ends.values))
        return output.values[starts + ends.values].float()

    def _summarize(self, batch: Batch, scores: Tensor) -> Metrics:
        """Compute metrics as means over steps. scores: [A]

        `accuracy` is the share of steps whose score has the right sign. A score of 0 counts half.
        """
        metrics, right = Metrics(), batch["step_labels"].values != 0
        metrics.mean("loss", step_loss(scores=scores, right=right).double().sum(), len(scores))
        metrics.mean("accuracy", rate_order(torch.where(right, scores, -scores)).sum(), len(scores))
        metrics.mean("right_score", scores[right].double().sum(), right.sum())
        metrics.mean("wrong_score", scores[~right].double().sum(), (~right).sum())
        return metrics

    def outputs(self, batch: Batch, output: ModelOutput) -> dict[str, Ragged]:
        return {"step_scores": Ragged(self._scores(batch, output), batch["step_ends"].lengths)}

    def metrics(self, batch: Batch) -> Metrics:
        return self._summarize(batch, batch["step_scores"].values)

    def weight(self, batch: Batch) -> float:
        return len(batch["step_ends"].values)

    def loss(self, batch: Batch, output: ModelOutput) -> tuple[Tensor, Metrics]:
        scores = self._scores(batch, output)
        right = batch["step_labels"].values != 0
        return step_loss(scores=scores, right=right).sum(), self._summarize(batch, scores.detach())


def make_pair_algorithm(
    experiment: RewardExperiment, graph: DataflowGraph, eval_graph: DataflowGraph | None
) -> StatelessAlgorithm:
    return _make_algorithm(PairMethod(experiment.loss), graph, eval_graph)


def make_ranking_algorithm(
    experiment: RankedRewardExperiment, graph: DataflowGraph, eval_graph: DataflowGraph | None
) -> StatelessAlgorithm:
    return _make_algorithm(RankingMethod(experiment.loss), graph, eval_graph)


def make_step_algorithm(
    experiment: ProcessRewardExperiment, graph: DataflowGraph, eval_graph: DataflowGraph | None
) -> StatelessAlgorithm:
    return _make_algorithm(StepMethod(), graph, eval_graph)


def _make_algorithm(
    method: PairMethod | RankingMethod | StepMethod, graph: DataflowGraph, eval_graph: DataflowGraph | None
) -> StatelessAlgorithm:
    return StatelessAlgorithm(graph, eval_graph, {"reward.train": method, "reward.inference": method})
