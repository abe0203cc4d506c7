"""Rewards in tests of graphs, which import no function."""

from realrl.algorithms.rewards.config import SINGLE, RewardTerm


def function_reward(reference: str) -> dict[str, RewardTerm]:
    """A reward that is one function; there need be none of that name."""
    return {SINGLE: RewardTerm.model_construct(function=reference)}
