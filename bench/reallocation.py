"""Measure reallocations between local processes, and other ways to move the same parameters.

The table has medians over rounds for pairs of layouts and sizes of models. In a round, all ways take turns:

- ours: `Reallocator.run` between existing float32 buffers, compiled in advance;
- p2p: the same bytes between the same ranks, one plain message for each pair, all at once. Bytes that stay on
  a rank are not copied;
- gather: the way of frameworks that pass whole tensors to the other side. For each tensor, all-gather over the
  tensor-parallel ranks, broadcast to the ranks that lack the tensor, and cut out the part that a rank needs;
- dtensor: `redistribute` of every tensor, if the target is whole tensors on the same ranks.

    python bench/reallocation.py [--processes 2 4 8] [--rounds N] [--json FILE]
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from harness import Results, make_parser
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from realrl.engine.buffers import FlatBuffer
from realrl.families.shape import ModelShape
from realrl.layout.layout import Layout, build_layout
from realrl.layout.routing.routes import Reallocation, reallocate
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.runtime.processes.environment import leave
from realrl.runtime.processes.process import Process, wait_to_be_scheduled
from realrl.runtime.worker.reallocation import Reallocator

LARGE = 16 << 20
"""A pair of layouts counts in the summary if it sends at least this many bytes per receiver."""
CPU = torch.device("cpu")


def model(hidden: int, layers: int, vocabulary: int) -> ModelShape:
    """Make a shape whose tensors 8 ranks can share equally."""
    return ModelShape(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=3 * hidden, layers=layers, heads=16,
        kv_heads=8, head_dim=hidden // 16,
    )  # fmt: skip


SIZES = {"small": model(256, 8, 2048), "medium": model(768, 4, 4096), "large": model(1024, 4, 8192)}
SAME: dict[int, list[tuple[Strategy, Strategy]]] = {
    2: [(Strategy(tp=2), Strategy(dp=2)), (Strategy(pp=2), Strategy(tp=2))],
    4: [
        (Strategy(tp=4), Strategy(dp=4)),
        (Strategy(dp=2, tp=2), Strategy(dp=4)),
        (Strategy(tp=2, pp=2), Strategy(dp=2, tp=2)),
        (Strategy(pp=4), Strategy(tp=4)),
    ],
    8: [
        (Strategy(tp=8), Strategy(dp=2, tp=4)),
        (Strategy(tp=2, pp=4), Strategy(dp=2, tp=4)),
        (Strategy(dp=2, tp=2, pp=2), Strategy(dp=8)),
    ],
}
"""Pairs of strategies of source and target, both on all processes, by number of processes."""
APART: dict[int, list[tuple[Strategy, Strategy]]] = {
    2: [(Strategy(), Strategy())],
    4: [(Strategy(tp=2), Strategy(dp=2)), (Strategy(dp=2), Strategy(tp=2))],
    8: [(Strategy(pp=4), Strategy(tp=4)), (Strategy(tp=4), Strategy(dp=2, tp=2))],
}
"""Pairs of strategies of a source on the first half of the processes and a target on the second half, by number of
processes."""


@dataclass(frozen=True)
class Case:
    """A reallocation to measure."""

    processes: int
    size: str
    source: Placement
    target: Placement

    @property
    def reallocation(self) -> Reallocation:
        """The schedule of the reallocation."""
        source, target = (build_layout(SIZES[self.size], "lm", place) for place in (self.source, self.target))
        return reallocate(source, target, Cluster(1, self.processes))


Row = dict[str, Any]
"""Figures of a case."""


def cases(processes: list[int]) -> list[Case]:
    """List all cases."""
    found = []
    for count in processes:
        for size in SIZES:
            for a, b in SAME[count]:
                everywhere = Mesh(0, count)
                found.append(Case(count, size, Placement(everywhere, a), Placement(everywhere, b)))
            for a, b in APART[count]:
                half = count // 2
                found.append(Case(count, size, Placement(Mesh(0, half), a), Placement(Mesh(half, half), b)))
    return found


def whole(held: Layout) -> dict[str, Tensor]:
    """Make all tensors. Each one is filled with its index."""
    return {s.name: torch.full(s.shape, float(i)) for i, s in enumerate(held.specs)}


def buffer(held: Layout, rank: int, values: dict[str, Tensor] | None = None) -> FlatBuffer | None:
    """Allocate the memory of a rank under a layout, and fill it if there are values."""
    if rank not in held.placement.ranks:
        return None
    flat = FlatBuffer([t.stored for t in held.tensors(rank)], torch.float32, CPU)
    flat.data.zero_()
    for local in held.tensors(rank) if values else ():
        flat[local.region.tensor][: local.region.size[0]] = values[local.region.tensor][local.region.slices]
    return flat


Way = Callable[[], None]


def point_to_point(plan: Reallocation, rank: int) -> Way:
    """Prepare plain messages of the same bytes between the same ranks."""
    amounts: defaultdict[tuple[int, int], int] = defaultdict(int)
    for transfer in plan.transfers:
        if rank in (transfer.sender, transfer.receiver):
            amounts[transfer.sender, transfer.receiver] += transfer.region.numel
    tensors = {pair: torch.ones(amount) for pair, amount in sorted(amounts.items())}

    def run() -> None:
        works = [
            dist.isend(tensor, to) if at == rank else dist.irecv(tensor, at)
            for (at, to), tensor in tensors.items()
        ]
        for work in works:
            assert work is not None
            work.wait()

    return run


Groups = dict[tuple[int, ...], dist.ProcessGroup]


class Gather:
    """Every rank gets whole tensors and cuts out its part."""

    def __init__(self, plan: Reallocation, rank: int, source: FlatBuffer | None, groups: Groups) -> None:
        self.plan, self.rank, self.source, self.groups = plan, rank, source, groups

    @staticmethod
    def rank_sets(plan: Reallocation) -> set[tuple[int, ...]]:
        """List the groups of ranks that need a process group."""
        p, s = plan.source.placement, plan.source.placement.strategy
        sets = {
            tuple(p.rank(dp=d, tp=t, pp=i) for t in range(s.tp)) for d in range(s.dp) for i in range(s.pp)
        }
        if set(plan.target.placement.ranks) <= set(p.ranks):
            pipelines = ((d, t) for d in range(s.dp) for t in range(s.tp))
            sets |= {tuple(p.rank(dp=d, tp=t, pp=i) for i in range(s.pp)) for d, t in pipelines}
        else:
            sets |= {(p.rank(dp=0, pp=i), *plan.target.placement.ranks) for i in range(s.pp)}
        return {ranks for ranks in sets if len(ranks) > 1}

    def run(self, target: FlatBuffer | None) -> None:
        """Run one pass over all tensors."""
        wanted = {local.region.tensor: local.region for local in self.plan.target.tensors(self.rank)}
        for spec, stages in zip(self.plan.source.specs, self.plan.source.stages, strict=True):
            full = self.whole(spec.name, spec.shape, stages[0])
            if target is not None and spec.name in wanted:
                assert full is not None, "all targets were told"
                target[spec.name].copy_(full[wanted[spec.name].slices])

    def whole(self, name: str, shape: tuple[int, ...], stage: int) -> Tensor | None:
        """Gather a tensor on every rank of the target."""
        placement, full = self.plan.source.placement, None
        tp = placement.strategy.tp
        inside = self.rank in placement.ranks
        if inside and placement.stage(self.rank) == stage:
            assert self.source is not None
            local, dp = self.source[name], placement.item_index(self.rank)
            full = local
            if tuple(local.shape) != shape:
                ranks = tuple(placement.rank(dp=dp, tp=t, pp=stage) for t in range(tp))
                parts = [torch.empty_like(local) for _ in ranks]
                dist.all_gather(parts, local, group=self.groups[ranks])
                full = torch.cat(parts, dim=0 if local.shape[0] != shape[0] else 1)
        if set(self.plan.target.placement.ranks) <= set(placement.ranks):
            if placement.strategy.pp > 1:
                dp, t = placement.item_index(self.rank), placement.index(self.rank, "tp")
                ranks = tuple(placement.rank(dp=dp, tp=t, pp=i) for i in range(placement.strategy.pp))
                full = self.tell(full, shape, ranks[stage], ranks)
        else:
            first = placement.rank(dp=0, pp=stage)
            ranks = (first, *self.plan.target.placement.ranks)
            if self.rank in ranks:
                full = self.tell(full, shape, first, ranks)
        return full

    def tell(
        self, full: Tensor | None, shape: tuple[int, ...], sender: int, ranks: tuple[int, ...]
    ) -> Tensor:
        """Broadcast a whole tensor from `sender` to `ranks`."""
        full = torch.empty(shape) if full is None else full
        dist.broadcast(full, sender, group=self.groups[ranks])
        return full


def device_mesh(case: Case) -> DeviceMesh | None:
    """Make the device mesh for DTensor; None if `redistribute` does not apply. All processes call this together."""
    before, after = case.source, case.target
    if before.mesh != after.mesh or before.strategy.pp > 1 or after.strategy.dp != after.mesh.size:
        return None
    return DeviceMesh("cpu", torch.arange(after.mesh.size).view(before.strategy.dp, before.strategy.tp))


def redistributions(plan: Reallocation, rank: int, source: FlatBuffer | None, mesh: DeviceMesh) -> Way:
    """Prepare `redistribute` of every tensor."""
    assert source is not None, "the target's ranks are the source's"
    tensors = []
    for spec, local in zip(plan.source.specs, plan.source.tensors(rank), strict=True):
        cut = [dim for dim, size in enumerate(local.shape) if size != spec.shape[dim]]
        way = [Replicate(), Shard(cut[0]) if cut else Replicate()]
        tensors.append(DTensor.from_local(source[spec.name], mesh, way, run_check=False))

    def run() -> None:
        for tensor in tensors:
            tensor.redistribute(mesh, [Replicate(), Replicate()])

    return run


def measure(case: Case, process: Process, groups: Groups, mesh: DeviceMesh | None, rounds: int) -> Row | None:
    """Measure a case; rank 0 returns the row."""
    rank, plan = process.rank, case.reallocation
    source, target = buffer(plan.source, rank, whole(plan.source)), buffer(plan.target, rank)
    types = (torch.float32, torch.float32)
    ours = Reallocator(plan, process, label="bench", dtypes=types)
    gather = Gather(plan, rank, source, groups)
    ways: dict[str, Way | None] = {
        "ours": lambda: ours.run(source, target),
        "p2p": point_to_point(plan, rank),
        "gather": partial(gather.run, target),
        "dtensor": None if mesh is None else redistributions(plan, rank, source, mesh),
    }
    expected = buffer(plan.target, rank, whole(plan.source))
    for name in ("ours", "gather"):
        if target is not None and expected is not None:
            target.data.fill_(-1)
        run = ways[name]
        assert run is not None
        run()
        right = target is None or expected is None or torch.equal(target.data, expected.data)
        assert right, f"{name}: wrong parameters in {case}"
    seconds: dict[str, list[float]] = {name: [] for name, way in ways.items() if way}
    active = dist.group.WORLD if process.world == case.processes else groups[tuple(range(case.processes))]
    for number in range(rounds + 1):
        for name in seconds:
            way = ways[name]
            assert way is not None
            dist.barrier(group=active)
            start = time.perf_counter()
            way()
            dist.barrier(group=active)
            if number:  # the first round connects processes and touches memory
                seconds[name].append(time.perf_counter() - start)
    return summarise(case, plan, seconds) if rank == 0 else None


def summarise(case: Case, plan: Reallocation, seconds: dict[str, list[float]]) -> Row:
    """Compute the median seconds of every way, and medians over rounds of the ratios to ours."""

    def ratio(a: str, b: str) -> float | None:
        if a not in seconds or b not in seconds:
            return None
        return round(statistics.median(x / y for x, y in zip(seconds[a], seconds[b], strict=True)), 3)

    sent = sum(moved.sent for moved in plan.bytes_by_rank(4).values())
    return {
        "processes": case.processes,
        "size": case.size,
        "pair": f"{case.source.layout} -> {case.target.layout}",
        "sent_megabytes": round(sent / 1e6, 1),
        **{way: round(statistics.median(values), 4) for way, values in seconds.items()},
        "over_p2p": ratio("ours", "p2p"),
        "speedup_over_gather": ratio("gather", "ours"),
        "speedup_over_dtensor": ratio("dtensor", "ours"),
        "counts": sent >= LARGE * case.target.mesh.size,
    }


def run_rank(rank: int, arguments: argparse.Namespace, directory: str) -> None:
    """Measure all cases as one process."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    wait_to_be_scheduled()
    world = max(arguments.processes)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world)
    process = Process(rank, world, CPU, dist.new_group(backend="gloo"))
    todo = cases(arguments.processes)
    sets = {ranks for case in todo for ranks in Gather.rank_sets(case.reallocation)}
    sets |= {tuple(range(count)) for count in arguments.processes}
    groups = {ranks: dist.new_group(list(ranks)) for ranks in sorted(sets)}
    rows = []
    for case in todo:
        mesh = device_mesh(case)
        if rank < case.processes:
            found = measure(case, process, groups, mesh, arguments.rounds)
            if found is not None:
                rows.append(found)
                print(format_row(found), flush=True)
        dist.barrier()
    if rank == 0:
        Path(directory, "rows").write_text(json.dumps(rows))
    dist.destroy_process_group()
    leave(0)


