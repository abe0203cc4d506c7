import math
import random

import pytest
import torch
from ppo_reference import VOCABULARY, TableModel

from realrl.algorithms.reward.losses import bradley_terry_loss
from realrl.algorithms.reward.method import PairInference, RewardTrain
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
    batch, model, method = random_pairs(seed, 7), TableModel(), RewardTrain()
    figures = expected_figures(batch, reference_scores(batch, model))
    loss, metrics = method.loss(batch, model(method.sequences(batch)))
    assert metrics.result() == figures
    assert loss.item() / method.weight(batch) == figures["loss"]


def test_evaluation_scores_each_side_and_reports_the_same_figures() -> None:
    batch, model, method = random_pairs(5, 7), TableModel(), PairInference()
    scores = reference_scores(batch, model)
    outputs = method.outputs(batch, model(method.sequences(batch)))
    assert outputs["chosen_score"].values.tolist() == pytest.approx([c for c, _ in scores])
    assert outputs["rejected_score"].values.tolist() == pytest.approx([r for _, r in scores])
    assert method.metrics(batch.with_fields(**outputs)).result() == expected_figures(batch, scores)


def test_a_tie_is_half_right() -> None:
    scores = {"chosen_score": torch.tensor([1.0, 2.0]), "rejected_score": torch.tensor([1.0, 1.0])}
    fields = {key: Ragged.scalars(values) for key, values in scores.items()}
    batch = Batch((0, 1), {**fields, "pairs_of_prompt": Ragged.scalars(torch.tensor([1, 1]))})
    assert PairInference().metrics(batch).result()["accuracy"] == 0.75


def test_the_two_sequences_of_a_pair_are_neighbours() -> None:
    batch = random_pairs(1, 3)
    rows = RewardTrain().sequences(batch).rows()
    for i in range(3):
        assert rows[2 * i].tolist() == batch["chosen"].row(i).tolist()
        assert rows[2 * i + 1].tolist() == batch["rejected"].row(i).tolist()


def test_micro_batches_add_up_to_the_batch() -> None:
    batch, method = random_pairs(2, 6), RewardTrain()
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


def test_extreme_margins_stay_finite() -> None:
    chosen, rejected = torch.tensor([300.0, -300.0]), torch.tensor([-300.0, 300.0])
    assert bradley_terry_loss(chosen=chosen, rejected=rejected).tolist() == [0.0, 600.0]
