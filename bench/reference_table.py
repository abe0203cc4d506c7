"""Predicted seconds of a PPO step beside the published ones of the ReaL paper (arXiv 2406.14088).

`bench/reference/realhf_v1.json` has 12 settings of its first version: sizes of the four models, GPUs, lengths, and
seconds per iteration, read off its weak-scaling figure and its result files (`measured_seconds`); the two differ by
-12.5 % to +5.5 % on the same setting, which is the noise of these numbers. Weights are in bfloat16, training
recomputes activations, and answers are always generated to full length.

`heuristic` has every call on all GPUs with tp=8, pp=nodes, dp=1; its micro-batches have 16,384 tokens at most,
and generation takes as many sequences at a time as there are. The cost model's constants are its defaults, with
three exceptions, all of which describe the paper's engine as it was in 2024 and are the same in all rows:

- generation runs as many groups of sequences as there are pipeline stages, where ours runs twice as many;
- 80 operations per layer and decoded token instead of 28, and 300 µs of the host per collective instead of 40.
  The published seconds of `heuristic` themselves say so: from 128 to 384 to 896 generated tokens, at an equal
  number of tokens in all, they grow by 1.2 to 1.4 ms per layer and token, whatever the model, batch and number of
  stages, where data movement and arithmetic explain 0.2 ms. So the host was the bottleneck, and no CUDA graph was
  used. For the searched plans of 7B and 13B, which need less tensor parallelism, it is 0.63 to 0.83 ms: this is
  taken to be the host's time without collectives, and the rest that of the two collectives of a layer.

The nodes are those of the paper's own cost constants: 170 GB/s between GPUs of a node and 20 GB/s between nodes,
which is 85 % of the links of the A800 and of 200 Gbit/s.

    python bench/reference_table.py [--json FILE]
"""

import argparse
import json
from collections import Counter
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from realrl.algorithms.graphs import build_graph
from realrl.config.load import load_experiment
from realrl.config.model import HEADS
from realrl.config.shape import ModelShape
from realrl.config.shapes import SHAPES
from realrl.dataflow.call import Call, Kind
from realrl.dataflow.graph import DataflowGraph
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.planner.cluster import ClusterSpec
from realrl.planner.cost import CallCost, CallOptions, CostModel
from realrl.planner.efficiency import Efficiency
from realrl.planner.memory import NOTHING, MemoryModel
from realrl.planner.workload import Workload

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "bench" / "reference" / "realhf_v1.json"
RECIPE = ROOT / "recipes" / "reference" / "ppo.yaml"
NAMES = {7: "llama-2-7b", 13: "llama-2-13b", 34: "codellama-34b", 70: "llama-2-70b"}
PER_NODE = 8
ENGINE = Efficiency(decode_operations=80, collective_host_s=300e-6)
"""The paper's engine in 2024; see above."""
OPTIONS = CallOptions(element_bytes=2, recompute=True)


@dataclass(frozen=True)
class Setting:
    """One published setting."""

    row: dict[str, Any]

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.row["gpus"] // PER_NODE

    @property
    def spec(self) -> ClusterSpec:
        """The cluster."""
        return ClusterSpec.parse(f"a800-80g:{self.nodes}x{PER_NODE}")

    @property
    def name(self) -> str:
        """For example `70B, 64 GPUs, 256 x (128 + 384)`."""
        r = self.row
        return f"{r['actor']}B, {r['gpus']} GPUs, {r['batch']} x ({r['prompt']} + {r['gen']})"

    @property
    def overrides(self) -> list[str]:
        """What of the recipe is different."""
        r = self.row
        return [
            f"data.batch={r['batch']}",
            f"data.max_prompt_tokens={r['prompt']}",
            f"data.max_tokens={r['prompt'] + r['gen']}",
            f"generation.max_new_tokens={r['gen']}",
            f"generation.min_new_tokens={r['gen']}",
            *(f"models.{role}.shape={NAMES[r[role]]}" for role in HEADS),
        ]

    def published(self, system: str) -> float:
        """Seconds per iteration of the paper: of the result files where there are any."""
        return (self.row.get("measured_seconds") or {}).get(system) or self.row["seconds"][system]