WIDTHS = {
    "processes": 9, "size": 8, "pair": 30, "sent_megabytes": 14, "ours": 8, "p2p": 8, "gather": 8, "dtensor": 8,
    "over_p2p": 8, "speedup_over_gather": 19, "speedup_over_dtensor": 20,
}  # fmt: skip
"""Columns of the table. Times are in seconds."""


def format_row(found: Row) -> str:
    """Format a line of the table."""
    cells = ("-" if found.get(name) is None else str(found[name]) for name in WIDTHS)
    line = " ".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS.values(), strict=True))
    return line if found["counts"] else f"{line}  (small)"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--processes", type=int, nargs="+", choices=(2, 4, 8), default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print(" ".join(f"{name:>{width}}" for name, width in WIDTHS.items()))
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(run_rank, args=(arguments, directory), nprocs=max(arguments.processes))
        rows = json.loads(Path(directory, "rows").read_text())
    large = [found for found in rows if found["counts"]]
    if not large:
        sys.exit("no pair is large enough for the summary")
    summary = {}
    for name in ("over_p2p", "speedup_over_gather", "speedup_over_dtensor"):
        values = [found[name] for found in large if found[name] is not None]
        summary[name] = round(statistics.median(values), 3) if values else None
    print(f"medians over {len(large)} pairs with at least {LARGE >> 20} MiB per receiver: {summary}")
    found = {"rounds": arguments.rounds, **summary, "rows": rows}
    Results(arguments.json).add("reallocation", found)


if __name__ == "__main__":
    main()
