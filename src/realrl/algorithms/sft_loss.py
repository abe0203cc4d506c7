"""Supervised fine-tuning: maximise the likelihood of answers given their prompts."""

import torch
from torch import Tensor

from realrl.algorithms.base.method import Metrics, ModelOutput, PlainTrain, StatelessAlgorithm
from realrl.algorithms.base.rows import row_sums
from realrl.algorithms.sft import SFTExperiment
from realrl.data.batch import Batch, Ragged, copy_numbers
from realrl.dataflow.graph import DataflowGraph


class SFTMethod(PlainTrain):
    """Cross-entropy over the tokens to learn. All these tokens of the global batch have the same weight."""

    def sequences(self, batch: Batch) -> Ragged:
        return batch["tokens"]

    def _nll(self, batch: Batch, output: ModelOutput) -> Tensor:
        """Compute -log p of each token to learn, and 0 for all other tokens: [T]."""
        assert output.logprobs is not None
        return -output.logprobs.masked_fill(batch["loss_mask"].values == 0, 0)

    def weight(self, batch: Batch) -> float:
        return int(batch["loss_mask"].values.sum())

    def loss(self, batch: Batch, output: ModelOutput) -> tuple[Tensor, Metrics]:
        loss = self._nll(batch, output).sum()
        metrics = Metrics()
        metrics.mean("loss", loss, batch["loss_mask"].values.sum())
        return loss, metrics

    def outputs(self, batch: Batch, output: ModelOutput) -> dict[str, Ragged]:
        """Compute `nll`, one number per item, summed over its tokens to learn."""
        nll, lengths = self._nll(batch, output), batch["tokens"].lengths
        items = torch.arange(len(lengths), device=nll.device)
        rows = items.repeat_interleave(copy_numbers(lengths, nll.device), output_size=len(nll))
        return {"nll": Ragged.scalars(row_sums(nll, rows, len(lengths)).float())}

    def metrics(self, batch: Batch) -> Metrics:
        """Report `loss`, the mean NLL per token to learn. The exponential of `loss` is the perplexity."""
        metrics = Metrics()
        metrics.mean("loss", batch["nll"].values.double().sum(), batch["loss_mask"].values.sum())
        return metrics


def make_algorithm(
    experiment: SFTExperiment, graph: DataflowGraph, eval_graph: DataflowGraph | None
) -> StatelessAlgorithm:
    method = SFTMethod()
    return StatelessAlgorithm(graph, eval_graph, {"actor.train": method, "actor.inference": method})
