"""Methods of the calls of KTO."""

import torch
from torch import Tensor

from realrl.algorithms.base import PlainTrain, StatelessAlgorithm
from realrl.algorithms.kto.config import KTOConfig
from realrl.algorithms.kto.graph import WORK
from realrl.algorithms.kto.losses import compute_kto_loss
from realrl.algorithms.method import Method, Metrics, ModelOutput, Sum
from realrl.algorithms.packed import Responses
from realrl.algorithms.policy.normalization import global_moments
from realrl.data.batch import Batch, Ragged
from realrl.dataflow.graph import DataflowGraph


def _rows_of_items(batch: Batch) -> tuple[list[str], Ragged]:
    """Order the rows of each item one after the other, of the keys that the call has; also these keys."""
    keys = [key for key in WORK if key in batch.fields]
    items = zip(*(batch[key].rows() for key in keys), strict=True)
    return keys, Ragged.of((row for item in items for row in item), dtype=batch[keys[0]].values.dtype)


def _sum_logprobs(rows: Ragged, starts: Tensor, output: ModelOutput) -> Tensor:
    """Sum log-probabilities of the tokens from `starts` [N] on in N rows. [N] float64"""
    assert output.logprobs is not None
    answers = Responses.of(rows, Ragged.scalars(starts))
    return answers.row_sums(output.logprobs[answers.index])


class LabelledInference:
    """Log-probabilities of answers, of mismatched ones, or of both, as the inputs of the call say."""

    def __init__(self, config: KTOConfig, prefix: str = "") -> None:
        """`prefix`: that of the outputs."""
        self._config = config
        self._prefix = prefix

    def sequences(self, batch: Batch) -> Ragged:
        """Select one or two rows per item."""
        return _rows_of_items(batch)[1]

    def outputs(self, batch: Batch, output: ModelOutput) -> dict[str, Ragged]:
        """Compute one number per row, summed over the tokens of the answer."""
        keys, rows = _rows_of_items(batch)
        starts = batch["prompt_length"].values.repeat_interleave(len(keys))
        sums = _sum_logprobs(rows, starts, output).float().view(-1, len(keys))
        names = {"tokens": "logps", "mismatched": "mismatched_logps"}
        return {
            f"{self._prefix}{names[key]}": Ragged.scalars(sums[:, i].contiguous())
            for i, key in enumerate(keys)
        }

    def metrics(self, batch: Batch) -> Metrics:
        """Compute metrics of evaluation: rewards, `kl`, which here may be negative, and the loss where it takes no
        divergence, which is a mean over all ranks."""
        config = self._config
        if "logps" not in batch.fields:
            return Metrics()
        log_ratio = batch["logps"].values.double() - batch["ref_logps"].values.double()
        metrics = _summarize(config, batch, log_ratio)
        if config.estimates_kl:
            metrics.mean("kl", _mismatched_log_ratio(batch).sum(), len(batch))
        else:
            good = batch["label"].values != 0
            losses = compute_kto_loss(config, log_ratio=log_ratio, good=good, kl=0.0)
            metrics.mean("loss", losses.sum(), len(batch))
        return metrics


class KTOTrain(PlainTrain):
    """Loss of labelled answers."""

    def __init__(self, config: KTOConfig) -> None:
        self._config = config
        self._kl = 0.0

    def prepare(self, batch: Batch, dp_sum: Sum) -> tuple[Batch, Metrics]:
        """Estimate the divergence from the mismatched answers of all ranks: at least 0, before the update."""
        metrics = Metrics()
        if self._config.estimates_kl:
            log_ratio = _mismatched_log_ratio(batch)
            self._kl = max(global_moments(log_ratio, dp_sum).mean, 0.0)
            metrics.mean("kl", log_ratio.new_tensor(self._kl), 1.0)
        return batch, metrics

    def sequences(self, batch: Batch) -> Ragged:
        """Select prompts with their answers."""
        return batch["tokens"]

    def weight(self, batch: Batch) -> float:
        """Count the answers."""
        return len(batch)

    def loss(self, batch: Batch, output: ModelOutput) -> tuple[Tensor, Metrics]:
        """Compute the sum over answers."""
        logps = _sum_logprobs(batch["tokens"], batch["prompt_length"].values, output)
        log_ratio = logps - batch["ref_logps"].values.double()
        good = batch["label"].values != 0
        loss = compute_kto_loss(self._config, log_ratio=log_ratio, good=good, kl=self._kl).sum()
        metrics = _summarize(self._config, batch, log_ratio.detach())
        metrics.mean("loss", loss, len(batch))
        return loss, metrics


def _mismatched_log_ratio(batch: Batch) -> Tensor:
    """Compute log p_actor - log p_ref of mismatched answers. [N] float64"""
    return batch["mismatched_logps"].values.double() - batch["ref_mismatched_logps"].values.double()


def _summarize(config: KTOConfig, batch: Batch, log_ratio: Tensor) -> Metrics:
    """Compute mean rewards of good and of bad answers, and the share of answers whose reward has the right sign,
    of which 0 is half right. log_ratio: [N]"""
    metrics, rewards = Metrics(), config.beta * log_ratio
    good = batch["label"].values != 0
    metrics.mean("chosen_reward", rewards[good].sum(), good.sum())
    metrics.mean("rejected_reward", rewards[~good].sum(), (~good).sum())
    right = torch.where(good, rewards > 0, rewards < 0).double() + 0.5 * (rewards == 0).double()
    metrics.mean("accuracy", right.sum(), len(batch))
    return metrics


def kto_algorithm(
    config: KTOConfig, graph: DataflowGraph, eval_graph: DataflowGraph | None
) -> StatelessAlgorithm:
    """Make the algorithm of these graphs."""
    methods: dict[str, Method] = {
        "ref.inference": LabelledInference(config, "ref_"),
        "actor.inference": LabelledInference(config),
        "actor.train": KTOTrain(config),
    }
    return StatelessAlgorithm(graph=graph, eval_graph=eval_graph, methods=methods)
