"""Sums of squares of gradients."""

import torch
from torch import Tensor

from realrl.model.gpu.path import on_gpu

_RUN = 2**16
"""Elements whose squares are summed in float32: a few roundings per lane. The sums of runs are added in float64.
Kernels that sum in float64 throughout first copy all elements to float64, which takes 8 bytes per element."""


def sum_squares(values: Tensor) -> Tensor:
    """Sum the squares of float32 values. [n], contiguous -> [] float64"""
    if not on_gpu(values):
        return torch.stack([torch.dot(run, run) for run in values.split(_RUN)]).sum(dtype=torch.float64)
    whole = len(values) - len(values) % _RUN
    norms = torch.linalg.vector_norm(values[:whole].view(-1, _RUN), dim=1)
    rest = torch.linalg.vector_norm(values[whole:])
    return torch.cat([norms, rest[None]]).double().square_().sum()
