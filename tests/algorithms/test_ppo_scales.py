"""The scales of PPO: of values and their errors, of rewards, and of a KL that is one; and what is not finite."""

import math

import pytest
import torch
from ppo_reference import (
    TableModel,
    action_rows,
    alone,
    make_algorithm,
    mean_and_std,
    random_items,
    reference_advantages,
    to_batch,
)

from realrl.algorithms.base.method import ModelOutput
from realrl.algorithms.clipped_policy_loss import RefInference
from realrl.algorithms.ppo import PPOConfig
from realrl.algorithms.ppo_loss import ActorTrain, CriticTrain
from realrl.algorithms.rewards.reward_methods import RewardInference, ScoreOptions
from realrl.data.batch import Batch, Ragged

ADAPTIVE = {"coef": 0.3, "adaptive": True, "target": 2.0, "horizon": 100}


def flat(rows: list[list[float]]) -> list[float]:
    return [x for row in rows for x in row]


@pytest.mark.parametrize("mode", ["none", "running", "exponential"])
def test_critic_measures_errors_in_deviations_of_the_returns_up_to_this_step(mode: str) -> None:
    config = PPOConfig(value_norm=mode, value_norm_beta=0.6, value_clip=0.3, kl={"coef": 0.2})
    critic, model, history = CriticTrain(config), TableModel(), []
    for step in range(3):
        items = random_items(20 + step, 5)
        returns = [reference_advantages(i, config, coef=0.2)[1] for i in items]
        history.append(flat(returns))
        unit = 1.0
        if mode == "running":
            unit = mean_and_std(flat(history))[1]
        elif mode == "exponential":
            weights = [0.6 ** (step - s) for s in range(step + 1)]
            first, second = (
                sum(w * sum(x**p for x in h) / len(h) for w, h in zip(weights, history, strict=True))
                / sum(weights)
                for p in (1, 2)
            )
            unit = math.sqrt(second - first**2)
        batch, metrics = critic.prepare(to_batch(items), alone)
        assert flat(action_rows(batch, "returns")) == pytest.approx(flat(returns), abs=1e-4)
        assert metrics.result()["return_mean"] == pytest.approx(mean_and_std(history[-1])[0], abs=1e-5)
        expected = 0.0
        for item, targets in zip(items, returns, strict=True):
            for t, target in zip(item.actions, targets, strict=True):
                value, old = model.table[1, item.tokens[t - 1]].item(), item.values[t - 1]
                near = min(max(value, old - 0.3 * unit), old + 0.3 * unit)
                expected += 0.5 * max(((value - target) / unit) ** 2, ((near - target) / unit) ** 2)
        loss, _ = critic.loss(batch, model(critic.sequences(batch)))
        assert loss.item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("mode", ["none", "running", "exponential"])
def test_statistics_that_move_leave_predictions_alone(mode: str) -> None:
    """What the critic is taken to predict depends on its output alone, before and after any update."""
    config = PPOConfig(value_norm=mode, reward_scale=2.0, reward_bias=1.5)
    together, model = make_algorithm(config), TableModel()
    for step in range(3):
        batch = to_batch(random_items(step, 6))
        values = together.method("critic.inference").outputs(batch, model(batch["sequences"]))["values"]
        expected = [(v - 1.5) * 2.0 for v in model.table[1, batch["sequences"].values].tolist()]
        assert values.values.tolist() == pytest.approx(expected, rel=1e-5)
        together.method("critic.train").prepare(batch, alone)


def test_a_critic_that_is_the_reward_model_starts_on_the_scale_of_rewards() -> None:
    """The value of a last token is the reward for it."""
    config = PPOConfig(reward_scale=0.5, reward_bias=3.0, reward_clip=None, truncated="score")
    together, model, items = make_algorithm(config), TableModel(), random_items(3, 7)
    batch = to_batch(items)
    output = model(batch["sequences"])
    batch = batch.with_fields(
        **together.method("reward.inference").outputs(batch, output),
        **together.method("critic.inference").outputs(batch, output),
    )
    rewards = ActorTrain(config).experience_maker.make_experience(batch, alone).rewards
    at_the_end = [row[-1].item() for row in batch["values"].rows()]
    assert rewards.tolist() == pytest.approx(at_the_end, rel=1e-5)


def test_one_score_that_is_not_finite_spoils_its_own_sequence_only() -> None:
    config = PPOConfig(value_norm="running", truncated="score", kl=ADAPTIVE)
    items = random_items(5, 6)
    items[2].score = math.nan
    actor, critic = ActorTrain(config), CriticTrain(config)
    advantages, figures = actor.prepare(to_batch(items), alone)
    returns, _ = critic.prepare(to_batch(items), alone)
    for batch, key in ((advantages, "advantages"), (returns, "returns")):
        finite = [all(map(math.isfinite, row)) for row in action_rows(batch, key)]
        assert finite == [True, True, False, True, True, True]
    assert math.isnan(figures.result()["score"]), "and it is seen"
    assert all(map(math.isfinite, actor.experience_maker.state_dict().values()))
    others, _ = ActorTrain(config).prepare(to_batch(items[:2] + items[3:]), alone)
    kept = [row for i, row in enumerate(action_rows(advantages, "advantages")) if i != 2]
    assert flat(kept) == pytest.approx(flat(action_rows(others, "advantages")), rel=1e-4, abs=1e-6)


