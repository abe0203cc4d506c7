"""Bytes and modelled seconds of reallocating LLaMA models from every training to every generation layout.

Both layouts lie on the same 1 to 16 nodes of 8 devices; degrees are powers of two, tensor parallelism stays
inside a node, the parameters of a device, in bfloat16, fit its memory, and generation has at most 16 stages, the
most that ReaL considers. Two columns of seconds:

- ours: the most loaded port of our schedule, and a latency per message.
- ReaL's rule, as its search engine estimates its own schedule (openpsi-project/ReaLHF, commit 20869585,
  realhf/search_engine/param_realloc.py, `compute_cost`; groups from realhf/impl/model/comm/param_realloc.py):
  for every pair of stages that share layers and every part of the tensor dimension that the layouts share,
  each node with a holder broadcasts to the needing ranks of its own node, and needing nodes without a holder
  are dealt to the least loaded of them. A broadcast costs each of its members bytes / bandwidth, times the
  number of receiving nodes where it leaves its node; each receiving rank, one that is itself the sender
  included, pays 0.03 s per step more. The estimate is the largest sum over the ranks.

Ranks of a node do not share the port of the node there, which flatters schedules in which several cross at once.
ReaL's file has 1800 and 200 Gbit/s for the two bandwidths; here both columns use those of `Links`, so that
only the schedules and rules differ.

    python bench/reallocation_bytes.py [--json FILE]
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from datetime import date
from multiprocessing import Pool
from pathlib import Path

from realrl.families.registry import model_tensors
from realrl.families.shape import ModelShape
from realrl.families.sizes import SHAPES
from realrl.layout.layout import build_layout
from realrl.layout.local_tensors import local_tensor
from realrl.layout.ranges import stage_layers
from realrl.layout.routing.links import Links
from realrl.layout.routing.routes import reallocate
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Mesh, Placement, Strategy

MODELS = ("llama-2-7b", "llama-2-13b", "codellama-34b", "llama-2-70b")
NODES, PER_NODE = (1, 2, 4, 8, 16), 8
MEMORY = 80e9
"""Bytes of a device."""
WIDTH = 2
"""Bytes of a bfloat16."""
GENERATION_STAGES = 16
LINKS = Links()
RECEIVE_STEP = 0.03
"""Seconds that ReaL adds per receive step (`set_interval_cost`)."""


@dataclass(frozen=True)
class Row:
    """One reallocation."""

    model: str
    nodes: int
    training: str
    generation: str
    device_bytes: int
    node_bytes: int
    network_bytes: int
    seconds: float
    real_seconds: float
    real_seconds_without_steps: float


def placements(shape: ModelShape, nodes: int) -> list[Placement]:
    """All layouts of a model on whole nodes that are compared."""
    size = nodes * PER_NODE
    powers = [2**i for i in range(size.bit_length())]
    found = []
    for tp in (p for p in powers if p <= PER_NODE):
        sizes = part_elements(shape, tp)
        for pp in (p for p in powers if p * tp <= size and p <= shape.layers):
            stages = stage_layers(shape.layers, pp)
            if max(sum(sizes[layer] for layer in stage) for stage in stages) * WIDTH <= MEMORY:
                found.append(Placement(Mesh(0, size), Strategy(dp=size // (tp * pp), tp=tp, pp=pp)))
    return found


def real_rule(
    layers: int, sizes: Counter[int], before: Placement, after: Placement, cluster: Cluster
) -> tuple[float, float]:
    """ReaL's estimate in seconds, and the same without the time per receive step.

    `sizes`: elements of each layer on one of max(tp before, tp after) tensor ranks.
    """
    with_steps: Counter[int] = Counter()
    without: Counter[int] = Counter()
    stages = [stage_layers(layers, p.strategy.pp) for p in (before, after)]
    for i, held in enumerate(stages[0]):
        for j, needed in enumerate(stages[1]):
            shared = range(max(held.start, needed.start), min(held.stop, needed.stop))
            elements = sum(sizes[layer] for layer in shared)
            if not shared:
                continue
            for sender, receivers in broadcasts(before, i, after, j, cluster):
                nodes = {cluster.node(rank) for rank in receivers}
                inside = nodes == {cluster.node(sender)}
                seconds = elements * WIDTH / (LINKS.device_bytes_per_s if inside else LINKS.node_bytes_per_s)
                seconds *= 1 if inside else len(nodes)
                for rank in receivers:
                    with_steps[rank] += RECEIVE_STEP
                members = {sender, *receivers}
                if len(members) > 1:
                    for rank in members:
                        with_steps[rank] += seconds
                        without[rank] += seconds
    return max(with_steps.values()), max(without.values(), default=0.0)


def part_elements(shape: ModelShape, tp: int) -> Counter[int]:
    """Elements of each layer on one of `tp` tensor ranks; embedding and head count with the end layers."""
    result: Counter[int] = Counter()
    for spec in model_tensors(shape, "lm"):
        if spec.layer:
            continue
        elements = local_tensor(shape, spec, tp, 0).region.numel
        ends = [0 if "embed" in spec.name else shape.layers - 1]
        result.update(dict.fromkeys(ends if spec.layer is None else range(shape.layers), elements))
    return result


def broadcasts(
    before: Placement, i: int, after: Placement, j: int, cluster: Cluster
) -> list[tuple[int, list[int]]]:
    """ReaL's (sender, receivers) for what stage `i` of one layout and stage `j` of the other share."""
    tp_before, tp_after = before.strategy.tp, after.strategy.tp
    parts = max(tp_before, tp_after)
    result = []
    for part in range(parts):
        by_node: list[defaultdict[int, list[int]]] = []
        for placement, tp, stage in ((before, tp_before, i), (after, tp_after, j)):
            ranks: defaultdict[int, list[int]] = defaultdict(list)
            for dp in range(placement.strategy.dp):
                rank = placement.rank(dp=dp, tp=part * tp // parts, pp=stage)
                ranks[cluster.node(rank)].append(rank)
            by_node.append(ranks)
        holders, needers = by_node
        served = {node: [node] if node in needers else [] for node in holders}
        for node in needers:
            if node not in holders:
                min(served.values(), key=len).append(node)
        for node, others in served.items():
            receivers = [rank for other in others for rank in needers[other]]
            if receivers:
                own = [rank for rank in holders[node] if rank in receivers]
                result.append(((own or holders[node])[0], receivers))
    return result


def measure(job: tuple[str, int, Placement]) -> list[Row]:
    """All reallocations from one training layout."""
    model, nodes, training = job
    shape, cluster = SHAPES[model], Cluster(nodes, PER_NODE)
    source, rows = build_layout(shape, "lm", training), []
    sizes = {tp: part_elements(shape, tp) for tp in (1, 2, 4, 8)}
    for generation in (p for p in placements(shape, nodes) if p.strategy.pp <= GENERATION_STAGES):
        target = build_layout(shape, "lm", generation)
        ours = reallocate(source, target, cluster, LINKS)
        moved = ours.bytes_by_link(WIDTH)
        parts = sizes[max(training.strategy.tp, generation.strategy.tp)]
        theirs = real_rule(shape.layers, parts, training, generation, cluster)
        names = [p.layout.split(" @")[0] for p in (training, generation)]
        rows.append(
            Row(
                model,
                nodes,
                *names,
                moved.device,
                moved.node,
                moved.network,
                round(ours.seconds(LINKS, WIDTH), 6),
                *(round(seconds, 6) for seconds in theirs),
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    start = time.perf_counter()
    jobs = [
        (model, nodes, p) for model in MODELS for nodes in NODES for p in placements(SHAPES[model], nodes)
    ]
    with Pool(os.cpu_count()) as pool:
        rows = [row for part in pool.imap(measure, reversed(jobs), chunksize=1) for row in part]
    elapsed = time.perf_counter() - start
    rows.sort(key=lambda row: (MODELS.index(row.model), row.nodes))
    summary = summarise(rows)
    print(
        f"{len(rows)} reallocations in {elapsed:.0f} s; medians [largest] over the pairs whose layouts differ"
    )
    print(f"{'model':14} {'nodes':>5} {'pairs':>5} {'between nodes, GB':>20} {'ours, s':>18} {'ReaL, s':>18}")
    for line in summary:
        cells = [
            f"{line[key][0]:.3f} [{line[key][1]:.3f}]" for key in ("network_gb", "seconds", "real_seconds")
        ]
        print(
            f"{line['model']:14} {line['nodes']:5} {line['pairs']:5} {cells[0]:>20} {cells[1]:>18} {cells[2]:>18}"
        )
    if arguments.json is not None:
        result = {
            "date": date.today().isoformat(),
            "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
            "seconds": round(elapsed, 1),
            "links": asdict(LINKS),
            "summary": summary,
            "rows": [asdict(row) for row in rows],
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


def summarise(rows: list[Row]) -> list[dict]:
    """Median and largest per model and number of nodes."""
    groups: defaultdict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in rows:
        if row.training != row.generation:
            groups[row.model, row.nodes].append(row)
    lines = []
    for (model, nodes), group in groups.items():
        columns = {
            "network_gb": [row.network_bytes / 1e9 for row in group],
            "seconds": [row.seconds for row in group],
            "real_seconds": [row.real_seconds for row in group],
        }
        pairs = {key: (round(statistics.median(v), 4), round(max(v), 4)) for key, v in columns.items()}
        lines.append({"model": model, "nodes": nodes, "pairs": len(group), **pairs})
    return lines


if __name__ == "__main__":
    main()
