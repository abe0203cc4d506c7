"""Checks that numbers are finite, and the errors to raise if they are not."""

import torch
from torch import Tensor

from realrl.config.errors import RunError


class NotFiniteError(RunError):
    """NaN or infinite numbers that end a run or prevent saving a model."""


class NotFiniteLogitsError(NotFiniteError):
    """Logits from which no token can be sampled."""

    def __init__(self, token: int, item: int) -> None:
        """`token` is the index of the token after the prompt, `item` the index of the item in the step's batch.
        Both start at 0."""
        super().__init__(token, item)
        self.token = token
        self.item = item

    def __str__(self) -> str:
        return self.describe(f"the prompt of item {self.item + 1} of this step's batch")

    def describe(self, prompt: str) -> str:
        """Write the error message with a description of the prompt, for example its place in a file."""
        return f"the logits of token {self.token + 1} after {prompt} are not finite (NaN or infinity)"


def all_finite(values: Tensor) -> bool:
    """Check that no value is NaN or infinite, without a temporary tensor as large as the input."""
    if not values.numel():
        return True
    lowest, highest = torch.aminmax(values.detach())  # NaN if any value is NaN
    return bool(torch.isfinite(lowest) & torch.isfinite(highest))
