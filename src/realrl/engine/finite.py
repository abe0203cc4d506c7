"""Numbers that are not finite: finding them, and the error where nothing can be done with them."""

import torch
from torch import Tensor

from realrl.config.errors import RunError


class NotFiniteError(RunError):
    """NaN or infinite numbers where a run cannot go on, or a model must not be saved."""


def all_finite(values: Tensor) -> bool:
    """Whether there is neither NaN nor infinity among them, without a temporary of their size."""
    if not values.numel():
        return True
    lowest, highest = torch.aminmax(values.detach())  # NaN if any value is
    return bool(torch.isfinite(lowest) & torch.isfinite(highest))
