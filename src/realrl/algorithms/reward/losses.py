"""Losses of models of preferences."""

import torch
from torch import Tensor
from torch.nn import functional


def bradley_terry_loss(*, chosen: Tensor, rejected: Tensor, margin: Tensor | None = None) -> Tensor:
    """Compute -log of the probability that `chosen` is preferred, logistic in the difference of scores.

    Bradley and Terry 1952; Ouyang et al. 2022, equation 1; with a margin Touvron et al. 2023, equation 2.

    chosen, rejected: [N] scores; margin: [N], subtracted from the difference; result: [N]
    """
    difference = chosen - rejected
    return -functional.logsigmoid(difference if margin is None else difference - margin)


def plackett_luce_loss(scores: Tensor) -> Tensor:
    """Compute -log of the probability of a ranking, in which each answer is drawn from those that are left.

    -sum over k of s_k - log(exp s_k + ... + exp s_K) (Plackett 1975; Luce 1959; Xia et al. 2008). Of two answers it
    is the Bradley-Terry loss.

    scores: [N, K], the best answer first; result: [N]
    """
    left = scores.flip(1).logcumsumexp(1).flip(1)
    return (left - scores)[:, :-1].sum(1)


def step_loss(*, scores: Tensor, right: Tensor) -> Tensor:
    """Compute -log of the probability of each step's label, logistic in its score.

    Lightman et al. 2023, section 2.

    scores: [A]; right: [A] bool; result: [A]
    """
    return functional.softplus(torch.where(right, -scores, scores))
