"""Learning and sampling of small models on several ranks, beside one: figures that must be equal."""

import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from realrl.algorithms.base.method import Metrics, ModelOutput
from realrl.algorithms.distillation import OfflineDistillationConfig
from realrl.algorithms.distillation_loss import DivergenceTrain, TopTeacher
from realrl.algorithms.reward_model_loss import PairMethod
from realrl.algorithms.sft_loss import SFTMethod
from realrl.data.balance import assign, partition_samples
from realrl.data.batch import Batch, Ragged
from realrl.dataflow.call import Candidates
from realrl.engine import pipeline
from realrl.engine.generation.generator import generate
from realrl.engine.generation.sampling_noise import SamplingSeed
from realrl.engine.model import Model
from realrl.engine.parallel_groups import ParallelGroups, select_groups
from realrl.engine.training.trainer import Trainer, TrainOptions
from realrl.families.adapters import ADAPTERS
from realrl.families.shape import Head, ModelShape
from realrl.huggingface.initial_weights import initialise
from realrl.layout import limits
from realrl.layout.layout import Layout, build_layout
from realrl.layout.sets import TrainablePart
from realrl.plan.communicators import list_rank_sets
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.recipe.generation import GenerationConfig
from realrl.recipe.optimizer import OptimizerConfig
from realrl.runtime.processes.environment import leave
from realrl.runtime.processes.process import Process, wait_to_be_scheduled
from tests.forked import run_forked

CPU = torch.device("cpu")
# A large epsilon, because without it Adam divides rounding differences of tiny gradients by their own size.
OPTIMIZER = OptimizerConfig(lr=3e-3, weight_decay=0.1, grad_clip=0.5, eps=1e-4)
STEPS = 2
ITEMS = 16
ENDLESS = 5
"""Item whose loss or gradient is not finite; it has something to learn."""
CANDIDATES = 20
"""More than a rank has of a vocabulary that many of them share."""
CACHE = 160
"""Tokens of the KV cache: some prompts wait for others to end."""
GROUP = 4
"""Samples of a prompt, where prompts are shared."""
BEGINNINGS = (9, 0, 3, 12)
"""Tokens that all sequences of a group begin with."""
SAMPLING = GenerationConfig(max_new_tokens=6, min_new_tokens=2)

Figures = dict[str, torch.Tensor]
Models = Mapping[str, tuple[ModelShape, Head]]
"""Name -> sizes and head."""
Case = tuple[str, Placement]
"""The name of a model, and where it is computed."""


def learn_alone(models: Models) -> dict[str, Figures]:
    """Have this process learn with every model. It computes each sequence by itself, also where sequences begin
    alike."""
    results = {}
    with patch("realrl.engine.model.can_share_prompts", lambda *_: False):
        for name, (shape, head) in models.items():
            layout = build_layout(shape, head, Placement(Mesh(0, 1), Strategy()))
            model = _build(layout, 0, ParallelGroups.of_single_rank(), CPU)
            results[name] = learn(model, batch(head, shape))
    return results


def check_learning_on_ranks(
    world: int,
    models: Models,
    cases: Sequence[Case],
    alone: Mapping[str, Figures],
    *,
    tolerance: float,
    ordered: bool = False,
    device: str = "cpu",
) -> None:
    """Check that every rank has, in every case, the figures of one process.

    `ordered`: messages between stages go as over NCCL. All cases share the processes.
    """
    with tempfile.TemporaryDirectory() as scratch:
        run_forked(_be_rank, world, world, scratch, dict(models), list(cases), ordered, device)
        found = [torch.load(f"{scratch}/out-{rank}") for rank in range(world)]
    for rank, results in enumerate(found):
        assert len(results) == len(cases)
        for (name, placement), figures in zip(cases, results, strict=True):
            samples = placement.strategy.can_generate()
            expected = {k: v for k, v in alone[name].items() if samples or not _is_sampled(k)}
            differing = figures.keys() ^ expected.keys()
            assert not differing, f"rank {rank}, {name}, {placement}: {differing}"
            for figure, value in expected.items():
                where = f"rank {rank}, {name}, {placement}: {figure}"
                torch.testing.assert_close(
                    figures[figure],
                    value,
                    rtol=tolerance,
                    atol=tolerance / 10,
                    equal_nan=True,
                    msg=lambda m, w=where: f"{w}: {m}",
                )


