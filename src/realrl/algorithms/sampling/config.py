"""Recipes of sampling without training. No torch."""

from realrl.algorithms.rewards.config import RewardSetting
from realrl.recipe.experiment import Experiment, Models
from realrl.recipe.generation import GenerationConfig
from realrl.recipe.model import ModelConfig


class SamplingModels(Models):
    """The models of sampling."""

    actor: ModelConfig
    """The language model that answers."""
    reward: ModelConfig | None = None
    """Reward model, a sequence classifier with one label; null without one."""


class SamplingExperiment(Experiment):
    """Answers of a language model, scored by a reward. Nothing is trained."""

    models: SamplingModels
    reward: RewardSetting
    """Reward of answers; null for that of `models.reward`, or for no scores where that is null, too."""
    generation: GenerationConfig = GenerationConfig()

    @property
    def is_scored(self) -> bool:
        """Whether answers get scores."""
        return self.reward is not None or self.models.reward is not None
