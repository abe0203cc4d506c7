"""Methods of the calls that learn from preference pairs."""

import torch
from torch import Tensor

from realrl.algorithms.base import PlainTrain, StatelessAlgorithm
from realrl.algorithms.method import Method, Metrics, ModelOutput, Sum
from realrl.algorithms.pairs import pair_rows, pair_weights
from realrl.algorithms.preference.config import PreferenceConfig
from realrl.algorithms.preference.losses import compute_preference_loss
from realrl.algorithms.preference.scores import (
    Sides,
    compute_scores,
    count_nll_tokens,
    sum_logprobs,
    sum_nll,
)
from realrl.data.batch import Batch, Ragged
from realrl.dataflow.graph import DataflowGraph


class PairLogprobs:
    """Log-probabilities of both answers of each pair, under the reference."""

    prefix = "ref_"

    def sequences(self, batch: Batch) -> Ragged:
        """Select two rows per pair: chosen, rejected."""
        return pair_rows(batch)

    def outputs(self, batch: Batch, output: ModelOutput) -> dict[str, Ragged]:
        """Compute one number per answer, summed over its tokens."""
        sums = sum_logprobs(batch, output)
        return {
            f"{self.prefix}{side}_logps": Ragged.scalars(of.float()) for side, of in sums._asdict().items()
        }

    def metrics(self, batch: Batch) -> Metrics:
        """Report nothing."""
        return Metrics()


class PreferenceInference(PairLogprobs):
    """Log-probabilities of both answers of each pair, under the actor."""

    prefix = ""

    def __init__(self, config: PreferenceConfig) -> None:
        self._config = config

    def outputs(self, batch: Batch, output: ModelOutput) -> dict[str, Ragged]:
        """Compute one number per answer and, where it counts for the loss, the NLL of chosen sequences."""
        outputs = super().outputs(batch, output)
        if self._config.nll_coef > 0:
            outputs["chosen_nll"] = Ragged.scalars(sum_nll(self._config, batch, output).float())
        return outputs

    def metrics(self, batch: Batch) -> Metrics:
        """Compute what training reports of the same pairs; `loss` only where no NLL belongs to it, since that is a
        mean over tokens of all ranks."""
        config = self._config
        logps = Sides(*(batch[f"{side}_logps"].values.double() for side in Sides._fields))
        losses, metrics = _compare(config, batch, logps)
        weights = pair_weights(batch)
        if config.nll_coef == 0:
            metrics.mean("loss", (losses * weights).sum(), weights.sum())
        else:
            _add_nll(metrics, config, batch, batch["chosen_nll"].values.double())
        return metrics


class PreferenceTrain(PlainTrain):
    """Loss of preference pairs, each weighing one over its number of pairs."""

    def __init__(self, config: PreferenceConfig) -> None:
        self._config = config
        self._tokens_per_weight = 1.0

    def prepare(self, batch: Batch, dp_sum: Sum) -> tuple[Batch, Metrics]:
        """Find the tokens per pair over all ranks, by which the NLL of a pair is divided."""
        if self._config.nll_coef > 0:
            weights = pair_weights(batch)
            tokens = (count_nll_tokens(self._config, batch) * weights).sum()
            total, pairs = dp_sum(torch.stack((tokens, weights.sum()))).tolist()
            self._tokens_per_weight = max(total, 1.0) / max(pairs, 1e-12)
        return batch, Metrics()

    def sequences(self, batch: Batch) -> Ragged:
        """Select two rows per pair: chosen, rejected."""
        return pair_rows(batch)

    def weight(self, batch: Batch) -> float:
        """Sum the weights of the pairs."""
        return float(pair_weights(batch).sum())

    def loss(self, batch: Batch, output: ModelOutput) -> tuple[Tensor, Metrics]:
        """Compute the weighted sum over pairs."""
        config, weights = self._config, pair_weights(batch)
        losses, metrics = _compare(config, batch, sum_logprobs(batch, output))
        if config.nll_coef > 0:
            nll = sum_nll(config, batch, output)
            losses = losses + config.nll_coef * nll / self._tokens_per_weight
            _add_nll(metrics, config, batch, nll)
        loss = (losses * weights).sum()
        metrics.mean("loss", loss, weights.sum())
        return loss, metrics


def _compare(config: PreferenceConfig, batch: Batch, logps: Sides) -> tuple[Tensor, Metrics]:
    """Compute the loss of each pair, without NLL, [N], and its weighted means over pairs.

    `preference_loss`; `accuracy`, the share of pairs whose chosen answer has the higher reward, of which a tie is
    half one; `margin`, the difference of rewards; rewards and log-probabilities of both answers.
    """
    scores, weights = compute_scores(config, batch, logps), pair_weights(batch)
    losses = compute_preference_loss(config, chosen=scores.chosen, rejected=scores.rejected)
    chosen, rejected = (config.beta * score.detach() for score in scores)
    per_pair = {
        "preference_loss": losses,
        "accuracy": (chosen > rejected).double() + 0.5 * (chosen == rejected).double(),
        "margin": chosen - rejected,
        "chosen_reward": chosen,
        "rejected_reward": rejected,
        "chosen_logps": logps.chosen,
        "rejected_logps": logps.rejected,
    }
    metrics = Metrics()
    for name, values in per_pair.items():
        metrics.mean(name, (values.double() * weights).sum(), weights.sum())
    return losses, metrics


def _add_nll(metrics: Metrics, config: PreferenceConfig, batch: Batch, nll: Tensor) -> None:
    """Add `nll`, the mean over tokens. nll: [N] sums"""
    weights = pair_weights(batch)
    metrics.mean("nll", (nll * weights).sum(), (count_nll_tokens(config, batch) * weights).sum())


def preference_algorithm(
    config: PreferenceConfig, graph: DataflowGraph, eval_graph: DataflowGraph | None
) -> StatelessAlgorithm:
    """Make the algorithm of these graphs."""
    methods: dict[str, Method] = {
        "ref.inference": PairLogprobs(),
        "actor.inference": PreferenceInference(config),
        "actor.train": PreferenceTrain(config),
    }
    return StatelessAlgorithm(graph=graph, eval_graph=eval_graph, methods=methods)
