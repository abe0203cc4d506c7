import math

import pytest
import torch
from ppo_reference import (
    TableModel,
    action_rows,
    alone,
    make_algorithm,
    mean_and_std,
    on_ranks,
    random_items,
    reference_advantages,
    reference_kl,
    reference_reward,
    to_batch,
)

from realrl.algorithms.base.method import Metrics
from realrl.algorithms.clipped_policy_loss import RefInference
from realrl.algorithms.policy import make_eval_graph
from realrl.algorithms.ppo import PPOConfig, train_graph
from realrl.algorithms.ppo_loss import ActorTrain, CriticInference, CriticTrain, PPOAlgorithm
from realrl.algorithms.rewards.reward_methods import RewardInference
from realrl.data.batch import Batch

ADAPTIVE = {"coef": 0.3, "adaptive": True, "target": 2.0, "horizon": 100}
EVERYTHING = PPOConfig(kl=ADAPTIVE, value_norm="running", missing_eos_penalty=0.4, truncated="score")


def algorithm(config: PPOConfig) -> PPOAlgorithm:
    return make_algorithm(config, temperature=0.8)


def flat(rows: list[list[float]]) -> list[float]:
    return [x for row in rows for x in row]


@pytest.mark.parametrize("normalise", [True, False])
def test_actor_gets_globally_normalised_advantages(normalise: bool) -> None:
    config = PPOConfig(advantage_norm=normalise)
    items = random_items(0, 8)
    raw = flat([reference_advantages(item, config, coef=0.1)[0] for item in items])
    mean, std = mean_and_std(raw)
    batch, metrics = ActorTrain(config).prepare(to_batch(items), alone)
    expected = [(a - mean) / std for a in raw] if normalise else raw
    assert flat(action_rows(batch, "advantages")) == pytest.approx(expected, abs=1e-4)
    assert metrics.result()["advantage_mean"] == pytest.approx(mean, abs=1e-5)
    assert metrics.result()["advantage_std"] == pytest.approx(std, rel=1e-5)


def test_actor_reports_the_step() -> None:
    config = PPOConfig(reward_scale=2.0, reward_clip=3.0, kl={"coef": 0.25})
    items = random_items(1, 9)
    _, metrics = ActorTrain(config).prepare(to_batch(items), alone)
    figures = metrics.result()
    assert figures["score"] == pytest.approx(sum(i.score for i in items) / 9, rel=1e-5)
    assert figures["reward"] == pytest.approx(sum(reference_reward(i, config) for i in items) / 9, rel=1e-5)
    assert figures["kl"] == pytest.approx(sum(reference_kl(i) for i in items) / 9, rel=1e-5)
    assert figures["response_tokens"] == pytest.approx(sum(len(i.actions) for i in items) / 9)
    assert figures["finished"] == pytest.approx(sum(i.finished for i in items) / 9)
    assert figures["kl_coef"] == 0.25


@pytest.mark.parametrize("method", [ActorTrain, CriticTrain])
@pytest.mark.parametrize("config", [PPOConfig(), EVERYTHING], ids=["default", "everything"])
@pytest.mark.parametrize("sizes", [(5, 3), (1, 7), (2, 3, 3), (8, 0)], ids=str)
def test_dp_ranks_prepare_what_one_process_would(
    method: type[ActorTrain] | type[CriticTrain], config: PPOConfig, sizes: tuple[int, ...]
) -> None:
    single, first = method(config), [sum(sizes[:rank]) for rank in range(len(sizes))]
    ranks = [method(config) for _ in sizes]
    key = "advantages" if method is ActorTrain else "returns"
    for step in range(3):
        batch = to_batch(random_items(step, sum(sizes)))
        expected, expected_metrics = single.prepare(batch, alone)
        results = on_ranks(
            len(sizes),
            lambda r, dp_sum, batch=batch: ranks[r].prepare(
                batch.select(range(first[r], first[r] + sizes[r])), dp_sum
            ),
        )
        parts = torch.cat([part[key].values for part, _ in results])
        torch.testing.assert_close(parts, expected[key].values, rtol=1e-6, atol=1e-6)
        merged = Metrics()
        for _, metrics in results:
            merged.update(metrics)
        assert merged.result() == pytest.approx(expected_metrics.result(), rel=1e-6)


def test_actor_and_critic_agree_whichever_of_them_runs_first_or_elsewhere() -> None:
    together, actor_only = algorithm(EVERYTHING), ActorTrain(EVERYTHING)
    for step in range(3):
        batch = to_batch(random_items(step, 6))
        order = ("actor.train", "critic.train") if step % 2 else ("critic.train", "actor.train")
        done = {name: together.method(name).prepare(batch, alone) for name in order}
        elsewhere, metrics = actor_only.prepare(batch, alone)
        assert elsewhere["advantages"].values.equal(done["actor.train"][0]["advantages"].values)
        assert metrics.result() == done["actor.train"][1].result()
    actor, critic = together.method("actor.train"), together.method("critic.train")
    assert actor.experience_maker.state_dict() == critic.experience_maker.state_dict()


