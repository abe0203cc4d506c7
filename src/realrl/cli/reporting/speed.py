"""Speed of a training step in a few words, from its performance metrics. No torch."""

from collections.abc import Mapping
from math import isfinite

from realrl.runtime.measure.metric_names import IDLE_RANK, PERFORMANCE

_STEP = ("tokens_per_s", "mfu", "idle", "idle_max")
_WORTH_TELLING = 0.05
"""Difference of the idlest rank to the mean that is told."""


def read_speed(metrics: Mapping[str, object]) -> dict[str, float]:
    """Select the performance metrics of a whole step and of its ranks, by name without prefix."""
    found = {}
    for name, value in metrics.items():
        short = name.removeprefix(PERFORMANCE)
        of_step = short in _STEP or short.startswith(IDLE_RANK)
        if short != name and of_step and isinstance(value, int | float) and isfinite(value):
            found[short] = float(value)
    return found


def describe_speed(speed: Mapping[str, float]) -> list[str]:
    """Describe what `read_speed` has found: throughput, MFU, and how idle ranks were where there are several."""
    parts = []
    if "tokens_per_s" in speed:
        parts.append(f"{speed['tokens_per_s']:,.0f} tokens/s")
    if "mfu" in speed:
        parts.append(f"MFU {_percent(speed['mfu'])}")
    if "idle_max" in speed and "idle" in speed:
        most, mean = speed["idle_max"], speed["idle"]
        ranks = [
            name.removeprefix(IDLE_RANK)
            for name, share in speed.items()
            if name.startswith(IDLE_RANK) and share == most
        ]
        which = f"rank {ranks[0]}: " if ranks else "at most "
        told = f" ({which}{_percent(most)})" if most - mean > _WORTH_TELLING else ""
        parts.append(f"idle {_percent(mean)}{told}")
    return parts


def describe_idle(speed: Mapping[str, float], rank: int) -> str:
    """Describe how idle a rank was; empty where that is not known."""
    share = speed.get(f"{IDLE_RANK}{rank}")
    return "" if share is None else _percent(share)


def _percent(share: float) -> str:
    return f"{100 * share:.{0 if share >= 0.1 else 1}f} %"
