"""The `critic.train` call."""

import math

from torch import Tensor

from realrl.algorithms.base import PlainTrain
from realrl.algorithms.method import Metrics, ModelOutput, Sum
from realrl.algorithms.packed import Responses
from realrl.algorithms.ppo.experience import Appraiser
from realrl.algorithms.ppo.losses import value_loss
from realrl.algorithms.ppo.normalization import global_moments
from realrl.config.algorithms import PPOConfig
from realrl.data.batch import Batch, Ragged


class CriticTrain(PlainTrain):
    """Clipped regression of the value before each action on its return."""

    def __init__(self, config: PPOConfig) -> None:
        self._config = config
        self.epochs = config.epochs
        self.appraiser = Appraiser(config)

    def prepare(self, batch: Batch, dp_sum: Sum) -> tuple[Batch, Metrics]:
        """Adds `returns`, like `sequences`, 0 on prompts, on the critic's scale as of the end of the step.

        The return of the action at position t is what the value at position t - 1 should have been.
        """
        experience = self.appraiser.appraise(batch, dp_sum)
        # Next step's values will be denormalised with statistics that already include this step's returns.
        targets = self.appraiser.value_norm.normalise(experience.returns)
        returns = experience.return_moments
        unexplained = global_moments(experience.returns - experience.values, dp_sum).variance
        explained = 1 - unexplained / returns.variance if returns.variance else math.nan
        metrics, number = Metrics(), experience.kl.new_tensor
        metrics.mean("return_mean", number(returns.mean), 1.0)
        metrics.mean("explained_variance", number(explained), 1.0)
        return batch.with_fields(returns=experience.actions.spread(targets)), metrics

    def sequences(self, batch: Batch) -> Ragged:
        """Prompt and response."""
        return batch["sequences"]

    def weight(self, batch: Batch) -> int:
        """Number of action tokens."""
        return Responses.of(batch["sequences"], batch["prompt_length"]).total

    def loss(self, batch: Batch, output: ModelOutput) -> tuple[Tensor, Metrics]:
        """Value loss summed over action tokens."""
        assert output.values is not None
        actions = Responses.of(batch["sequences"], batch["prompt_length"])
        at = actions.index
        result = value_loss(
            values=output.values[at - 1].float(),
            old_values=batch["values"].values[at - 1],
            returns=batch["returns"].values[at],
            clip=self._config.value_clip,
        )
        loss, metrics = result.loss.sum(), Metrics()
        metrics.mean("value_loss", loss, actions.total)
        metrics.mean("value_clip_fraction", result.clipped.double().sum(), actions.total)
        return loss, metrics
