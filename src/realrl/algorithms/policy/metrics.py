"""Metrics of training a policy on its samples."""

from torch import Tensor

from realrl.algorithms.method import Metrics
from realrl.algorithms.policy.losses import PolicyLoss, approximate_kl


class UpdateMetrics:
    """Metrics of the micro-batches of a train call; knows whether the policy has been updated in this step."""

    def __init__(self) -> None:
        self._updated = False

    def begin_step(self) -> None:
        """Note that the trainer holds the sampler's weights."""
        self._updated = False

    def note_update(self) -> None:
        """Note that the losses of a mini-batch are computed, and its update follows."""
        self._updated = True

    def compute(
        self, result: PolicyLoss, *, logprobs: Tensor, old_logprobs: Tensor, entropy: Tensor
    ) -> Metrics:
        """Compute means over action tokens, and the largest change of a log-probability before the first update.

        logprobs, old_logprobs, entropy: [A]
        """
        metrics = Metrics()
        count = len(logprobs)
        new = logprobs.detach()
        metrics.mean("policy_loss_per_token", result.loss.sum(), count)
        metrics.mean("importance_ratio", result.ratio.double().sum(), count)
        metrics.mean("clip_fraction", result.clipped.double().sum(), count)
        metrics.mean(
            "approx_kl", approximate_kl(logprobs=new, old_logprobs=old_logprobs).double().sum(), count
        )
        metrics.mean("entropy", entropy.double().sum(), count)
        self.add_mismatch(metrics, logprobs=new, old_logprobs=old_logprobs)
        return metrics

    def add_mismatch(self, metrics: Metrics, *, logprobs: Tensor, old_logprobs: Tensor) -> None:
        """Add the largest change of a log-probability before the first update. logprobs, old_logprobs: [A]"""
        if not self._updated:
            # Before the first update the trainer holds the sampler's weights: any difference is numerical.
            change = (logprobs.detach() - old_logprobs).abs()
            metrics.max("sampler_trainer_mismatch", change.max() if len(change) else change.new_zeros(()))
