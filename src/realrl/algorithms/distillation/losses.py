"""Divergences of an actor from a teacher, from tokens that the actor drew."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from realrl.algorithms.distillation.config import DistillationConfig
from realrl.algorithms.policy.losses import MAX_LOG_RATIO


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
