"""Compare degrees of context parallelism for single sequences with one degree for all.

    python bench/pool.py predict [--json FILE]
    python bench/pool.py measure [--rounds 5] [--json FILE]

Sequences have log-normal lengths with a long tail. `predict` draws mini-batches for 64 H100, and adds up the
predicted seconds of all micro-batches on each rank. The busiest rank counts. Under "static", all context-parallel
ranks divide every micro-batch. Under "pool", they divide only long sequences. The reduction of gradients takes the
same time in both cases, and is left out.

`measure` trains a small model on 4 processes, with the same lengths divided by 64. Both ways take turns, step by
step.
"""

import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from harness import Results, make_parser

from realrl.algorithms.sft_loss import SFTMethod
from realrl.data.balance import micro_batches, partition
from realrl.data.batch import Batch, Ragged
from realrl.dataflow.call import Call, Kind
from realrl.engine.model import Model
from realrl.engine.parallel_groups import select_groups
from realrl.engine.training.trainer import Trainer, TrainOptions
from realrl.families.shape import ModelShape
from realrl.families.sizes import SHAPES, estimate_attention_cost
from realrl.huggingface.initial_weights import initialise
from realrl.layout.layout import build_layout
from realrl.plan.communicators import list_rank_sets
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.plan.pool import Share, divide_pool
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.workload.workload import Workload
from realrl.program.memory import StoredModel
from realrl.recipe.optimizer import OptimizerConfig
from realrl.runtime.processes.process import Process

Divide = Callable[..., list[Share]]

CALL = Call("actor.train", "actor", Kind.TRAIN, ("tokens",), work=("tokens",))
MEDIAN, SIGMA = 3000, 1.4
"""Lengths of sequences in tokens: log-normal, cut at the longest."""
LONGEST = 131072
SEQUENCES = 256
"""Sequences of a mini-batch on 64 GPUs."""
RANK_TOKENS = 16384
"""Tokens of a micro-batch on one GPU."""
SMALL = ModelShape(
    vocab_size=1024, hidden_size=256, intermediate_size=704, layers=4, heads=4, kv_heads=2, head_dim=64
)
PROCESSES = 4


def draw(
    count: int, seed: int, scale: float = 1.0, longest: int = LONGEST, sigma: float = SIGMA
) -> list[int]:
    """Draw lengths in tokens."""
    rng = random.Random(seed)
    drawn = (rng.lognormvariate(math.log(MEDIAN), sigma) for _ in range(count))
    return [max(2, round(scale * min(longest, length))) for length in drawn]


def divide_all(
    tokens: Sequence[int], costs: Sequence[float], ranks: int, most: int, alone: Sequence[float] | None = None
) -> list[Share]:
    """Let all ranks divide every item."""
    return [Share(range(ranks), [*range(len(tokens))])]


@dataclass(frozen=True)
class Mixture:
    """Long-tailed lengths, and the meshes on which the longest sequence fits."""

    longest: int
    sigma: float
    meshes: tuple[tuple[int, int], ...]
    """Degrees dp and cp."""


MIXTURES = (
    Mixture(LONGEST, SIGMA, ((8, 8), (2, 32), (1, 64))),
    Mixture(1 << 19, 1.8, ((2, 32), (1, 64))),
)

WAYS: dict[str, Divide] = {"static": divide_all, "pool": divide_pool}


def predict(name: str, mixture: Mixture, dp: int, cp: int, divide: Divide) -> float:
    """Predict the seconds of the busiest rank, mean of five mini-batches."""
    shape = SHAPES[name]
    seconds = []
    for seed in range(5):
        lengths = draw(SEQUENCES, seed, longest=mixture.longest, sigma=mixture.sigma)
        groups = partition(lengths, dp)
        seconds.append(max(predict_group(shape, [lengths[i] for i in group], cp, divide) for group in groups))
    return statistics.mean(seconds)


def predict_group(shape: ModelShape, lengths: Sequence[int], cp: int, divide: Divide) -> float:
    """Predict the seconds of the busiest of `cp` ranks that have the same sequences."""
    attention = estimate_attention_cost(shape)
    costs = [n + attention * n * n for n in lengths]
    loads = [0.0] * cp
    for share in divide(lengths, costs, cp, RANK_TOKENS):
        own = [lengths[i] for i in share.items]
        for group in micro_batches(own, RANK_TOKENS * len(share.ranks)):
            seconds = predict_pass(shape, tuple(own[i] for i in group), len(share.ranks))
            for rank in share.ranks:
                loads[rank] += seconds
    return max(loads)


