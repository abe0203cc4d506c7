"""Loss of labelled answers."""

import torch
from torch import Tensor

from realrl.algorithms.kto.config import KTOConfig


def compute_kto_loss(config: KTOConfig, *, log_ratio: Tensor, good: Tensor, kl: float) -> Tensor:
    """Compute the weighted loss of each answer (Ethayarajh et al. 2024, equation 8).

    w (1 - sigmoid(beta (r - z))) of a good answer and w (1 - sigmoid(beta (z - r))) of a bad one, with r the log
    ratio and z the divergence of the actor from the reference.

    log_ratio: [N] log p_actor - log p_ref of whole answers; good: [N] bool; kl: z, at least 0; result: [N]
    """
    distance = config.beta * (log_ratio - kl)
    weight = torch.where(good, config.desirable_weight, config.undesirable_weight)
    # 1 - sigmoid(x) as sigmoid(-x), which keeps its digits where it is small
    return weight * torch.sigmoid(torch.where(good, -distance, distance))
