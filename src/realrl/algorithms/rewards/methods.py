"""Methods of the calls that score sequences."""

from realrl.algorithms.method import Method
from realrl.algorithms.rewards.config import SINGLE, Rewards, is_mixture
from realrl.algorithms.rewards.function import RewardFunction
from realrl.algorithms.rewards.graph import SUM, name_call, name_key
from realrl.algorithms.rewards.inference import RewardInference
from realrl.algorithms.rewards.mixture import RewardSum


def make_reward_methods(
    reward: Rewards | None, *, finished_only: bool = False, prefix: str = ""
) -> dict[str, Method]:
    """Make the methods of `score_sequences`, by call; `finished_only` as of `RewardInference`."""
    if reward is None:
        alone = RewardInference(finished_only=finished_only, prefix=prefix)
        return {name_call(SINGLE, None, prefix): alone}
    mixed = is_mixture(reward)
    methods: dict[str, Method] = {}
    for name, term in reward.items():
        key = name_key(name, prefix) if mixed else f"{prefix}score"
        methods[name_call(name, term, prefix)] = (
            RewardInference(key=key, in_mixture=mixed, finished_only=finished_only, prefix=prefix)
            if term.model is not None
            else RewardFunction(
                name, term, key=key, in_mixture=mixed, finished_only=finished_only, prefix=prefix
            )
        )
    if mixed:
        methods[f"{SUM}_{prefix}".rstrip("_")] = RewardSum(reward, finished_only=finished_only, prefix=prefix)
    return methods
