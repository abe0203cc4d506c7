"""Reward of both sides: cheap, and different for the samples of a prompt."""

from typing import Any


def reward(completions: list[str], completion_ids: list[list[int]], **fields: Any) -> list[float]:
    """Share of even tokens."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
