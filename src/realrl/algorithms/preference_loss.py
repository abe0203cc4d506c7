"""Learning from preference pairs: losses, scores, and the methods of all calls."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from realrl.algorithms.base.method import Metrics, ModelOutput, PlainTrain, StatelessAlgorithm, Sum
from realrl.algorithms.base.rows import Responses, add_pair_means, pair_rows, pair_weights, rate_order
from realrl.algorithms.preference import SIDES, PreferenceConfig, PreferenceExperiment
from realrl.data.batch import Batch, Ragged, copy_numbers
from realrl.dataflow.graph import DataflowGraph


def compute_preference_loss(config: PreferenceConfig, *, chosen: Tensor, rejected: Tensor) -> Tensor:
    """Compute the loss of each pair, see `PreferenceConfig.loss`.

    `sigmoid`: Rafailov et al. 2023, equation 7, with the margin of SimPO (Meng et al. 2024, equation 6) and the
    smoothing of conservative DPO (Mitchell 2023). `robust`: Chowdhury et al. 2024, equation 12. `ipo`: Azar et al.
    2023, equation 17. `odds_ratio`: Hong et al. 2024, equation 7.

    chosen, rejected: [N] scores; result: [N]
    """
    beta, smoothing = config.beta, config.label_smoothing
    difference = chosen - rejected
    match config.loss:
        case "sigmoid" | "robust":
            logits = beta * difference - config.gamma
            right, wrong = functional.logsigmoid(logits), functional.logsigmoid(-logits)
            if config.loss == "robust":
                return -((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing)
            return -(1 - smoothing) * right - smoothing * wrong
        case "hinge":
            return functional.relu(1 - beta * difference)
        case "ipo":
            return (difference - 1 / (2 * beta)).square()
        case "odds_ratio":
            log_odds = difference - (_log1mexp(chosen) - _log1mexp(rejected))
            return -beta * functional.logsigmoid(log_odds)


def _log1mexp(x: Tensor) -> Tensor:
    """Compute log(1 - exp(x)) for x < 0 (Maechler 2012, "Accurately computing log(1 - exp(-|a|))")."""
    # A mean log-probability of 0 (a certain answer) would give an infinite loss and no gradient.
    x = x.clamp(max=-torch.finfo(x.dtype).eps)
    near = x > -0.6931471805599453
    # The branch that is not used gets safe numbers; otherwise its gradient would be NaN.
    return torch.where(
        near,
        torch.log(-torch.expm1(torch.where(near, x, -1.0))),
        torch.log1p(-torch.exp(torch.where(near, -1.0, x))),
    )


class Sides(NamedTuple):
    """A number for each pair's chosen and rejected answer, [N] each."""

    chosen: Tensor
    rejected: Tensor


def sum_logprobs(batch: Batch, output: ModelOutput) -> Sides:
    """Sum the log-probabilities of each answer's tokens. [N] float64 each"""
    assert output.logprobs is not None
    starts = torch.stack([batch[f"{side}_prompt_length"].values for side in SIDES], 1)
    answers = Responses.of(pair_rows(batch), Ragged.scalars(starts.flatten()))
    sums = answers.row_sums(output.logprobs[answers.index])
    return Sides(sums[0::2], sums[1::2])


def _count_tokens(batch: Batch, side: str) -> Tensor:
    """Count the tokens of each chosen or rejected answer. [N] int64"""
    starts = batch[f"{side}_prompt_length"].values.clamp(min=1)
    return (copy_numbers(batch[side].lengths, starts.device) - starts).clamp(min=0)


def _compute_scores(config: PreferenceConfig, batch: Batch, logps: Sides) -> Sides:
    """Compute the scores of answers, see `PreferenceConfig`. logps: [N] each -> [N] each"""
    scores = []
    for side, score in zip(SIDES, logps, strict=True):
        if config.reference != "none":
            score = score - batch[f"ref_{side}_logps"].values.double()
        scores.append(score / _count_tokens(batch, side).clamp(min=1) if config.per_token else score)
    return Sides(*scores)


def _sum_nll(config: PreferenceConfig, batch: Batch, output: ModelOutput) -> Tensor:
    """Sum -log p over the tokens of each chosen sequence that the NLL includes. [N] float64"""
    assert output.logprobs is not None
    starts = batch["chosen_prompt_length"].values
    if config.nll_prompts:
        starts = torch.ones_like(starts)
    # Rejected sequences count as prompts over their whole length, so that their tokens are left out.
    ends = copy_numbers(batch["rejected"].lengths, starts.device)
    found = Responses.of(pair_rows(batch), Ragged.scalars(torch.stack((starts, ends), 1).flatten()))
    return -found.row_sums(output.logprobs[found.index])[0::2]


def _count_nll_tokens(config: PreferenceConfig, batch: Batch) -> Tensor:
    """Count the tokens of `_sum_nll`. [N] int64"""
    if not config.nll_prompts:
        return _count_tokens(batch, "chosen")
    return copy_numbers(batch["chosen"].lengths, batch["chosen_prompt_length"].values.device) - 1


