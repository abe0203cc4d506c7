"""Sliding windows, soft caps of scores, and sinks: what attention does besides a causal softmax."""

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

_EVERYTHING = 1 << 24
"""Window of a layer without one: more tokens than a sequence has, and exact in float32."""


@dataclass(frozen=True, eq=False)
class AttentionRule:
    """Rule by which the scores of a layer become weights."""

    window: int | None = None
    """Tokens that one sees, itself included; None for all before it."""
    cap: float | None = None
    """Scores x become cap * tanh(x / cap); None where they stay as they are."""
    sinks: Tensor | None = None
    """A further score for each query head of this rank, whose weight goes to nothing. [heads]"""

    @property
    def is_plain(self) -> bool:
        """Whether attention by a rule is a causal softmax and nothing else."""
        return self.window is None and self.needs_scores is False

    @property
    def needs_scores(self) -> bool:
        """Whether a rule changes scores by a cap or sinks, which kernels of libraries do not know."""
        return self.cap is not None or self.sinks is not None

    def within(self, length: int) -> "AttentionRule":
        """Return the rule for sequences of up to so many tokens, from which a wider window hides nothing."""
        hides = self.window is not None and self.window < length
        return self if hides or self.window is None else replace(self, window=None)

    @property
    def bounds(self) -> tuple[int, float]:
        """Window and cap as kernels get them, where there are none, too: 0 is no cap."""
        return self.window or _EVERYTHING, self.cap or 0.0

    def for_kernel(self, heads: int) -> tuple[int, float, Tensor]:
        """Return window, cap and sinks as kernels on a CPU get them, where there are none, too."""
        sinks = _no_sinks(heads) if self.sinks is None else self.sinks.detach().float()
        return *self.bounds, sinks


CAUSAL = AttentionRule()
"""A causal softmax."""


@cache
def _no_sinks(heads: int) -> Tensor:
    return torch.full((heads,), -torch.inf)
