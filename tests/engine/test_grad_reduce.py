"""Buckets of gradients are added up during the backward pass, and change nothing."""

from typing import Any

import pytest
import torch

from realrl.algorithms.sft_loss import SFTMethod
from realrl.data.batch import Batch, Ragged
from realrl.engine.model import Model, make_unsharded_model
from realrl.engine.parallel_groups import ParallelGroups
from realrl.engine.training.optimizer import Bucket
from realrl.engine.training.trainer import Trainer, TrainOptions
from realrl.families.shape import ModelShape
from realrl.huggingface.initial_weights import initialise
from realrl.layout import limits
from realrl.layout.layout import build_layout
from realrl.model.group import Group
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.recipe.optimizer import OptimizerConfig

SHAPE = ModelShape(
    vocab_size=50, hidden_size=16, intermediate_size=24, layers=4, heads=2, kv_heads=2, head_dim=8
)
ROWS = Ragged.of([torch.arange(1 + i, 8 + 2 * i) for i in range(6)])
BATCH = Batch(
    tuple(range(6)),
    {"tokens": ROWS, "loss_mask": Ragged.of([(torch.arange(n) > 0).long() for n in ROWS.lengths])},
)


def learn(started: list[int], model: Model | None = None) -> torch.Tensor:
    """Parameters after two steps of several micro-batches; notes the buckets started before each update."""
    if model is None:
        model = make_unsharded_model(SHAPE, "lm", dtype=torch.float32, device=torch.device("cpu"))
        initialise(model.parameters, model.layout.specs, SHAPE, 1)
    trainer = Trainer(model, OptimizerConfig(lr=1e-2, grad_clip=None))
    start, step = trainer.optimizer.start_reduce, trainer.optimizer.step

    def note_start(bucket: Bucket) -> None:
        started.append(trainer.optimizer.buckets.index(bucket))
        start(bucket)

    def note_step(lr: float, **settings: Any) -> float:
        started.append(-1)
        return step(lr, **settings)

    trainer.optimizer.start_reduce, trainer.optimizer.step = note_start, note_step  # type: ignore[method-assign]
    for _ in range(2):
        trainer.train(BATCH, SFTMethod(), [list(range(6))], TrainOptions(max_tokens=20), lr=1e-2)
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


def make_lone_tensor_rank(tp: int, kv_heads: int = 2) -> Model:
    """The first of several TP ranks, which meets no others: its sums are its own parts."""
    placement = Placement(Mesh(0, tp), Strategy(tp=tp))
    groups = ParallelGroups.of_single_rank(tensor=Group(tuple(range(tp)), 0))
    layout = build_layout(SHAPE.model_copy(update={"family": "qwen3", "kv_heads": kv_heads}), "lm", placement)
    return Model(layout, 0, groups, dtype=torch.float32, device=torch.device("cpu"))


def test_tensor_parallel_ranks_start_buckets_during_backward_with_partial_gradients_in_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "BUCKET_ELEMENTS", 1500)
    model, started = make_lone_tensor_rank(2), []
    learn(started, model)
    (run,) = model.sets["base"].buffer.runs
    buckets = run.buckets
    assert buckets > 2 and started == [*reversed(range(buckets)), -1] * 2


def test_buckets_with_heads_that_tensor_parallel_ranks_share_start_after_these_are_summed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "BUCKET_ELEMENTS", 100)
    model, started = make_lone_tensor_rank(2, kv_heads=1), []
    learn(started, model)
    update = started.index(-1)
    early, late = started[:update], started[update + 1 :]
    buffer = model.sets["base"].buffer
    buckets = buffer.runs[0].buckets
    size = buffer.data.numel() // buckets
    heads = [spec for spec in buffer.tensors if "k_proj" in spec.name or "v_proj" in spec.name]
    starts = [buffer.offset(spec.name) for spec in heads]
    places = [p for s, first in zip(heads, starts, strict=True) for p in range(first, first + s.numel)]
    shared = {place // size for place in places}
    assert shared and early == [bucket for bucket in reversed(range(buckets)) if bucket not in shared]
    assert late[: len(shared)] == sorted(shared, reverse=True)
