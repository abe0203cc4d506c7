"""Where a recipe's models are to come from, checked before anything is read. No torch."""

from realrl.config.errors import UserError
from realrl.config.paths import is_local, local_path
from realrl.families.shape import TRAINABLE
from realrl.recipe.experiment import Experiment


def check_directories(experiment: Experiment) -> None:
    """UserError if a model, or a tokenizer, is to come from a directory that is not there."""
    roles = experiment.spec.roles_of(experiment)
    # Roles that may have taken their path from another one come last, so that the one with the mistake is named.
    for role in sorted(roles, key=lambda role: roles[role].weights_from is not None):
        for field in ("path", "tokenizer"):
            path = getattr(getattr(experiment.models, role), field)
            if path is not None and is_local(path) and not local_path(path).is_dir():
                raise UserError(f"models.{role}.{field}={path}: no such directory")


def check_trainable(experiment: Experiment) -> None:
    """UserError if a model is to start from the sizes of a family that can be planned for and not trained. Of one
    with weights, whoever loads them finds out."""
    for role in experiment.spec.roles_of(experiment):
        shape = getattr(experiment.models, role).shape
        if shape is not None and shape.family not in TRAINABLE:
            raise UserError(
                f"models.{role}.shape: models of family {shape.family} can be planned for (realrl plan, realrl"
                f" show) and not trained yet; trained are: {', '.join(TRAINABLE)}"
            )
