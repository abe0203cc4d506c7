"""The weight of the KL penalty."""

from realrl.config.algorithms import KLConfig

# Ziegler et al. 2019, section 2.2: the relative error is clipped so that one odd batch cannot throw the
# coefficient far.
MAX_RELATIVE_ERROR = 0.2


class KLController:
    """Coefficient of the penalty: fixed, or steered so that the KL per sequence approaches a target."""

    def __init__(self, config: KLConfig) -> None:
        self._config = config
        self.coef: float = config.coef

    def update(self, *, kl: float, sequences: int) -> None:
        """If adaptive, coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * sequences / horizon.

        kl: mean over the step's sequences, in nats; sequences: how many there were over all ranks.
        """
        if self._config.adaptive:
            error = kl / self._config.target - 1
            error = min(max(error, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
            self.coef *= 1 + error * sequences / self._config.horizon

    def state_dict(self) -> dict[str, float]:
        """The coefficient."""
        return {"kl_coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Put an adaptive coefficient back; a fixed one is what the recipe says."""
        if self._config.adaptive:
            self.coef = state["kl_coef"]
