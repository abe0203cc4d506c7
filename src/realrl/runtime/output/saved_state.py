"""State that an algorithm saves beside final and best models, besides weights. No torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from realrl.config.errors import UserError
from realrl.config.json_file import read_json
from realrl.config.paths import is_local, local_path
from realrl.recipe.algorithm import get_spec
from realrl.recipe.experiment import Experiment


def name_state_file(models: Path) -> Path:
    """Name the file beside saved models; `models` is the directory of the first trained role's."""
    return models.with_name(f"{models.name}-state.json")


def find_saved_state(experiment: Experiment, trained: Sequence[str]) -> tuple[Path, Mapping[str, Any]] | None:
    """Find what the same algorithm saved beside models that all trained roles of a recipe start from.

    None where they start from others. UserError where the file is damaged.
    """
    paths = [getattr(experiment.models, role).path for role in trained]
    if any(path is None or not is_local(path) for path in paths):
        return None
    first = local_path(paths[0])
    beside = [first, *(first.with_name(f"{first.name}-{role}") for role in trained[1:])]
    file = name_state_file(first)
    if beside != [local_path(path) for path in paths] or not file.is_file():
        return None
    saved = read_json(file)
    state, name = saved.get("state"), saved.get("algorithm")
    if not isinstance(state, dict) or not isinstance(name, str):
        raise UserError(f"{file} is damaged: it has no algorithm with its state; delete it to start without")
    return (file, state) if name == get_spec(experiment).name else None


class _Loading(Protocol):
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def load_saved_state(algorithm: _Loading, file: Path, state: Mapping[str, Any]) -> None:
    """Load what `find_saved_state` has found; UserError where it is not what the algorithm saves."""
    try:
        algorithm.load_state_dict(dict(state))
    except UserError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{file} is damaged: the algorithm cannot read it ({error!r}); delete it to start without"
        ) from None
