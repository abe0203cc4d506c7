"""Advantages of trajectories are those of their actions alone, by the definition."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from realrl.algorithms.base.rows import Responses
from realrl.algorithms.ppo import PPOConfig
from realrl.algorithms.ppo_experience import ExperienceMaker
from realrl.data.batch import Batch, Ragged

MASKS = [[0, 0, 0, 1, 1, 0, 0, 1], [0, 0, 1, 0, 1, 1, 1, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1]]
"""1 for actions; the first three, one and four tokens are prompts."""
PROMPTS = (3, 1, 4)


def make_batch(finished: Sequence[float] = (1.0, 1.0, 1.0)) -> Batch:
    draw = torch.Generator().manual_seed(1)
    lengths = [len(mask) for mask in MASKS]

    def rows(values: Tensor) -> Ragged:
        return Ragged(values, tuple(lengths))

    def floats() -> Tensor:
        return torch.randn(sum(lengths), generator=draw)

    mask = torch.tensor([bit for row in MASKS for bit in row], dtype=torch.int16)
    ends = torch.tensor(
        [bool(bit and not after) for row in MASKS for bit, after in zip(row, [*row[1:], 0], strict=True)]
    )
    return Batch(
        (0, 1, 2),
        {
            "sequences": rows(torch.zeros(sum(lengths), dtype=torch.int64)),
            "prompt_length": Ragged.scalars(torch.tensor(PROMPTS)),
            "finished": Ragged.scalars(torch.tensor(finished)),
            "action_mask": rows(mask),
            "turn_rewards": rows(torch.where(ends, floats(), 0.0)),
            "logprobs": rows(floats()),
            "ref_logprobs": rows(floats()),
            "values": rows(floats()),
            "score": Ragged.scalars(torch.tensor([0.5, -2.0, 1.5], dtype=torch.float64)),
        },
    )


def by_definition(batch: Batch, config: PPOConfig, weight: float) -> list[list[float]]:
    """The advantages of each sequence's actions."""
    found = []
    for i, mask in enumerate(MASKS):
        row = {
            name: batch[name].row(i).double().tolist()
            for name in ("turn_rewards", "logprobs", "ref_logprobs", "values")
        }
        places = [t for t, bit in enumerate(mask) if bit]
        finished, score = batch["finished"].values[i] == 1, batch["score"].values[i].item()
        counts = finished or config.truncated == "score"
        turns = [weight * row["turn_rewards"][t] for t in places]
        rewards = [
            turn - config.kl.coef * (row["logprobs"][t] - row["ref_logprobs"][t])
            for turn, t in zip(turns, places, strict=True)
        ]
        rewards[-1] += score - sum(turns) if counts else 0.0
        states = [row["values"][t - 1] for t in places] + [0.0 if counts else row["values"][-1]]
        advantages, ahead = list[float](), 0.0
        for k in reversed(range(len(places))):
            delta = rewards[k] + config.gamma * states[k + 1] - states[k]
            ahead = delta + config.gamma * config.lam * ahead
            advantages.insert(0, ahead)
        found.append(advantages)
    return found


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("truncated", ["score", "bootstrap"])
def test_advantages_of_ppo_step_over_what_the_environment_wrote(weight: float, truncated: Any) -> None:
    config = PPOConfig(gamma=0.9, lam=0.8, truncated=truncated)
    batch = make_batch(finished=(1.0, 0.0, 1.0))
    made = ExperienceMaker(config, turn_weight=weight).make_experience(batch, lambda x: x)
    expected = [value for row in by_definition(batch, config, weight) for value in row]
    torch.testing.assert_close(
        made.advantages, torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=0
    )
    assert made.actions.counts.tolist() == [sum(mask) for mask in MASKS]


def test_actions_are_numbered_across_turns() -> None:
    found = Responses.find(make_batch())
    offsets = [0, *torch.tensor([len(mask) for mask in MASKS]).cumsum(0).tolist()]
    places = [[offsets[i] + t for t, bit in enumerate(mask) if bit] for i, mask in enumerate(MASKS)]
    assert found.index.tolist() == [place for row in places for place in row]
    assert found.column.tolist() == [k for row in places for k in range(len(row))]
    padded = found.pad(torch.arange(float(found.total)))
    assert math.isclose(padded.sum().item(), sum(range(found.total))) and padded.shape == (3, 6)
    assert torch.equal(found.unpad(padded), torch.arange(float(found.total)))


def test_only_kept_trajectories_have_actions() -> None:
    found = Responses.find(make_batch(), kept=torch.tensor([1.0, 0.0, 1.0]))
    assert found.counts.tolist() == [3, 0, 2] and found.row.tolist() == [0, 0, 0, 2, 2]
    assert found.column.tolist() == [0, 1, 2, 0, 1]
