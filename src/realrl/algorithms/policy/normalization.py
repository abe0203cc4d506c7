"""Means and deviations over all ranks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from realrl.algorithms.method import Sum

EPSILON = 1e-8


@dataclass(frozen=True)
class Moments:
    """Count, mean and variance (mean squared distance from the mean) of the finite numbers on all ranks."""

    count: float
    mean: float
    variance: float

    @property
    def mean_square(self) -> float:
        """Mean of the squares."""
        return self.mean**2 + self.variance

    @property
    def std(self) -> float:
        """Standard deviation."""
        return float(self.variance**0.5)


def global_moments(values: Tensor, dp_sum: Sum) -> Moments:
    """Compute moments over all ranks of `values`: [A] on this rank. All zero where no rank has a finite one.

    What is not finite is left out, so that one broken sequence spoils its own mini-batch and not the step.
    """
    # float64, so that the order in which ranks add up does not show in float32
    x = values.detach().double()
    x = x[x.isfinite()]
    count, total = dp_sum(torch.stack([x.new_tensor(x.numel()), x.sum()])).tolist()
    n = max(count, 1.0)
    mean = total / n
    # Of numbers far from 0, the mean of the squares less the squared mean would be rounding alone.
    squares = dp_sum((x - mean).square().sum()[None]).item()
    return Moments(count, mean, squares / n)


def whiten(values: Tensor, moments: Moments) -> Tensor:
    """Shift and scale values to mean 0 and deviation 1 by `moments`. values: [A]"""
    return (values - moments.mean) / (moments.std + EPSILON)
