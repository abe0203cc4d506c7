"""Process reward modelling: the score of a step is the scalar head's value at its last token."""

import torch
from torch import Tensor

from realrl.algorithms.base import PlainTrain
from realrl.algorithms.method import Metrics, ModelOutput
from realrl.algorithms.reward.losses import step_loss
from realrl.data.batch import Batch, Ragged, copy_numbers


def _select_scores(batch: Batch, output: ModelOutput) -> Tensor:
    """Select the scores of all steps: [A]."""
    assert output.values is not None
    ends = batch["step_ends"]
    starts = copy_numbers(batch["tokens"].offsets[:-1], ends.values.device)
    counts = copy_numbers(ends.lengths, ends.values.device)
    starts = starts.repeat_interleave(counts, output_size=len(ends.values))
    return output.values[starts + ends.values].float()


def _summarize(scores: Tensor, right: Tensor) -> Metrics:
    """Compute means over steps: `loss`; `accuracy`, the share judged right, of which a score of 0 is half right;
    the scores of right and of wrong steps. scores: [A]; right: [A] bool"""
    metrics = Metrics()
    metrics.mean("loss", step_loss(scores=scores, right=right).double().sum(), len(scores))
    judged = torch.where(right, scores > 0, scores < 0).double() + 0.5 * (scores == 0).double()
    metrics.mean("accuracy", judged.sum(), len(scores))
    metrics.mean("right_score", scores[right].double().sum(), right.sum())
    metrics.mean("wrong_score", scores[~right].double().sum(), (~right).sum())
    return metrics


class StepInference:
    """Scores of steps."""

    def sequences(self, batch: Batch) -> Ragged:
        """Select prompts with their answers."""
        return batch["tokens"]

    def outputs(self, batch: Batch, output: ModelOutput) -> dict[str, Ragged]:
        """Compute one score per step."""
        return {"step_scores": Ragged(_select_scores(batch, output), batch["step_ends"].lengths)}

    def metrics(self, batch: Batch) -> Metrics:
        """Compute what training reports."""
        return _summarize(batch["step_scores"].values, batch["step_labels"].values != 0)


class StepTrain(PlainTrain):
    """Loss over steps, which all weigh the same in the global batch."""

    def sequences(self, batch: Batch) -> Ragged:
        """Select prompts with their answers."""
        return batch["tokens"]

    def weight(self, batch: Batch) -> float:
        """Count the steps."""
        return len(batch["step_ends"].values)

    def loss(self, batch: Batch, output: ModelOutput) -> tuple[Tensor, Metrics]:
        """Compute the sum over steps."""
        scores, right = _select_scores(batch, output), batch["step_labels"].values != 0
        return step_loss(scores=scores, right=right).sum(), _summarize(scores.detach(), right)
