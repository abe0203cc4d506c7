"""Buckets of gradients are added up during the backward pass, and change nothing."""

import pytest
import torch

from realrl.algorithms.sft.method import SFTTrain
from realrl.data.batch import Batch, Ragged
from realrl.engine.model import make_unsharded_model
from realrl.engine.training.trainer import Trainer
from realrl.families.shape import ModelShape
from realrl.layout import limits
from realrl.model.init import initialise
from realrl.recipe.model import OptimizerConfig

SHAPE = ModelShape(
    vocab_size=50, hidden_size=16, intermediate_size=24, layers=4, heads=2, kv_heads=2, head_dim=8
)
ROWS = Ragged.of([torch.arange(1 + i, 8 + 2 * i) for i in range(6)])
BATCH = Batch(
    tuple(range(6)),
    {"tokens": ROWS, "loss_mask": Ragged.of([(torch.arange(n) > 0).long() for n in ROWS.lengths])},
)


def learn(started: list[int]) -> torch.Tensor:
    """Parameters after two steps of several micro-batches; notes the buckets started before each update."""
    model = make_unsharded_model(SHAPE, "lm", dtype=torch.float32, device=torch.device("cpu"))
    initialise(model.parameters, model.layout.specs, SHAPE, 1)
    trainer = Trainer(model, OptimizerConfig(lr=1e-2, grad_clip=None))
    start, step = trainer.optimizer.start_reduce, trainer.optimizer.step

    def note_start(bucket: int) -> None:
        started.append(bucket)
        start(bucket)

    def note_step(lr: float, *, head_scale: float) -> float:
        started.append(-1)
        return step(lr, head_scale=head_scale)

    trainer.optimizer.start_reduce, trainer.optimizer.step = note_start, note_step  # type: ignore[method-assign]
    for _ in range(2):
        trainer.train(BATCH, SFTTrain(), [list(range(6))], lr=1e-2, max_tokens=20)
    return model.sets["base"].buffer.data[: sum(t.numel for t in model.parameters.tensors)].clone()


def test_overlapped_reduction_starts_the_last_buckets_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BUCKET_ELEMENTS", 1500)
    started: list[int] = []
    learn(started)
    count = started.index(-1)
    assert count > 3
    assert started == [*reversed(range(count)), -1] * 2


def test_bucket_size_does_not_change_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = learn([])
    monkeypatch.setattr(limits, "BUCKET_ELEMENTS", 1500)
    torch.testing.assert_close(learn([]), whole, rtol=1e-6, atol=1e-7)
