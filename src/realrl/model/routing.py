"""Routing: the choice of experts for each token, and how it is recorded, replayed and balanced."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from realrl.model.group import Group, make_single_rank_group


class Routing:
    """Default routing: each token takes the experts that it prefers most."""

    def route(
        self, layer: int, probabilities: Tensor, preferences: Tensor, per_token: int
    ) -> tuple[Tensor, Tensor]:
        """Choose the experts of tokens in a layer of the stage. probabilities, or other scores: [T, E] float32;
        preferences, by which experts are chosen and which are usually the scores: [T, E] without gradient

        -> scores from which the weights of experts are taken [T, E], and indices of the chosen experts
        [T, per_token] int64
        """
        return probabilities, preferences.topk(per_token, dim=1).indices


LIKELIEST = Routing()


NONE_CHOSEN = -1
"""Marks a token that has not passed through a layer's experts. All tokens have it in dense layers."""
EXPERT_DTYPE = torch.int16
"""Type of recorded expert numbers."""


class RecordedRouting(Routing):
    """Routing by `inner`, with the chosen experts recorded for router replay."""

    def __init__(
        self,
        record: Tensor,
        places: tuple[Tensor, ...],
        inner: Routing,
        collect: Callable[[Tensor], Tensor] = lambda experts: experts,
    ) -> None:
        """`record` is [layers of the stage, ..., k] EXPERT_DTYPE. `places` index its middle dims, one index per
        token, [T]. If a rank routes only some of these tokens, `collect` makes the experts of all of them from
        those of its own."""
        self._record, self._places, self._inner, self._collect = record, places, inner, collect

    def route(
        self, layer: int, probabilities: Tensor, preferences: Tensor, per_token: int
    ) -> tuple[Tensor, Tensor]:
        weighed, experts = self._inner.route(layer, probabilities, preferences, per_token)
        self._record[layer][self._places] = self._collect(experts.to(EXPERT_DTYPE))
        return weighed, experts

    def skip(self, layer: int) -> None:
        """Record that the tokens do not pass through a layer's experts."""
        self._record[layer][self._places] = NONE_CHOSEN


class ReplayedRouting(Routing):
    """Routing with recorded experts; tokens without a record take the experts that they prefer most.

    The weights of the experts, and their gradients, come from the model's current scores.
    """

    def __init__(self, experts: Tensor, first: int = 0) -> None:
        """experts: [T, layers, k] EXPERT_DTYPE, of the layers of the stage from `first` on."""
        self._experts, self._first = experts, first

    def route(
        self, layer: int, probabilities: Tensor, preferences: Tensor, per_token: int
    ) -> tuple[Tensor, Tensor]:
        weighed, experts = super().route(layer, probabilities, preferences, per_token)
        chosen = self._experts[:, layer - self._first].long()
        return weighed, torch.where(chosen == NONE_CHOSEN, experts, chosen)


class ExpertCounts:
    """Counts and losses of the routing in a call, for each layer of the stage."""

    def __init__(self, layers: int, experts: int, device: torch.device) -> None:
        self.chosen = torch.zeros(layers, experts, dtype=torch.int64, device=device)
        """How many tokens chose each expert. [layers, E]"""
        self.losses = torch.zeros(layers, dtype=torch.float64, device=device)
        """Sum of the balance losses of all sequences. [layers]"""


class BalancedRouting(Routing):
    """Routing by `inner` that also counts how balanced one micro-batch is. With a coefficient, training also learns
    to balance.

    The balance loss of a sequence of T tokens in a layer is E * sum over experts e of f_e * P_e. f_e is the number
    of its tokens that chose e, divided by T; P_e is the mean probability of e (Switch Transformer, arXiv
    2101.03961, equations 4 to 6; per sequence as in DeepSeek-V3, arXiv 2412.19437, equations 17 to 20). If all
    experts are used equally, the loss is k, the number of experts per token. The gradient treats choices as
    constants, so the loss is linear in the probabilities. Scores that do not add up to 1 are divided by their sum,
    as in DeepSeek-V3.
    """

    def __init__(
        self,
        inner: Routing,
        counts: ExpertCounts,
        *,
        rows: Tensor,
        lengths: Tensor,
        coefficient: Tensor | None,
        group: Group | None = None,
        members: Tensor | None = None,
    ) -> None:
        """rows: [T], the sequence of each token, or B for padding. lengths: [B], the number of tokens of each
        sequence. `coefficient`, a scalar, is the factor of each sequence's balance loss in the trained loss; None
        leaves the loss out. The ranks of `group` divide the tokens of each sequence; by default one rank has them
        all. If sequences share tokens, `members` ([B, parts], 1 or 0) has the parts of each sequence, and `rows`
        has the part of each token."""
        self._inner, self._counts, self._coefficient = inner, counts, coefficient
        self._rows, self._lengths, self._members = rows, lengths, members
        self._group = group or make_single_rank_group()
        self._counted: set[int] = set()
        """Layers that have been counted. Recomputation routes the same tokens again, and must not count them
        twice."""

    def route(
        self, layer: int, probabilities: Tensor, preferences: Tensor, per_token: int
    ) -> tuple[Tensor, Tensor]:
        """Choose the same experts as `inner`. In the backward pass, the returned scores also get the gradient of
        the balance loss."""
        probabilities, experts = self._inner.route(layer, probabilities, preferences, per_token)
        own = self._count(experts, probabilities.shape[1])
        slopes = self._find_slopes(self._group.sum(own.clone()))
        if layer not in self._counted:
            self._counted.add(layer)
            self._counts.chosen[layer] += own.sum(0)
            # A GPU's sum over tokens has a fixed order. A scatter-add by sequence would not.
            scores = probabilities.detach()
            losses = (scores * slopes[self._rows]).sum(1, dtype=torch.float64) / scores.sum(1)
            self._counts.losses[layer] += losses.sum()
        if self._coefficient is not None and torch.is_grad_enabled():
            slopes = slopes * self._coefficient
            probabilities = _AddGradient.apply(probabilities, slopes, self._rows)
        return probabilities, experts

    def _count(self, experts: Tensor, count: int) -> Tensor:
        """Count how often this rank's tokens of each sequence chose each expert. experts: [T, k] -> [B, E] int64"""
        places = (self._rows[:, None] * count + experts).flatten()
        parts = len(self._lengths) if self._members is None else self._members.shape[1]
        found = torch.zeros((parts + 1) * count, dtype=torch.int64, device=experts.device)
        found = found.scatter_add_(0, places, torch.ones_like(places)).view(-1, count)[:-1]
        return found if self._members is None else (self._members @ found.double()).long()

    def _find_slopes(self, counts: Tensor) -> Tensor:
        """Compute the derivative of the balance losses with respect to the probabilities of one token. It is the
        same for all tokens of a sequence, or of a part of sequences, and 0 for padding. -> [B or parts + 1, E]"""
        slopes = counts.float() * (counts.shape[1] / self._lengths.float().square())[:, None]
        if self._members is not None:
            slopes = self._members.float().T @ slopes
        return F.pad(slopes, (0, 0, 0, 1))


class _AddGradient(Function):
    """Identity whose backward pass adds the gradient of a loss that is linear in each row's normalised values."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, slopes: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(values, slopes, rows)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        values, slopes, rows = ctx.saved_tensors
        slopes, sums = slopes[rows], values.sum(1, keepdim=True)
        mean = (slopes * values).sum(1, keepdim=True) / sums
        return grad + (slopes - mean) / sums, None, None
