"""Whether a recipe has a reference policy. No torch."""

from typing import TypeVar

from realrl.recipe.experiment import Experiment

Recipe = TypeVar("Recipe", bound=Experiment)


def complete_reference(experiment: Recipe, section: str, kl_coef: float, ref_ema: float | None) -> Recipe:
    """Leave out the reference of a recipe whose KL coefficient is 0, unless the recipe gives one.

    Called by a validator of the recipe; `section` is where its coefficient stands. ValueError where there is a
    coefficient, or an EMA, and no reference.
    """
    models = experiment.models
    if models.ref is None:  # type: ignore[attr-defined]
        if kl_coef > 0:
            raise ValueError(
                f"models.ref is null, and {section}.kl.coef={kl_coef:g} needs it; set one of them"
            )
        if ref_ema is not None:
            raise ValueError(f"{section}.ref_ema={ref_ema:g} moves models.ref, which is null")
        return experiment
    if kl_coef == 0 and "ref" not in models.model_fields_set:
        if ref_ema is not None:
            raise ValueError(
                f"{section}.ref_ema={ref_ema:g} moves the reference, which {section}.kl.coef=0 leaves out;"
                " give models.ref, or set ref_ema=null"
            )
        # Before anyone else sees the object, so it is still as good as immutable.
        object.__setattr__(experiment, "models", models.model_copy(update={"ref": None}))
    return experiment
