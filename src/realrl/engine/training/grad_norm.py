"""Sums of squares of gradients."""

import torch
from torch import Tensor

_CPU_RUN = 2**16
"""Elements whose squares are summed in float32 on a CPU: a few roundings per lane, and fast; sums of these sums are
float64. Kernels that sum in float64 throughout convert every element first, which takes twenty times as long."""


def sum_squares(values: Tensor) -> Tensor:
    """Sum the squares of float32 values. [n] -> [] float64"""
    if values.device.type == "cpu":
        return torch.stack([torch.dot(run, run) for run in values.split(_CPU_RUN)]).sum(dtype=torch.float64)
    return torch.linalg.vector_norm(values, dtype=torch.float64).square_()
