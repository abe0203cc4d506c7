"""Method of the inference call of the critic."""

from realrl.algorithms.method import Metrics, ModelOutput
from realrl.algorithms.ppo.config import PPOConfig
from realrl.algorithms.ppo.experience import to_reward_scale
from realrl.data.batch import Batch, Ragged


class CriticInference:
    """The critic's value of the state after each token."""

    def __init__(self, config: PPOConfig) -> None:
        self._config = config

    def sequences(self, batch: Batch) -> Ragged:
        """Select prompt and response."""
        return batch["sequences"]

    def outputs(self, batch: Batch, output: ModelOutput) -> dict[str, Ragged]:
        """Compute `values`: one number per token, on the scale of rewards."""
        assert output.values is not None
        values = to_reward_scale(output.values.float(), self._config)
        return {"values": Ragged(values, output.lengths)}

    def metrics(self, batch: Batch) -> Metrics:
        """Report nothing: `critic.train` reports on values."""
        return Metrics()
