"""Sliding windows, soft caps of scores, and sinks: the variants of causal attention."""

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

_EVERYTHING = 1 << 24
"""Window size that means "no window". It is longer than any sequence, and float32 represents it exactly."""


@dataclass(frozen=True, eq=False)
class AttentionRule:
    """How a layer turns scores into attention weights."""

    window: int | None = None
    """Number of tokens that a token sees, itself included; None if it sees all earlier tokens."""
    cap: float | None = None
    """Scores x become cap * tanh(x / cap); None leaves scores unchanged."""
    sinks: Tensor | None = None
    """One learned score for each query head of this rank. It counts in the softmax, but no value belongs to it.
    [heads]"""

    @property
    def is_plain(self) -> bool:
        return self.window is None and self.needs_scores is False

    @property
    def needs_scores(self) -> bool:
        """Whether scores are capped or sinks join the softmax; library kernels support neither."""
        return self.cap is not None or self.sinks is not None

    def within(self, length: int) -> "AttentionRule":
        """Return an equivalent rule for sequences of up to `length` tokens. It has no window if the window hides
        nothing."""
        hides = self.window is not None and self.window < length
        return self if hides or self.window is None else replace(self, window=None)

    @property
    def bounds(self) -> tuple[int, float]:
        """Window and cap as kernels take them. A huge window means no window, and a cap of 0 means no cap."""
        return self.window or _EVERYTHING, self.cap or 0.0

    def for_kernel(self, heads: int) -> tuple[int, float, Tensor]:
        """Return window, cap and sinks as CPU kernels take them. Without sinks, each head gets a sink of -inf,
        which has no weight."""
        sinks = _no_sinks(heads) if self.sinks is None else self.sinks.detach().float()
        return *self.bounds, sinks


CAUSAL = AttentionRule()


@cache
def _no_sinks(heads: int) -> Tensor:
    return torch.full((heads,), -torch.inf)
