"""KTO: the loss of labelled answers, and the methods of all calls."""

import torch
from torch import Tensor

from realrl.algorithms.base.method import Method, Metrics, ModelOutput, PlainTrain, StatelessAlgorithm, Sum
from realrl.algorithms.base.rows import Responses, interleave, rate_order
from realrl.algorithms.clipped_policy_loss import global_moments
from realrl.algorithms.kto import LOGPS, KTOConfig, KTOExperiment
from realrl.data.batch import Batch, Ragged
from realrl.dataflow.graph import DataflowGraph


def compute_kto_loss(config: KTOConfig, *, log_ratio: Tensor, good: Tensor, kl: float) -> Tensor:
    """Compute the weighted loss of each answer (Ethayarajh et al. 2024, equation 8).

    The loss is w (1 - sigmoid(beta (r - z))) for a good answer and w (1 - sigmoid(beta (z - r))) for a bad answer.
    w is the weight of good or bad answers, r the log ratio, and z the divergence of the actor from the reference.

    log_ratio: [N] log p_actor - log p_ref of whole answers; good: [N] bool; kl: z, at least 0; result: [N]
    """
    distance = config.beta * (log_ratio - kl)
    weight = torch.where(good, config.desirable_weight, config.undesirable_weight)
    # sigmoid(-x) equals 1 - sigmoid(x), which would lose digits if the result is small.
    return weight * torch.sigmoid(torch.where(good, -distance, distance))


def _sum_logprobs(rows: Ragged, starts: Tensor, output: ModelOutput) -> Tensor:
    """Sum the log-probabilities of the tokens of row i from position `starts[i]` on. starts: [N] -> [N] float64"""
    assert output.logprobs is not None
    answers = Responses.of(rows, Ragged.scalars(starts))
    return answers.row_sums(output.logprobs[answers.index])


def _compute_log_ratio(batch: Batch, key: str) -> Tensor:
    """Compute log p_actor - log p_ref of answers (`key`: logps or mismatched_logps). [N] float64"""
    return batch[key].values.double() - batch[f"ref_{key}"].values.double()


def _summarize(config: KTOConfig, batch: Batch, log_ratio: Tensor) -> Metrics:
    """Compute mean rewards of good and bad answers, and `accuracy`. log_ratio: [N]

    `accuracy` is the share of answers whose reward has the right sign. An answer with reward 0 counts half.
    """
    metrics, rewards = Metrics(), config.beta * log_ratio
    good = batch["label"].values != 0
    metrics.mean("chosen_reward", rewards[good].sum(), good.sum())
    metrics.mean("rejected_reward", rewards[~good].sum(), (~good).sum())
    metrics.mean("accuracy", rate_order(torch.where(good, rewards, -rewards)).sum(), len(batch))
    return metrics


class LabelledInference:
    """Log-probabilities of the rows among the call's inputs: answers, mismatched answers, or both kinds."""

    def __init__(self, config: KTOConfig, prefix: str = "") -> None:
        """`prefix`: prefix of the output keys."""
        self._config, self._prefix = config, prefix

    def sequences(self, batch: Batch) -> Ragged:
        return interleave(batch, _find_rows(batch))

    def outputs(self, batch: Batch, output: ModelOutput) -> dict[str, Ragged]:
        """Compute one number per row, summed over the tokens of the answer."""
        keys = _find_rows(batch)
        starts = batch["prompt_length"].values.repeat_interleave(len(keys))
        sums = _sum_logprobs(interleave(batch, keys), starts, output).float().view(-1, len(keys))
        return {
            f"{self._prefix}{LOGPS[key]}": Ragged.scalars(sums[:, i].contiguous())
            for i, key in enumerate(keys)
        }

    def metrics(self, batch: Batch) -> Metrics:
        """Report rewards in evaluations, and `kl` or `loss`.

        A loss that uses the divergence is not reported, because it needs the mean divergence over all ranks. `kl`
        is reported instead, and may be negative here.
        """
        config = self._config
        if "logps" not in batch.fields:
            return Metrics()
        log_ratio = _compute_log_ratio(batch, "logps")
        metrics = _summarize(config, batch, log_ratio)
        if config.estimates_kl:
            metrics.mean("kl", _compute_log_ratio(batch, "mismatched_logps").sum(), len(batch))
        else:
            good = batch["label"].values != 0
            losses = compute_kto_loss(config, log_ratio=log_ratio, good=good, kl=0.0)
            metrics.mean("loss", losses.sum(), len(batch))
        return metrics


def _find_rows(batch: Batch) -> list[str]:
    return [key for key in LOGPS if key in batch.fields]


class KTOTrain(PlainTrain):
    """Loss of labelled answers."""

    def __init__(self, config: KTOConfig) -> None:
        self._config = config
        self._kl = 0.0

    def prepare(self, batch: Batch, dp_sum: Sum) -> tuple[Batch, Metrics]:
        """Estimate the divergence, at least 0, from the mismatched answers of all ranks."""
        metrics = Metrics()
        if self._config.estimates_kl:
            log_ratio = _compute_log_ratio(batch, "mismatched_logps")
            self._kl = max(global_moments(log_ratio, dp_sum).mean, 0.0)
            metrics.mean("kl", log_ratio.new_tensor(self._kl), 1.0)
        return batch, metrics

    def sequences(self, batch: Batch) -> Ragged:
        return batch["tokens"]

    def weight(self, batch: Batch) -> float:
        return len(batch)

    def loss(self, batch: Batch, output: ModelOutput) -> tuple[Tensor, Metrics]:
        logps = _sum_logprobs(batch["tokens"], batch["prompt_length"].values, output)
        log_ratio = logps - batch["ref_logps"].values.double()
        good = batch["label"].values != 0
        loss = compute_kto_loss(self._config, log_ratio=log_ratio, good=good, kl=self._kl).sum()
        metrics = _summarize(self._config, batch, log_ratio.detach())
        metrics.mean("loss", loss, len(batch))
        return loss, metrics


def make_algorithm(
    experiment: KTOExperiment, graph: DataflowGraph, eval_graph: DataflowGraph | None
) -> StatelessAlgorithm:
    config = experiment.kto
    methods: dict[str, Method] = {
        "ref.inference": LabelledInference(config, "ref_"),
        "actor.inference": LabelledInference(config),
        "actor.train": KTOTrain(config),
    }
    return StatelessAlgorithm(graph, eval_graph, methods)
