"""Method of the `critic.train` call."""

import math

from torch import Tensor

from realrl.algorithms.base import PlainTrain
from realrl.algorithms.method import Metrics, ModelOutput, Sum
from realrl.algorithms.policy.normalization import global_moments
from realrl.algorithms.ppo.config import PPOConfig
from realrl.algorithms.ppo.experience import ExperienceMaker, add_to_batch, find_actions, to_reward_scale
from realrl.algorithms.ppo.losses import value_loss
from realrl.data.batch import Batch, Ragged


class CriticTrain(PlainTrain):
    """Clipped regression of the value before each action on its return, in units of the returns' deviation."""

    def __init__(self, config: PPOConfig, *, restricted: bool = False, skips: bool = False) -> None:
        """`restricted` and `skips` as of `ExperienceMaker`."""
        self._config = config
        self.epochs = config.epochs
        self.experience_maker = ExperienceMaker(config, restricted=restricted, skips=skips)

    @property
    def head_scale(self) -> float:
        """Return the deviation of the returns on the scale of the critic's output.

        Errors in units of the deviation and this rate for the head are what PopArt (van Hasselt et al. 2016) comes
        to under Adam, whose steps do not depend on the scale of gradients; but no weight has to be rewritten when
        the statistics move.
        """
        if self._config.value_norm == "none":
            return 1.0
        return self.experience_maker.return_scale.std / self._config.reward_scale

    def prepare(self, batch: Batch, dp_sum: Sum) -> tuple[Batch, Metrics]:
        """Add `returns`, like `sequences`, 0 on prompts, on the scale of rewards.

        The return of the action at position t is what the value at position t - 1 should have been.
        """
        experience = self.experience_maker.make_experience(batch, dp_sum)
        returns = experience.return_moments
        unexplained = global_moments(experience.returns - experience.values, dp_sum).variance
        explained = 1 - unexplained / returns.variance if returns.variance else math.nan
        metrics, number = Metrics(), experience.kl.new_tensor
        metrics.mean("return_mean", number(returns.mean), 1.0)
        metrics.mean("explained_variance", number(explained), 1.0)
        return add_to_batch(batch, experience, returns=experience.returns), metrics

    def sequences(self, batch: Batch) -> Ragged:
        """Select prompt and response."""
        return batch["sequences"]

    def weight(self, batch: Batch) -> int:
        """Count the action tokens."""
        return find_actions(batch).total

    def loss(self, batch: Batch, output: ModelOutput) -> tuple[Tensor, Metrics]:
        """Compute the value loss summed over action tokens."""
        assert output.values is not None
        actions = find_actions(batch)
        at, unit = actions.index, self.experience_maker.return_scale.std
        result = value_loss(
            values=to_reward_scale(output.values[at - 1].float(), self._config) / unit,
            old_values=batch["values"].values[at - 1] / unit,
            returns=batch["returns"].values[at] / unit,
            clip=self._config.value_clip,
        )
        loss, metrics = result.loss.sum(), Metrics()
        metrics.mean("value_loss", loss, actions.total)
        metrics.mean("value_clip_fraction", result.clipped.double().sum(), actions.total)
        return loss, metrics
