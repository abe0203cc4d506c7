"""Supervised fine-tuning: maximise the likelihood of answers given their prompts."""

import torch
from torch import Tensor

from realrl.algorithms.base import PlainTrain, StatelessAlgorithm
from realrl.algorithms.method import Method, Metrics, ModelOutput
from realrl.data.batch import Batch, Ragged
from realrl.dataflow.graph import DataflowGraph


def _trained(batch: Batch) -> Tensor:
    """Places of the A tokens to learn among all T of rows that are not empty, [A].

    Never the first token of a row, which nothing predicts.
    """
    mask = batch["trained"].values.bool()
    firsts = torch.tensor(batch["trained"].offsets[:-1], dtype=torch.long, device=mask.device)
    return mask.index_fill(0, firsts, False).nonzero().squeeze(1)


class SFTInference:
    """Negative log-likelihood of the tokens to learn."""

    def sequences(self, batch: Batch) -> Ragged:
        """Prompts and answers."""
        return batch["tokens"]

    def outputs(self, batch: Batch, output: ModelOutput) -> dict[str, Ragged]:
        """`nll`: one number per item, summed over its tokens to learn."""
        assert output.logprobs is not None
        index, lengths = _trained(batch), torch.tensor(batch["tokens"].lengths, device=output.logprobs.device)
        rows = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
        # In double precision, so that a row's sum does not depend on the batch around it.
        sums = torch.zeros(len(lengths), dtype=torch.float64, device=lengths.device)
        sums = sums.index_add(0, rows[index], -output.logprobs[index].double())
        return {"nll": Ragged.scalars(sums.float())}

    def metrics(self, batch: Batch) -> Metrics:
        """`loss`: mean per token to learn; its exponential is the perplexity."""
        metrics = Metrics()
        metrics.mean("loss", batch["nll"].values.double().sum(), len(_trained(batch)))
        return metrics


class SFTTrain(PlainTrain):
    """Cross-entropy over the tokens to learn, which all weigh the same in the global batch."""

    def sequences(self, batch: Batch) -> Ragged:
        """Prompts and answers."""
        return batch["tokens"]

    def weight(self, batch: Batch) -> float:
        """Number of tokens to learn."""
        return len(_trained(batch))

    def loss(self, batch: Batch, output: ModelOutput) -> tuple[Tensor, Metrics]:
        """-log p summed over the tokens to learn."""
        assert output.logprobs is not None
        index = _trained(batch)
        loss = -output.logprobs[index].sum()
        metrics = Metrics()
        metrics.mean("loss", loss, len(index))
        return loss, metrics


def sft_algorithm(graph: DataflowGraph, eval_graph: DataflowGraph | None) -> StatelessAlgorithm:
    """The algorithm for these graphs."""
    methods: dict[str, Method] = {"actor.train": SFTTrain(), "actor.inference": SFTInference()}
    return StatelessAlgorithm(graph=graph, eval_graph=eval_graph, methods=methods)
