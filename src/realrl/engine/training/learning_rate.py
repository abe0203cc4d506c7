"""Learning rate schedules."""

import math

from realrl.recipe.model import OptimizerConfig


def compute_learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Compute the learning rate of a step: linear warm-up, then the schedule to its end.

    `step` counts from 0 to `steps`.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    progress = min(1.0, progress)
    match config.schedule:
        case "constant":
            return config.lr
        case "linear":
            remaining = 1 - progress
        case "cosine":
            remaining = 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * remaining)
