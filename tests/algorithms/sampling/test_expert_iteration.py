"""Expert iteration: what is learnt and its loss beside plain Python, skipped answers, steps without any."""

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from realrl.algorithms.expert_iteration import ExpertIterationConfig
from realrl.algorithms.expert_iteration_loss import ExpertIterationTrain, select_answers
from realrl.config.errors import UserCodeError
from realrl.data.batch import Batch
from realrl.engine.model import make_unsharded_model
from realrl.engine.training.trainer import Trainer, TrainOptions
from realrl.families.shape import ModelShape
from realrl.recipe.optimizer import OptimizerConfig
from realrl.testing.shrink import SHAPE
from tests.algorithms.ppo_reference import Item, TableModel, alone, on_ranks, random_items, to_batch

PROMPTS, SAMPLES = 3, 4
NAN = math.nan


def make_train(*, skips: bool = False, **changes: Any) -> ExpertIterationTrain:
    config = ExpertIterationConfig(samples=SAMPLES, **changes)
    return ExpertIterationTrain(config, prompts=PROMPTS, skips=skips)


def random_batch(seed: int, scores: list[float] | None = None) -> tuple[list[Item], Batch]:
    items = random_items(seed, PROMPTS * SAMPLES)
    for item, score in zip(items, scores or (), strict=False):
        item.score = score
    return items, to_batch(items)


@pytest.mark.parametrize(
    ("scores", "keep", "threshold", "expected"),
    [
        ([1.0, 3.0, 2.0, 3.0], 1, None, [1]),
        ([1.0, 3.0, 2.0, 3.0], 3, None, [1, 2, 3]),
        ([1.0, 3.0, 2.0, 3.0], None, 2.0, [1, 2, 3]),
        ([1.0, 3.0, 2.0, 3.0], 2, 2.5, [1, 3]),
        ([1.0, 0.0, 1.0, 0.5], 3, 1.0, [0, 2]),
        ([1.0, 0.0, 1.0, 0.5], None, 2.0, []),
        ([NAN, -5.0, NAN, -6.0], 3, None, [1, 3]),
        ([NAN, NAN, NAN, NAN], 1, None, []),
        ([math.inf, 1.0, NAN, -math.inf], 2, None, [1]),
    ],
)
def test_the_best_are_selected_and_none_without_a_score(
    scores: list[float], keep: int | None, threshold: float | None, expected: list[int]
) -> None:
    table = torch.tensor([scores, [0.0, 1.0, 2.0, 3.0]], dtype=torch.float64)
    chosen = select_answers(table, keep=keep, threshold=threshold)
    assert chosen[0].nonzero().flatten().tolist() == expected


def written_out(
    items: list[Item], table: list[float], config: ExpertIterationConfig
) -> tuple[set[int], float]:
    """The items that are learnt, and the loss of all of them, for a model that looks at the token alone."""
    learnt: set[int] = set()
    for first in range(0, len(items), SAMPLES):
        group = sorted(range(first, first + SAMPLES), key=lambda i: (-items[i].score, i))
        group = [i for i in group if config.threshold is None or items[i].score >= config.threshold]
        learnt |= set(group[: config.keep])
    nlls = [[-table[items[i].tokens[t]] for t in items[i].actions] for i in sorted(learnt)]
    if config.aggregate == "token_mean":
        return learnt, sum(map(sum, nlls)) / sum(map(len, nlls))
    return learnt, sum(sum(nll) / len(nll) for nll in nlls) / len(nlls)


