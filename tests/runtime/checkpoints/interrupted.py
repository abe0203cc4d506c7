"""Runs as they are left by a kill, made of a run that came to its end."""

import shutil
from pathlib import Path

from realrl.checkpoint.saved import list_checkpoints


def interrupt(run_dir: Path, step: int, directory: Path) -> Path:
    """Copy a run as if it had been killed soon after its checkpoint after `step` steps, into another directory.

    Metrics of later steps stay: they were written before the kill.
    """
    copy = directory / "run"
    shutil.copytree(run_dir, copy)
    for later, path in list_checkpoints(copy).items():
        if later > step:
            shutil.rmtree(path)
    for model in (*copy.glob("final*"), *copy.glob("best*")):
        shutil.rmtree(model) if model.is_dir() else model.unlink()
    (copy / "summary.json").unlink()
    return copy