def test_explained_variance_compares_values_with_returns() -> None:
    config, items = PPOConfig(), random_items(4, 6)
    pairs = [
        (r, r - a)
        for item in items
        for a, r in zip(*reference_advantages(item, config, coef=0.1), strict=True)
    ]
    left = mean_and_std([r - v for r, v in pairs])[1] ** 2
    total = mean_and_std([r for r, _ in pairs])[1] ** 2
    _, metrics = CriticTrain(config).prepare(to_batch(items), alone)
    assert metrics.result()["explained_variance"] == pytest.approx(1 - left / total, abs=1e-4)


def test_adaptive_coefficient_is_used_from_the_next_step_on() -> None:
    config = PPOConfig(kl=ADAPTIVE)
    actor, items = ActorTrain(config), random_items(2, 10)
    mean_kl = sum(reference_kl(i) for i in items) / 10
    _, first = actor.prepare(to_batch(items), alone)
    _, second = actor.prepare(to_batch(items), alone)
    error = min(max(mean_kl / 2.0 - 1, -0.2), 0.2)
    assert first.result()["kl_coef"] == 0.3
    assert second.result()["kl_coef"] == pytest.approx(0.3 * (1 + error * 10 / 100))


def test_actor_loss_agrees_with_loops_over_tokens() -> None:
    config, items, model = PPOConfig(clip=0.1, advantage_norm=False), random_items(5, 6), TableModel()
    actor = ActorTrain(config)
    batch, _ = actor.prepare(to_batch(items), alone)
    loss, metrics = actor.loss(batch, model(actor.sequences(batch)))
    table, expected, ratios = model.table[0].tolist(), 0.0, []
    for item in items:
        advantages, _ = reference_advantages(item, config, coef=0.1)
        for t, advantage in zip(item.actions, advantages, strict=True):
            ratio = math.exp(table[item.tokens[t]] - item.logprobs[t])
            ratios.append(ratio)
            expected -= min(ratio * advantage, min(max(ratio, 0.9), 1.1) * advantage)
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    assert actor.weight(batch) == len(ratios)
    figures = metrics.result()
    assert figures["policy_loss_per_token"] == pytest.approx(expected / len(ratios), rel=1e-4)
    assert figures["importance_ratio"] == pytest.approx(sum(ratios) / len(ratios), rel=1e-5)
    mean_kl = sum(r - 1 - math.log(r) for r in ratios) / len(ratios)
    assert figures["approx_kl"] == pytest.approx(mean_kl, rel=1e-4)
    actions = [table[i.tokens[t]] for i in items for t in i.actions]
    assert figures["entropy"] == pytest.approx(-sum(actions) / len(actions), rel=1e-5)


def test_critic_loss_compares_the_value_before_each_action() -> None:
    config, items, model = PPOConfig(value_clip=0.2), random_items(6, 6), TableModel()
    critic = CriticTrain(config)
    batch, _ = critic.prepare(to_batch(items), alone)
    loss, metrics = critic.loss(batch, model(critic.sequences(batch)))
    table, expected, count = model.table[1].tolist(), 0.0, 0
    for item in items:
        _, returns = reference_advantages(item, config, coef=0.1)
        for t, target in zip(item.actions, returns, strict=True):
            value, old = table[item.tokens[t - 1]], item.values[t - 1]
            near = min(max(value, old - 0.2), old + 0.2)
            expected += 0.5 * max((value - target) ** 2, (near - target) ** 2)
            count += 1
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    assert critic.weight(batch) == count
    assert metrics.result()["value_loss"] == pytest.approx(expected / count, rel=1e-4)


@pytest.mark.parametrize("method", [ActorTrain, CriticTrain])
def test_micro_batches_add_up_to_the_batch(method: type[ActorTrain] | type[CriticTrain]) -> None:
    train, whole, parts = method(EVERYTHING), TableModel(), TableModel()
    batch, _ = train.prepare(to_batch(random_items(7, 8)), alone)
    loss, metrics = train.loss(batch, whole(train.sequences(batch)))
    loss.backward()
    total, weight, merged = 0.0, 0, Metrics()
    for positions in ([7, 1], [0], [2, 3, 4, 6, 5]):
        part = batch.select(positions)
        part_loss, part_metrics = train.loss(part, parts(train.sequences(part)))
        part_loss.backward()
        total, weight = total + part_loss.item(), weight + train.weight(part)
        merged.update(part_metrics)
    assert total == pytest.approx(loss.item(), rel=1e-5)
    assert weight == train.weight(batch)
    assert merged.result() == pytest.approx(metrics.result(), rel=1e-5)
    torch.testing.assert_close(parts.table.grad, whole.table.grad)


