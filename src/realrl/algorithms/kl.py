"""Divergence of the trained model from a reference: estimators, and the coefficient of a penalty."""

import torch
from torch import Tensor

from realrl.algorithms.base.rows import Responses
from realrl.algorithms.policy import KLConfig, KLEstimator
from realrl.data.batch import Batch

# Limit of the logarithms of ratios. exp(20) is finite in float32, while an infinite ratio would turn the zero
# gradient of its clipped branch into NaN. No ratio that training should follow comes near e^20.
MAX_LOG_RATIO = 20.0


def approximate_kl(*, logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Estimate KL(old || new) from tokens that the old policy drew (Schulman 2020, "Approximating KL divergence").

    The estimator is k3: r - 1 - log r with r = p_new / p_old, which is never negative.

    logprobs, old_logprobs: [A]; result: [A]
    """
    log_ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.expm1() - log_ratio


def estimate_kl(estimator: KLEstimator, *, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Estimate KL(actor || reference) from tokens that the actor drew (Schulman 2020).

    With x = log p_actor - log p_ref, k1 is x, k2 is x^2 / 2, and k3 is exp(-x) - 1 + x.

    logprobs, ref_logprobs: [A]; result: [A]
    """
    if estimator == "k3":
        return approximate_kl(logprobs=ref_logprobs, old_logprobs=logprobs)
    log_ratio = logprobs - ref_logprobs
    return log_ratio if estimator == "k1" else 0.5 * log_ratio.square()


def token_kl(log_ratio: Tensor, *, restricted: bool) -> Tensor:
    """Estimate the KL divergence of the actor from the reference at each token that the actor drew.

    log_ratio: [A] log p_actor - log p_ref over the whole vocabulary; result: [A]

    For unrestricted samples, the estimate is log_ratio itself, whose mean is the divergence (Schulman 2020, k1). If
    sampling excludes tokens (`restricted`), the mean of log_ratio can be negative. The estimate then is
    r - 1 - log r with r = p_ref / p_actor (k3). Its mean is the generalised divergence: the sum of
    p log(p / q) - p + q over the tokens that can be drawn, divided by the actor's total probability of these tokens
    (p of the actor, q of the reference). This divergence is never negative, and 0 only if actor and reference agree
    on all of these tokens.
    """
    if not restricted:
        return log_ratio
    return approximate_kl(logprobs=-log_ratio, old_logprobs=torch.zeros_like(log_ratio))


def sequence_kl(batch: Batch, answers: Responses, *, restricted: bool) -> Tensor:
    """Sum `token_kl` over each answer. [N] float64"""
    log_ratio = (batch["logprobs"].values - batch["ref_logprobs"].values)[answers.index]
    return answers.row_sums(token_kl(log_ratio, restricted=restricted))


# Ziegler et al. 2019, section 2.2, clip the relative error, so that one odd batch cannot move the coefficient far.
MAX_RELATIVE_ERROR = 0.2


class KLController:
    """Coefficient of the KL penalty: fixed, or steered so that the KL per sequence approaches a target."""

    def __init__(self, config: KLConfig) -> None:
        self._config = config
        self.coef: float = config.coef

    def update(self, *, kl: float, sequences: int) -> None:
        """Update an adaptive coefficient: coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * sequences / horizon.

        kl: mean over the step's sequences, in nats; sequences: number of sequences with a finite KL, over all
        ranks. With 0 sequences, the coefficient does not change.
        """
        if self._config.adaptive and sequences:
            error = kl / self._config.target - 1
            error = min(max(error, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
            self.coef *= 1 + error * sequences / self._config.horizon

    def state_dict(self) -> dict[str, float]:
        return {"kl_coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore an adaptive coefficient. A fixed coefficient comes from the recipe."""
        if self._config.adaptive:
            self.coef = state["kl_coef"]