def _compare(config: PreferenceConfig, batch: Batch, logps: Sides) -> tuple[Tensor, Metrics]:
    """Compute the loss of each pair without NLL, [N], and metrics as weighted means over pairs.

    `accuracy` is the share of pairs whose chosen answer has the higher reward; ties count half. `margin` is the
    difference of rewards.
    """
    scores = _compute_scores(config, batch, logps)
    losses = compute_preference_loss(config, chosen=scores.chosen, rejected=scores.rejected)
    chosen, rejected = (config.beta * score.detach() for score in scores)
    metrics = Metrics()
    add_pair_means(
        metrics,
        batch,
        preference_loss=losses,
        accuracy=rate_order(chosen - rejected),
        margin=chosen - rejected,
        chosen_reward=chosen,
        rejected_reward=rejected,
        chosen_logps=logps.chosen,
        rejected_logps=logps.rejected,
    )
    return losses, metrics


def _add_nll(metrics: Metrics, config: PreferenceConfig, batch: Batch, nll: Tensor) -> None:
    """Add the metric `nll`, a weighted mean over tokens. nll: [N] sums over the tokens of each chosen sequence"""
    weights = pair_weights(batch)
    metrics.mean("nll", (nll * weights).sum(), (_count_nll_tokens(config, batch) * weights).sum())


class RefLogprobs:
    """Log-probabilities of both answers of each pair, under the reference."""

    prefix = "ref_"

    def sequences(self, batch: Batch) -> Ragged:
        return pair_rows(batch)

    def outputs(self, batch: Batch, output: ModelOutput) -> dict[str, Ragged]:
        """Compute one number per answer, summed over its tokens."""
        sums = zip(SIDES, sum_logprobs(batch, output), strict=True)
        return {f"{self.prefix}{side}_logps": Ragged.scalars(of.float()) for side, of in sums}

    def metrics(self, batch: Batch) -> Metrics:
        return Metrics()


class PreferenceMethod(RefLogprobs, PlainTrain):
    """Method that trains on preference pairs, or evaluates them.

    The weight of each pair is 1 / (number of pairs of its prompt).
    """

    prefix = ""

    def __init__(self, config: PreferenceConfig) -> None:
        self._config = config
        self._tokens_per_weight = 1.0

    def outputs(self, batch: Batch, output: ModelOutput) -> dict[str, Ragged]:
        """Compute one number per answer, and the NLL of chosen sequences if the loss includes it."""
        outputs = super().outputs(batch, output)
        if self._config.nll_coef > 0:
            outputs["chosen_nll"] = Ragged.scalars(_sum_nll(self._config, batch, output).float())
        return outputs

    def metrics(self, batch: Batch) -> Metrics:
        """Report the metrics of training.

        If the loss includes the NLL, `loss` is left out, because it needs the number of tokens on all ranks.
        """
        config = self._config
        logps = Sides(*(batch[f"{side}_logps"].values.double() for side in SIDES))
        losses, metrics = _compare(config, batch, logps)
        if config.nll_coef == 0:
            add_pair_means(metrics, batch, loss=losses)
        else:
            _add_nll(metrics, config, batch, batch["chosen_nll"].values.double())
        return metrics

    def prepare(self, batch: Batch, dp_sum: Sum) -> tuple[Batch, Metrics]:
        """Compute the mean number of NLL tokens per pair over all ranks. `loss` divides the NLL of a pair by it."""
        if self._config.nll_coef > 0:
            weights = pair_weights(batch)
            tokens = (_count_nll_tokens(self._config, batch) * weights).sum()
            total, pairs = dp_sum(torch.stack((tokens, weights.sum()))).tolist()
            self._tokens_per_weight = max(total, 1.0) / max(pairs, 1e-12)
        return batch, Metrics()

    def weight(self, batch: Batch) -> float:
        return float(pair_weights(batch).sum())

    def loss(self, batch: Batch, output: ModelOutput) -> tuple[Tensor, Metrics]:
        config = self._config
        losses, metrics = _compare(config, batch, sum_logprobs(batch, output))
        if config.nll_coef > 0:
            nll = _sum_nll(config, batch, output)
            losses = losses + config.nll_coef * nll / self._tokens_per_weight
            _add_nll(metrics, config, batch, nll)
        add_pair_means(metrics, batch, loss=losses)
        return (losses * pair_weights(batch)).sum(), metrics


def make_algorithm(
    experiment: PreferenceExperiment, graph: DataflowGraph, eval_graph: DataflowGraph | None
) -> StatelessAlgorithm:
    method = PreferenceMethod(experiment.preference)
    methods = {"ref.inference": RefLogprobs(), "actor.inference": method, "actor.train": method}
    return StatelessAlgorithm(graph, eval_graph, methods)