def _is_sampled(figure: str) -> bool:
    return figure.split()[0] in ("samples", "logprobs")


def _be_rank(
    rank: int, world: int, scratch: str, models: Models, cases: Iterable[Case], ordered: bool, device: str
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    wait_to_be_scheduled()
    limits.BUCKET_ELEMENTS = 3000  # several buckets even in models as small as these
    limits.MERGED_ROWS = 5
    place = CPU if device == "cpu" else torch.device(device, rank)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    store = Path(scratch) / "store"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    process = Process(rank, world, place, dist.new_group(backend="gloo"))
    if ordered:
        pipeline.needs_order = lambda device: True
    groups = process.groups(list_rank_sets(placement for _, placement in cases))
    results = []
    for name, placement in cases:
        shape, head = models[name]
        own = select_groups(placement, rank, groups)
        model = _build(build_layout(shape, head, placement), rank, own, process.device)
        results.append(learn(model, batch(head, shape)))
    torch.save(results, f"{scratch}/out-{rank}")
    dist.barrier()
    dist.destroy_process_group()
    leave(0)


def _build(layout: Layout, rank: int, groups: ParallelGroups, device: torch.device) -> Model:
    """A rank's part of a model, or of its adapters' learning. Adapters are not 0, so that all their parts have
    gradients."""
    part = TrainablePart(adapters=layout.shape.lora is not None)
    model = Model(layout, rank, groups, dtype=torch.float32, device=device, part=part)
    regions = {local.region.tensor: local.region for local in layout.tensors(rank)}
    specs = [spec for spec in layout.specs if spec.name in regions]
    initialise(model.parameters, specs, layout.shape, 1, regions)
    for spec in specs:
        if spec.parameter in ADAPTERS:
            seed = int.from_bytes(spec.name.encode()) % 2**60
            values = torch.empty(spec.shape).normal_(std=0.3, generator=torch.Generator().manual_seed(seed))
            region = regions[spec.name]
            model.parameters[spec.name][: region.size[0]] = values[region.slices]
    return model


def batch(head: Head, shape: ModelShape) -> Batch:
    generator = torch.Generator().manual_seed(5)

    def draw(length: int) -> torch.Tensor:
        return torch.randint(1, shape.vocab_size, (length,), generator=generator)

    beginnings = [draw(length) for length in BEGINNINGS]

    def rows(count: int) -> Ragged:
        lengths = torch.randint(2, 17, (count,), generator=generator).tolist()
        return Ragged.of([torch.cat((beginnings[i // GROUP], draw(n))) for i, n in enumerate(lengths)])

    ids = tuple(range(ITEMS))
    if head == "scalar":
        # Weights of 1, 1/2, 1/3, and 1/4, whose sum over a micro-batch or a rank can be less than 1.
        pairs = Ragged.scalars(torch.arange(ITEMS) % 4 + 1)
        return Batch(ids, {"chosen": rows(ITEMS), "rejected": rows(ITEMS), "pairs_of_prompt": pairs})
    tokens = rows(ITEMS)
    mask = torch.randint(0, 3, tokens.values.shape, generator=generator).clamp(max=1)
    mask[list(tokens.offsets[:-1])] = 0
    places = (len(mask), shape.vocab_size)
    teacher = torch.randn(places, generator=generator).log_softmax(1).topk(CANDIDATES)
    fields = {"loss_mask": mask, "teacher_ids": teacher.indices.int(), "teacher_top_logprobs": teacher.values}
    return Batch(
        ids, {"tokens": tokens, **{name: Ragged(values, tokens.lengths) for name, values in fields.items()}}
    )


class _EndlessGradient(SFTMethod):
    """SFT whose gradient is not finite in the micro-batch that has a certain item, though its loss is."""

    def loss(self, batch: Batch, output: ModelOutput) -> tuple[torch.Tensor, Metrics]:
        """See `TrainMethod`."""
        loss, metrics = super().loss(batch, output)
        return (loss + (loss * 0).sqrt() if ENDLESS in batch.ids else loss), metrics


class _EndlessLoss(PairMethod):
    """Pairs whose loss is not finite in the micro-batch that has a certain item, though its gradient is."""

    def loss(self, batch: Batch, output: ModelOutput) -> tuple[torch.Tensor, Metrics]:
        """See `TrainMethod`."""
        loss, metrics = super().loss(batch, output)
        return (loss + torch.nan if ENDLESS in batch.ids else loss), metrics


def learn(model: Model, everything: Batch) -> dict[str, torch.Tensor]:
    """A few steps of training, of which the first skips one update and the last distils a language model, then
    inference, then generation; metrics by name, equal on every rank."""
    head, strategy = model.head, model.layout.placement.strategy
    dp_index = model.groups.data.index
    methods = [_EndlessLoss(), PairMethod()]
    if head == "lm":
        methods = [_EndlessGradient(), DivergenceTrain(OfflineDistillationConfig(divergence="jsd"))]
    infer = SFTMethod() if head == "lm" else PairMethod()
    costs = [sum(field.lengths[i] for field in everything.fields.values()) for i in range(len(everything))]
    mine = assign(costs, minibatches=2, dp=strategy.dp)[dp_index]
    items = sorted(i for part in mine for i in part)
    local = everything.select(items)
    # Weights come when there is a trainer, as in a run.
    buffers = [held.buffer.data for held in model.sets.values()]
    weights = [data.clone() for data in buffers]
    for data in buffers:
        data.zero_()
    trainer, results = Trainer(model, OPTIMIZER), {}
    for data, values in zip(buffers, weights, strict=True):
        data.copy_(values)
    trainer.adopt()
    for step, train in enumerate(methods):
        positions = [[items.index(i) for i in part] for part in mine]
        budget = strategy.micro_batch_tokens
        metrics = trainer.train(
            local,
            train,
            positions,
            TrainOptions(
                max_tokens=budget,
                recompute=strategy.recompute,
                zero_bubble=strategy.zero_bubble,
                candidates=None if step == 0 or head == "scalar" else Candidates(CANDIDATES, "teacher_ids"),
            ),
            lr=OPTIMIZER.lr,
        ).result()
        for name, value in metrics.items():
            results[f"{step}/{name}"] = torch.tensor(value)
    scored, _ = model.infer(local, infer, strategy.micro_batch_tokens)
    key = "nll" if head == "lm" else "chosen_score"
    results["inference"] = gathered(
        model, items, [float(r) for r in scored[key].rows()] if key in scored.fields else []
    )
    if head == "lm":
        likeliest, _ = model.infer(
            local, TopTeacher(), strategy.micro_batch_tokens, candidates=Candidates(CANDIDATES)
        )
        for name in ("teacher_ids", "teacher_top_logprobs"):
            sums = [float(row.double().square().sum()) for row in likeliest[name].rows()]
            results[name] = gathered(model, items, sums if model.shard.last else [])
    if head == "lm" and strategy.can_generate():
        results |= sample(model, items, local, samples=1)
        # Every prompt GROUP times; one process prefills and caches each of them by itself.
        prompts = everything["tokens"].select([i // GROUP for i in range(ITEMS)])
        items = partition_samples(prompts.lengths, GROUP, strategy.dp)[dp_index]
        local = Batch(tuple(items), {"tokens": prompts.select(items)})
        shared = sample(model, items, local, samples=1 if strategy.size == 1 else GROUP)
        results |= {f"{name} of shared prompts": values for name, values in shared.items()}
    return results


def sample(model: Model, items: list[int], local: Batch, *, samples: int) -> dict[str, torch.Tensor]:
    """Figures that tell sampled tokens apart, and sums of log-probabilities, of all items."""
    texts = generate(
        model,
        local,
        "tokens",
        sampling=SAMPLING,
        stop_token_ids=(3,),
        seed=SamplingSeed(1, 2),
        kv_capacity=CACHE,
        samples=samples,
    )
    sums: list[float] = []
    logprobs: list[float] = []
    if "sequences" in texts.fields:
        sums = [float((torch.arange(len(r)) + 1).mul(r).sum()) for r in texts["sequences"].rows()]
        logprobs = [float(r.sum()) for r in texts["logprobs"].rows()]
    return {"samples": gathered(model, items, sums), "logprobs": gathered(model, items, logprobs)}


def gathered(model: Model, items: list[int], values: list[float]) -> torch.Tensor:
    """What the last stages' first tensor and context ranks have, in the order of items, on every rank."""
    out = torch.zeros(ITEMS, dtype=torch.float64)
    if values and model.shard.tp_index == 0 and model.groups.context.index == 0:
        out[items] = torch.tensor(values, dtype=torch.float64)
    return model.groups.mesh.sum(out.to(model.device)).cpu()
