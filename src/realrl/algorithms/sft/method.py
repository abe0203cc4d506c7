"""Supervised fine-tuning: maximise the likelihood of answers given their prompts."""

from torch import Tensor

from realrl.algorithms.base import PlainTrain, StatelessAlgorithm
from realrl.algorithms.method import Method, Metrics, ModelOutput
from realrl.algorithms.packed import Responses
from realrl.data.batch import Batch, Ragged
from realrl.dataflow.graph import DataflowGraph


def _answers(batch: Batch) -> Responses:
    return Responses.of(batch["tokens"], batch["prompt_length"])


class SFTInference:
    """Negative log-likelihood of each answer."""

    def sequences(self, batch: Batch) -> Ragged:
        """Prompt and answer."""
        return batch["tokens"]

    def outputs(self, batch: Batch, output: ModelOutput) -> dict[str, Ragged]:
        """`nll`: one number per item, summed over the tokens of its answer."""
        assert output.logprobs is not None
        answers = _answers(batch)
        return {"nll": Ragged.scalars(answers.row_sums(-output.logprobs[answers.index]).float())}

    def metrics(self, batch: Batch) -> Metrics:
        """`loss`: mean per answer token; its exponential is the perplexity."""
        metrics = Metrics()
        metrics.mean("loss", batch["nll"].values.double().sum(), _answers(batch).total)
        return metrics


class SFTTrain(PlainTrain):
    """Cross-entropy over answer tokens; every answer token of the global batch weighs the same."""

    def sequences(self, batch: Batch) -> Ragged:
        """Prompt and answer."""
        return batch["tokens"]

    def weight(self, batch: Batch) -> int:
        """Number of answer tokens."""
        return _answers(batch).total

    def loss(self, batch: Batch, output: ModelOutput) -> tuple[Tensor, Metrics]:
        """-log p summed over answer tokens."""
        assert output.logprobs is not None
        answers = _answers(batch)
        loss = -output.logprobs[answers.index].sum()
        metrics = Metrics()
        metrics.mean("loss", loss, answers.total)
        return loss, metrics


def sft_algorithm(graph: DataflowGraph, eval_graph: DataflowGraph | None) -> StatelessAlgorithm:
    """The algorithm for these graphs."""
    methods: dict[str, Method] = {"actor.train": SFTTrain(), "actor.inference": SFTInference()}
    return StatelessAlgorithm(graph=graph, eval_graph=eval_graph, methods=methods)
