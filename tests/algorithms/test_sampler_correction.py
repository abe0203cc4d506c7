"""Importance weights between sampler and trainer, beside formulas written out in double precision."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ppo_reference import Item, alone, on_ranks, random_items, reference_advantages, to_batch
from pydantic import ValidationError
from torch import Tensor

from realrl.algorithms.base.method import Metrics, ModelOutput
from realrl.algorithms.base.rows import AGES, Responses, find_ages
from realrl.algorithms.build import build_algorithm
from realrl.algorithms.clipped_policy_loss import LogprobsInference, PolicyTrain, compute_sampler_weights
from realrl.algorithms.distillation import DRAWN, DistillationConfig
from realrl.algorithms.distillation_loss import DrawnTrain
from realrl.algorithms.policy import samples_are_stale
from realrl.algorithms.policy_gradient import PolicyGradientConfig
from realrl.algorithms.policy_gradient_loss import PolicyGradientTrain
from realrl.algorithms.ppo import PPOConfig
from realrl.algorithms.ppo_loss import ActorTrain
from realrl.data.batch import Batch, Ragged
from realrl.recipe.load import parse_experiment

PROMPTS, SAMPLES, CLIP, CAP = 3, 4, 0.2, 1.5
MODES = ["truncate", "mask", "sequence_truncate", "sequence_mask"]
FAMILIES = ["ppo", "policy_gradient"]


def make_train(family: str, *, stale: bool = False, **changes: Any) -> PolicyTrain:
    """The train method of a family, whose loss is the sum over tokens of clipped losses."""
    if family == "ppo":
        return ActorTrain(PPOConfig(clip=CLIP, advantage_norm=False, **changes), stale=stale)
    settings = {"samples": SAMPLES, "clip": CLIP, "aggregate": "token_mean", **changes}
    config = PolicyGradientConfig(**settings)
    return PolicyGradientTrain(config, prompts=PROMPTS, max_new_tokens=7, stale=stale)


def correcting(family: str, mode: str = "sequence_mask", **changes: Any) -> PolicyTrain:
    settings = {"recompute_logprobs": True, "sampler_correction": mode, "sampler_cap": CAP}
    return make_train(family, **(settings | changes))


def make_batch(seed: int, change: float = 0.4) -> tuple[list[Item], Batch]:
    """Sequences whose recomputed log-probabilities differ from the recorded ones by noise of this size."""
    items = random_items(seed, PROMPTS * SAMPLES)
    batch = to_batch(items)
    return items, batch.with_fields(old_logprobs=near(batch["logprobs"], seed, change))


def near(logprobs: Ragged, seed: int, change: float) -> Ragged:
    noise = torch.randn(len(logprobs.values), generator=torch.Generator().manual_seed(seed))
    return Ragged(logprobs.values + change * noise, logprobs.lengths)


def model_output(batch: Batch, seed: int) -> ModelOutput:
    """Output of a model near the old policy, so that some ratios are clipped."""
    logprobs = near(batch["old_logprobs"], seed, 0.3).values.requires_grad_()
    return ModelOutput(batch["sequences"].lengths, logprobs, torch.zeros_like(logprobs))


def weigh_by_hand(ratios: list[float], mode: str) -> tuple[list[float], list[bool]]:
    """The weights of one answer's tokens, and whether each of them was limited. ratios: p_old / p_sampler"""
    if mode.startswith("sequence"):
        ratios = [math.prod(ratios)] * len(ratios)
    match mode.removeprefix("sequence_"):
        case "none":
            return [1.0] * len(ratios), [False] * len(ratios)
        case "truncate":
            return [min(ratio, CAP) for ratio in ratios], [ratio > CAP for ratio in ratios]
        case "mask":
            inside = [1 / CAP <= ratio <= CAP for ratio in ratios]
            pairs = zip(ratios, inside, strict=True)
            return [ratio if kept else 0.0 for ratio, kept in pairs], [not kept for kept in inside]
    raise AssertionError(mode)


def all_weights(items: list[Item], batch: Batch, mode: str) -> tuple[list[float], list[bool]]:
    """`weigh_by_hand` of all answer tokens of a batch, one answer after the other."""
    weights, limited = [], []
    for i, item in enumerate(items):
        old, sampled = (batch[key].row(i).double() for key in ("old_logprobs", "logprobs"))
        found = weigh_by_hand((old - sampled).exp()[item.prompt :].tolist(), mode)
        weights += found[0]
        limited += found[1]
    return weights, limited


