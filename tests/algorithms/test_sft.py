import math
import random

import pytest
import torch
from ppo_reference import VOCABULARY, TableModel, alone

from realrl.algorithms.sft_loss import SFTMethod
from realrl.data.batch import Batch, Ragged


def random_batch(seed: int, count: int) -> Batch:
    rng = random.Random(seed)
    rows = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 9))] for _ in range(count)]
    masks = [[0, *(rng.randint(0, 1) for _ in row[1:])] for row in rows]
    fields = {
        key: Ragged.of(value, dtype=torch.int64) for key, value in (("tokens", rows), ("loss_mask", masks))
    }
    return Batch(tuple(range(count)), fields)


def reference_nll(batch: Batch, model: TableModel) -> tuple[list[float], int]:
    """Per item, and the number of tokens to learn."""
    losses, answers = [], 0
    for tokens, mask in zip(batch["tokens"].rows(), batch["loss_mask"].rows(), strict=True):
        learnt = [t for t in range(len(tokens)) if mask[t]]
        losses.append(sum(-float(model.table[0, tokens[t]].detach()) for t in learnt))
        answers += len(learnt)
    return losses, answers


@pytest.mark.parametrize("seed", range(5))
def test_loss_is_the_nll_of_the_tokens_to_learn(seed: int) -> None:
    batch, model, method = random_batch(seed, 6), TableModel(), SFTMethod()
    losses, answers = reference_nll(batch, model)
    prepared, _ = method.prepare(batch, alone)
    loss, metrics = method.loss(prepared, model(method.sequences(prepared)))
    assert loss.item() == pytest.approx(sum(losses), rel=1e-5)
    assert method.weight(batch) == answers
    assert metrics.result()["loss"] == pytest.approx(sum(losses) / answers, rel=1e-5)


def test_evaluation_reports_the_same_loss_as_training() -> None:
    batch, model, method = random_batch(7, 6), TableModel(), SFTMethod()
    losses, answers = reference_nll(batch, model)
    outputs = method.outputs(batch, model(method.sequences(batch)))
    assert outputs["nll"].values.tolist() == pytest.approx(losses, rel=1e-5)
    assert outputs["nll"].lengths == (1,) * 6
    metrics = method.metrics(batch.with_fields(**outputs)).result()
    assert metrics == {"loss": pytest.approx(sum(losses) / answers, rel=1e-5)}


def test_an_item_without_answer_adds_nothing_and_keeps_gradients_finite() -> None:
    fields = {
        "tokens": Ragged.of([[1, 2, 3]], dtype=torch.int64),
        "loss_mask": Ragged.of([[0, 0, 0]], dtype=torch.int64),
    }
    batch, model, method = Batch((0,), fields), TableModel(), SFTMethod()
    loss, metrics = method.loss(batch, model(method.sequences(batch)))
    loss.backward()
    assert loss.item() == 0 and method.weight(batch) == 0
    assert not model.table.grad.any()
    assert math.isnan(metrics.result()["loss"])


def test_micro_batches_add_up_to_the_batch() -> None:
    batch, method = random_batch(3, 8), SFTMethod()
    whole, parts = TableModel(), TableModel()
    loss, metrics = method.loss(batch, whole(method.sequences(batch)))
    loss.backward()
    total, weight = 0.0, 0
    for positions in ([4, 0, 7], [1], [2, 3, 5, 6]):
        part = batch.select(positions)
        part_loss, part_metrics = method.loss(part, parts(method.sequences(part)))
        part_loss.backward()
        total, weight = total + part_loss.item(), weight + method.weight(part)
        metrics.update(part_metrics)
    assert total == pytest.approx(loss.item(), rel=1e-6) and weight == method.weight(batch)
    torch.testing.assert_close(parts.table.grad, whole.table.grad)
    assert metrics.result()["loss"] == pytest.approx(total / weight, rel=1e-6)
