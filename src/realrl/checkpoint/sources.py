"""Sources of a recipe's models, checked before anything is read. No torch."""

from realrl.config.errors import UserError
from realrl.config.paths import is_local, local_path
from realrl.recipe.algorithm import get_spec
from realrl.recipe.experiment import Experiment


def check_directories(experiment: Experiment) -> None:
    """Check that the local directories of models and tokenizers exist; else UserError."""
    for role in get_spec(experiment).list_sources_first(experiment):
        for field in ("path", "tokenizer"):
            path = getattr(getattr(experiment.models, role), field)
            if path is not None and is_local(path) and not local_path(path).is_dir():
                raise UserError(f"models.{role}.{field}={path}: no such directory")
    against = experiment.evaluation.against
    if against is not None and is_local(against) and not local_path(against).is_dir():
        raise UserError(f"evaluation.against={against}: no such directory")