def settings() -> list[Setting]:
    """All of them, in the order of the file."""
    return [Setting(row) for row in json.loads(PUBLISHED.read_text(encoding="utf-8"))]


@dataclass(frozen=True)
class Problem:
    """A setting as the planner sees it."""

    graph: DataflowGraph
    shapes: dict[str, ModelShape]
    workload: Workload

    @classmethod
    def of(cls, setting: Setting) -> "Problem":
        """From the recipe of the settings."""
        experiment = load_experiment(str(RECIPE), setting.overrides)
        shapes = {role: SHAPES[NAMES[setting.row[role]]] for role in HEADS}
        return cls(build_graph(experiment), shapes, Workload.of(experiment))


def heuristic(setting: Setting, call: Call) -> Placement:
    """tp = 8, pp = nodes, dp = 1."""
    everything = setting.row["batch"] * (setting.row["prompt"] + setting.row["gen"])
    tokens = everything if call.kind is Kind.GENERATE else 16384
    strategy = Strategy(1, PER_NODE, setting.nodes, micro_batch_tokens=tokens)
    return Placement(Mesh(0, setting.row["gpus"]), strategy)


def predict(setting: Setting, efficiency: Efficiency) -> tuple[dict[str, CallCost], int, int]:
    """Cost of each call, peak bytes of the fullest device, and what it has."""
    problem = Problem.of(setting)
    model, memory = CostModel(setting.spec, efficiency=efficiency), MemoryModel(setting.spec, efficiency)
    costs, needs = {}, {}
    for call in problem.graph.order:
        shape, head, place = problem.shapes[call.role], HEADS[call.role], heuristic(setting, call)
        arguments = (call, shape, head, place, problem.workload, OPTIONS)
        costs[call.name] = model.call(*arguments)
        # All calls of a role have one layout, so its parameters are there once.
        stages = memory.stages(*arguments)
        before = needs.get(call.role, stages)
        needs[call.role] = [max(a, b, key=lambda n: n.bytes) for a, b in zip(before, stages, strict=True)]
    peak = max(sum(stage, NOTHING).bytes for stage in zip(*needs.values(), strict=True))
    return costs, peak, memory.capacity(0)


def disorder(first: list[float], second: list[float]) -> int:
    """Pairs that the two lists order differently."""
    return sum(
        (first[i] - first[j]) * (second[i] - second[j]) < 0 for i, j in combinations(range(len(first)), 2)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    print(f"{'setting':30} {'published':>9} {'predicted':>9} {'error':>7} {'peak':>8}   terms")
    for setting in settings():
        costs, peak, capacity = predict(setting, ENGINE)
        ours, _, _ = predict(setting, Efficiency())
        predicted, published = sum(c.seconds for c in costs.values()), setting.published("ReaL-Heuristic")
        terms: Counter[str] = Counter()
        for cost in costs.values():
            terms.update(cost.terms)
        rows.append(
            {
                "setting": setting.name,
                "published": published,
                "predicted": round(predicted, 2),
                "this_engine": round(sum(c.seconds for c in ours.values()), 2),
                "peak_bytes": peak,
                "fits": peak <= capacity,
                "calls": {name: round(cost.seconds, 2) for name, cost in costs.items()},
                "terms": {name: round(seconds, 2) for name, seconds in terms.items()},
            }
        )
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in terms.most_common() if seconds > 0.05)
        error = predicted / published - 1
        print(
            f"{setting.name:30} {published:9.1f} {predicted:9.1f} {error:+7.1%} {peak / 2**30:4.0f} GiB   {parts}"
        )
    errors = [row["predicted"] / row["published"] - 1 for row in rows]
    wrong = disorder([row["published"] for row in rows], [row["predicted"] for row in rows])
    pairs = len(rows) * (len(rows) - 1) // 2
    print(
        f"errors {min(errors):+.1%} to {max(errors):+.1%}, mean of their sizes"
        f" {sum(map(abs, errors)) / len(errors):.1%}; {wrong} of {pairs} pairs in another order"
    )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
