"""Recipes of reward modelling. No torch."""

from pydantic import Field, NonNegativeFloat

from realrl.config.base import Settings
from realrl.recipe.experiment import Experiment, Models
from realrl.recipe.forms import MOST_ANSWERS
from realrl.recipe.model import TrainedModelConfig


class RewardModels(Models):
    """The model of reward modelling."""

    reward: TrainedModelConfig
    """Starts from a language model or a sequence classifier; becomes a sequence classifier with one label."""


class PairLossConfig(Settings):
    """Loss of the scores of pairs."""

    margins: bool = False
    """Whether each record has a number `margin`, by which the chosen answer's score should be above the other's
    (Touvron et al. 2023, equation 2)."""
    center_rewards_coefficient: NonNegativeFloat = 0.0
    """Weight of the squared sum of both scores, which draws their mean towards 0 (Eisenstein et al. 2023); 0.01 is
    usual."""


class RankingConfig(Settings):
    """Loss of the scores of ranked answers."""

    answers: int = Field(default=4, ge=2, le=MOST_ANSWERS)
    """Answers of each record, the best first."""
    center_rewards_coefficient: NonNegativeFloat = 0.0
    """Weight of the squared sum of the scores of a record, which draws their mean towards 0."""


class RewardExperiment(Experiment):
    """Reward modelling on preference pairs (Bradley-Terry)."""

    models: RewardModels
    loss: PairLossConfig = PairLossConfig()


class RankedRewardExperiment(Experiment):
    """Reward modelling on several ranked answers per prompt (Plackett-Luce)."""

    models: RewardModels
    loss: RankingConfig = RankingConfig()


class ProcessRewardExperiment(Experiment):
    """Process reward modelling: a score per step of an answer, right or wrong (Lightman et al. 2023)."""

    models: RewardModels
