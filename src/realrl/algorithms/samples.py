"""Samples of each prompt of a training step, whichever data-parallel ranks they are on."""

from collections.abc import Sequence

import torch
from torch import Tensor

from realrl.algorithms.method import Sum


def gather_samples(values: Tensor, ids: Sequence[int], *, prompts: int, samples: int, dp_sum: Sum) -> Tensor:
    """Gather a value of all items of a step, one row per prompt: [prompts, samples] float64, equal on every rank.

    values: [N] of this rank's items `ids`, as `TrainMethod.prepare` sees them. Item i is sample i % `samples` of
    prompt i // `samples`. Every entry is one rank's value plus zeros, so the result is exact and does not depend on
    the placement of items.
    """
    table = torch.zeros(prompts * samples, dtype=torch.float64, device=values.device)
    table[list(ids)] = values.detach().double()
    return dp_sum(table).view(prompts, samples)
