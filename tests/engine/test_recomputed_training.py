"""Recomputation changes what is kept for the backward pass, and nothing else."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from realrl.algorithms.base.method import TrainMethod
from realrl.algorithms.reward_model_loss import PairMethod
from realrl.algorithms.sft_loss import SFTMethod
from realrl.data.batch import Batch, Ragged
from realrl.engine.model import Model, make_unsharded_model
from realrl.engine.training.trainer import Trainer, TrainOptions
from realrl.families.shape import Head, ModelShape
from realrl.huggingface.initial_weights import initialise
from realrl.layout import limits
from realrl.model.packing import Packing
from realrl.recipe.optimizer import OptimizerConfig

SHAPE = ModelShape(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=40,
    layers=5,
    heads=4,
    kv_heads=2,
    head_dim=8,
    init_std=0.2,
    tied_embeddings=True,
)
LENGTHS = (9, 17, 3, 30, 12, 8)


def rows(seed: int) -> Ragged:
    generator = torch.Generator().manual_seed(seed)
    return Ragged.of([torch.randint(1, SHAPE.vocab_size, (n,), generator=generator) for n in LENGTHS])


ONES = Ragged.scalars(torch.ones(len(LENGTHS), dtype=torch.int64))
LOSS_MASK = Ragged.of([(torch.arange(n) > 0).long() for n in LENGTHS])
WORK: dict[Head, tuple[Batch, TrainMethod]] = {
    "lm": (Batch(tuple(range(6)), {"tokens": rows(1), "loss_mask": LOSS_MASK}), SFTMethod()),
    "scalar": (
        Batch(tuple(range(6)), {"chosen": rows(1), "rejected": rows(2), "pairs_of_prompt": ONES}),
        PairMethod(),
    ),
}


def make(head: Head, dtype: torch.dtype) -> Model:
    model = make_unsharded_model(SHAPE, head, dtype=dtype, device=torch.device("cpu"))
    initialise(model.parameters, model.layout.specs, SHAPE, 1)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head", ["lm", "scalar"])
def test_recomputation_gives_the_same_metrics_and_updates_bit_for_bit(
    head: Head, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "BUCKET_ELEMENTS", 5000)  # gradients are added up in several buckets
    batch, method = WORK[head]
    results = []
    for recompute in (False, True):
        model = make(head, dtype)
        trainer = Trainer(model, OptimizerConfig(lr=1e-2))
        metrics = [
            trainer.train(
                batch,
                method,
                [[0, 1, 2], [3, 4, 5]],
                TrainOptions(max_tokens=40, recompute=recompute),
                lr=1e-2,
            ).result()
            for _ in range(2)
        ]
        results.append((metrics, model.sets["base"].buffer.data))
    (plain, expected), (again, got) = results
    assert again == plain and plain[0]["grad_norm"] > 0
    assert torch.equal(got, expected)


def test_every_pass_of_a_micro_batch_is_a_turn() -> None:
    batch, method = WORK["lm"]
    passes: list[int] = []
    Trainer(make("lm", torch.float32), OptimizerConfig()).train(
        batch,
        method,
        [[0, 1, 2], [3, 4, 5]],
        TrainOptions(max_tokens=30, after_pass=lambda: passes.append(1)),
        lr=0.0,
    )
    assert len(passes) == 2 * (1 + 2)  # the first three sequences are one micro-batch


def saved_elements(model: Model, recompute: bool) -> int:
    """Elements that a forward pass of the stage keeps, parameters aside."""
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes() // tensor.itemsize
        return tensor

    tokens = rows(1)
    packing = Packing.of(tokens.lengths, "cpu")
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        # Kept until counted, because the storage of what is freed is used again.
        hidden = model.forward(tokens, packing, None, recompute=recompute)
    found.pop(model.sets["base"].buffer.data.untyped_storage().data_ptr())
    assert hidden.requires_grad
    return sum(found.values())


def test_recomputation_keeps_only_inputs_of_layers() -> None:
    model = make("lm", torch.float32)
    Trainer(model, OptimizerConfig())
    tokens = sum(LENGTHS)
    once = tokens * (SHAPE.hidden_size + 2)  # input of the final norm with its scale, and the tokens
    kept = saved_elements(model, True)
    assert kept == SHAPE.layers * tokens * SHAPE.hidden_size + once
    assert saved_elements(model, False) > 9 * kept
