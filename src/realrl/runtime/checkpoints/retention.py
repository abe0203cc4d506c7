"""Checkpoints of a run on disk: which there are, which are kept, and their deletion. No torch."""

import json
import shutil
from collections.abc import Mapping
from math import isfinite
from pathlib import Path

from realrl.config.files import partial_path, write_whole
from realrl.recipe.evaluation import BestConfig
from realrl.recipe.sections.checkpoint import CheckpointConfig
from realrl.runtime.output.saved import checkpoint_path, list_checkpoints

METRIC = "metric.json"
"""File of a checkpoint with the `evaluation.best` of its models."""


def write_metric(run_dir: Path, step: int, best: BestConfig, value: float) -> None:
    """Write how good the models of a checkpoint are; OSError."""
    text = json.dumps({"metric": best.metric, "value": value}) + "\n"
    write_whole(checkpoint_path(run_dir, step) / METRIC, text)


def read_best_metrics(run_dir: Path, best: BestConfig) -> dict[int, float]:
    """Read how good the models of checkpoints are, by steps, where they were evaluated by this metric."""
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
    """Tell whether a value is among the `count` best of all checkpoints; of equal ones the first."""
    sign = 1 if best.keep == "highest" else -1
    return isfinite(value) and sum(sign * other >= sign * value for other in others.values()) < count


def choose_kept(
    steps: list[int],
    settings: CheckpointConfig,
    best: BestConfig | None,
    metrics: Mapping[int, float],
    back: int | None = None,
) -> set[int]:
    """Choose which of the checkpoints after these steps are kept: the last ones, and the best ones by `metrics`.

    And the one that training would go back to after a spike in the next step, at least `back` steps.
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
    """Delete checkpoints that are not kept, see `choose_kept`; OSError."""
    found = list_checkpoints(run_dir)
    metrics = {} if best is None else read_best_metrics(run_dir, best)
    for step in found.keys() - choose_kept([*found], settings, best, metrics, back):
        delete_checkpoint(found[step])


def delete_checkpoint(path: Path) -> None:
    """Delete a checkpoint, so that it is one to its end or none at all; OSError."""
    doomed = partial_path(path)
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed)
