"""Trajectories of a samples file, as the page of a run, reports and notebooks show them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from realrl.dataflow.environment import (
    ENVIRONMENT_FAILED,
    ENVIRONMENT_REWARD,
    FAILED_CALLS,
    TRAJECTORY,
    TURNS,
)

NUMBERS = (ENVIRONMENT_REWARD, TURNS, FAILED_CALLS)
"""Fields of a samples file with numbers of a trajectory."""
SAMPLED, WRITTEN = "sampled by the model", "written by the environment or the chat template"
"""What the looks of parts mean."""
FAILED = "the environment failed"


@dataclass(frozen=True)
class Part:
    """Part of a trajectory: a turn of the model, or what stands before it."""

    text: str
    sampled: bool
    """Whether the model has sampled it."""
    reward: float | None = None
    """Reward of the turn; None if it is 0, or if the environment gave none."""


def has_failed(row: Mapping[str, Any]) -> bool:
    """Return whether the environment of a sample failed."""
    return row.get(ENVIRONMENT_FAILED) is True


def read_parts(row: Mapping[str, Any]) -> list[Part] | None:
    """Read the trajectory of a row in a samples file; None if it has none. Malformed parts are left out."""
    found = row.get(TRAJECTORY)
    if not isinstance(found, list):
        return None
    return [
        Part(
            part["text"],
            part.get("sampled") is True,
            reward if isinstance(reward := part.get("reward"), int | float) else None,
        )
        for part in found
        if isinstance(part, dict) and isinstance(part.get("text"), str)
    ]


def mark_parts(parts: list[Part]) -> str:
    """Write a trajectory without colours: turns of the model in [[ ]], and each part on a line of its own."""
    return "\n".join(f"[[{part.text.strip()}]]" if part.sampled else part.text.strip() for part in parts)
