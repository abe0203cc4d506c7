"""Compare the schedules of reallocations with a lower bound that holds for every schedule.

The bench draws random pairs of placements on clusters of 1 to 16 nodes of 8 devices: whole nodes or an
aligned slice of one, any data, tensor and pipeline degrees that fill the mesh, random small models and
published ones. For each pair, the time of our schedule's most loaded port is divided by the optimum of a
linear program.

The program covers every schedule that sends ranks only what they need, in any number of hops, with relays in
other nodes and repeated entries into a node. It works on sets of regions that have the same holders H and the same
needers N; a set has B elements. The bench finds the sets from the two layouts alone. Variables: what a rank of H or
N sends inside its node and to other nodes, and what enters a node. Constraints:

- all copies are sent: inside + entering >= |needers in the node| B;
- at least B enters a node without holders, and holders send at least B of the copies into such nodes;
- in a node with holders, the holders and the network together bring in at least B;
- whatever enters a node was sent by others, and holders send at least B in all.

The loads of the devices' in-ports are fixed. The busiest in-port is a lower bound by itself; the program is
solved only if that bound is not tight already.

    python bench/route_bounds.py --pairs 2000 --seed N [--json FILE]
"""

import os
import random
import statistics
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from multiprocessing import Pool

import numpy as np
from harness import Results, make_parser
from scipy.optimize import linprog
from scipy.sparse import coo_array

from realrl.families.shape import Head, ModelShape
from realrl.families.sizes import SHAPES
from realrl.layout.layout import Layout, build_layout
from realrl.layout.region import Region
from realrl.layout.routing.routes import reallocate
from realrl.plan.cluster import Cluster, Links
from realrl.plan.placement import Mesh, Placement, Strategy

PER_NODE = 8
LINKS = Links()
Class = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Pair:
    """A reallocation to schedule."""

    cluster: Cluster
    source: Layout
    target: Layout

    def __str__(self) -> str:
        shape = self.source.shape
        sizes = f"V{shape.vocab_size} h{shape.hidden_size} f{shape.intermediate_size} L{shape.layers}"
        heads = f"{shape.heads}/{shape.kv_heads} heads of {shape.head_dim}"
        tied = ", tied" if shape.tied_embeddings else ""
        moved = f"{self.source.placement.layout} -> {self.target.placement.layout}"
        return f"{sizes}, {heads}{tied}, {self.source.head}: {moved} on {self.cluster}"


def random_shape(rng: random.Random) -> ModelShape:
    """Draw a small model whose sizes divide badly, or a published one in 20 % of the draws."""
    if rng.random() < 0.2:
        return SHAPES[rng.choice(sorted(SHAPES))]
    kv_heads, head_dim = rng.choice([1, 2, 3, 4, 5, 6, 8, 12]), rng.choice([8, 16, 32, 64])
    heads = kv_heads * rng.choice([1, 1, 2, 3, 4, 8])
    hidden = rng.randint(4, 64) * 16
    return ModelShape(
        vocab_size=rng.randint(500, 20000),
        hidden_size=hidden,
        intermediate_size=rng.randint(hidden, 4 * hidden),
        layers=rng.randint(1, 32),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        tied_embeddings=rng.random() < 0.3,
    )


