"""Samples without a score leave losses and statistics, whatever the algorithm."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from realrl.algorithms.base.method import Metrics, ModelOutput
from realrl.algorithms.policy_gradient import PolicyGradientConfig
from realrl.algorithms.policy_gradient_loss import PolicyGradientTrain
from realrl.algorithms.ppo import PPOConfig
from realrl.algorithms.ppo_loss import ActorTrain, CriticTrain
from realrl.config.errors import UserCodeError
from realrl.data.batch import Batch, Ragged


def alone(tensor: Tensor) -> Tensor:
    return tensor


def random_batch(count: int, seed: int = 0) -> Batch:
    """Items of one prompt token and 1 to 5 answer tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = tuple(int(n) for n in torch.randint(2, 7, (count,), generator=generator))

    def per_token() -> Ragged:
        return Ragged(torch.randn(sum(lengths), generator=generator), lengths)

    def per_item() -> Ragged:
        return Ragged.scalars(torch.randn(count, generator=generator))

    return Batch(
        tuple(range(count)),
        {
            "sequences": Ragged(torch.zeros(sum(lengths), dtype=torch.int64), lengths),
            "prompt_length": Ragged.scalars(torch.ones(count, dtype=torch.int64)),
            "finished": Ragged.scalars(torch.ones(count)),
            "logprobs": per_token(),
            "ref_logprobs": per_token(),
            "values": per_token(),
            "score": per_item(),
        },
    )


def with_scores(batch: Batch, scores: dict[int, float]) -> Batch:
    values = batch["score"].values.clone()
    for item, score in scores.items():
        values[item] = score
    return batch.with_fields(score=Ragged.scalars(values))


def loss_of(method: Any, batch: Batch) -> tuple[float, float, Metrics]:
    """Loss over weight of items, by outputs that depend on the place of a token alone."""
    prepared, metrics = method.prepare(batch, alone)
    rows = [torch.sin(torch.arange(length) + 1.0) for length in batch["sequences"].lengths]
    numbers = torch.cat(rows)
    output = ModelOutput(
        batch["sequences"].lengths, logprobs=numbers, entropy=torch.zeros_like(numbers), values=numbers
    )
    loss, _ = method.loss(prepared, output)
    return float(loss), float(method.weight(prepared)), metrics


@pytest.mark.parametrize("method", [ActorTrain, CriticTrain])
@pytest.mark.parametrize("truncated", ["score", "bootstrap"])
def test_ppo_learns_from_the_rest_as_if_it_were_all(method: Any, truncated: Any) -> None:
    config = PPOConfig(value_norm="running", truncated=truncated, kl={"coef": 0.2})
    batch = random_batch(6)
    rest = batch.select([0, 2, 3, 5])
    rest = Batch(tuple(range(4)), rest.fields)
    found = loss_of(method(config, skips=True), with_scores(batch, {1: math.nan, 4: math.nan}))
    expected = loss_of(method(config), rest)
    assert found[:2] == pytest.approx(expected[:2], rel=1e-5)
    names = ("score", "reward", "advantage_mean", "advantage_std", "return_mean", "explained_variance")
    ours, theirs = found[2].result(), expected[2].result()
    for name in set(names) & set(ours):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-7)
    if method is ActorTrain:
        assert ours["skipped"] == pytest.approx(1 / 3)


def train_of(**changes: Any) -> PolicyGradientTrain:
    config = PolicyGradientConfig.model_validate({"samples": 3, "kl": {"coef": 0.0}, **changes})
    return PolicyGradientTrain(config, prompts=2, max_new_tokens=8, skips=True)


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
@pytest.mark.parametrize("aggregate", ["sequence_mean", "token_mean"])
def test_a_group_is_what_is_left_of_it(baseline: str, aggregate: str) -> None:
    batch = with_scores(random_batch(6), {1: math.nan})
    prepared, metrics = train_of(baseline=baseline, aggregate=aggregate, scale="none").prepare(batch, alone)
    kept = prepared["kept"].values.tolist()
    assert kept == [1, 0, 1, 1, 1, 1]
    score = batch["score"].values.tolist()
    first = score[0] - (score[2] if baseline == "leave_one_out" else (score[0] + score[2]) / 2)
    assert prepared["advantages"].row(0)[1].item() == pytest.approx(first, abs=1e-5)
    assert not prepared["advantages"].row(1).any()
    rest = [value for value in score if not math.isnan(value)]
    assert metrics.result()["score"] == pytest.approx(sum(rest) / 5)
    assert metrics.result()["skipped"] == pytest.approx(1 / 6)


def test_equal_rewards_are_those_of_the_samples_that_have_one() -> None:
    batch = with_scores(random_batch(6), {0: 1.0, 1: math.nan, 2: 1.0})
    _, metrics = train_of().prepare(batch, alone)
    assert metrics.result()["groups_of_equal_rewards"] == 0.5


def test_a_score_that_a_mistake_made_infinite_is_not_skipped() -> None:
    for scores in ({0: math.inf}, dict.fromkeys(range(6), math.inf)):
        batch = with_scores(random_batch(6), scores)
        for method in (train_of(), train_of(baseline="none"), ActorTrain(PPOConfig(), skips=True)):
            loss, _, _ = loss_of(method, batch)
            assert not math.isfinite(loss)


@pytest.mark.parametrize("method", [train_of(), ActorTrain(PPOConfig(), skips=True)])
def test_a_step_without_any_score_is_an_error(method: Any) -> None:
    with pytest.raises(UserCodeError, match=r"^the reward gave None, or failed, for all answers of the step"):
        method.prepare(with_scores(random_batch(6), dict.fromkeys(range(6), math.nan)), alone)
