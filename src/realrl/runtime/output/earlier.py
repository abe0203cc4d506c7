"""Find an earlier run in a recipe's run directory, and decide whether the new start may continue or delete it.

Does not import torch.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realrl.checkpoint.saved import BEST, CONFIG, SUMMARY, list_checkpoints
from realrl.config.errors import UserError
from realrl.config.explain import brief
from realrl.config.yaml_file import read_yaml
from realrl.recipe.experiment import Experiment
from realrl.recipe.load import dump_settings, parse_experiment
from realrl.runtime.output.rundir import HISTORY, RunDirectory, read_history
from realrl.runtime.processes.environment import find_job, restart_count

_OF_START = {"run_dir", "overwrite", "resume"}
"""Settings that apply to one start of a run only. Changes of these settings are not reported."""
FREE = _OF_START | {
    "cluster",
    "device",
    "device_memory",
    "host_memory",
    "plan",
    "profile",
    "micro_batch_tokens",
    "recompute",
    "search_dtypes",
    "kernels",
    "data.eval",
    "data.eval_batch",
    "training.steps",
    "training.epochs",
    "training.max_skipped",
    "evaluation",
    "checkpoint",
    "launch",
    "trackers",
    "debug",
}
"""Settings, or whole sections, that may change when a run is resumed."""
LENGTH = ("training.steps", "training.epochs")
"""Settings that determine the number of steps."""
_SHOWN = 3
"""Maximum number of changed settings in an error message."""


@dataclass(frozen=True)
class EarlierRun:
    """An earlier run that is continued.

    `checkpoints`: number of steps before each checkpoint, the latest first. If it is empty, the run starts from its
    beginning. `changed`: settings that differ now, as `name: old, now new`. `continues`: whether all of them are
    free to change in the middle of a run (`FREE`). `finished`: whether no training step is left.
    """

    checkpoints: tuple[int, ...]
    changed: tuple[str, ...] = ()
    continues: bool = True
    finished: bool = False


def describe_finished(run_dir: str) -> str:
    """Write the message that nothing is left to train in `run_dir`."""
    return f"run_dir={run_dir}: this run is already finished"


def find_earlier_run(experiment: Experiment) -> EarlierRun | None:
    """Find the run in the recipe's directory that must be continued; None if a new run starts.

    Raises UserError if the directory cannot be used, or if it has an earlier run that may be neither continued nor
    deleted.
    """
    directory = RunDirectory(experiment.run_dir)
    if not directory.check(experiment):
        return None
    path, restarted = directory.path, restart_count() > 0
    if experiment.overwrite and not (restarted and _is_of_this_job(path)):
        return None
    if experiment.resume == "never" and not restarted:
        raise UserError(
            f"run_dir={path} holds an earlier run, and resume=never; choose another directory, set resume=auto to"
            " continue it, or overwrite=true to delete it"
        )
    mine, theirs = dump_settings(experiment), _read_config(path)
    differing = {
        name: f"{name}: {brief(old)}, now {brief(new)}" for name, (old, new) in _compare(theirs, mine).items()
    }
    others = [text for name, text in differing.items() if not _is_free(name)]
    if others and experiment.resume != "changed":
        more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        raise UserError(
            f"run_dir={path} holds a run of another recipe ({'; '.join(others[:_SHOWN])}{more}); choose another"
            " directory, set resume=changed to continue it with the new settings, or overwrite=true to delete it"
        )
    ended = (path / SUMMARY).is_file()
    longer = any(name in differing for name in LENGTH)
    checkpoints = tuple(list_checkpoints(path))
    if ended and not longer and not others:
        return EarlierRun(checkpoints, finished=True)
    if not checkpoints and (saved := _find_models(path)) is not None:
        raise UserError(
            f"run_dir={path} holds an earlier run without a checkpoint to continue from, and models ({saved.name});"
            " choose another directory, or set overwrite=true to delete it"
        )
    changed = tuple(differing[name] for name in differing if name not in _OF_START)
    return EarlierRun(checkpoints, changed, continues=not others)


def _is_of_this_job(path: Path) -> bool:
    """Return whether the run in a directory belongs to the launch that has just restarted it."""
    starts, job = read_history(path / HISTORY), find_job()
    return bool(starts) and (job is None or starts[-1].get("job") == job)


def _find_models(path: Path) -> Path | None:
    return next((path / name for name in (BEST, "final") if (path / name).is_dir()), None)


def _read_config(path: Path) -> Mapping[str, Any]:
    """Read the settings of an earlier run as this version would write them.

    An older version may have written relative paths, and did not write newer settings.
    """
    read = read_yaml(str(path / CONFIG))
    if not isinstance(read, dict):
        raise UserError(f"{path / CONFIG} is not a recipe; choose another run_dir, or set overwrite=true")
    try:
        return dump_settings(parse_experiment(read))
    except UserError:
        # This version cannot read the settings, so the comparison will show which ones are wrong.
        return read


def _is_free(name: str) -> bool:
    return any(name == free or name.startswith(f"{free}.") for free in FREE)


def _compare(old: Any, new: Any, name: str = "") -> dict[str, tuple[Any, Any]]:
    """Find the values that differ. Keys are dotted names; values are pairs (old, new)."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        found: dict[str, tuple[Any, Any]] = {}
        for key in dict.fromkeys([*old, *new]):
            inner = f"{name}.{key}" if name else str(key)
            found |= _compare(old.get(key), new.get(key), inner)
        return found
    return {} if _normal(old) == _normal(new) else {name: (old, new)}


def _normal(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=os.fspath)
