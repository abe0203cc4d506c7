"""The loss of routers, and metrics of how they spread tokens: values and gradients, alike under every strategy."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from realrl.algorithms.base.method import TrainMethod
from realrl.algorithms.reward_model_loss import PairMethod
from realrl.algorithms.sft_loss import SFTMethod
from realrl.data.balance import assign
from realrl.data.batch import Batch, Ragged
from realrl.engine.model import Model, make_unsharded_model
from realrl.engine.parallel_groups import select_groups
from realrl.engine.training.trainer import Trainer, TrainOptions
from realrl.families.registry import model_tensors
from realrl.families.shape import Head, Mixture, ModelShape
from realrl.huggingface.initial_weights import initialise
from realrl.layout.layout import build_layout
from realrl.layout.sets import WHOLE, TrainablePart
from realrl.model.routing import LIKELIEST, BalancedRouting, ExpertCounts
from realrl.plan.communicators import list_rank_sets
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.recipe.optimizer import OptimizerConfig
from realrl.runtime.processes.environment import leave
from realrl.runtime.processes.process import Process, wait_to_be_scheduled
from tests.forked import run_forked
from tests.model.small_models import SHAPES, find_theirs, make_theirs, random_rows

CPU = torch.device("cpu")
LENGTHS = [9, 1, 17, 4, 23, 2, 12, 5]
ITEMS = range(len(LENGTHS))
BALANCE = ("router_loss", "router_busiest", "router_idle")
# A large epsilon, because without it Adam divides rounding differences of tiny gradients by their own size.
OPTIMIZER = OptimizerConfig(lr=3e-3, grad_clip=0.5, eps=1e-4)


def work(shape: ModelShape, head: Head) -> tuple[Batch, TrainMethod]:
    """Records of a head, and the method that learns from them."""
    tokens = Ragged.of(random_rows(shape.vocab_size, LENGTHS))
    if head == "scalar":
        rejected = Ragged.of(random_rows(shape.vocab_size, LENGTHS[::-1], seed=1))
        ones = Ragged.scalars(torch.ones(len(LENGTHS), dtype=torch.int64))
        return Batch(
            tuple(ITEMS), {"chosen": tokens, "rejected": rejected, "pairs_of_prompt": ones}
        ), PairMethod()
    mask = torch.ones_like(tokens.values)
    mask[list(tokens.offsets[:-1])] = 0
    return Batch(tuple(ITEMS), {"tokens": tokens, "loss_mask": Ragged(mask, tokens.lengths)}), SFTMethod()


def gradients_of(
    shape: ModelShape, head: Head, weights: Mapping[str, Tensor], coefficient: float
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Gradients of one optimizer step, and the metrics of the call."""
    model = make_unsharded_model(shape, head, dtype=torch.float32, device=CPU)
    for name, values in weights.items():
        model.parameters[name][:] = values
    trainer, found = Trainer(model, OPTIMIZER, router_loss=coefficient), {}
    batch, method = work(shape, head)

    def note(*_: object, **options: object) -> float:
        found.update({name: trainer.gradients[name].clone() for name in weights})
        return 1.0

    trainer.optimizer.step = note  # type: ignore[method-assign]
    metrics = trainer.train(batch, method, [[*ITEMS]], TrainOptions(max_tokens=50), lr=0.0).result()
    return found, metrics


def balance_loss(probabilities: Tensor, per_token: int) -> Tensor:
    """The loss of one sequence in one layer. probabilities: [T, E]"""
    tokens, experts = probabilities.shape
    chosen = torch.zeros(experts)
    for row in probabilities:
        for expert in row.argsort(descending=True)[:per_token]:
            chosen[expert] += 1 / tokens
    return experts * (chosen * probabilities.mean(0)).sum()


