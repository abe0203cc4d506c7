"""Models of algorithms that learn from preferences without sampling, of which some have a reference. No torch."""

from typing import TypeVar

from pydantic import Field

from realrl.config.base import PRESENCE
from realrl.recipe.experiment import Experiment, Models
from realrl.recipe.model import ModelConfig, TrainedModelConfig

Recipe = TypeVar("Recipe", bound=Experiment)


class PreferenceModels(Models):
    """The models of learning from preferences."""

    actor: TrainedModelConfig
    """The policy."""
    ref: ModelConfig | None = Field(default=ModelConfig(), json_schema_extra=PRESENCE)
    """Frozen reference policy; the actor's starting point when it has no `path`. Its `dtype` is the actor's if not
    given. Where the loss takes no reference model there is none."""


def leave_out_reference(experiment: Recipe, needed: bool, setting: str) -> Recipe:
    """Leave out the reference of a recipe that does not need it, by a `setting` that errors name.

    Called by a validator of the recipe. ValueError where a needed reference is null, or one is given in vain.
    """
    models = experiment.models
    ref = models.ref  # type: ignore[attr-defined]
    if needed and ref is None:
        raise ValueError(f"models.ref is null, and {setting} needs it")
    if not needed and ref is not None:
        if "ref" in models.model_fields_set:
            raise ValueError(f"models.ref is given, and {setting} has no use for it; leave it out")
        # Before anyone else sees the object, so it is still as good as immutable.
        object.__setattr__(experiment, "models", models.model_copy(update={"ref": None}))
    return experiment