@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize(
    "selection", [{"keep": 1}, {"keep": 3, "threshold": -1.0}, {"keep": None, "threshold": 0.0}]
)
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_loss_and_its_gradient_are_those_written_out_on_any_number_of_ranks(
    aggregate: str, selection: dict[str, Any], ranks: int
) -> None:
    items, batch = random_batch(1)
    model, reference = TableModel(), TableModel()
    config = ExpertIterationConfig(samples=SAMPLES, aggregate=aggregate, **selection)
    learnt, _ = written_out(items, reference.table[0].tolist(), config)

    def run(rank: int, dp_sum: Any) -> tuple[Tensor, float, list[int], dict[str, float]]:
        method = ExpertIterationTrain(config, prompts=PROMPTS)
        mine = batch.select(range(rank, len(batch), ranks))
        prepared, metrics = method.prepare(mine, dp_sum)
        loss, _ = method.loss(prepared, model(method.sequences(prepared)))
        kept = [i for i, of in zip(mine.ids, prepared["kept"].values.tolist(), strict=True) if of]
        return loss, method.weight(prepared), kept, metrics.to_plain()["means"]

    found = on_ranks(ranks, run)
    assert {i for _, _, kept, _ in found for i in kept} == learnt
    loss = sum(loss for loss, *_ in found) / sum(weight for _, weight, *_ in found)
    (gradient,) = torch.autograd.grad(loss, model.table)

    nlls = [-reference.table[0][torch.tensor(items[i].tokens[items[i].prompt :])] for i in sorted(learnt)]
    expected = (
        torch.cat(nlls).mean() if aggregate == "token_mean" else torch.stack([n.mean() for n in nlls]).mean()
    )
    (expected_gradient,) = torch.autograd.grad(expected, reference.table)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert written_out(items, reference.table[0].tolist(), config)[1] == pytest.approx(
        expected.item(), rel=1e-5
    )
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-6)

    sums = {
        name: [sum(part) for part in zip(*(m[name] for *_, m in found), strict=True)] for name in found[0][3]
    }
    means = {name: total / weight for name, (total, weight) in sums.items()}
    assert means["kept"] == pytest.approx(len(learnt) / len(items))
    assert means["score"] == pytest.approx(sum(item.score for item in items) / len(items), rel=1e-5)
    assert means["kept_score"] == pytest.approx(sum(items[i].score for i in learnt) / len(learnt), rel=1e-5)
    groups = {i // SAMPLES for i in learnt}
    assert means["prompts_without_kept"] == pytest.approx(1 - len(groups) / PROMPTS)


def test_only_what_is_learnt_goes_through_the_model() -> None:
    items, batch = random_batch(2)
    method = make_train(keep=1)
    prepared, _ = method.prepare(batch, alone)
    kept = prepared["kept"].values.tolist()
    expected = [len(item.tokens) if of else 1 for item, of in zip(items, kept, strict=True)]
    assert list(method.sequences(prepared).lengths) == expected and sum(kept) == PROMPTS


def test_skipped_answers_are_neither_learnt_nor_counted() -> None:
    scores = [NAN, 5.0, NAN, 1.0, NAN, NAN, NAN, NAN]
    items, batch = random_batch(3, scores)
    prepared, metrics = make_train(keep=3, skips=True).prepare(batch, alone)
    assert prepared["kept"].values.tolist()[:8] == [0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    found = metrics.result()
    rest = [item.score for item in items if not math.isnan(item.score)]
    assert found["score"] == pytest.approx(sum(rest) / len(rest), rel=1e-5)
    assert found["skipped"] == pytest.approx(6 / len(items))
    assert found["prompts_without_kept"] == pytest.approx(1 / PROMPTS)
    with pytest.raises(UserCodeError, match="gave None, or failed, for all answers of the step"):
        make_train(skips=True).prepare(random_batch(3, [NAN] * 12)[1], alone)


@pytest.mark.parametrize(("score", "skips"), [(NAN, False), (math.inf, False), (math.inf, True)])
def test_a_score_that_a_mistake_made_is_never_learnt(score: float, skips: bool) -> None:
    _, batch = random_batch(4, [score])
    method, model = make_train(skips=skips), TableModel()
    prepared, metrics = method.prepare(batch, alone)
    loss, _ = method.loss(prepared, model(method.sequences(prepared)))
    assert loss.isnan(), "so that the step is not applied, but counted"
    assert not math.isfinite(metrics.result()["score"])


def test_mini_batches_without_anything_to_learn_change_nothing() -> None:
    shape = ModelShape.model_validate({**SHAPE, "init_std": 0.2})
    model = make_unsharded_model(shape, "lm", dtype=torch.float32, device=torch.device("cpu"))
    (parameters,) = (held.buffer.data for held in model.sets.values())
    parameters.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
    trainer = Trainer(model, OptimizerConfig(lr=1e-2, weight_decay=0.1))
    _, batch = random_batch(5, [2.0, *[0.0] * 11])
    minibatches = [list(range(4)), list(range(4, 12))]

    def step(threshold: float) -> dict[str, float]:
        method = make_train(threshold=threshold)
        return trainer.train(batch, method, minibatches, TrainOptions(max_tokens=64), lr=1e-2).result()

    first = step(1.0)
    assert first["empty_steps"] == 1 and first["loss"] > 0 and first["grad_norm"] > 0
    before = parameters.clone()
    nothing = step(3.0)
    assert nothing["empty_steps"] == 2 and nothing["kept"] == 0 and nothing["skipped_steps"] == 0
    assert torch.equal(parameters, before), "no momentum, no weight decay"
    assert "empty_steps" not in step(-1.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 4, "keep": 5}, "keep=5 of 4 samples"),
        ({"samples": 4, "keep": 4}, "keep=4 and threshold=null learn all 4 samples"),
        ({"samples": 4, "keep": None}, "keep=null and threshold=null learn all"),
        ({"samples": 1}, "keep=1 and threshold=null learn all 1 samples"),
    ],
)
def test_a_selection_that_selects_nothing_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ExpertIterationConfig.model_validate(changes)
