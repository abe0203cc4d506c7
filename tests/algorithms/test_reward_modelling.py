import math
import random
from collections import defaultdict
from itertools import permutations
from types import SimpleNamespace

import pytest
import torch
from ppo_reference import VOCABULARY, TableModel

from realrl.algorithms.base.method import ModelOutput
from realrl.algorithms.reward_model import PairLossConfig, RankingConfig
from realrl.algorithms.reward_model_loss import (
    PairMethod,
    RankingMethod,
    StepMethod,
    plackett_luce_loss,
)
from realrl.data.batch import Batch, Ragged


def random_pairs(seed: int, count: int) -> Batch:
    rng = random.Random(seed)

    def rows() -> Ragged:
        lengths = [rng.randint(1, 6) for _ in range(count)]
        return Ragged.of([[rng.randrange(VOCABULARY) for _ in range(n)] for n in lengths], dtype=torch.int64)

    pairs = Ragged.scalars(torch.tensor([rng.randint(1, 4) for _ in range(count)]))
    return Batch(tuple(range(count)), {"chosen": rows(), "rejected": rows(), "pairs_of_prompt": pairs})


def reference_scores(batch: Batch, model: TableModel) -> list[tuple[float, float]]:
    value = model.table[1].detach().tolist()
    pairs = zip(batch["chosen"].rows(), batch["rejected"].rows(), strict=True)
    return [(value[int(c[-1])], value[int(r[-1])]) for c, r in pairs]


def expected_figures(batch: Batch, scores: list[tuple[float, float]]) -> dict[str, float]:
    """Means over pairs that weigh one over their number; ties are half right."""
    weights = [1 / n for n in batch["pairs_of_prompt"].values.tolist()]

    def mean(values: list[float]) -> float:
        return sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)

    figures = {
        "loss": mean([math.log(1 + math.exp(r - c)) for c, r in scores]),
        "accuracy": mean([1.0 if c > r else 0.5 if c == r else 0.0 for c, r in scores]),
        "margin": mean([c - r for c, r in scores]),
        "chosen_score": mean([c for c, _ in scores]),
        "rejected_score": mean([r for _, r in scores]),
    }
    return {name: pytest.approx(value, rel=1e-5) for name, value in figures.items()}


@pytest.mark.parametrize("seed", range(4))
def test_training_compares_the_values_at_the_last_tokens(seed: int) -> None:
    batch, model, method = random_pairs(seed, 7), TableModel(), PairMethod()
    figures = expected_figures(batch, reference_scores(batch, model))
    loss, metrics = method.loss(batch, model(method.sequences(batch)))
    assert metrics.result() == figures
    assert loss.item() / method.weight(batch) == figures["loss"]


def test_evaluation_scores_each_side_and_reports_the_same_figures() -> None:
    batch, model, method = random_pairs(5, 7), TableModel(), PairMethod()
    scores = reference_scores(batch, model)
    outputs = method.outputs(batch, model(method.sequences(batch)))
    assert outputs["chosen_score"].values.tolist() == pytest.approx([c for c, _ in scores])
    assert outputs["rejected_score"].values.tolist() == pytest.approx([r for _, r in scores])
    assert method.metrics(batch.with_fields(**outputs)).result() == expected_figures(batch, scores)


def test_a_tie_is_half_right() -> None:
    scores = {"chosen_score": torch.tensor([1.0, 2.0]), "rejected_score": torch.tensor([1.0, 1.0])}
    fields = {key: Ragged.scalars(values) for key, values in scores.items()}
    batch = Batch((0, 1), {**fields, "pairs_of_prompt": Ragged.scalars(torch.tensor([1, 1]))})
    assert PairMethod().metrics(batch).result()["accuracy"] == 0.75


def test_micro_batches_add_up_to_the_batch() -> None:
    batch, method = random_pairs(2, 6), PairMethod()
    whole, parts = TableModel(), TableModel()
    loss, _ = method.loss(batch, whole(method.sequences(batch)))
    loss.backward()
    total, weight = 0.0, 0.0
    for positions in ([5], [0, 2], [1, 4, 3]):
        part = batch.select(positions)
        part_loss, _ = method.loss(part, parts(method.sequences(part)))
        part_loss.backward()
        total, weight = total + part_loss.item(), weight + method.weight(part)
    assert total == pytest.approx(loss.item(), rel=1e-6)
    assert weight == pytest.approx(method.weight(batch), rel=1e-6)
    torch.testing.assert_close(parts.table.grad, whole.table.grad)


