"""Losses of the policy gradients beside those of TRL, and their advantages beside plain Python."""

import math
from collections import defaultdict
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ppo_reference import Item, on_ranks, random_items, to_batch
from torch import Tensor

from realrl.algorithms.base.method import ModelOutput
from realrl.algorithms.base.rows import Responses
from realrl.algorithms.policy_gradient import PolicyGradientConfig
from realrl.algorithms.policy_gradient_loss import PolicyGradientTrain
from realrl.data.batch import Batch, Ragged
from realrl.engine.model import make_unsharded_model
from realrl.engine.training.trainer import Trainer, TrainOptions
from realrl.families.shape import ModelShape
from realrl.recipe.optimizer import OptimizerConfig
from realrl.recipe.registry import find_algorithm
from realrl.testing.shrink import SHAPE

PROMPTS, SAMPLES, MOST = 3, 4, 7


def alone(tensor: Tensor) -> Tensor:
    return tensor


def config_of(preset: str, **changes: Any) -> PolicyGradientConfig:
    section: PolicyGradientConfig = find_algorithm(preset)[0].recipe.model_fields["policy"].default
    return type(section).model_validate(section.model_dump() | changes)


def make_train(config: PolicyGradientConfig, *, skips: bool = False) -> PolicyGradientTrain:
    return PolicyGradientTrain(config, prompts=PROMPTS, max_new_tokens=MOST, skips=skips)


def random_batch(seed: int, samples: int = SAMPLES) -> tuple[list[Item], Batch]:
    items = random_items(seed, PROMPTS * samples)
    for item in items:
        item.ref_logprobs = [0.0] * item.prompt + item.ref_logprobs[item.prompt :]
    batch = to_batch(items)
    greedy = torch.randn(len(items), generator=torch.Generator().manual_seed(seed))
    return items, batch.with_fields(greedy_score=Ragged.scalars(greedy))


def model_output(batch: Batch, seed: int, change: float = 0.3) -> ModelOutput:
    """A trained model's output: near what was sampled, so that some ratios are clipped."""
    noise = torch.randn(len(batch["logprobs"].values), generator=torch.Generator().manual_seed(seed))
    logprobs = (batch["logprobs"].values + change * noise).requires_grad_()
    return ModelOutput(batch["sequences"].lengths, logprobs=logprobs, entropy=torch.zeros_like(logprobs))


def padded(values: Tensor, answers: Responses) -> Tensor:
    return answers.pad(values[answers.index])


def trl_loss(trainer: str, settings: dict[str, Any], inputs: dict[str, Tensor], logprobs: Tensor) -> Tensor:
    """The loss of one of TRL's trainers, from everything that it takes of models."""
    from accelerate import Accelerator
    from trl import GRPOTrainer, RLOOTrainer

    count = len(logprobs)
    stub = SimpleNamespace(
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=MOST,
        accelerator=Accelerator(cpu=True),
        model=SimpleNamespace(training=True),
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
        **settings,
    )
    ids = torch.zeros(count, logprobs.shape[1], dtype=torch.int64)
    prompt = torch.zeros(count, 1, dtype=torch.int64)
    given = {"prompt_ids": prompt, "prompt_mask": prompt + 1, "completion_ids": ids, **inputs}
    classes = {"grpo": GRPOTrainer, "rloo": RLOOTrainer}
    return classes[trainer]._compute_loss(stub, None, given)


def trl_loss_of(
    batch: Batch, config: PolicyGradientConfig, trainer: str, settings: dict[str, Any], logprobs: Tensor
) -> Tensor:
    """TRL's loss of a prepared batch. logprobs: [T] of the trained model"""
    answers = Responses.of(batch["sequences"], batch["prompt_length"])
    mask = padded(torch.ones_like(logprobs), answers)
    inputs = {
        "completion_mask": mask,
        "advantages": padded(batch["advantages"].values, answers)[:, 0],
        "old_per_token_logps": padded(batch["logprobs"].values, answers),
        "old_logps": padded(batch["logprobs"].values, answers).sum(1),
        "ref_per_token_logps": padded(batch["ref_logprobs"].values, answers),
        "num_items_in_batch": mask.sum(),
    }
    low, high = config.clip_range
    arguments = SimpleNamespace(use_bias_correction_kl=False, delta=config.dual_clip, steps_per_generation=1)
    of = {"args": arguments, "epsilon_low": low, "epsilon_high": high, **settings}
    return trl_loss(trainer, of, inputs, padded(logprobs, answers))


GRPO = {"loss_type": "grpo", "importance_sampling_level": "token", "beta": 0.0}


