"""Divergences of an actor from a teacher: of distributions, and estimated from tokens that the actor drew."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from realrl.algorithms.distillation.config import DistillationConfig, DivergenceConfig
from realrl.algorithms.policy.losses import MAX_LOG_RATIO

MIN_OTHERS = 1e-6
"""Least probability that all other tokens together count for. Less is lost in the rounding of float32, and where
there are no others it keeps their part of the divergence at nothing."""


def compute_divergence(config: DivergenceConfig, *, logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """Compute the divergence of the actor p from the teacher q at each token.

    Both are distributions over k + 1 outcomes: the k tokens and, with probability 1 - sum of theirs, any other.
    Sums are over outcomes, and b is the share of the teacher (Agarwal et al. 2023, equation 1):

    - reverse KL: sum p (log p - log q);
    - forward KL: sum q (log q - log p);
    - Jensen-Shannon with m = b q + (1 - b) p: b sum q (log q - log m) + (1 - b) sum p (log p - log m).

    It is at most the divergence over the whole vocabulary, which it is where no token is left out.

    logprobs, teacher_logprobs: [A, k] of the same tokens; result: [A]
    """
    actor, teacher = _add_others(logprobs), _add_others(teacher_logprobs)
    match config.divergence:
        case "reverse_kl":
            return _kl(actor, teacher)
        case "forward_kl":
            return _kl(teacher, actor)
        case "jsd":
            beta = config.jsd_beta
            mixture = torch.logaddexp(teacher + math.log(beta), actor + math.log1p(-beta))
            return beta * _kl(teacher, mixture) + (1 - beta) * _kl(actor, mixture)


def _add_others(logprobs: Tensor) -> Tensor:
    """Add the log-probability of all other tokens together. [A, k] -> [A, k + 1]"""
    others = (1 - logprobs.exp().sum(1, keepdim=True)).clamp(min=MIN_OTHERS)
    return torch.cat([logprobs, others.log()], 1)


def _kl(first: Tensor, second: Tensor) -> Tensor:
    """Compute KL(first || second) of log-probabilities. [A, outcomes] -> [A]"""
    return (first.exp() * (first - second)).sum(1)


class Divergence(NamedTuple):
    """Estimates per token. value: [A], whose mean is the divergence; advantages: [A]."""

    value: Tensor
    advantages: Tensor


def estimate_divergence(
    config: DistillationConfig, *, logprobs: Tensor, teacher_logprobs: Tensor
) -> Divergence:
    """Estimate the divergence at each token, and the advantages that descend it by a policy gradient.

    With w = p_teacher / p_actor an f-divergence is the mean of f(w) over tokens of the actor, and its gradient the
    mean of (f(w) - w f'(w)) grad log p_actor; the advantage is the negated factor, up to a constant, which has no
    effect in the mean:

    - reverse KL: f = -log w, advantage log w;
    - forward KL: f = w log w, advantage w - 1;
    - Jensen-Shannon with share b of the teacher, m = b w + 1 - b (Agarwal et al. 2023, equation 1):
      f = b w log(w / m) - (1 - b) log m, advantage (1 - b) log m.

    logprobs, teacher_logprobs: [A] of tokens drawn from the actor
    """
    log_ratio = (teacher_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    match config.divergence:
        case "reverse_kl":
            return Divergence(-log_ratio, log_ratio)
        case "forward_kl":
            bounded = log_ratio.clamp(max=math.log(config.max_ratio))
            # f(w) - w + 1 has the same mean, and is never negative.
            return Divergence(bounded.exp() * bounded - bounded.expm1(), bounded.expm1())
        case "jsd":
            beta = config.jsd_beta
            teacher, actor = log_ratio + math.log(beta), torch.full_like(log_ratio, math.log1p(-beta))
            mixture = torch.logaddexp(teacher, actor)
            value = beta * log_ratio.exp() * (log_ratio - mixture) - (1 - beta) * mixture
            return Divergence(value, (1 - beta) * mixture)
