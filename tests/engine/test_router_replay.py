"""Router replay: experts are recorded as they were chosen, and what was recorded is what a pass computes with."""

import os
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from realrl.algorithms.sft_loss import SFTMethod
from realrl.data.batch import Batch, Ragged
from realrl.dataflow.call import Replay
from realrl.engine.generation.generator import generate
from realrl.engine.generation.sampling_noise import SamplingSeed
from realrl.engine.generation.scheduler import Scheduler
from realrl.engine.host_items import HostItems
from realrl.engine.model import Model, make_unsharded_model
from realrl.engine.parallel_groups import select_groups
from realrl.engine.training.trainer import Trainer, TrainOptions
from realrl.families.shape import Mixture, ModelShape
from realrl.layout.layout import build_layout
from realrl.model.packing import Packing
from realrl.plan.communicators import list_rank_sets
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.recipe.generation import GenerationConfig
from realrl.recipe.optimizer import OptimizerConfig
from realrl.runtime.processes.environment import leave
from realrl.runtime.processes.process import Process, wait_to_be_scheduled
from tests.forked import run_forked
from tests.model.small_models import SHAPES, make_twins

CPU = torch.device("cpu")
FAMILIES = ("mixtral", "qwen3_moe", "qwen3_moe-dense", "gpt_oss")
PLACEMENTS = {
    "mixtral": [
        Placement(Mesh(0, 2), Strategy(tp=2, sequence_parallel=True)),
        Placement(Mesh(0, 2), Strategy(tp=2, ep=2, sequence_parallel=True)),
        Placement(Mesh(0, 2), Strategy(tp=2, ep=2, micro_batch_tokens=30, recompute=True)),
    ],
    "qwen3_moe": [
        Placement(Mesh(0, 2), Strategy(pp=2, micro_batch_tokens=30, recompute=True)),
        Placement(Mesh(0, 2), Strategy(pp=2, vpp=2, micro_batch_tokens=30, recompute=True)),
    ],
    "qwen3_moe-dense": [Placement(Mesh(0, 2), Strategy(pp=2, micro_batch_tokens=30))],
    "gpt_oss": [
        Placement(Mesh(0, 2), Strategy(tp=2, micro_batch_tokens=30)),
        Placement(Mesh(0, 2), Strategy(tp=2, ep=2, micro_batch_tokens=30)),
    ],
}
CAPACITIES = (100, 1 << 20)
"""Tokens of the cache: so few that rows are preempted, and enough for all."""
SAMPLES = 3
ENDS = (0, 1, 2)
"""Tokens that end some answers early."""
REPLAYS = (Replay("tokens", "experts"),)
NONE = -1

Figures = dict[str, Tensor]


def shape_of(family: str) -> ModelShape:
    windowed = (0, 1, 2) if SHAPES[family].window else ()
    shape = SHAPES[family].model_copy(
        update={"layers": 4 if family == "qwen3_moe" else 3, "windowed_layers": windowed}
    )
    assert shape.mixture is not None
    even = shape.mixture.model_copy(update={"experts": shape.mixture.experts + 1})
    return shape.model_copy(update={"mixture": even})


def make_models(shape: ModelShape) -> tuple[Model, PreTrainedModel]:
    """Our model and that of transformers, with the same random weights."""
    _, buffer, theirs = make_twins(shape, "lm")
    model = make_unsharded_model(shape, "lm", dtype=torch.float32, device=CPU)
    for tensor in model.layout.specs:
        model.parameters[tensor.name].copy_(buffer[tensor.name])
    return model, theirs