@pytest.mark.parametrize(
    ("preset", "changes", "trainer", "settings"),
    [
        ("grpo", {"kl": {"coef": 0.04}}, "grpo", {**GRPO, "beta": 0.04}),
        ("grpo", {"kl": {"coef": 0.0}, "dual_clip": 1.5}, "grpo", GRPO),
        ("dr_grpo", {}, "grpo", {**GRPO, "loss_type": "dr_grpo"}),
        ("dapo", {}, "grpo", {**GRPO, "loss_type": "dapo"}),
        ("gspo", {"clip": 0.1, "clip_high": 0.15}, "grpo", {**GRPO, "importance_sampling_level": "sequence"}),
        ("rloo", {"clip": 0.5}, "rloo", {}),
    ],
    ids=["grpo", "grpo-delta", "dr_grpo", "dapo", "gspo", "rloo"],
)
def test_loss_and_its_gradient_equal_those_of_trl(
    preset: str, changes: dict[str, Any], trainer: str, settings: dict[str, Any]
) -> None:
    config = config_of(preset, samples=SAMPLES, **changes)
    _, batch = random_batch(1)
    method = make_train(config)
    prepared, _ = method.prepare(batch, alone)
    output = model_output(prepared, 2)
    assert output.logprobs is not None
    loss, metrics = method.loss(prepared, output)
    loss = loss / method.weight(prepared)
    (gradient,) = torch.autograd.grad(loss, output.logprobs)

    logprobs = output.logprobs.detach().clone().requires_grad_()
    expected = trl_loss_of(prepared, config, trainer, settings, logprobs)
    (expected_gradient,) = torch.autograd.grad(expected, logprobs)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-7)
    clipped = metrics.result()["clip_fraction"]
    assert 0 < clipped < 1


@pytest.mark.parametrize(
    ("preset", "changes", "trainer", "settings"),
    [
        ("grpo", {"kl": {"coef": 0.04}}, "grpo", {**GRPO, "beta": 0.04}),
        ("dr_grpo", {}, "grpo", {**GRPO, "loss_type": "dr_grpo"}),
        ("gspo", {}, "grpo", {**GRPO, "importance_sampling_level": "sequence"}),
        ("rloo", {"kl": {"coef": 0.0}}, "rloo", {}),
    ],
)
def test_the_metric_loss_is_that_of_trl_whatever_the_micro_batches(
    preset: str,
    changes: dict[str, Any],
    trainer: str,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of(preset, samples=SAMPLES, minibatches=1, epochs=1, **changes)
    _, batch = random_batch(1)
    outputs: list[Tensor] = []
    plain = PolicyGradientTrain.loss

    def keep(method: PolicyGradientTrain, part: Batch, output: ModelOutput) -> Any:
        assert output.logprobs is not None
        outputs.append(output.logprobs.detach())
        return plain(method, part, output)

    monkeypatch.setattr(PolicyGradientTrain, "loss", keep)
    losses = [train_once(make_train(config), batch, tokens)["loss"] for tokens in (10_000, 16)]
    assert len(outputs) > 3, "the second one has several micro-batches"
    prepared, _ = make_train(config).prepare(batch, alone)
    expected = trl_loss_of(prepared, config, trainer, settings, outputs[0]).item()
    assert losses == pytest.approx([expected, expected], rel=1e-5, abs=1e-6)


def train_once(method: PolicyGradientTrain, batch: Batch, tokens: int) -> dict[str, float]:
    """Metrics of a train call of a small model, in micro-batches of so many tokens."""
    shape = ModelShape.model_validate({**SHAPE, "init_std": 0.2})
    model = make_unsharded_model(shape, "lm", dtype=torch.float32, device=torch.device("cpu"))
    (parameters,) = (held.buffer.data for held in model.sets.values())
    parameters.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
    trainer = Trainer(model, OptimizerConfig())
    return trainer.train(
        batch, method, [list(range(len(batch)))], TrainOptions(max_tokens=tokens), lr=1e-3
    ).result()


def groups(values: list[float], samples: int) -> list[list[float]]:
    return [values[i : i + samples] for i in range(0, len(values), samples)]


def reference_advantages(
    items: list[Item], greedy: list[float], config: PolicyGradientConfig
) -> list[list[float]]:
    """Advantages of every token of every answer, written out."""
    kls = [[item.logprobs[t] - item.ref_logprobs[t] for t in item.actions] for item in items]
    coef, place = config.kl.coef, config.kl.place
    rewards = [
        item.score - (coef * sum(kl) if place == "reward" else 0) for item, kl in zip(items, kls, strict=True)
    ]
    advantages = []
    for group in groups(rewards, config.samples):
        others = [[r for j, r in enumerate(group) if j != i] for i in range(len(group))]
        for i, reward in enumerate(group):
            match config.baseline:
                case "group_mean":
                    advantage = reward - fmean(group)
                case "leave_one_out":
                    advantage = reward - fmean(others[i])
                case "greedy":
                    advantage = reward - greedy[len(advantages)]
                case "none":
                    advantage = reward
            if config.scale == "group_std":
                advantage /= stdev(group) + 1e-4
            elif config.scale == "batch_std":
                advantage /= stdev(rewards) + 1e-4
            advantages.append(advantage)
    tokens = [
        [a - (coef * sum(kl[t:]) if place == "token_reward" else 0) for t in range(len(kl))]
        for a, kl in zip(advantages, kls, strict=True)
    ]
    if config.scale == "batch_norm":
        flat = [a for row in tokens for a in row]
        mean, deviation = fmean(flat), math.sqrt(fmean(a * a for a in flat) - fmean(flat) ** 2)
        tokens = [[(a - mean) / (deviation + 1e-8) for a in row] for row in tokens]
    return tokens


@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("grpo", {}),
        ("grpo", {"scale": "batch_std"}),
        ("dr_grpo", {}),
        ("rloo", {}),
        ("reinforce_pp", {}),
        ("reinforce_pp_baseline", {}),
        ("remax", {}),
    ],
)
@pytest.mark.parametrize("ranks", [1, 3])
def test_advantages_equal_those_written_out_on_any_number_of_ranks(
    preset: str, changes: dict[str, Any], ranks: int
) -> None:
    samples = min(config_of(preset).samples, SAMPLES)
    config = config_of(preset, **changes, samples=samples)
    items, batch = random_batch(3, config.samples)
    expected = reference_advantages(items, batch["greedy_score"].values.tolist(), config)

    def run(rank: int, dp_sum: Any) -> list[tuple[int, list[float]]]:
        mine = batch.select(range(rank, len(batch), ranks))
        prepared, _ = make_train(config).prepare(mine, dp_sum)
        rows = prepared["advantages"].rows()
        return [(i, row.tolist()[items[i].prompt :]) for i, row in zip(mine.ids, rows, strict=True)]

    for i, row in (pair for found in on_ranks(ranks, run) for pair in found):
        assert row == pytest.approx(expected[i], rel=1e-4, abs=1e-5)