def test_mismatch_is_measured_before_the_first_update_of_every_step_only() -> None:
    actor, model, items = ActorTrain(PPOConfig()), TableModel(), random_items(8, 4)
    gaps = [abs(model.table[0, i.tokens[t]].item() - i.logprobs[t]) for i in items for t in i.actions]
    for _ in range(2):
        batch, _ = actor.prepare(to_batch(items), alone)
        _, before = actor.loss(batch, model(batch["sequences"]))
        assert before.result()["sampler_trainer_mismatch"] == pytest.approx(max(gaps), rel=1e-5)
        actor.stop({"importance_ratio": 1.0})
        _, after = actor.loss(batch, model(batch["sequences"]))
        assert "sampler_trainer_mismatch" not in after.result()


@pytest.mark.parametrize(
    ("limit", "ratio", "stops"),
    [(5.0, 4.9, False), (5.0, 5.1, True), (5.0, math.nan, False), (None, 1e9, False)],
)
def test_early_stop_is_seen_in_the_figures_and_forgotten_in_the_next_step(
    limit: float | None, ratio: float, stops: bool
) -> None:
    actor, batch = ActorTrain(PPOConfig(early_stop_ratio=limit)), to_batch(random_items(9, 3))
    actor.prepare(batch, alone)
    assert actor.stop({"importance_ratio": ratio}) is stops
    assert actor.finish().result() == {"early_stopped": float(stops)}
    actor.prepare(batch, alone)
    assert actor.finish().result() == {"early_stopped": 0.0}


@pytest.mark.parametrize("trained_here", [["actor.train"], ["critic.train"], ["actor.train", "critic.train"]])
def test_state_survives_a_restart_even_onto_other_ranks(trained_here: list[str]) -> None:
    config = PPOConfig(kl=ADAPTIVE, value_norm="exponential")
    before, after = algorithm(config), algorithm(config)
    for step in range(3):
        for name in trained_here:
            before.method(name).prepare(to_batch(random_items(step, 4)), alone)
    after.load_state_dict(before.state_dict())
    assert after.state_dict() == before.state_dict()
    batch = to_batch(random_items(99, 4))
    for name, key in (("actor.train", "advantages"), ("critic.train", "returns")):
        resumed, _ = after.method(name).prepare(batch, alone)
        if name in trained_here:
            kept_on, _ = before.method(name).prepare(batch, alone)
            assert resumed[key].values.equal(kept_on[key].values)
    assert (
        after.method("actor.train").experience_maker.steps
        == after.method("critic.train").experience_maker.steps
        == 4
    )


def call_inputs(batch: Batch, call: str, *, evaluation: bool) -> Batch:
    graph = make_eval_graph() if evaluation else train_graph(minibatches=1)
    return Batch(batch.ids, {key: batch[key] for key in graph.call(call).inputs})


def test_inference_calls_turn_model_outputs_into_keys() -> None:
    items, model = random_items(10, 5), TableModel()
    batch = to_batch(items)
    logprobs, values = model.table.detach().tolist()
    score = RewardInference().outputs(batch, model(batch["sequences"]))["score"]
    assert score.values.tolist() == pytest.approx([values[i.tokens[-1]] for i in items])
    ref = RefInference().outputs(batch, model(batch["sequences"]))["ref_logprobs"]
    assert ref.values.tolist() == pytest.approx([logprobs[t] for i in items for t in i.tokens])
    critic = CriticInference(PPOConfig()).outputs(batch, model(batch["sequences"]))["values"]
    assert critic.values.tolist() == pytest.approx([values[t] for i in items for t in i.tokens])
    assert critic.lengths == ref.lengths == batch["sequences"].lengths


def test_evaluation_reports_score_length_and_kl_from_its_own_keys() -> None:
    items = random_items(11, 5)
    batch = to_batch(items)
    reward = call_inputs(batch, "reward.inference", evaluation=True).with_fields(score=batch["score"])
    assert RewardInference().metrics(reward).result() == pytest.approx(
        {
            "score": sum(i.score for i in items) / 5,
            "response_tokens": sum(len(i.actions) for i in items) / 5,
            "finished": sum(i.finished for i in items) / 5,
        }
    )
    ref = call_inputs(batch, "ref.inference", evaluation=True).with_fields(ref_logprobs=batch["ref_logprobs"])
    expected = sum(reference_kl(i) for i in items) / 5
    assert RefInference().metrics(ref).result() == {"kl": pytest.approx(expected, rel=1e-5)}


def test_inference_calls_of_a_training_step_do_with_what_the_graph_gives_them() -> None:
    batch = to_batch(random_items(12, 3))
    reward = call_inputs(batch, "reward.inference", evaluation=False).with_fields(score=batch["score"])
    ref = call_inputs(batch, "ref.inference", evaluation=False).with_fields(
        ref_logprobs=batch["ref_logprobs"]
    )
    assert RewardInference().metrics(reward).result() == {}
    assert RefInference().metrics(ref).result() == {}
