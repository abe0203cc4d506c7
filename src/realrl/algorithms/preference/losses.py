"""Losses of preference pairs."""

import torch
from torch import Tensor
from torch.nn import functional

from realrl.algorithms.preference.config import PreferenceConfig


def compute_preference_loss(config: PreferenceConfig, *, chosen: Tensor, rejected: Tensor) -> Tensor:
    """Compute the loss of each pair, see `PreferenceConfig.loss`.

    `sigmoid`: Rafailov et al. 2023, equation 7, with the margin of SimPO (Meng et al. 2024, equation 6) and the
    smoothing of conservative DPO (Mitchell 2023). `robust`: Chowdhury et al. 2024, equation 12. `ipo`: Azar et al.
    2023, equation 17. `odds_ratio`: Hong et al. 2024, equation 7.

    chosen, rejected: [N] scores; result: [N]
    """
    beta, smoothing = config.beta, config.label_smoothing
    difference = chosen - rejected
    match config.loss:
        case "sigmoid" | "robust":
            logits = beta * difference - config.gamma
            right, wrong = functional.logsigmoid(logits), functional.logsigmoid(-logits)
            if config.loss == "robust":
                return -((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing)
            return -(1 - smoothing) * right - smoothing * wrong
        case "hinge":
            return functional.relu(1 - beta * difference)
        case "ipo":
            return (difference - 1 / (2 * beta)).square()
        case "odds_ratio":
            log_odds = difference - (_log1mexp(chosen) - _log1mexp(rejected))
            return -beta * functional.logsigmoid(log_odds)


def _log1mexp(x: Tensor) -> Tensor:
    """Compute log(1 - exp(x)) for x < 0 (Maechler 2012, "Accurately computing log(1 - exp(-|a|))")."""
    # A mean log-probability of 0, which is a certain answer, would give an infinite loss and no gradient.
    x = x.clamp(max=-torch.finfo(x.dtype).eps)
    near = x > -0.6931471805599453
    # Each branch only sees numbers of its own, so that no gradient of the other one is NaN.
    return torch.where(
        near,
        torch.log(-torch.expm1(torch.where(near, x, -1.0))),
        torch.log1p(-torch.exp(torch.where(near, -1.0, x))),
    )