def effective_sample_size(weights: list[float]) -> float:
    return sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))


@pytest.mark.parametrize("mode", ["none", *MODES])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradient_are_those_of_the_decoupled_objective(family: str, mode: str) -> None:
    items, batch = make_batch(1)
    method = correcting(family, mode)
    prepared, metrics = method.prepare(batch, alone)
    output = model_output(batch, 2)
    assert output.logprobs is not None
    loss, in_loss = method.loss(prepared, output)
    (gradient,) = torch.autograd.grad(loss, output.logprobs)

    if family == "ppo":  # the penalty on rewards takes the sampler's log-probabilities
        rows = [reference_advantages(item, PPOConfig(), coef=0.1)[0] for item in items]
        advantages = [advantage for row in rows for advantage in row]
    else:
        at = Responses.find(batch).index
        advantages = prepared["advantages"].values[at].tolist()
    places = Responses.find(batch).index.tolist()
    weights, limited = all_weights(items, batch, mode)
    new, old = output.logprobs.tolist(), batch["old_logprobs"].values.tolist()
    expected, slopes = 0.0, [0.0] * len(new)
    for t, advantage, weight in zip(places, advantages, weights, strict=True):
        ratio = math.exp(new[t] - old[t])
        bounded = min(max(ratio, 1 - CLIP), 1 + CLIP)
        expected -= weight * min(ratio * advantage, bounded * advantage)
        if ratio * advantage <= bounded * advantage:
            slopes[t] = -weight * ratio * advantage
    assert loss.item() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    torch.testing.assert_close(gradient, torch.tensor(slopes), rtol=1e-4, atol=1e-5)
    assert 0 < in_loss.result()["clip_fraction"] < 1

    found = metrics.result()
    if mode == "none":
        assert not {"sampler_weight", "sampler_corrections_beyond_cap", "effective_sample_size"} & {*found}
        return
    assert 0 < sum(limited) < len(limited)
    assert found["sampler_corrections_beyond_cap"] == pytest.approx(sum(limited) / len(limited))
    assert found["sampler_weight"] == pytest.approx(sum(weights) / len(weights), rel=1e-5)
    assert found["effective_sample_size"] == pytest.approx(effective_sample_size(weights), rel=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sizes", [(5, 7), (1, 11), (4, 4, 4), (12, 0)], ids=str)
def test_weights_and_their_metrics_do_not_depend_on_ranks(
    family: str, mode: str, sizes: tuple[int, ...]
) -> None:
    _, batch = make_batch(3)
    whole, metrics = correcting(family, mode).prepare(batch, alone)

    def run(rank: int, dp_sum: Any) -> tuple[Batch, Metrics]:
        first = sum(sizes[:rank])
        return correcting(family, mode).prepare(batch.select(range(first, first + sizes[rank])), dp_sum)

    results = on_ranks(len(sizes), run)
    parts = torch.cat([part["sampler_weights"].values for part, _ in results])
    assert parts.equal(whole["sampler_weights"].values)
    together, expected = Metrics(), metrics.result()
    for _, own in results:
        together.update(own)
        same = pytest.approx(expected["effective_sample_size"], rel=1e-12)
        assert own.result()["effective_sample_size"] == same
    for name in ("effective_sample_size", "sampler_weight", "sampler_corrections_beyond_cap"):
        assert together.result()[name] == pytest.approx(expected[name], rel=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_do_not_depend_on_micro_batches(family: str) -> None:
    _, batch = make_batch(4)
    method = correcting(family)
    prepared, _ = method.prepare(batch, alone)
    output = model_output(batch, 5)
    assert output.logprobs is not None
    loss, _ = method.loss(prepared, output)
    rows = Ragged(output.logprobs, output.lengths).rows()
    total = 0.0
    for positions in ([11, 0, 4], [1, 2, 3], [5, 6, 7, 8, 9, 10]):
        part = prepared.select(positions)
        logprobs = torch.cat([rows[i] for i in positions])
        own = ModelOutput(part["sequences"].lengths, logprobs, torch.zeros_like(logprobs))
        total += method.loss(part, own)[0].item()
    assert total == pytest.approx(loss.item(), rel=1e-5)


def test_weights_of_answers_leave_out_what_an_environment_wrote() -> None:
    lengths = (4, 3)
    mask = torch.tensor([0, 1, 0, 1, 0, 1, 1])
    answers = Responses.of(
        Ragged(torch.zeros(7, dtype=torch.int64), lengths),
        Ragged.scalars(torch.tensor([1, 1])),
        mask=mask,
    )
    ratios = torch.tensor([1.2, 1.1, 2.0, 0.5], dtype=torch.float64)
    found = compute_sampler_weights(log_ratio=ratios.log(), answers=answers, mode="sequence_mask", cap=CAP)
    assert found.weights.tolist() == pytest.approx([1.32, 1.32, 1.0, 1.0])
    assert not found.beyond.any()
    found = compute_sampler_weights(log_ratio=ratios.log(), answers=answers, mode="sequence_mask", cap=1.3)
    assert found.weights.tolist() == pytest.approx([0.0, 0.0, 1.0, 1.0])
    assert found.beyond.tolist() == [True, True, False, False]


def test_answers_outside_the_loss_do_not_count_in_the_metrics() -> None:
    items, batch = make_batch(16)
    _, metrics = correcting("policy_gradient", "truncate", mask_truncated=True).prepare(batch, alone)
    kept = [i for i, item in enumerate(items) if item.finished]
    weights, limited = all_weights([items[i] for i in kept], batch.select(kept), "truncate")
    assert len(kept) < len(items)
    found = metrics.result()
    assert found["sampler_weight"] == pytest.approx(sum(weights) / len(weights), rel=1e-5)
    assert found["sampler_corrections_beyond_cap"] == pytest.approx(sum(limited) / len(limited))
    assert found["effective_sample_size"] == pytest.approx(effective_sample_size(weights), rel=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_in_which_every_weight_is_0_teaches_nothing(family: str) -> None:
    _, batch = make_batch(6)
    old = Ragged(batch["logprobs"].values + 5.0, batch["logprobs"].lengths)
    batch = batch.with_fields(old_logprobs=old)
    method = correcting(family, kl={"coef": 0.0})
    prepared, metrics = method.prepare(batch, alone)
    output = model_output(batch, 7)
    assert output.logprobs is not None
    loss, _ = method.loss(prepared, output)
    (gradient,) = torch.autograd.grad(loss, output.logprobs)
    assert loss.item() == 0 and not gradient.any()
    assert metrics.result()["effective_sample_size"] == 0 == metrics.result()["sampler_weight"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_log_probability_that_is_no_number_reaches_the_loss(family: str) -> None:
    _, batch = make_batch(8)
    values = batch["old_logprobs"].values.clone()
    values[Responses.find(batch).index[0]] = torch.nan
    batch = batch.with_fields(old_logprobs=Ragged(values, batch["old_logprobs"].lengths))
    method = correcting(family)
    prepared, _ = method.prepare(batch, alone)
    logprobs = batch["logprobs"].values
    output = ModelOutput(batch["sequences"].lengths, logprobs, torch.zeros_like(logprobs))
    assert method.loss(prepared, output)[0].isnan()


def mean_kl(new: Tensor, old: Tensor) -> float:
    """Mean of r - 1 - log r with r = p_new / p_old."""
    log_ratio = new.double() - old.double()
    return (log_ratio.exp() - 1 - log_ratio).mean().item()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_stale_samples_have_a_divergence_instead_of_a_mismatch(family: str, recompute: bool) -> None:
    _, batch = make_batch(9)
    output = model_output(batch, 10)
    if not recompute:
        batch = Batch(batch.ids, {key: batch[key] for key in batch.fields if key != "old_logprobs"})
    method = make_train(family, stale=True, recompute_logprobs=recompute)
    prepared, before = method.prepare(batch, alone)
    _, first = method.loss(prepared, output)
    method.stop({"importance_ratio": 1.0})
    _, later = method.loss(prepared, output)

    at, sampled = Responses.find(batch).index, batch["logprobs"].values
    assert output.logprobs is not None
    start = batch["old_logprobs"].values if recompute else output.logprobs.detach()
    reporting, silent = (before, first) if recompute else (first, before)
    assert reporting.result()["stale_kl"] == pytest.approx(mean_kl(start[at], sampled[at]), rel=1e-4)
    assert "stale_kl" not in {*silent.result(), *later.result()}
    assert "sampler_trainer_mismatch" not in {*before.result(), *first.result(), *later.result()}


def test_the_mean_age_is_that_of_tokens_in_the_loss() -> None:
    _, batch = make_batch(16)
    batch = batch.with_fields(**{AGES: find_ages(batch, oldest=3, part=2, limit=2)})
    finished = batch["finished"].values != 0
    counts = Responses.find(batch).counts[finished].tolist()
    expected = [min(3 - token // 2, 2) for count in counts for token in range(count)]
    _, metrics = make_train("policy_gradient", mask_truncated=True).prepare(batch, alone)
    assert 0 < len(counts) < len(batch)
    assert metrics.result()["staleness"] == pytest.approx(sum(expected) / len(expected))


def test_distillation_reports_stale_samples_too() -> None:
    _, batch = make_batch(13)
    output = model_output(batch, 14)
    at, sampled = Responses.find(batch).index, batch["logprobs"].values
    batch = Batch(
        batch.ids, {key: batch[key] for key in ("sequences", "prompt_length", "finished", "logprobs")}
    )
    batch = batch.with_fields(**{DRAWN.name: near(batch["logprobs"], 15, 0.5)})
    method = DrawnTrain(DistillationConfig(top_k=None), stale=True)
    prepared, _ = method.prepare(batch, alone)
    _, metrics = method.loss(prepared, output)
    assert output.logprobs is not None
    assert metrics.result()["stale_kl"] == pytest.approx(mean_kl(output.logprobs[at], sampled[at]), rel=1e-4)
    assert "sampler_trainer_mismatch" not in metrics.result()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_mismatch_compares_with_the_sampler_even_if_log_probabilities_are_recomputed(family: str) -> None:
    _, batch = make_batch(11)
    method = correcting(family)
    prepared, before = method.prepare(batch, alone)
    output = model_output(batch, 12)
    _, metrics = method.loss(prepared, output)
    assert output.logprobs is not None
    gaps = (output.logprobs - batch["logprobs"].values)[Responses.find(batch).index].abs()
    assert metrics.result()["sampler_trainer_mismatch"] == pytest.approx(gaps.max().item())
    assert "stale_kl" not in {*before.result(), *metrics.result()}


def recipe(**changes: Any) -> dict[str, Any]:
    return {
        "algorithm": "ppo",
        "run_dir": "r",
        "data": {"train": "t", "batch": 8},
        "models": {"actor": {"path": "a"}, "reward": {"path": "b"}},
        **changes,
    }


def test_ppo_recomputes_for_the_actor_only() -> None:
    algorithm = build_algorithm(parse_experiment(recipe(ppo={"recompute_logprobs": True})))
    graph = algorithm.graph
    assert graph.call("actor.inference").outputs == ("old_logprobs",)
    assert isinstance(algorithm.method("actor.inference"), LogprobsInference)
    assert "old_logprobs" in graph.call("actor.train").inputs
    assert "old_logprobs" not in graph.call("critic.train").inputs
    plain = build_algorithm(parse_experiment(recipe())).graph
    assert "actor.inference" not in [call.name for call in plain.calls]


@pytest.mark.parametrize("config", [PPOConfig, PolicyGradientConfig])
@pytest.mark.parametrize("mode", MODES)
def test_corrections_need_recomputed_log_probabilities(config: type[PPOConfig], mode: Any) -> None:
    with pytest.raises(
        ValidationError, match=f"sampler_correction={mode} compares .*recompute_logprobs=true"
    ):
        config(sampler_correction=mode)


def test_samples_are_stale_only_if_the_recipe_says_so() -> None:
    experiment = parse_experiment(recipe())
    assert not samples_are_stale(experiment)
    for staleness, stale in ((0, False), (2, True)):
        asynchronous: Any = SimpleNamespace(asynchrony=SimpleNamespace(staleness=staleness))
        assert samples_are_stale(asynchronous) is stale
