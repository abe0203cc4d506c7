import math
import random

import pytest
import torch
from ppo_reference import VOCABULARY, TableModel

from realrl.algorithms.reward.losses import bradley_terry_loss
from realrl.algorithms.reward.method import RewardInference, RewardTrain
from realrl.data.batch import Batch, Ragged


def random_pairs(seed: int, count: int) -> Batch:
    rng = random.Random(seed)

    def rows() -> Ragged:
        lengths = [rng.randint(1, 6) for _ in range(count)]
        return Ragged.of([[rng.randrange(VOCABULARY) for _ in range(n)] for n in lengths], dtype=torch.int64)

    return Batch(tuple(range(count)), {"chosen": rows(), "rejected": rows()})


def reference_scores(batch: Batch, model: TableModel) -> list[tuple[float, float]]:
    value = model.table[1].detach().tolist()
    pairs = zip(batch["chosen"].rows(), batch["rejected"].rows(), strict=True)
    return [(value[int(c[-1])], value[int(r[-1])]) for c, r in pairs]


def expected_figures(scores: list[tuple[float, float]]) -> dict[str, float]:
    n = len(scores)
    return {
        "loss": pytest.approx(sum(math.log(1 + math.exp(r - c)) for c, r in scores) / n, rel=1e-5),
        "accuracy": sum(c > r for c, r in scores) / n,
        "margin": pytest.approx(sum(c - r for c, r in scores) / n, rel=1e-5),
        "chosen_score": pytest.approx(sum(c for c, _ in scores) / n, rel=1e-5),
        "rejected_score": pytest.approx(sum(r for _, r in scores) / n, rel=1e-5),
    }


@pytest.mark.parametrize("seed", range(4))
def test_training_compares_the_values_at_the_last_tokens(seed: int) -> None:
    batch, model, method = random_pairs(seed, 7), TableModel(), RewardTrain()
    figures = expected_figures(reference_scores(batch, model))
    loss, metrics = method.loss(batch, model(method.sequences(batch)))
    assert metrics.result() == figures
    assert loss.item() / method.weight(batch) == figures["loss"]


def test_evaluation_scores_each_side_and_reports_the_same_figures() -> None:
    batch, model, method = random_pairs(5, 7), TableModel(), RewardInference()
    scores = reference_scores(batch, model)
    outputs = method.outputs(batch, model(method.sequences(batch)))
    assert outputs["chosen_score"].values.tolist() == pytest.approx([c for c, _ in scores])
    assert outputs["rejected_score"].values.tolist() == pytest.approx([r for _, r in scores])
    assert method.metrics(batch.with_fields(**outputs)).result() == expected_figures(scores)


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
    total = 0.0
    for positions in ([5], [0, 2], [1, 4, 3]):
        part = batch.select(positions)
        part_loss, _ = method.loss(part, parts(method.sequences(part)))
        part_loss.backward()
        total += part_loss.item()
    assert total == pytest.approx(loss.item(), rel=1e-6)
    torch.testing.assert_close(parts.table.grad, whole.table.grad)


def test_extreme_margins_stay_finite() -> None:
    chosen, rejected = torch.tensor([300.0, -300.0]), torch.tensor([-300.0, 300.0])
    assert bradley_terry_loss(chosen=chosen, rejected=rejected).tolist() == [0.0, 600.0]