def make_prompts() -> Batch:
    """Several random prompts, each `SAMPLES` times."""
    generator = torch.Generator().manual_seed(0)
    prompts = Ragged.of([torch.randint(3, 85, (n,), generator=generator) for n in (5, 20, 1, 12)])
    rows = prompts.select([i // SAMPLES for i in range(len(prompts) * SAMPLES)])
    return Batch(tuple(range(len(rows))), {"prompts": rows})


def sample(model: Model, kv_capacity: int = 1 << 20) -> Batch:
    return generate(
        model,
        make_prompts(),
        "prompts",
        sampling=GenerationConfig(max_new_tokens=60),
        stop_token_ids=ENDS,
        seed=SamplingSeed(2, 2),
        kv_capacity=kv_capacity,
        samples=SAMPLES,
        record_experts=True,
    )


@torch.no_grad()
def find_experts(theirs: PreTrainedModel, shape: ModelShape, row: Tensor) -> Tensor:
    """Experts that a sequence passes through in transformers, by number. [T, layers, k]"""
    assert shape.mixture is not None
    logits = theirs(row[None], output_router_logits=True).router_logits
    found = torch.full((len(row), shape.layers, shape.mixture.per_token), NONE)
    for layer, of in zip(find_mixed(shape), logits, strict=True):
        found[:, layer] = of.topk(shape.mixture.per_token).indices.sort(1).values
    return found


def find_mixed(shape: ModelShape) -> list[int]:
    """Layers with experts."""
    return [layer for layer in range(shape.layers) if shape.mixture_of(layer)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kv_capacity", CAPACITIES)
def test_recorded_experts_are_those_of_a_forward_pass_over_whole_sequences(
    family: str, kv_capacity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    preempt, preempted = Scheduler._preempt, []
    monkeypatch.setattr(Scheduler, "_preempt", lambda *args: preempted.append(1) or preempt(*args))
    shape = shape_of(family)
    model, theirs = make_models(shape)
    samples = sample(model, kv_capacity)
    assert bool(preempted) == (kv_capacity == CAPACITIES[0])
    for i, row in enumerate(samples["sequences"].rows()):
        got = samples["routed_experts"].row(i).view(len(row), shape.layers, -1).sort(2).values.long()
        expected = find_experts(theirs, shape, row)
        expected[: int(samples["prompt_length"].values[i]) - 1, -1] = NONE
        expected[-1] = NONE
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def make_rows() -> Ragged:
    generator = torch.Generator().manual_seed(1)
    return Ragged.of([torch.randint(0, 85, (n,), generator=generator) for n in (9, 17, 1, 23)])


def choose_others(shape: ModelShape, tokens: int) -> Tensor:
    """Experts at random, but for some tokens and layers without a choice. [T, layers * k] int16"""
    assert shape.mixture is not None
    generator = torch.Generator().manual_seed(2)
    noise = torch.rand(tokens, shape.layers, shape.mixture.experts, generator=generator)
    chosen = noise.topk(shape.mixture.per_token).indices
    chosen[torch.rand(tokens, shape.layers, generator=generator) < 0.2] = NONE
    return chosen.short().flatten(1)


def force(theirs: PreTrainedModel, shape: ModelShape, experts: Callable[[], Tensor]) -> None:
    """Have tokens pass through given experts, weighed by the model's own probabilities."""
    mixture = shape.mixture
    assert mixture is not None

    def route(gate: torch.nn.Module, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden.reshape(-1, shape.hidden_size), gate.weight, getattr(gate, "bias", None))
        probabilities = logits.softmax(-1)
        given = experts().view(-1, shape.layers, mixture.per_token)[:, layer].long()
        chosen = torch.where(given < 0, probabilities.topk(mixture.per_token).indices, given)
        weights = probabilities.gather(1, chosen)
        if mixture.normalised:
            weights = weights / weights.sum(1, keepdim=True)
        return logits, weights, chosen

    for number in find_mixed(shape):
        router = find_router(theirs.model.layers[number])
        router.forward = lambda hidden, gate=router, n=number: route(gate, n, hidden)


def find_router(layer: torch.nn.Module) -> torch.nn.Module:
    return layer.mlp.router if hasattr(layer.mlp, "router") else layer.mlp.gate


def reference(family: str) -> tuple[Figures, Figures]:
    """Weights, and what transformers and torch compute with them and given experts, of rows one by one."""
    shape, rows = shape_of(family), make_rows()
    model, theirs = make_models(shape)
    others = Ragged(choose_others(shape, len(rows.values)), rows.lengths)
    found, losses = {}, []
    for i, row in enumerate(rows.rows()):
        force(theirs, shape, lambda i=i: others.row(i))
        logprobs = theirs(row[None]).logits[0, :-1].log_softmax(-1).gather(1, row[1:, None])
        losses.append(-logprobs.sum())
    found["nll"] = torch.stack(losses).detach()
    (torch.stack(losses).sum() / (len(rows.values) - len(rows))).backward()
    found["norm"] = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1e9).detach()
    found |= {
        f"gate {number}": find_router(theirs.model.layers[number]).weight.grad for number in find_mixed(shape)
    }
    return {tensor.name: model.parameters[tensor.name] for tensor in model.layout.specs}, found


def make_batch(shape: ModelShape) -> Batch:
    rows = make_rows()
    mask = torch.ones_like(rows.values)
    mask[list(rows.offsets[:-1])] = 0
    experts = choose_others(shape, len(rows.values))
    fields = {
        "tokens": rows,
        "loss_mask": Ragged(mask, rows.lengths),
        "experts": Ragged(experts, rows.lengths),
    }
    return Batch(tuple(range(len(rows))), fields)


def check_replay(model: Model, expected: Figures, where: str) -> None:
    """Compare log-probabilities and gradients with given experts with those of the reference."""
    batch, strategy = make_batch(model.shape), model.layout.placement.strategy
    limit = strategy.micro_batch_tokens
    scored, _ = model.infer(batch, SFTMethod(), limit, replays=REPLAYS)
    own, _ = model.infer(batch.without(["experts"]), SFTMethod(), limit)
    if model.shard.last:
        torch.testing.assert_close(scored["nll"].values, expected["nll"], rtol=1e-4, atol=1e-4, msg=where)
        assert not torch.allclose(own["nll"].values, expected["nll"], rtol=1e-2, atol=1e-2)
    trainer = Trainer(model, OptimizerConfig(grad_clip=None))
    gradients: Figures = {}
    step = trainer.optimizer.step

    def noted(lr: float, *, summed: Mapping[str, Tensor], **options: float) -> float:
        for name in (tensor.region.tensor for tensor in model.layout.tensors(model.rank)):
            local = trainer.gradients[name]
            gradients[name] = summed.get(name, local).view_as(local).clone()
        return step(lr, summed=summed, **options)

    trainer.optimizer.step = noted  # type: ignore[method-assign]
    metrics = trainer.train(
        batch,
        SFTMethod(),
        [list(range(len(batch)))],
        TrainOptions(max_tokens=limit, recompute=strategy.recompute),
        lr=0.01,
        replays=REPLAYS,
    ).result()
    assert metrics["grad_norm"] == pytest.approx(float(expected["norm"]), rel=1e-4), where
    for layer in {*model.shard.layers} & {*find_mixed(model.shape)}:
        (name,) = (n for n in gradients if f".{layer}." in n and n.endswith(("gate.weight", "router.weight")))
        wanted = expected[f"gate {layer}"]
        scale = float(wanted.abs().max())
        torch.testing.assert_close(gradients[name], wanted, rtol=0, atol=1e-4 * max(1.0, scale), msg=where)


@pytest.mark.parametrize("family", FAMILIES)
def test_given_experts_give_log_probabilities_and_gradients_of_a_model_that_uses_them(family: str) -> None:
    _, expected = reference(family)
    check_replay(make_models(shape_of(family))[0], expected, family)


def run_rank(rank: int, directory: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    wait_to_be_scheduled()
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    process = Process(rank, 2, CPU, dist.new_group(backend="gloo"))
    groups = process.groups(list_rank_sets(chain(*PLACEMENTS.values())))
    for family, placement in ((family, one) for family, some in PLACEMENTS.items() for one in some):
        weights, expected, samples = torch.load(f"{directory}/{family}.pt", weights_only=True)
        model = Model(
            build_layout(shape_of(family), "lm", placement),
            rank,
            select_groups(placement, rank, groups),
            dtype=torch.float32,
            device=CPU,
        )
        for local in model.layout.tensors(rank):
            region = local.region
            model.parameters[region.tensor][: region.size[0]] = weights[region.tensor][region.slices]
        for capacity in CAPACITIES if placement.strategy.ep == placement.strategy.vpp == 1 else ():
            found = sample(model, capacity)
            if rank in placement.output_ranks:
                for key, values in samples.items():
                    torch.testing.assert_close(found[key].values, values, rtol=0, atol=0)
        check_replay(model, expected, f"{family}, rank {rank}")
    dist.barrier()
    dist.destroy_process_group()
    leave(0)


def test_tensor_sequence_and_pipeline_parallelism_record_and_replay_the_same(tmp_path: Path) -> None:
    for family in FAMILIES:
        found = sample(make_models(shape_of(family))[0])
        samples = {key: found[key].values for key in ("sequences", "routed_experts")}
        torch.save((*reference(family), samples), tmp_path / f"{family}.pt")
    run_forked(run_rank, 2, str(tmp_path))


def test_rounding_in_the_router_moves_log_probabilities_unless_experts_are_replayed() -> None:
    shape = shape_of("mixtral").model_copy(update={"mixture": Mixture(experts=6, per_token=2)})
    model, _ = make_models(shape)
    routers = [model.parameters[t.name] for t in model.layout.specs if t.name.endswith("gate.weight")]
    assert len(routers) == shape.layers
    for router in routers:  # any two of three equal ones
        router[:3], router[3:] = router[:1].clone(), router[3:4].clone()
    samples = sample(model)
    torch.manual_seed(3)
    for router in routers:
        router += 1e-7 * torch.randn_like(router)
    rows = samples["sequences"]
    mask = Ragged.of(
        [torch.arange(len(row)) >= n for row, n in zip(rows.rows(), samples["prompts"].lengths, strict=True)]
    )
    batch = Batch(samples.ids, {"tokens": rows, "loss_mask": mask, "experts": samples["routed_experts"]})
    recorded = torch.stack([row.sum() for row in samples["logprobs"].rows()])
    own, _ = model.infer(batch.without(["experts"]), SFTMethod(), 1 << 20)
    replayed, _ = model.infer(batch, SFTMethod(), 1 << 20, replays=REPLAYS)
    torch.testing.assert_close(-replayed["nll"].values, recorded, rtol=0, atol=1e-3)
    assert float((own["nll"].values + recorded).abs().max()) > 0.1


def test_experts_are_those_of_the_sampler_as_far_as_a_row_repeats_its_sequence() -> None:
    """Rows that are whole, cut, another sequence, changed inside, and longer."""
    model, _ = make_models(shape_of("qwen3_moe"))
    sampled = make_rows().select([0, 1, 3, 1, 0])
    experts = Ragged(choose_others(model.shape, len(sampled.values)), sampled.lengths)
    assert model.shape.mixture is not None
    size = model.shape.layers, model.shape.mixture.per_token
    batch = Batch(tuple(range(5)), {"tokens": sampled, "experts": experts})
    rows = [row.clone() for row in sampled.rows()]
    rows[1] = rows[1][:4]
    rows[2] = rows[2] + 1
    rows[3][6] += 1
    rows[4] = torch.cat([rows[4], rows[4][:2]])
    same = [9, 4, 0, 6, 9]
    order = [4, 2, 1, 0, 3]
    items = HostItems.of(Ragged.of(rows), batch, REPLAYS).select([1, 2, 0, 4, 3])
    items = items.select([3, 1, 0, 2, 4])  # of those that were selected
    run = Ragged.of(rows).select(order)
    routing = items.make_routing(model.shard, Packing.of(run.lengths, CPU))
    probabilities = torch.rand(len(run.values), model.shape.mixture.experts).softmax(1)
    likeliest = probabilities.topk(size[1]).indices
    for layer in range(size[0]):
        weighed, chosen = routing.route(layer, probabilities, probabilities, size[1])
        assert weighed is probabilities
        for position, item in enumerate(order):
            for t in range(run.lengths[position]):
                given = torch.full((size[1],), NONE)
                if t < same[item]:
                    given = experts.row(item)[t].view(size)[layer]
                at = run.offsets[position] + t
                assert chosen[at].tolist() == (likeliest[at] if given[0] < 0 else given).tolist()


def test_rows_of_two_samples_of_an_item_replay_each_its_own() -> None:
    model, _ = make_models(shape_of("mixtral"))
    both = make_rows()
    first, other = both.select([0, 1]), both.select([3, 0])
    fields = {"tokens": first, "other_tokens": other}
    for prefix, rows in (("", first), ("other_", other)):
        experts = choose_others(model.shape, len(rows.values))
        fields[f"{prefix}experts"] = Ragged(experts, rows.lengths)
    batch = Batch((0, 1), fields)
    replays = (*REPLAYS, Replay("other_tokens", "other_experts"))
    pairs = Ragged.of([first.row(0), other.row(0), first.row(1), other.row(1)])
    packing = Packing.of(pairs.lengths, CPU)
    routing = HostItems.of(pairs, batch, replays).make_routing(model.shard, packing)
    with torch.no_grad():
        together = Ragged(model.forward(pairs, packing, None, routing=routing), pairs.lengths)
        for rows, made, places in ((first, replays[:1], (0, 2)), (other, replays[1:], (1, 3))):
            alone = Packing.of(rows.lengths, CPU)
            routing = HostItems.of(rows, batch, made).make_routing(model.shard, alone)
            apart = model.forward(rows, alone, None, routing=routing)
            torch.testing.assert_close(together.select(places).values, apart, rtol=1e-5, atol=1e-5)


def test_the_balance_of_experts_is_that_of_replayed_ones() -> None:
    model, _ = make_models(shape_of("mixtral"))
    rows, mixture = make_rows(), model.shape.mixture
    assert mixture is not None
    same = torch.arange(mixture.per_token).repeat(len(rows.values), model.shape.layers).short()
    batch = make_batch(model.shape).with_fields(experts=Ragged(same, rows.lengths))
    trainer = Trainer(model, OptimizerConfig(), router_loss=0.1)
    items = [list(range(len(batch)))]
    metrics = trainer.train(
        batch, SFTMethod(), items, TrainOptions(max_tokens=30), lr=0.0, replays=REPLAYS
    ).result()
    assert metrics["router_idle"] == pytest.approx(1 - mixture.per_token / mixture.experts)
    assert metrics["router_busiest"] == pytest.approx(mixture.experts / mixture.per_token)
