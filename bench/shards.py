"""Memory of ranks while a model is read from Hugging Face files and while it is saved, beside what they hold of it.

Per plan, one local CPU process per rank reads its regions of a model of random weights in several files, and all of
them save it again, the first one writing. Sampled is the anonymous memory of every process (`RssAnon`; pages of
the files that are read belong to the system's cache, and are free to go), every 2 ms. Figures are of the rank
whose peak is the largest for what it holds: the bytes of its own regions; the peak while they are read, over what
the process had before; and the peak of all ranks, the first of which writes, while the model is saved.

    python bench/shards.py [--models llama-3.2-1b pythia-1b] [--plans 1,4,1 1,2,2 ...] [--json FILE]
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event, Thread
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from results_file import ResultsFile

from realrl.engine.buffers.flat import FlatBuffer
from realrl.families.registry import model_tensors
from realrl.families.shape import ModelShape
from realrl.families.sizes.published import SHAPES
from realrl.huggingface import model_files
from realrl.huggingface.directory import read_origin
from realrl.huggingface.shards import list_portions
from realrl.layout.layout import build_layout
from realrl.plan.cluster import Cluster
from realrl.plan.communicators import list_rank_sets
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.plan.plan import Plan
from realrl.recipe.model import ModelConfig
from realrl.runtime.monitor.host_memory import steady_memory
from realrl.runtime.processes.environment import leave
from realrl.runtime.processes.process import Process
from realrl.runtime.worker.roles import Roles

ROLE = "actor"
INTERVAL = 0.002
"""Seconds between samples of a process's memory."""
FILE_BYTES = 5e8
"""Maximum bytes of a file of the models that are read."""
PLANS = ("1,4,1", "1,2,2", "1,1,4", "1,3,1", "1,1,3")
"""dp, tp, pp. Three ranks cut heads, rows of the vocabulary and layers unevenly."""


def make_model(directory: Path, shape: ModelShape) -> None:
    """Write a model of random weights in bfloat16."""
    portions = list_portions(model_tensors(shape, "lm"), torch.bfloat16)

    def draw(number: int) -> FlatBuffer:
        buffer = FlatBuffer([part.stored for part in portions[number]], torch.bfloat16, "cpu")
        buffer.data.normal_(0, 0.02)
        return buffer

    model_files.save(directory, shape, "lm", draw, None, torch.bfloat16, FILE_BYTES)


class Peak:
    """Largest anonymous memory of this process while a block runs, in bytes over a baseline."""

    def __init__(self, baseline: int = 0) -> None:
        self.bytes = 0
        self._baseline, self._done = baseline, Event()
        self._thread = Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            done = self._done.wait(INTERVAL)
            self.bytes = max(self.bytes, read_anonymous() - self._baseline)
            if done:
                return


def read_anonymous() -> int:
    """Read the anonymous memory of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def run_rank(rank: int, placement: Placement, directory: Path, store: str, results: Connection) -> None:
    """Read a model and save it, as one rank; sends (rank, figures)."""
    world = placement.mesh.size
    steady_memory()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    process = Process(rank, world, torch.device("cpu"), dist.new_group(backend="gloo"))
    groups = process.groups(list_rank_sets([placement]))
    plan = Plan(Cluster(1, world), {"actor.generate": placement})
    config = ModelConfig(path=str(directory / "model"), dtype="bfloat16")
    baseline = read_anonymous()
    roles = Roles(
        {ROLE: config}, {ROLE: "lm"}, {ROLE: placement}, process, groups, plan, temperature=1.0, seed=0
    )
    seconds = {}
    with Peak(baseline) as reading:
        seconds["read"] = timed(roles.load_weights)
    roles.origins[ROLE] = read_origin(config.path or "")
    process.gather(None)
    with Peak(baseline) as writing:
        seconds["write"] = timed(lambda: roles.save(ROLE, directory / "saved", cast(Any, None), ()))
        process.gather(None)
    layout = build_layout(roles.shapes[ROLE], "lm", placement)
    own = sum(local.region.numel for local in layout.tensors(rank)) * torch.bfloat16.itemsize
    results.send((rank, {"own": own, "reading": reading.bytes, "writing": writing.bytes, **seconds}))
    dist.barrier()
    leave(0)


def timed(action: Callable[[], object]) -> float:
    """Measure the seconds of a call."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def measure(directory: Path, strategy: Strategy) -> list[dict[str, float]]:
    """Read and save the model in `directory` under a plan; figures by rank."""
    world = strategy.size
    receive, send = mp.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        arguments = (Placement(Mesh(0, world), strategy), directory, f"{scratch}/store", send)
        context = mp.start_processes(run_rank, arguments, world, join=False, start_method="spawn")
        found = dict(receive.recv() for _ in range(world))
        while not context.join():
            pass
    return [found[rank] for rank in range(world)]


def summarise(ranks: list[dict[str, float]]) -> dict[str, float]:
    """Figures of a plan: megabytes, and ratios to a rank's own regions."""
    worst = max(ranks, key=lambda rank: rank["reading"] / rank["own"])
    first = ranks[0]
    return {
        "own_mb": worst["own"] / 1e6,
        "reading_mb": worst["reading"] / 1e6,
        "reading_ratio": worst["reading"] / worst["own"],
        "writer_own_mb": first["own"] / 1e6,
        "writing_mb": first["writing"] / 1e6,
        "writing_ratio": max(rank["writing"] / rank["own"] for rank in ranks),
        "read_s": max(rank["read"] for rank in ranks),
        "write_s": first["write"],
    }


def main() -> None:
    """Measure the chosen models under the chosen plans."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=sorted(SHAPES), default=("llama-3.2-1b", "pythia-1b"))
    parser.add_argument("--plans", nargs="+", default=PLANS, metavar="DP,TP,PP")
    parser.add_argument("--directory", type=Path, default=None, help="where models are written meanwhile")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    results = ResultsFile(arguments.json)
    os.environ["OMP_NUM_THREADS"] = "1"
    for model in arguments.models:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as scratch:
            make_model(Path(scratch) / "model", SHAPES[model])
            for plan in arguments.plans:
                dp, tp, pp = map(int, plan.split(","))
                figures = summarise(measure(Path(scratch), Strategy(dp=dp, tp=tp, pp=pp)))
                results.add(f"{model} dp={dp} tp={tp} pp={pp}", figures)
                print(model, plan, {name: round(value, 3) for name, value in figures.items()}, flush=True)


if __name__ == "__main__":
    main()
