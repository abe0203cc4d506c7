"""Recipes of KTO. No torch."""

from typing import Literal, Self

from pydantic import NonNegativeFloat, PositiveFloat, model_validator

from realrl.config.base import Settings
from realrl.recipe.experiment import Experiment, Models
from realrl.recipe.model import ModelConfig, TrainedModelConfig


class KTOConfig(Settings):
    """Loss of labelled answers. The reward of an answer is `beta` times its log-probability minus that under the
    reference."""

    loss: Literal["kto", "apo_zero_unpaired"] = "kto"
    """`kto`: 1 - sigmoid(reward - beta z) of good answers and 1 - sigmoid(beta z - reward) of bad ones, where z
    estimates the divergence of the actor from the reference. `apo_zero_unpaired`: the same with z = 0, which spares
    the estimate (D'Oosterlinck et al. 2024)."""
    beta: PositiveFloat = 0.1
    """Scale of rewards; the higher, the nearer to the reference the actor stays."""
    desirable_weight: NonNegativeFloat = 1.0
    """Weight of good answers. Where they are few, raise it until their number times their weight is 1 to 4/3 of
    that of bad ones."""
    undesirable_weight: NonNegativeFloat = 1.0
    """Weight of bad answers."""

    @property
    def estimates_kl(self) -> bool:
        """Whether the loss takes an estimate of the divergence."""
        return self.loss == "kto"


class KTOModels(Models):
    """The models of KTO."""

    actor: TrainedModelConfig
    """The policy."""
    ref: ModelConfig = ModelConfig()
    """Frozen reference policy; the actor's starting point when it has no `path`. Its `dtype` is the actor's if not
    given."""


class KTOExperiment(Experiment):
    """KTO: answers that are each good or bad, without pairs (Ethayarajh et al. 2024, arXiv 2402.01306)."""

    models: KTOModels
    kto: KTOConfig = KTOConfig()

    @model_validator(mode="after")
    def _mismatched(self) -> Self:
        if self.kto.estimates_kl and self.data.batch < 2:
            raise ValueError(
                "data.batch=1 leaves no other answers of the step to estimate the divergence from; set it to at"
                " least 2, or kto.loss=apo_zero_unpaired"
            )
        return self
