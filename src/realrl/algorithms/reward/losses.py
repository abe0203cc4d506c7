"""Loss of the Bradley-Terry model of preferences."""

from torch import Tensor
from torch.nn import functional


def bradley_terry_loss(*, chosen: Tensor, rejected: Tensor) -> Tensor:
    """Compute -log of the probability that `chosen` is preferred, logistic in the difference of scores.

    Bradley and Terry 1952; Ouyang et al. 2022, equation 1.

    chosen, rejected: [N] scores; result: [N]
    """
    return -functional.logsigmoid(chosen - rejected)
