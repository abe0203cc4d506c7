"""Answers that distillation learns from: sampled ones, or those of records."""

import torch
from torch import Tensor

from realrl.algorithms.method import Metrics
from realrl.algorithms.packed import Responses
from realrl.data.batch import Batch, Ragged


def select_rows(batch: Batch) -> Ragged:
    """Select the rows of tokens that models are run on."""
    return batch["sequences" if "sequences" in batch.fields else "tokens"]


def find_answers(batch: Batch) -> Tensor:
    """Find the places of the A tokens of answers among all T tokens. -> [A], ascending"""
    if "sequences" in batch.fields:
        return Responses.of(batch["sequences"], batch["prompt_length"]).index
    return batch["loss_mask"].values.nonzero().squeeze(1)


def measure_answers(batch: Batch) -> Metrics:
    """Compute metrics of sampled answers, `response_tokens` and `finished`; none of records."""
    metrics = Metrics()
    if "sequences" in batch.fields:
        metrics.mean("response_tokens", torch.tensor(float(len(find_answers(batch)))), len(batch))
        metrics.mean("finished", batch["finished"].values.double().sum(), len(batch))
    return metrics
