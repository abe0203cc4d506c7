"""Commit checkpoints on disk, choose the checkpoints to keep, and delete all others.

Does not import torch.
"""

import json
import os
import shutil
from collections.abc import Mapping
from math import isfinite
from pathlib import Path

from realrl.checkpoint.saved import checkpoint_path, list_checkpoints, list_records
from realrl.config.files import partial_path, write_whole
from realrl.recipe.evaluation import BestConfig
from realrl.recipe.run_settings import CheckpointConfig

METRIC = "metric.json"
"""File in a checkpoint with the value that its models reached in the metric of `evaluation.best`."""


def write_metric(run_dir: Path, step: int, best: BestConfig, value: float) -> None:
    """Write the value that the models of a checkpoint reached in the metric of `best`. Raises OSError."""
    text = json.dumps({"metric": best.metric, "value": value}) + "\n"
    write_whole(checkpoint_path(run_dir, step) / METRIC, text)


def read_best_metrics(run_dir: Path, best: BestConfig) -> dict[int, float]:
    """Read the value of the metric of `best` from all checkpoints that store it. Keys are steps."""
    values = {}
    for step, path in list_checkpoints(run_dir).items():
        try:
            read = json.loads((path / METRIC).read_text())
            if read["metric"] == best.metric and isfinite(read["value"]):
                values[step] = float(read["value"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return values


def is_among_best(value: float, others: Mapping[int, float], best: BestConfig, count: int) -> bool:
    """Return whether a new value is among the `count` best. An equal value in `others` ranks higher."""
    sign = 1 if best.keep == "highest" else -1
    return isfinite(value) and sum(sign * other >= sign * value for other in others.values()) < count


def choose_kept(
    steps: list[int],
    settings: CheckpointConfig,
    best: BestConfig | None,
    metrics: Mapping[int, float],
    back: int | None = None,
) -> set[int]:
    """Choose the checkpoints to keep: the last ones, the best ones by `metrics`, and one to go back to after a
    spike.

    The next step could be a spike, so the checkpoint to go back to is at least `back` steps older than that step.
    """
    kept = set(sorted(steps)[-settings.keep :])
    if back is not None and steps:
        kept |= {max((step for step in steps if step <= max(steps) + 1 - back), default=max(steps))}
    if best is not None and settings.keep_best:
        sign = 1 if best.keep == "highest" else -1
        ranked = sorted(metrics, key=lambda step: (-sign * metrics[step], step))
        kept |= set(ranked[: settings.keep_best])
    return kept


def prune(
    run_dir: Path, settings: CheckpointConfig, best: BestConfig | None, back: int | None = None
) -> None:
    """Delete all checkpoints that `choose_kept` does not choose, and that no record starts from. Raises OSError."""
    found = list_checkpoints(run_dir)
    metrics = {} if best is None else read_best_metrics(run_dir, best)
    kept = choose_kept([*found], settings, best, metrics, back)
    kept |= {record.checkpoint for record in list_records(run_dir).values()}
    for step in found.keys() - kept:
        delete_checkpoint(found[step])


def commit(path: Path) -> None:
    """Give a complete checkpoint its final name, and flush it to disk.

    An older checkpoint of this name is replaced.
    """
    replaced = path.with_name(f".{path.name}.replaced.partial")
    shutil.rmtree(replaced, ignore_errors=True)
    if path.exists():
        path.rename(replaced)
    partial_path(path).rename(path)
    shutil.rmtree(replaced, ignore_errors=True)
    for directory in (path, path.parent):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def delete_checkpoint(path: Path) -> None:
    """Delete a checkpoint. Raises OSError.

    The directory is renamed first, so that a half-deleted directory is never taken for a checkpoint.
    """
    doomed = partial_path(path)
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed)
