"""Recipes of reward modelling. No torch."""

from realrl.recipe.experiment import Experiment, Models
from realrl.recipe.model import TrainedModelConfig


class RewardModels(Models):
    """The model of reward modelling."""

    reward: TrainedModelConfig
    """Starts from a language model or a sequence classifier; becomes a sequence classifier with one label."""


class RewardExperiment(Experiment):
    """Reward modelling on preference pairs (Bradley-Terry)."""

    models: RewardModels