def with_scores(batch: Batch, scores: Tensor) -> Batch:
    return batch.with_fields(score=Ragged.scalars(scores))


def test_skipped_answers_leave_the_loss_and_the_statistics_of_their_group() -> None:
    config = config_of("grpo", samples=SAMPLES)
    _, batch = random_batch(4)
    scores = batch["score"].values.clone()
    scores[1] = torch.nan
    method = make_train(config, skips=True)
    prepared, _ = method.prepare(with_scores(batch, scores), alone)
    assert prepared["kept"].values.tolist() == [float(i != 1) for i in range(len(batch))]
    rest = [scores[i].item() for i in (0, 2, 3)]
    first = prepared["advantages"].row(0)[int(batch["prompt_length"].values[0])].item()
    assert first == pytest.approx((rest[0] - fmean(rest)) / (stdev(rest) + 1e-4), rel=1e-4)

    output = model_output(prepared, 5)
    assert output.logprobs is not None
    loss, _ = method.loss(prepared, output)
    (gradient,) = torch.autograd.grad(loss, output.logprobs)
    start, end = batch["sequences"].offsets[1:3]
    assert loss.isfinite() and not gradient[start:end].any() and gradient[end:].any()
    assert method.weight(prepared) == len(batch) - 1


def test_a_score_that_is_no_number_makes_no_finite_loss_where_nothing_may_be_skipped() -> None:
    _, batch = random_batch(6)
    scores = batch["score"].values.clone()
    scores[2] = torch.nan
    method = make_train(config_of("grpo", samples=SAMPLES))
    prepared, metrics = method.prepare(with_scores(batch, scores), alone)
    loss, _ = method.loss(prepared, model_output(prepared, 7))
    assert loss.isnan() and math.isnan(metrics.result()["score"])


def test_a_group_of_one_answer_that_has_a_reward_teaches_nothing() -> None:
    _, batch = random_batch(8)
    scores = batch["score"].values.clone()
    scores[1:SAMPLES] = torch.nan
    for preset in ("grpo", "rloo"):
        method = make_train(config_of(preset, samples=SAMPLES, kl={"coef": 0.0}), skips=True)
        prepared, _ = method.prepare(with_scores(batch, scores), alone)
        assert not prepared["advantages"].row(0).any()


def test_truncated_answers_are_left_out_where_the_recipe_says_so() -> None:
    _, batch = random_batch(9)
    method = make_train(config_of("dapo", samples=SAMPLES, mask_truncated=True))
    prepared, _ = method.prepare(batch, alone)
    assert prepared["kept"].values.equal(batch["finished"].values)
    answers = Responses.of(batch["sequences"], batch["prompt_length"])
    assert method.weight(prepared) == int(answers.counts[batch["finished"].values != 0].sum())


def test_overlong_answers_lose_reward_as_in_the_paper() -> None:
    config = config_of("dapo", samples=SAMPLES, overlong_buffer=4, overlong_penalty=2.0)
    items, batch = random_batch(10)
    _, metrics = make_train(config).prepare(batch, alone)
    punished = [
        item.score + (0 if len(item.actions) <= 3 else 2.0 * (3 - len(item.actions)) / 4) for item in items
    ]
    assert metrics.result()["reward"] == pytest.approx(fmean(punished), rel=1e-5)
