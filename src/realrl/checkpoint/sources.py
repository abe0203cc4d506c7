"""Where a recipe's models are to come from, checked before anything is read. No torch."""

from realrl.config.errors import UserError
from realrl.config.paths import is_local, local_path
from realrl.families.config_json import not_trainable
from realrl.families.registry import find_family
from realrl.recipe.experiment import Experiment


def check_directories(experiment: Experiment) -> None:
    """UserError if a model, or a tokenizer, is to come from a directory that is not there."""
    fields = type(experiment.models).model_fields
    # Roles that may have taken their path from another one come last, so that the one with the mistake is named.
    for role in sorted(fields, key=lambda role: not fields[role].is_required()):
        for field in ("path", "tokenizer"):
            path = getattr(getattr(experiment.models, role), field)
            if path is not None and is_local(path) and not local_path(path).is_dir():
                raise UserError(f"models.{role}.{field}={path}: no such directory")


def check_trainable(experiment: Experiment) -> None:
    """UserError if a model is to start from the sizes of a family that can be planned for and not trained. Of one
    with weights, whoever loads them finds out."""
    for role in type(experiment.models).model_fields:
        shape = getattr(experiment.models, role).shape
        if shape is not None and not find_family(shape.family).trainable:
            raise UserError(f"models.{role}.shape: {not_trainable(shape.family)}")