def random_placement(rng: random.Random, cluster: Cluster, shape: ModelShape) -> Placement:
    """Draw a placement that the model allows."""
    if rng.random() < 0.2:
        size = rng.choice([s for s in range(1, PER_NODE) if PER_NODE % s == 0])
        mesh = Mesh(rng.randrange(cluster.size // size) * size, size)
    else:
        nodes = rng.randint(1, cluster.nodes)
        mesh = Mesh(rng.randint(0, cluster.nodes - nodes) * PER_NODE, nodes * PER_NODE)
    strategies = [
        Strategy(dp=mesh.size // (tp * pp), tp=tp, pp=pp)
        for tp, pp in product(range(1, mesh.size + 1), repeat=2)
        if mesh.size % (tp * pp) == 0 and tp <= shape.heads and pp <= shape.layers
    ]
    return Placement(mesh, rng.choice(strategies))


def random_pair(rng: random.Random) -> Pair:
    """Draw a model, a cluster and two placements."""
    cluster, shape = Cluster(rng.randint(1, 16), PER_NODE), random_shape(rng)
    head: Head = rng.choice(["lm", "lm", "scalar"])
    source, target = (build_layout(shape, head, random_placement(rng, cluster, shape)) for _ in range(2))
    return Pair(cluster, source, target)


def classes(pair: Pair) -> dict[Class, int]:
    """Count the elements that some rank needs and does not hold, by (holders, needers)."""
    tensors: defaultdict[str, tuple[list[tuple[Region, int]], list[tuple[Region, int]]]]
    tensors = defaultdict(lambda: ([], []))
    for side, held in enumerate((pair.source, pair.target)):
        for rank in held.placement.ranks:
            for local in held.tensors(rank):
                tensors[local.region.tensor][side].append((local.region, rank))
    alike: Counter[tuple[tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...], ...]] = Counter()
    for sides in tensors.values():
        alike[tuple(tuple((r.offset, r.size, rank) for r, rank in side) for side in sides)] += 1
    result: Counter[Class] = Counter()
    for (before, after), count in alike.items():
        for key, elements in cut_tensor(before, after).items():
            result[key] += elements * count
    return result


def cut_tensor(before: Iterable[tuple], after: Iterable[tuple]) -> Counter[Class]:
    """Count the elements of one tensor by (holders, needers), on a grid. Elements of a cell have the same ranks."""
    before, after = list(before), list(after)
    dims = range(len(before[0][0]))
    edges = [sorted({e for o, s, _ in before + after for e in (o[d], o[d] + s[d])}) for d in dims]
    ranks = 1 + max(rank for *_, rank in before + after)
    grid = np.zeros((2, ranks, *(len(line) - 1 for line in edges)), dtype=bool)
    for side, shards in enumerate((before, after)):
        for offset, size, rank in shards:
            box = tuple(
                slice(bisect_left(edges[d], offset[d]), bisect_left(edges[d], offset[d] + size[d]))
                for d in dims
            )
            grid[(side, rank, *box)] = True
    widths = np.array([1])
    for line in edges:
        widths = np.multiply.outer(widths, np.diff(line))
    result: Counter[Class] = Counter()
    cells = grid.reshape(2, ranks, -1)
    for cell, elements in enumerate(widths.ravel()):
        holders, needers = cells[0, :, cell], cells[1, :, cell] & ~cells[0, :, cell]
        if needers.any():
            result[tuple(np.flatnonzero(holders)), tuple(np.flatnonzero(needers))] += int(elements)
    return result


def in_port_bound(found: dict[Class, int]) -> float:
    """Compute the seconds of the busiest in-port if a node takes in everything once, at one byte per element."""
    devices: Counter[int] = Counter()
    nodes: Counter[int] = Counter()
    for (holders, needers), elements in found.items():
        devices.update(dict.fromkeys(needers, elements))
        without = {n // PER_NODE for n in needers} - {h // PER_NODE for h in holders}
        nodes.update(dict.fromkeys(without, elements))
    return max(
        max(devices.values(), default=0) / LINKS.device_bytes_per_s,
        max(nodes.values(), default=0) / LINKS.node_bytes_per_s,
    )


class Program:
    """Linear program: rows `coefficients x >= right` over non-negative variables. Variable 0 is the time."""

    def __init__(self) -> None:
        self.variables = 1
        self.rows: list[dict[int, float]] = []
        self.right: list[float] = []

    def new(self) -> int:
        """Add a variable."""
        self.variables += 1
        return self.variables - 1

    def require(self, row: dict[int, float], right: float) -> None:
        """Add a constraint."""
        self.rows.append(row)
        self.right.append(right)

    def minimum(self) -> float:
        """Solve for the least time."""
        entries = [(i, j, -value) for i, row in enumerate(self.rows) for j, value in row.items()]
        i, j, values = (np.array(column) for column in zip(*entries, strict=True))
        matrix = coo_array((values, (i, j)), shape=(len(self.rows), self.variables)).tocsr()
        cost = np.zeros(self.variables)
        cost[0] = 1.0
        solved = linprog(cost, A_ub=matrix, b_ub=-np.array(self.right), bounds=(0, None), method="highs")
        assert solved.status == 0, solved.message
        return float(solved.fun)


def lower_bound(found: dict[Class, int]) -> float:
    """Compute the least possible seconds of a schedule's most loaded port, at one byte per element."""
    program = Program()
    scale = 1.0 / max(found.values())
    ports: defaultdict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    received: Counter[int] = Counter()
    for (holders, needers), elements in found.items():
        size = elements * scale
        received.update(dict.fromkeys(needers, size))
        held, needed = {h // PER_NODE for h in holders}, Counter(n // PER_NODE for n in needers)
        inside = {d: program.new() for d in (*holders, *needers) if d // PER_NODE in needed}
        outside = {d: program.new() for d in (*holders, *needers)}
        entering = {node: program.new() for node in needed}
        for d, x in inside.items():
            ports["device", d][x] = 1.0
        for d, x in outside.items():
            ports["device", d][x] = ports["node out", d // PER_NODE][x] = 1.0
        for node, count in needed.items():
            ports["node in", node][entering[node]] = 1.0
            senders = {x: 1.0 for d, x in inside.items() if d // PER_NODE == node}
            program.require(senders | {entering[node]: 1.0}, count * size)
            first = {inside[h]: 1.0 for h in holders if h // PER_NODE == node}
            program.require(first | {entering[node]: 1.0}, size)
            others = {x: 1.0 for d, x in outside.items() if d // PER_NODE != node}
            program.require(others | {entering[node]: -1.0}, 0.0)
        program.require(dict.fromkeys(outside.values(), 1.0) | dict.fromkeys(entering.values(), -1.0), 0.0)
        program.require({x: 1.0 for h in holders for x in (inside.get(h), outside[h]) if x}, size)
        if set(needed) - held:
            program.require({outside[h]: 1.0 for h in holders}, size)
    node_speed, device_speed = LINKS.node_bytes_per_s, LINKS.device_bytes_per_s
    for (kind, _), row in ports.items():
        speed = device_speed / node_speed if kind == "device" else 1.0
        program.require(dict.fromkeys(row, -1.0) | {0: speed}, 0.0)
    program.require({0: device_speed / node_speed}, max(received.values()))
    return program.minimum() / scale / node_speed


def measure(job: tuple[int, int]) -> tuple[float, float, str] | None:
    """Return the ratio to the bound, the seconds of scheduling, and the pair; None if nothing moves."""
    pair = random_pair(random.Random(f"{job[0]} {job[1]}"))
    start = time.perf_counter()
    ours = reallocate(pair.source, pair.target, pair.cluster)
    elapsed = time.perf_counter() - start
    found = classes(pair)
    if not found:
        assert not ours.hops, f"nothing needs to move: {pair}"
        return None
    busiest, bound = ours.busiest_seconds(LINKS, 1), in_port_bound(found)
    if busiest > bound * 1.0001:
        bound = lower_bound(found)
    assert busiest > bound * 0.9999, f"below the lower bound: {pair}"
    return busiest / bound, elapsed, str(pair)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="chooses the pairs")
    arguments = parser.parse_args()
    with Pool(os.cpu_count()) as pool:
        measured = pool.map(measure, [(arguments.seed, i) for i in range(arguments.pairs)], chunksize=8)
    moving = sorted((found for found in measured if found is not None), reverse=True)
    for ratio, _, text in moving[:5]:
        print(f"{ratio:.4f}  {text}")
    result = {
        "seed": arguments.seed,
        "pairs": arguments.pairs,
        "moving_pairs": len(moving),
        "worst_ratio": round(moving[0][0], 5),
        "mean_ratio": round(statistics.fmean(ratio for ratio, *_ in moving), 5),
        "slowest_schedule_seconds": round(max(seconds for _, seconds, _ in moving), 3),
    }
    print(result)
    Results(arguments.json).add("route bounds", result)


if __name__ == "__main__":
    main()
