"""What calls post on every rank of a placement: recordings of the engine with a tiny model."""

from collections.abc import Sequence
from functools import cache

import pytest
import torch

from realrl.algorithms.sft_loss import SFTMethod
from realrl.data.balance import assign
from realrl.data.batch import Batch, Ragged
from realrl.dataflow.call import Kind
from realrl.engine.generation.generator import generate
from realrl.engine.generation.sampling_noise import SamplingSeed
from realrl.engine.model import Model
from realrl.engine.training.trainer import Trainer, TrainOptions
from realrl.families.shape import ModelShape
from realrl.huggingface.initial_weights import initialise
from realrl.layout.layout import build_layout
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.recipe.generation import GenerationConfig
from realrl.recipe.optimizer import OptimizerConfig
from tests.nccl.recording import make_groups, recording
from tests.nccl.simulator import Action

CPU = torch.device("cpu")
SHAPE = ModelShape(
    family="qwen2", vocab_size=16, hidden_size=8, intermediate_size=8, layers=8, heads=8, kv_heads=2,
    head_dim=2, tied_embeddings=True,
)  # fmt: skip
ITEMS = 24
TOKENS = 5
"""Tokens that are generated to each prompt."""


@cache
def record_call(kind: Kind, strategy: Strategy, place: int) -> tuple[Action, ...]:
    """Record what the rank at a place of a mesh from rank 0 on posts in a call."""
    placement = Placement(Mesh(0, strategy.size), strategy)
    model = Model(
        build_layout(SHAPE, "lm", placement),
        place,
        make_groups(placement, place),
        dtype=torch.float32,
        device=CPU,
    )
    regions = {local.region.tensor: local.region for local in model.layout.tensors(place)}
    initialise(
        model.parameters, [spec for spec in model.layout.specs if spec.name in regions], SHAPE, 1, regions
    )
    with recording() as recorder:
        # Pipelines are made here, as those of GPUs.
        model = Model(model.layout, place, model.groups, dtype=torch.float32, device=CPU)
        initialise(
            model.parameters, [spec for spec in model.layout.specs if spec.name in regions], SHAPE, 1, regions
        )
        run_call(kind, model)
    return tuple(recorder.actions)


def record_uneven_training(strategy: Strategy, lengths: Sequence[int]) -> dict[int, tuple[Action, ...]]:
    """Record what all ranks post in training on items of these lengths, if some have more micro-batches than
    others. Ranks that are recorded alone cannot agree on numbers, so they are recorded twice."""
    counts: list[list[int]] = []
    most: list[int] = []

    def note(_: Model, count: int) -> int:
        counts[-1].append(count)
        return count

    def agree(_: Model, count: int) -> int:
        counts[-1].append(count)
        return most[len(counts[-1]) - 1]

    recorded: dict[int, tuple[Action, ...]] = {}
    everything = _batch(lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.nccl.calls._batch", lambda: everything)
        for method in (note, agree):
            patch.setattr(Model, "agree_on_passes", method)
            counts.clear()
            for rank in range(strategy.size):
                counts.append([])
                recorded[rank] = record_call.__wrapped__(Kind.TRAIN, strategy, rank)
            most = [max(of_ranks) for of_ranks in zip(*counts, strict=True)]
            assert any(len({*of_ranks}) > 1 for of_ranks in zip(*counts, strict=True))
    return recorded


def run_call(kind: Kind, model: Model) -> None:
    """Run a call on this rank's items."""
    strategy = model.layout.placement.strategy
    everything = _batch()
    costs = list(everything["tokens"].lengths)
    mine = assign(costs, minibatches=2, dp=strategy.dp)[model.groups.data.index]
    items = sorted(i for part in mine for i in part)
    local = everything.select(items)
    if kind is Kind.TRAIN:
        Trainer(model, OptimizerConfig()).train(
            local,
            SFTMethod(),
            [[items.index(i) for i in part] for part in mine],
            TrainOptions(
                max_tokens=strategy.micro_batch_tokens,
                recompute=strategy.recompute,
                zero_bubble=strategy.zero_bubble,
            ),
            lr=0.01,
        )
    elif kind is Kind.INFERENCE:
        model.infer(local, SFTMethod(), strategy.micro_batch_tokens)
    else:
        generate(
            model,
            local,
            "tokens",
            sampling=GenerationConfig(max_new_tokens=TOKENS, min_new_tokens=TOKENS),
            stop_token_ids=(),
            seed=SamplingSeed(1, 2),
            kv_capacity=2 * strategy.micro_batch_tokens,
        )


def _batch(lengths: Sequence[int] = ()) -> Batch:
    generator = torch.Generator().manual_seed(5)
    lengths = lengths or torch.randint(2, 13, (ITEMS,), generator=generator).tolist()
    tokens = Ragged.of([torch.randint(1, SHAPE.vocab_size, (n,), generator=generator) for n in lengths])
    mask = torch.ones_like(tokens.values)
    mask[list(tokens.offsets[:-1])] = 0
    return Batch(tuple(range(len(lengths))), {"tokens": tokens, "loss_mask": Ragged(mask, tokens.lengths)})
