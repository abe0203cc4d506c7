"""Compare ways to divide a train call and a generate call of a small mixture of experts among local processes.

The ways are tensor, context and expert parallelism on 4 processes, alone and together, and schedules of a pipeline
on 2 processes. They take turns, step by step. A ratio is the seconds of a step under the first way, divided by
those of the way: above 1, the way is faster. Predicted ratios come from the cost model of CPUs without a profile.

train: sequences of 512 tokens, or one long sequence of 6,144 tokens, which only tensor and context parallelism
divide. generate: 32 prompts of 32 tokens with answers of 48 tokens, or one prompt of 6,144 tokens. pipeline: 4
micro-batches of 512 tokens.

    python bench/divided.py [--rounds 5] [--calls train generate ...] [--json FILE]
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from harness import Results, make_parser

from realrl.algorithms.sft_loss import SFTMethod
from realrl.data.balance import assign, partition_samples
from realrl.data.batch import Batch, Ragged
from realrl.dataflow.call import Call, Kind
from realrl.engine.generation.generator import generate
from realrl.engine.generation.sampling_noise import SamplingSeed
from realrl.engine.model import Model
from realrl.engine.parallel_groups import select_groups
from realrl.engine.training.trainer import Trainer, TrainOptions
from realrl.families.shape import Mixture, ModelShape
from realrl.huggingface.initial_weights import initialise
from realrl.layout.layout import build_layout
from realrl.plan.communicators import list_rank_sets
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.workload.workload import Workload
from realrl.program.memory import StoredModel
from realrl.recipe.generation import GenerationConfig
from realrl.recipe.optimizer import OptimizerConfig
from realrl.runtime.processes.process import Process

SHAPE = ModelShape(
    family="qwen3_moe", vocab_size=1024, hidden_size=256, intermediate_size=256, layers=4, heads=8, kv_heads=4,
    head_dim=32, mixture=Mixture(experts=16, per_token=2),
)  # fmt: skip
TOKENS = 8192
Ways = Mapping[str, Mapping[str, Any]]
TRAIN: Ways = {
    "tp=4": {"tp": 4},
    "dp=4": {"dp": 4},
    "dp=4 ep=4": {"dp": 4, "ep": 4},
    "tp=4 ep=4": {"tp": 4, "ep": 4},
    "dp=2 tp=2 ep=4": {"dp": 2, "tp": 2, "ep": 4},
}
LONG: Ways = {
    "tp=4": {"tp": 4},
    "cp=4": {"cp": 4},
    "cp=4 ep=4": {"cp": 4, "ep": 4},
    "tp=2 cp=2": {"tp": 2, "cp": 2},
}
GENERATE: Ways = {
    "tp=4": {"tp": 4},
    "dp=4": {"dp": 4},
    "dp=4 ep=4": {"dp": 4, "ep": 4},
    "dp=2 tp=2 ep=4": {"dp": 2, "tp": 2, "ep": 4},
}
GENERATE_LONG: Ways = {
    "tp=4": {"tp": 4},
    "cp=4": {"cp": 4},
    "tp=2 cp=2": {"tp": 2, "cp": 2},
    "pp=4": {"pp": 4},
}
PIPELINE: Ways = {
    "pp=2": {"pp": 2},
    "vpp=2": {"pp": 2, "vpp": 2},
    "zero bubble": {"pp": 2, "zero_bubble": True},
    "vpp=2, zero b.": {"pp": 2, "vpp": 2, "zero_bubble": True},
}
SETS: Mapping[str, tuple[Ways, list[int], int]] = {
    "train": (TRAIN, [512] * 16, 0),
    "train long": (LONG, [6144], 0),
    "generate": (GENERATE, [32] * 32, 48),
    "generate long": (GENERATE_LONG, [6144], 48),
    "pipeline": (PIPELINE, [512] * 4, 0),
}
"""Name -> ways, lengths of sequences or prompts, and tokens of answers."""


def place(settings: Mapping[str, Any]) -> Placement:
    """Place a strategy on processes from the first one on."""
    strategy = Strategy(**settings, micro_batch_tokens=TOKENS)
    return Placement(Mesh(0, strategy.size), strategy)


def predict(name: str, settings: Mapping[str, Any]) -> float:
    """Predict the seconds of a call."""
    _, lengths, answer = SETS[name]
    kind = Kind.GENERATE if answer else Kind.TRAIN
    call = Call("actor", "actor", kind, ("tokens",), work=("tokens",))
    workload = Workload(len(lengths), (lengths[0],), (answer,), answer)
    model = StoredModel(SHAPE, "lm", "float32", trained=True)
    placement = place(settings)
    cost = CostModel(ClusterSpec.parse(f"cpu:1x{placement.mesh.size}"))
    return sum(cost.call(call, model, placement, workload).terms.values())


def make_run(model: Model, lengths: list[int], answer: int) -> Callable[[], object]:
    """Make a function that trains on sequences, or continues prompts, of this rank."""
    strategy, dp = model.layout.placement.strategy, model.groups.data.index
    generator = torch.Generator().manual_seed(1)
    rows = Ragged.of([torch.randint(4, SHAPE.vocab_size, (n,), generator=generator) for n in lengths])
    if answer:
        items = partition_samples(lengths, 1, strategy.dp)[dp]
        prompts = Batch(tuple(items), {"tokens": rows.select(items)})
        sampling = GenerationConfig(max_new_tokens=answer, min_new_tokens=answer)
        return lambda: generate(
            model,
            prompts,
            "tokens",
            sampling=sampling,
            stop_token_ids=(3,),
            seed=SamplingSeed(1, 1),
            kv_capacity=TOKENS,
        )
    (items,) = assign(lengths, minibatches=1, dp=strategy.dp)[dp]
    own = rows.select(items)
    masks = Ragged.of([(torch.arange(n) > 0).long() for n in own.lengths])
    batch = Batch(tuple(items), {"tokens": own, "loss_mask": masks})
    trainer = Trainer(model, OptimizerConfig(lr=1e-6))
    trainer.adopt()
    options = TrainOptions(max_tokens=strategy.micro_batch_tokens, zero_bubble=strategy.zero_bubble)
    return lambda: trainer.train(batch, SFTMethod(), [range(len(batch))], options, lr=1e-6)


def run_rank(rank: int, world: int, names: list[str], store: str, rounds: int, out: str) -> None:
    """Run all ways of some calls in turns, and save the seconds of their steps."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    process = Process(rank, world, torch.device("cpu"), dist.new_group(backend="gloo"))
    found: dict[str, dict[str, list[float]]] = {}
    for name in names:
        ways, lengths, answer = SETS[name]
        placements = {way: place(settings) for way, settings in ways.items()}
        groups = process.groups(list_rank_sets(placements.values()))
        runs = {}
        for way, placement in placements.items():
            model = Model(
                build_layout(SHAPE, "lm", placement),
                rank,
                select_groups(placement, rank, groups),
                dtype=torch.float32,
                device=process.device,
            )
            regions = {local.region.tensor: local.region for local in model.layout.tensors(rank)}
            specs = [spec for spec in model.layout.specs if spec.name in regions]
            initialise(model.parameters, specs, SHAPE, 1, regions)
            runs[way] = make_run(model, lengths, answer)
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds + 1):
            for way, run in runs.items():
                dist.barrier()
                start = time.perf_counter()
                run()
                dist.barrier()
                seconds[way].append(time.perf_counter() - start)
        found[name] = {way: of[1:] for way, of in seconds.items()}
    if rank == 0:
        torch.save(found, out)
    dist.destroy_process_group()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", nargs="+", default=[*SETS], choices=[*SETS])
    arguments = parser.parse_args()
    results = Results(arguments.json)
    measured: dict[str, dict[str, list[float]]] = {}
    sizes = {name: place(next(iter(SETS[name][0].values()))).mesh.size for name in arguments.calls}
    for world in dict.fromkeys(sizes.values()):
        names = [name for name, size in sizes.items() if size == world]
        with tempfile.TemporaryDirectory() as scratch:
            store, out = (str(Path(scratch) / name) for name in ("store", "out"))
            mp.spawn(run_rank, (world, names, store, arguments.rounds, out), world)
            measured |= torch.load(out)
    print(f"{'call':13} {'way':15} {'seconds':>8} {'ratio':>6} {'range':>12} {'predicted':>10}")
    for name, of_ways in measured.items():
        ways, first = SETS[name][0], next(iter(of_ways))
        for way, seconds in of_ways.items():
            ratios = [one / other for one, other in zip(of_ways[first], seconds, strict=True)]
            row: dict[str, Any] = {
                "seconds": round(statistics.median(seconds), 3),
                "ratio": round(statistics.median(ratios), 2),
                "range": [round(min(ratios), 2), round(max(ratios), 2)],
                "predicted": round(predict(name, ways[first]) / predict(name, ways[way]), 2),
            }
            results.add(f"{name} {way}", row)
            low, high = row["range"]
            print(
                f"{name:13} {way:15} {row['seconds']:8.3f} {row['ratio']:6.2f} {low:5.2f} - {high:4.2f}"
                f" {row['predicted']:10.2f}"
            )


if __name__ == "__main__":
    main()