@pytest.mark.parametrize(("margins", "coefficient"), [(False, 0.01), (True, 0.0), (True, 0.3)])
def test_margins_and_centring_are_those_of_trl(margins: bool, coefficient: float) -> None:
    from accelerate import Accelerator
    from trl import RewardTrainer

    batch = random_pairs(8, 6)
    margin = torch.rand(6)
    fields = {"pairs_of_prompt": Ragged.scalars(torch.ones(6)), "margin": Ragged.scalars(margin)}
    batch = batch.with_fields(**fields)
    config = PairLossConfig(margins=margins, center_rewards_coefficient=coefficient)
    method, model = PairMethod(config), TableModel()
    loss, _ = method.loss(batch, model(method.sequences(batch)))
    loss = loss / method.weight(batch)
    (gradient,) = torch.autograd.grad(loss, model.table)

    pairs = zip(batch["chosen"].rows(), batch["rejected"].rows(), strict=True)
    ends = torch.tensor([[int(c[-1]), int(r[-1])] for c, r in pairs])
    logits = model.table[1][ends.T.flatten()][:, None]
    stub = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=Accelerator(cpu=True),
        args=SimpleNamespace(center_rewards_coefficient=coefficient or None),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {"attention_mask": torch.ones(1), **({"margin": margin} if margins else {})}
    expected = RewardTrainer.compute_loss(stub, lambda **_: SimpleNamespace(logits=logits), inputs)
    (expected_gradient,) = torch.autograd.grad(expected, model.table)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-7)


def test_probabilities_of_all_rankings_of_answers_add_up_to_one() -> None:
    scores = torch.tensor([0.3, -1.0, 2.0, 0.5])
    orders = torch.stack([scores[list(order)] for order in permutations(range(4))])
    assert (-plackett_luce_loss(orders)).exp().sum().item() == pytest.approx(1.0, rel=1e-5)
    best = scores.softmax(0)[2] * scores[[3, 0, 1]].softmax(0)[0] * scores[[0, 1]].softmax(0)[0]
    found = plackett_luce_loss(scores[[2, 3, 0, 1]][None])
    assert found.item() == pytest.approx(-math.log(best.item()), rel=1e-5)


def test_two_ranked_answers_are_a_pair() -> None:
    batch = random_pairs(9, 5)
    fields = {"pairs_of_prompt": Ragged.scalars(torch.ones(5))}
    pairs = batch.with_fields(**fields)
    ranked = Batch(batch.ids, {"answer_0": batch["chosen"], "answer_1": batch["rejected"]})
    model = TableModel()
    method = RankingMethod(RankingConfig(answers=2, center_rewards_coefficient=0.2))
    of_pairs = PairMethod(PairLossConfig(center_rewards_coefficient=0.2))
    loss, metrics = method.loss(ranked, model(method.sequences(ranked)))
    expected, theirs = of_pairs.loss(pairs, model(of_pairs.sequences(pairs)))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    found = metrics.result()
    for name in ("loss", "accuracy", "margin"):
        assert found[name] == pytest.approx(theirs.result()[name], rel=1e-6)
    inference = RankingMethod(RankingConfig(answers=2, center_rewards_coefficient=0.2))
    outputs = inference.outputs(ranked, model(inference.sequences(ranked)))
    assert inference.metrics(ranked.with_fields(**outputs)).result() == pytest.approx(found, rel=1e-6)


def test_steps_are_judged_at_their_last_tokens() -> None:
    tokens = Ragged.of([[1, 2, 3, 4], [5, 6, 7]], dtype=torch.int64)
    fields = {
        "tokens": tokens,
        "step_ends": Ragged.of([[2, 3], [1]], dtype=torch.int64),
        "step_labels": Ragged.of([[1, 0], [1]], dtype=torch.int64),
    }
    batch = Batch((0, 1), fields)
    values = torch.tensor([9.0, 9.0, 2.0, 0.5, 9.0, -1.0, 9.0], requires_grad=True)
    output = ModelOutput(tokens.lengths, values=values)
    loss, metrics = StepMethod().loss(batch, output)
    sigmoid = [1 / (1 + math.exp(-score)) for score in (2.0, 0.5, -1.0)]
    expected = -math.log(sigmoid[0]) - math.log(1 - sigmoid[1]) - math.log(sigmoid[2])
    assert loss.item() == pytest.approx(expected, rel=1e-5) and StepMethod().weight(batch) == 3
    loss.backward()
    assert values.grad is not None and values.grad.nonzero().flatten().tolist() == [2, 3, 5]
    assert metrics.result()["accuracy"] == pytest.approx(1 / 3)
    found = StepMethod().outputs(batch, output)
    assert found["step_scores"].values.tolist() == [2.0, 0.5, -1.0]
    evaluated = StepMethod().metrics(batch.with_fields(**found)).result()
    assert evaluated == pytest.approx(metrics.result(), rel=1e-6)