def test_score_is_that_of_the_sequences_it_is_trained_on() -> None:
    items = random_items(6, 8)
    for truncated, counted in (("score", items), ("bootstrap", [i for i in items if i.finished])):
        config = PPOConfig(truncated=truncated)
        batch, mean = to_batch(items), sum(i.score for i in counted) / len(counted)
        _, metrics = ActorTrain(config).prepare(batch, alone)
        assert metrics.result()["score"] == pytest.approx(mean, rel=1e-5)
        method = RewardInference(ScoreOptions(finished_only=truncated == "bootstrap"))
        evaluated = method.metrics(batch).result()
        assert evaluated["score"] == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize(
    ("truncated", "finished", "speaks"),
    [("bootstrap", 0.3, True), ("bootstrap", 0.7, False), ("score", 0.0, False)],
)
def test_scores_that_go_unused_are_remarked_on(truncated: str, finished: float, speaks: bool) -> None:
    remarks = make_algorithm(PPOConfig(truncated=truncated)).notes({"actor.train/finished": finished})
    assert ["ppo.truncated=score" in text for text in remarks] == [True] * speaks


def test_steering_and_reporting_use_a_divergence_where_sampling_is_restricted() -> None:
    """Tokens of which the actor draws only one, that it likes less than the reference does."""
    items = random_items(13, 6)
    for item in items:
        item.ref_logprobs = [x + 0.4 for x in item.logprobs]
    batch = to_batch(items)
    _, plain = ActorTrain(PPOConfig()).prepare(batch, alone)
    _, restricted = ActorTrain(PPOConfig(), restricted=True).prepare(batch, alone)
    assert plain.result()["kl"] < 0 < restricted.result()["kl"]
    evaluated = RefInference(restricted=True).metrics(batch).result()["kl"]
    assert evaluated == pytest.approx(restricted.result()["kl"], rel=1e-5)


@pytest.mark.parametrize(
    ("sampling", "restricted"),
    [({}, False), ({"top_k": 5}, True), ({"top_p": 0.9}, True), ({"min_new_tokens": 2}, True)],
)
def test_every_train_call_knows_whether_sampling_is_restricted(
    sampling: dict[str, float], restricted: bool
) -> None:
    together = make_algorithm(PPOConfig(kl={**ADAPTIVE, "target": 0.1}), **sampling)
    items = random_items(14, 6)
    for item in items:
        item.ref_logprobs = [x + 0.4 for x in item.logprobs]
    factor = 1.2 if restricted else 0.8
    for name in ("actor.train", "critic.train"):
        together.method(name).prepare(to_batch(items), alone)
        coefficient = together.method(name).experience_maker.state_dict()["kl_coef"]
        assert (coefficient - 0.3) * (factor - 1) > 0, "raised for a divergence, lowered for a negative sum"


# The experiment of a critic that starts exactly right: only statistics that move could make it wrong.
ANSWERS, LENGTH = 1024, 12


def step_of_answers(mean: float, values: torch.Tensor, generator: torch.Generator) -> Batch:
    """Answers of LENGTH tokens, whose score, N(mean, 1), nothing about them tells; `values`: [LENGTH + 1] by
    position, of the state after each token."""
    scores = torch.randn(ANSWERS, generator=generator) + mean
    rows = torch.arange(LENGTH + 1).repeat(ANSWERS)
    lengths = (LENGTH + 1,) * ANSWERS
    zeros = Ragged(torch.zeros(len(rows)), lengths)
    fields = {
        "sequences": Ragged(rows, lengths),
        "prompt_length": Ragged.scalars(torch.ones(ANSWERS, dtype=torch.int64)),
        "finished": Ragged.scalars(torch.ones(ANSWERS)),
        "logprobs": zeros,
        "ref_logprobs": zeros,
        "values": Ragged(values.detach()[rows], lengths),
        "score": Ragged.scalars(scores),
    }
    return Batch(tuple(range(ANSWERS)), fields)


@pytest.mark.parametrize("mode", ["running", "exponential"])
@pytest.mark.parametrize("mean", [4.0, -4.0])
@pytest.mark.parametrize("rate", [0.02, 0.1, 0.5])
def test_a_critic_that_starts_right_stays_right(mode: str, mean: float, rate: float) -> None:
    config = PPOConfig(value_norm=mode, advantage_norm=False, truncated="score")
    actor, critic, generator = ActorTrain(config), CriticTrain(config), torch.Generator().manual_seed(3)
    table = torch.full((LENGTH + 1,), mean, requires_grad=True)
    for step in range(30):
        batch = step_of_answers(mean, table, generator)
        judged, _ = actor.prepare(batch, alone)
        advantages = judged["advantages"].values.view(ANSWERS, -1)[:, 1:]
        by_position = advantages.mean(0).var(correction=0) / advantages.var(correction=0)
        assert by_position < 0.01, step
        prepared, _ = critic.prepare(batch, alone)
        for positions in torch.arange(ANSWERS).chunk(4):
            part = prepared.select(positions.tolist())
            output = ModelOutput(part["sequences"].lengths, values=table[part["sequences"].values])
            loss, _ = critic.loss(part, output)
            (gradient,) = torch.autograd.grad(loss / critic.weight(part) * LENGTH, table)
            with torch.no_grad():
                # A gradient step of `rate` on outputs in units of the returns' deviation.
                table -= rate * critic.head_scale**2 * gradient
        bias = (table.detach()[:-1] - mean).abs().max()
        assert bias <= 0.15, step