def predict_pass(shape: ModelShape, lengths: tuple[int, ...], ranks: int) -> float:
    """Predict the seconds of a micro-batch that `ranks` ranks divide, with recomputation, in bfloat16."""
    spec = ClusterSpec.parse("h100:8x8")
    strategy = Strategy(cp=ranks, recompute=True, micro_batch_tokens=sum(lengths))
    model = StoredModel(shape, "lm", "bfloat16", trained=True)
    place, cost = Placement(Mesh(0, ranks), strategy), CostModel(spec)
    apart = cost.call(CALL, model, place, Workload(len(lengths), lengths)).terms
    # The planner would not let ranks divide short sequences. A single long one has the same exchange of keys.
    joined = cost.call(CALL, model, place, Workload(1, (sum(lengths),))).terms
    return apart["compute"] + apart["launch"] + joined["context"]


def run_rank(rank: int, store: str, rounds: int, out: str) -> None:
    """Train in turns with both ways, and save the seconds of the steps."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=PROCESSES)
    process = Process(rank, PROCESSES, torch.device("cpu"), dist.new_group(backend="gloo"))
    lengths = draw(24, 3, scale=1 / 64)
    most = -(-max(lengths) // PROCESSES) * PROCESSES
    placement = Placement(Mesh(0, PROCESSES), Strategy(cp=PROCESSES, micro_batch_tokens=max(2048, most)))
    groups = process.groups(list_rank_sets([placement]))
    model = Model(
        build_layout(SMALL, "lm", placement),
        rank,
        select_groups(placement, rank, groups),
        dtype=torch.float32,
        device=process.device,
    )
    initialise(model.parameters, model.layout.specs, SMALL, 1)
    trainer = Trainer(model, OptimizerConfig(lr=1e-6))
    trainer.adopt()
    generator = torch.Generator().manual_seed(1)
    rows = Ragged.of([torch.randint(4, SMALL.vocab_size, (n,), generator=generator) for n in lengths])
    masks = Ragged.of([(torch.arange(n) > 0).long() for n in lengths])
    batch = Batch(tuple(range(len(lengths))), {"tokens": rows, "loss_mask": masks})
    options = TrainOptions(max_tokens=placement.strategy.micro_batch_tokens)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds + 1):
        for way, divide in WAYS.items():
            with patch("realrl.engine.micro_batches.divide_pool", divide):
                dist.barrier()
                start = time.perf_counter()
                trainer.train(batch, SFTMethod(), [range(len(batch))], options, lr=1e-6)
                dist.barrier()
                seconds[way].append(time.perf_counter() - start)
    if rank == 0:
        torch.save({way: of[1:] for way, of in seconds.items()}, out)
    dist.destroy_process_group()


def measure(rounds: int) -> dict[str, Any]:
    """Measure both ways on local processes."""
    with tempfile.TemporaryDirectory() as scratch:
        out = str(Path(scratch) / "out")
        mp.spawn(run_rank, (str(Path(scratch) / "store"), rounds, out), PROCESSES)
        found = torch.load(out)
    ratios = [a / b for a, b in zip(found["static"], found["pool"], strict=True)]
    return {
        "processes": PROCESSES,
        "static_s": round(statistics.median(found["static"]), 3),
        "pool_s": round(statistics.median(found["pool"]), 3),
        "ratio": round(statistics.median(ratios), 2),
        "ratio_range": [round(min(ratios), 2), round(max(ratios), 2)],
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("what", choices=("predict", "measure"))
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    results = Results(arguments.json)
    if arguments.what == "measure":
        found = measure(arguments.rounds)
        results.add("measure", found)
        print(found)
        return
    print(f"{'model':14} {'longest':>8} {'dp':>3} {'cp':>3} {'static s':>9} {'pool s':>8}")
    for name in ("qwen2.5-7b", "llama-3.1-70b"):
        for mixture in MIXTURES:
            for dp, cp in mixture.meshes:
                of = {way: round(predict(name, mixture, dp, cp, divide), 3) for way, divide in WAYS.items()}
                results.add(f"{name} {mixture.longest} dp{dp} cp{cp}", of)
                print(f"{name:14} {mixture.longest:8} {dp:3} {cp:3} {of['static']:9.3f} {of['pool']:8.3f}")


if __name__ == "__main__":
    sys.exit(main())
