"""KL divergence from the reference, and the coefficient of its penalty."""

import torch
from torch import Tensor

from realrl.algorithms.policy.config import KLConfig
from realrl.algorithms.policy.losses import approximate_kl

# Ziegler et al. 2019, section 2.2: the relative error is clipped so that one odd batch cannot throw the
# coefficient far.
MAX_RELATIVE_ERROR = 0.2


def token_kl(log_ratio: Tensor, *, restricted: bool) -> Tensor:
    """Estimate the KL divergence of the actor from the reference at each token of a sample.

    log_ratio: [A] log p_actor - log p_ref over the whole vocabulary, of tokens that the actor drew; result: [A].
    From unrestricted samples its mean is the divergence (Schulman 2020, k1). Where sampling leaves tokens out
    (`restricted`) that mean can be negative, and is no divergence. The mean of r - 1 - log r with
    r = p_ref / p_actor (k3) then is the generalised divergence, sum of p log(p / q) - p + q, between the
    probabilities of the tokens that may be drawn, divided by the actor's total probability of those: never
    negative, and 0 only where actor and reference agree on all of them.
    """
    if not restricted:
        return log_ratio
    return approximate_kl(logprobs=-log_ratio, old_logprobs=torch.zeros_like(log_ratio))


class KLController:
    """Coefficient of the penalty: fixed, or steered so that the KL per sequence approaches a target."""

    def __init__(self, config: KLConfig) -> None:
        self._config = config
        self.coef: float = config.coef

    def update(self, *, kl: float, sequences: int) -> None:
        """Update an adaptive coefficient: coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * sequences / horizon.

        kl: mean over the step's sequences, in nats; sequences: how many there were over all ranks, 0 if the KL of
        none was finite, which changes nothing.
        """
        if self._config.adaptive and sequences:
            error = kl / self._config.target - 1
            error = min(max(error, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
            self.coef *= 1 + error * sequences / self._config.horizon

    def state_dict(self) -> dict[str, float]:
        """Save the coefficient."""
        return {"kl_coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Load an adaptive coefficient; a fixed one is what the recipe says."""
        if self._config.adaptive:
            self.coef = state["kl_coef"]
