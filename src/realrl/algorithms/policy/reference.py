"""Whether a recipe has a reference policy, and how that follows the actor. No torch."""

from typing import TypeVar

from realrl.algorithms.policy.config import ReferenceConfig
from realrl.dataflow.call import MovingAverage
from realrl.recipe.experiment import Experiment
from realrl.recipe.model import ModelConfig

Recipe = TypeVar("Recipe", bound=Experiment)


def list_averages(
    config: ReferenceConfig, actor: ModelConfig, ref: ModelConfig | None
) -> tuple[MovingAverage, ...]:
    """List the moving average that the reference is of the actor, if there is a reference and it follows."""
    if ref is None or config.following is None:
        return ()
    factor = 1.0 if config.ref_ema is None else config.ref_ema
    return (MovingAverage("ref", "actor", factor, ref.starts_like(actor), config.ref_every or 1),)


def complete_reference(experiment: Recipe, section: str, kl_coef: float, settings: ReferenceConfig) -> Recipe:
    """Leave out the reference of a recipe whose KL coefficient is 0, unless the recipe gives one.

    Called by a validator of the recipe; `section` is where its coefficient and its `settings` stand. ValueError
    where there is a coefficient, or the reference is to follow the actor, and there is none.
    """
    follows = settings.following
    models = experiment.models
    if models.ref is None:  # type: ignore[attr-defined]
        if kl_coef > 0:
            raise ValueError(
                f"models.ref is null, and {section}.kl.coef={kl_coef:g} needs it; set one of them"
            )
        if follows is not None:
            raise ValueError(f"{section}.{follows} moves models.ref, which is null")
        return experiment
    if kl_coef == 0 and "ref" not in models.model_fields_set:
        if follows is not None:
            raise ValueError(
                f"{section}.{follows} moves the reference, which {section}.kl.coef=0 leaves out;"
                f" give models.ref, or set {follows.partition('=')[0]}=null"
            )
        # Before anyone else sees the object, so it is still as good as immutable.
        object.__setattr__(experiment, "models", models.model_copy(update={"ref": None}))
    return experiment
