"""Rewards that hardly differ keep their difference up to the advantages, beside exact arithmetic."""

from fractions import Fraction
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from reward_functions import make_input, write_function
from torch import Tensor

from realrl.algorithms.base.method import FunctionInput
from realrl.algorithms.policy_gradient import PolicyGradientConfig
from realrl.algorithms.policy_gradient_loss import PolicyGradientTrain, subtract_baseline
from realrl.algorithms.ppo import PPOConfig
from realrl.algorithms.ppo_experience import shape_rewards
from realrl.algorithms.rewards.config import RewardTerm
from realrl.algorithms.rewards.reward_methods import make_reward_methods
from realrl.data.batch import Batch, Ragged
from realrl.recipe.registry import find_algorithm

ANSWERS = ["a", "b", "c", "d"]
CASES = [(1.0, 1e-5), (10.0, 1e-5), (1000.0, 1e-4), (16384.0, 1e-3)]


def make_rewards(directory: Path, scores: list[float]) -> str:
    """A function that gives these scores to the answers."""
    return write_function(
        directory,
        f"SCORES = dict(zip({ANSWERS!r}, {scores!r}))\n"
        "def score(completions): return [SCORES[text] for text in completions]\n",
    )


def score(reward: dict[str, RewardTerm]) -> Batch:
    """Score the answers by a reward as a step does: its batch with all scores."""
    batch = make_input(ANSWERS).batch
    for name, method in make_reward_methods(reward).items():
        function: Any = method
        function.load()
        outputs, _ = function.call(FunctionInput(batch, {}, make_input(ANSWERS).tokenizer))
        assert all(rows.values.dtype == torch.float64 for rows in outputs.values()), name
        batch = batch.with_fields(**outputs)
    count = len(ANSWERS)
    zeros = Ragged(torch.zeros(2 * count), (2,) * count)
    return batch.with_fields(finished=Ragged.scalars(torch.ones(count)), logprobs=zeros, ref_logprobs=zeros)


def advantages_of(batch: Batch, preset: str, **changes: Any) -> tuple[Tensor, dict[str, float]]:
    """The advantage of each answer, all of one prompt, and metrics."""
    section: PolicyGradientConfig = find_algorithm(preset)[0].recipe.model_fields["policy"].default
    changed = {"samples": len(ANSWERS), "kl": {"coef": 0.0}, "mask_truncated": False} | changes
    config = type(section).model_validate(section.model_dump() | changed)
    train = PolicyGradientTrain(config, prompts=1, max_new_tokens=1)
    prepared, metrics = train.prepare(batch, lambda tensor: tensor)
    assert prepared["advantages"].values.dtype == torch.float32
    return prepared["advantages"].values[1::2], metrics.result()


def exact_advantages(scores: list[float], scale: str) -> list[float]:
    exact = list(map(Fraction, scores))
    mean = sum(exact) / len(exact)
    std = sqrt(sum((value - mean) ** 2 for value in exact) / (len(exact) - 1))
    unit = {"none": 1.0, "group_std": std + 1e-4}[scale]
    return [float(value - mean) / unit for value in exact]


@pytest.mark.parametrize("scale", ["none", "group_std"])
@pytest.mark.parametrize(("base", "step"), CASES)
def test_advantages_of_near_equal_rewards_are_exact(
    tmp_path: Path, base: float, step: float, scale: str
) -> None:
    scores = [base, base + step, base, base]
    batch = score({"reward": RewardTerm(function=make_rewards(tmp_path, scores))})
    advantages, metrics = advantages_of(batch, "grpo", scale=scale)
    assert advantages.tolist() == pytest.approx(exact_advantages(scores, scale), rel=1e-6)
    assert metrics["groups_of_equal_rewards"] == 0


def test_a_small_term_beside_a_large_one_counts(tmp_path: Path) -> None:
    large, small = [1000.0] * 4, [0.0, 1e-5, 0.0, 0.0]
    batch = score(
        {
            "large": RewardTerm(function=make_rewards(tmp_path, large)),
            "small": RewardTerm(function=make_rewards(tmp_path, small)),
        }
    )
    advantages, metrics = advantages_of(batch, "dr_grpo")
    scores = [a + b for a, b in zip(large, small, strict=True)]
    assert advantages.tolist() == pytest.approx(exact_advantages(scores, "none"), rel=1e-6)
    assert metrics["groups_of_equal_rewards"] == 0


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
@pytest.mark.parametrize("reward", [0.1, 0.7, -3.3])
@pytest.mark.parametrize("samples", range(2, 9))
def test_equal_rewards_have_no_advantage_at_all(baseline: Any, reward: float, samples: int) -> None:
    rewards = torch.full((2, samples + 1), reward, dtype=torch.float64)
    rewards[0, 0] = torch.nan
    rewards[1, 0] = reward + 1
    advantages = subtract_baseline(rewards, baseline)
    assert advantages[0].isnan().tolist() == [True] + [False] * samples
    assert advantages[0, 1:].eq(0).all() and advantages[1].ne(0).all()


def test_terms_with_equal_sums_give_equal_scores(tmp_path: Path) -> None:
    first, second = make_rewards(tmp_path, [0.1, 0.3, 0.2, 0.15]), [0.2, 0.0, 0.1, 0.15]
    batch = score({"a": RewardTerm(function=first), "b": RewardTerm(function=make_rewards(tmp_path, second))})
    assert batch["score"].values.unique().tolist() == [0.3]


@pytest.mark.parametrize(("base", "step"), CASES)
def test_deviations_of_the_whole_batch_are_those_of_the_differences(
    tmp_path: Path, base: float, step: float
) -> None:
    scores = [base, base + step, base, base]
    batch = score({"reward": RewardTerm(function=make_rewards(tmp_path, scores))})
    advantages, _ = advantages_of(batch, "reinforce_pp")
    exact = list(map(Fraction, scores))
    mean = sum(exact) / len(exact)
    std = sqrt(sum((value - mean) ** 2 for value in exact) / len(exact))
    wanted = [float(value - mean) / (std + 1e-8) for value in exact]
    assert advantages.tolist() == pytest.approx(wanted, rel=1e-4)


def test_a_bias_near_the_scores_leaves_their_differences_in_ppo(tmp_path: Path) -> None:
    scores = [16384.0, 16384.001, 16384.0, 16384.0]
    batch = score({"reward": RewardTerm(function=make_rewards(tmp_path, scores))})
    config = PPOConfig(reward_bias=16384.0)
    shaped = shape_rewards(score=batch["score"].values, finished=batch["finished"].values, config=config)
    assert shaped.tolist() == [value - 16384.0 for value in scores]
