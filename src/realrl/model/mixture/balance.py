"""Balance of experts: how evenly tokens are spread over them, and the loss by which routers learn it."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from realrl.model.mixture.routing import Routing


class ExpertCounts:
    """Sums of what passes of a call have chosen, by layer of the stage."""

    def __init__(self, layers: int, experts: int, device: torch.device) -> None:
        self.chosen = torch.zeros(layers, experts, dtype=torch.int64, device=device)
        """How often tokens chose each expert. [layers, E]"""
        self.losses = torch.zeros(layers, dtype=torch.float64, device=device)
        """Balance losses of all sequences. [layers]"""


class BalancedRouting(Routing):
    """Choice of experts by another routing, whose balance is counted and learnt, for one micro-batch.

    The balance loss of a sequence of T tokens in a layer is E * sum of f_e * P_e over the experts e, where f_e is
    the number of its tokens that chose e, divided by T, and P_e the mean probability of e (Switch Transformer,
    arXiv 2101.03961, equations 4 to 6; of each sequence by itself as in DeepSeek-V3, arXiv 2412.19437, equations 17
    to 20). It is k, the experts of a token, where all experts are alike. Choices are constants, so that the loss is
    linear in the probabilities. Scores that do not add up to 1 are divided by their sum, as in the latter.
    """

    def __init__(
        self,
        inner: Routing,
        counts: ExpertCounts,
        *,
        rows: Tensor,
        lengths: Tensor,
        coefficient: Tensor | None,
    ) -> None:
        """`inner` chooses. rows: [T] sequence of each token; lengths: [B] tokens of each sequence.

        `coefficient`, a scalar, is what the balance loss of each sequence in each layer is multiplied by in the
        loss that is trained, None where it is no part of it.
        """
        self._inner, self._counts, self._coefficient = inner, counts, coefficient
        self._rows, self._lengths = rows, lengths
        self._counted: set[int] = set()
        """Layers whose choices have been counted; those of a recomputation are the same once more."""

    def route(self, layer: int, probabilities: Tensor, per_token: int) -> tuple[Tensor, Tensor]:
        """Choose as `inner` does; probabilities have the gradient of the balance loss beside that of their use."""
        probabilities, experts = self._inner.route(layer, probabilities, per_token)
        counts = self._count(experts, probabilities.shape[1])
        slopes = self._find_slopes(counts)
        if layer not in self._counted:
            self._counted.add(layer)
            self._counts.chosen[layer] += counts.sum(0)
            # By tokens, whose order is fixed, and not added up by sequences, whose order of additions is not.
            scores = probabilities.detach()
            losses = (scores * slopes[self._rows]).sum(1, dtype=torch.float64) / scores.sum(1)
            self._counts.losses[layer] += losses.sum()
        if self._coefficient is not None and torch.is_grad_enabled():
            slopes = slopes * self._coefficient
            probabilities = _AddGradient.apply(probabilities, slopes, self._rows)
        return probabilities, experts

    def _count(self, experts: Tensor, count: int) -> Tensor:
        """Count how often the tokens of each sequence chose each expert. experts: [T, k] -> [B, E] int64"""
        places = (self._rows[:, None] * count + experts).flatten()
        found = torch.zeros(len(self._lengths) * count, dtype=torch.int64, device=experts.device)
        return found.scatter_add_(0, places, torch.ones_like(places)).view(-1, count)

    def _find_slopes(self, counts: Tensor) -> Tensor:
        """Find the derivatives of the balance loss by the probabilities of each token of a sequence. -> [B, E]"""
        return counts.float() * (counts.shape[1] / self._lengths.float().square())[:, None]


class _AddGradient(Function):
    """Identity whose backward pass adds the gradient of a loss, linear in the shares of a row's sum."""

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
