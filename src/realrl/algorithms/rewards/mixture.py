"""Method of the call that adds up the terms of a mixture."""

from collections.abc import Collection

import torch

from realrl.algorithms.method import FunctionInput, Metrics
from realrl.algorithms.rewards.config import Rewards
from realrl.algorithms.rewards.graph import name_key
from realrl.algorithms.rewards.inference import compute_score_metrics
from realrl.algorithms.rewards.scoring.scores import NOT_APPLICABLE, SKIPPED
from realrl.data.batch import Ragged


class RewardSum:
    """Weighted sum of the scores of terms.

    A sample that a term skipped has none, nor has one that no term applies to.
    """

    def __init__(self, reward: Rewards, *, finished_only: bool = False, prefix: str = "") -> None:
        """`finished_only` and `prefix` as of `RewardInference`."""
        self._reward = reward
        self._finished_only = finished_only
        self._prefix = prefix

    def load(self) -> None:
        """Do nothing."""

    def wants(self, field: str) -> bool:
        """Tell that no field of records is looked at."""
        return False

    def check_fields(self, source: str, fields: Collection[str]) -> None:
        """Accept all fields."""

    def call(self, inputs: FunctionInput) -> tuple[dict[str, Ragged], Metrics]:
        """`score`: one number per sequence."""
        batch = inputs.batch
        total = torch.zeros(len(batch), dtype=torch.float64)
        applies = torch.zeros(len(batch), dtype=torch.bool)
        for name, term in self._reward.items():
            if term.weight == 0:
                continue
            scores = batch[name_key(name, self._prefix)].values
            if term.model is not None:
                # A model's NaN is a mistake, and must not look like a skipped sample: infinite, it makes the step
                # not finite, which training notices.
                total = torch.where(scores.isfinite(), total + term.weight * scores, torch.inf)
                applies[:] = True
                continue
            given = scores != NOT_APPLICABLE
            total = torch.where(given, total + term.weight * scores, total)
            applies |= given
        # Rounded, 0.1 + 0.2 is 0.3, so that samples with equal scores count as equal.
        total = torch.tensor([float(f"{value:.12g}") for value in total.tolist()], dtype=torch.float64)
        score = Ragged.scalars(torch.where(applies, total, SKIPPED))
        if self._prefix:
            return {f"{self._prefix}score": score}, Metrics()
        metrics = compute_score_metrics(batch.with_fields(score=score), finished_only=self._finished_only)
        metrics.mean("skipped", score.values.isnan().double().sum(), len(batch))
        return {"score": score}, metrics
