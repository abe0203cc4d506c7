"""Recipes of supervised fine-tuning. No torch."""

from realrl.recipe.experiment import Experiment, Models
from realrl.recipe.model import TrainedModelConfig


class SFTModels(Models):
    """The model of supervised fine-tuning."""

    actor: TrainedModelConfig
    """The language model to fine-tune."""


class SFTExperiment(Experiment):
    """Supervised fine-tuning on `{prompt, answer}` records or conversations."""

    models: SFTModels