def in_transformers(
    shape: ModelShape, head: Head, weights: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Gradients of the mean loss over sequences and layers, and the metrics."""
    theirs = make_theirs(shape, head).eval()
    state = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, values in weights.items():
            find_theirs(state, name).copy_(values)
    assert shape.mixture is not None
    losses = []
    counts = torch.zeros(shape.layers - len(shape.dense_layers), shape.mixture.experts)
    batch, method = work(shape, head)
    for row in method.sequences(batch).rows():
        for layer, logits in enumerate(theirs.model(row[None], output_router_logits=True).router_logits):
            probabilities = logits.softmax(-1)
            losses.append(balance_loss(probabilities, shape.mixture.per_token))
            chosen = probabilities.topk(shape.mixture.per_token).indices
            counts[layer] += torch.bincount(chosen.flatten(), minlength=shape.mixture.experts)
    loss = torch.stack(losses).mean()
    loss.backward()
    zeros = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in state.items()}
    shares = counts / counts.sum(1, keepdim=True)
    values = (loss, (shares.amax(1) * shape.mixture.experts).mean(), (counts == 0).float().mean())
    found = {name: find_theirs(zeros, name) for name in weights}
    return found, {name: value.item() for name, value in zip(BALANCE, values, strict=True)}


@pytest.mark.parametrize("head", ["lm", "scalar"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "qwen3_moe-dense"])
def test_loss_and_gradients_are_those_of_autograd_over_each_sequence(family: str, head: Head) -> None:
    shape, coefficient = SHAPES[family], 8.0
    torch.manual_seed(0)
    weights = {
        spec.name: torch.randn(spec.shape) * 0.2 + ("norm" in spec.name)
        for spec in model_tensors(shape, head)
    }
    without, plain = gradients_of(shape, head, weights, 0.0)
    balanced, metrics = gradients_of(shape, head, weights, coefficient)
    expected, wanted = in_transformers(shape, head, weights)
    assert {name: metrics[name] for name in BALANCE} == pytest.approx(wanted, rel=1e-5)
    assert {name: plain[name] for name in BALANCE} == pytest.approx(wanted, rel=1e-5)
    assert plain["loss"] == metrics["loss"]  # that of the method alone
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        ours = (balanced[name] - without[name]) / coefficient
        torch.testing.assert_close(
            ours, gradient, rtol=0, atol=1e-4 * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_scores_that_do_not_add_up_to_one_are_balanced_as_shares_of_their_sum() -> None:
    torch.manual_seed(0)
    logits = torch.randn(sum(LENGTHS), 6, requires_grad=True)
    counts = ExpertCounts(1, 6, CPU)
    lengths = torch.tensor(LENGTHS)
    rows = torch.arange(len(LENGTHS)).repeat_interleave(lengths)
    balanced = BalancedRouting(LIKELIEST, counts, rows=rows, lengths=lengths, coefficient=torch.tensor(2.0))
    scores, _ = balanced.route(0, logits.sigmoid(), logits.sigmoid().detach(), 2)
    scores.backward(torch.zeros_like(scores))
    found, logits.grad = logits.grad, None
    shares = logits.sigmoid() / logits.sigmoid().sum(1, keepdim=True)
    loss = torch.stack([balance_loss(part, 2) for part in shares.split(LENGTHS)]).sum()
    (2 * loss).backward()
    torch.testing.assert_close(found, logits.grad)
    torch.testing.assert_close(counts.losses[0].float(), loss.detach())


SHAPE = ModelShape(
    family="qwen3_moe", vocab_size=61, hidden_size=24, intermediate_size=7, layers=4, heads=6, kv_heads=3,
    head_dim=6, init_std=0.3, mixture=Mixture(experts=10, per_token=2), dense_layers=(0, 1), dense_size=11,
)  # fmt: skip
"""With two pipeline stages, the first one has no experts."""
PARTS = {"whole": WHOLE, "last layer": TrainablePart(last_layers=1)}
STRATEGIES = {
    1: ["1 1 1", "1 1 1 r"],
    2: [
        "2 1 1",
        "1 2 1 r",
        "1 2 1 s",
        "1 1 2",
        "1 1 2 r",
        "1 1 2 v2",
        "1 1 2 v2 r",
        "2 1 1 z2",
        "2 1 1 z3 r",
        "1 1 1 c2",
        "1 1 1 c2 r",
        "2 1 1 e2",
        "2 1 1 e2 z3 r",
        "1 2 1 e2 s",
        "1 1 1 c2 e2 r",
    ],
}
Learnt = tuple[list[dict[str, float]], dict[str, tuple[object, Tensor]]]
"""Metrics of calls, and for each tensor of a rank its place in the whole one, and its values."""


def placement_of(text: str, micro_batch_tokens: int = 30) -> Placement:
    dp, tp, pp, *flags = text.split()
    strategy = Strategy(
        dp=int(dp), cp=1 + ("c2" in flags), ep=1 + ("e2" in flags), tp=int(tp), pp=int(pp),
        vpp=1 + ("v2" in flags), micro_batch_tokens=micro_batch_tokens,
        sequence_parallel="s" in flags, recompute="r" in flags,
        zero=next((stage for stage in (2, 3) if f"z{stage}" in flags), 1),
    )  # fmt: skip
    return Placement(Mesh(0, strategy.size), strategy)


def learn(part: TrainablePart, placement: Placement, process: Process, groups: object) -> Learnt:
    """Two calls of two optimizer steps each."""
    model = Model(
        build_layout(SHAPE, "lm", placement), process.rank, select_groups(placement, process.rank, groups),  # type: ignore[arg-type]
        dtype=torch.float32, device=CPU, part=part,
    )  # fmt: skip
    regions = {local.region.tensor: local.region for local in model.layout.tensors(process.rank)}
    specs = [spec for spec in model.layout.specs if spec.name in regions]
    initialise(model.parameters, specs, SHAPE, 1, regions)
    trainer, strategy = Trainer(model, OPTIMIZER, router_loss=0.5), placement.strategy
    batch, method = work(SHAPE, "lm")
    mine = assign(LENGTHS, minibatches=2, dp=strategy.dp)[model.groups.data.index]
    items = sorted(i for positions in mine for i in positions)
    metrics = [
        trainer.train(
            batch.select(items),
            method,
            [[items.index(i) for i in positions] for positions in mine],
            TrainOptions(max_tokens=strategy.micro_batch_tokens, recompute=strategy.recompute),
            lr=OPTIMIZER.lr,
        ).result()
        for _ in range(2)
    ]
    values = {
        name: (region.slices, model.parameters[name][: region.size[0]].clone())
        for name, region in regions.items()
    }
    return metrics, values


def run_rank(rank: int, world: int, store: str, out: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    wait_to_be_scheduled()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    process = Process(rank, world, CPU, dist.new_group(backend="gloo"))
    groups = process.groups(list_rank_sets(map(placement_of, STRATEGIES[world])))
    results = {
        (name, text): learn(part, placement_of(text), process, groups)
        for name, part in PARTS.items()
        for text in STRATEGIES[world]
    }
    torch.save(results, f"{out}-{rank}")
    dist.barrier()
    dist.destroy_process_group()
    leave(0)


def check(found: Learnt, expected: Learnt, where: str) -> None:
    for ours, theirs in zip(found[0], expected[0], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6), where
        # Counts, which rounding does not change.
        assert [ours[name] for name in BALANCE[1:]] == pytest.approx([theirs[name] for name in BALANCE[1:]])
    for name, (place, values) in found[1].items():
        torch.testing.assert_close(
            values, expected[1][name][1][place], rtol=1e-4, atol=1e-5, msg=f"{where}: {name}"
        )


def test_updates_and_metrics_are_the_same_under_every_strategy(tmp_path: Path) -> None:
    single = Process(0, 1, CPU, None)
    whole = {name: learn(part, placement_of("1 1 1", 1000), single, {}) for name, part in PARTS.items()}
    for name, part in PARTS.items():
        for text in STRATEGIES[1]:
            check(learn(part, placement_of(text), single, {}), whole[name], f"{name}, {text}")
    with tempfile.TemporaryDirectory() as scratch:
        run_forked(run_rank, 2, 2, f"{scratch}/store", str(tmp_path / "out"))
    for rank in range(2):
        for (name, text), found in torch.load(f"{tmp_path}/out-{rank}", weights_only=False).items():
            check(found, whole[name], f"rank {rank}: {name}, {text}")
