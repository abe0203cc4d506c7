"""Predicted seconds of a PPO step beside the published ones of the ReaL paper (arXiv 2406.14088).

`bench/reference/realhf_v1.json` has 12 settings of its first version: sizes of the four models, GPUs, lengths, and
seconds per iteration, read off its weak-scaling figure and its result files (`measured_seconds`); the two differ by
-12.5 % to +5.5 % on the same setting, which is the noise of these numbers. Weights are in bfloat16, training
recomputes activations, and answers are always generated to full length.

`heuristic` has every call on all GPUs with tp=8, pp=nodes, dp=1; its micro-batches have 16,384 tokens at most,
and generation takes as many sequences at a time as there are. `searched` is what our search finds for the same
engine, training always with recomputation; `gain` is by how much it is faster than `heuristic`, published (with
the plan that ReaL's search found) and predicted (with ours, which need not be the same plan). The cost model's
constants are its defaults, with three exceptions, which describe the paper's engine as it was in 2024 and are the
same in all rows: 61 operations per layer and decoded token instead of 10, each launched by the host and not as part
of a CUDA graph, and 285 µs of the host per collective instead of 40. The published seconds of `heuristic`
themselves say so: from 128 to 384 to 896 generated tokens,
at an equal number of tokens in all, they grow by 1.2 to 1.4 ms per layer and token, whatever the model, batch
and number of stages, where data movement and arithmetic explain 0.2 ms. So the host was the bottleneck, and no
CUDA graph was used. For the searched plans of 7B and 13B, which need less tensor parallelism, it is 0.63 to 0.83
ms: the middle of this is taken to be the host's time without collectives, and the rest of the middle of the
former that of the two collectives of a layer.

`restricted` is what our search finds among the plans that ReaL's own search lists and its engine runs, by its
public code (openpsi-project/ReaLHF, `search_engine/enumerate.py` and `api/quickstart/device_mesh.py`): meshes of
four devices, or of whole nodes; tp of 1, 2, 4 or 8; training with its data and tensor ranks inside a node, which
crosses nodes by pipelining alone; at most as many stages as there are nodes, or 8; micro-batches as many as stages,
and twice as many in training; and nothing offloaded but reference and reward model. Of these plans `chosen` is the
one that ReaL's own estimator holds for the fastest (`search_engine/estimate.py`; `judge_as_real` has its rules):
the published gains are those of such plans. Both are costed by our model.

The nodes are those of the paper's own cost constants: 170 GB/s between GPUs of a node and 20 GB/s between nodes,
which is 85 % of the links of the A800 and of 200 Gbit/s.

    python bench/reference_table.py [--json FILE]
"""

import argparse
import json
from collections import Counter
from dataclasses import dataclass, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np

from realrl.algorithms.ppo import ALGORITHM as PPO_SPEC
from realrl.dataflow.call import Call, Kind
from realrl.families.sizes.published import SHAPES
from realrl.layout.kv_blocks import BLOCK_TOKENS, count_blocks, count_prompt_blocks
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.plan.plan import Plan
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cluster.efficiency import Efficiency
from realrl.planner.cost.cost_model import CallCost, CostModel
from realrl.planner.evaluate.timeline import PlanEvaluation, Timeline
from realrl.planner.memory.memory_model import MemoryModel
from realrl.planner.search.search import SearchResult, search_plans
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.space.build import SearchSpace, build_problem
from realrl.planner.space.candidate import Candidate
from realrl.planner.space.problem import Problem
from realrl.planner.workload.workload import Workload
from realrl.program.memory import StoredModel
from realrl.recipe.graphs import build_graph
from realrl.recipe.load import load_experiment

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "bench" / "reference" / "realhf_v1.json"
RECIPE = ROOT / "recipes" / "reference" / "ppo.yaml"
NAMES = {0.5: "qwen2.5-0.5b", 7: "llama-2-7b", 13: "llama-2-13b", 34: "codellama-34b", 70: "llama-2-70b"}
PER_NODE = 8
ENGINE = Efficiency(decode_operations=61, decode_graphs=False, collective_host_s=285e-6)
"""The paper's engine in 2024; see above."""
HEURISTIC, SEARCHED = "ReaL-Heuristic", "ReaL"
MINIBATCHES = 4
OFFLOADED = ("ref", "reward")
"""Roles whose parameters ReaL may offload."""


@dataclass(frozen=True)
class Setting:
    """One published setting."""

    row: dict[str, Any]

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.row["gpus"] // PER_NODE

    @property
    def name(self) -> str:
        """For example `70B, 64 GPUs, 256 x (128 + 384)`."""
        r = self.row
        return f"{r['actor']}B, {r['gpus']} GPUs, {r['batch']} x ({r['prompt']} + {r['gen']})"

    @property
    def tokens(self) -> int:
        """Prompts and answers of a step."""
        return self.row["batch"] * (self.row["prompt"] + self.row["gen"])

    def scenario(self, efficiency: Efficiency) -> Scenario:
        """From the recipe of the settings."""
        r = self.row
        overrides = [
            f"data.batch={r['batch']}",
            f"data.max_prompt_tokens={r['prompt']}",
            f"data.max_tokens={r['prompt'] + r['gen']}",
            f"generation.max_new_tokens={r['gen']}",
            f"generation.min_new_tokens={r['gen']}",
            *(f"models.{role}.shape={NAMES[r[role]]}" for role in PPO_SPEC.heads),
        ]
        experiment = load_experiment(str(RECIPE), overrides)
        graph, spec = build_graph(experiment), ClusterSpec.parse(f"a800-80g:{self.nodes}x{PER_NODE}")
        models = {
            role: StoredModel(SHAPES[NAMES[r[role]]], head, "bfloat16", graph.trained(role))
            for role, head in PPO_SPEC.heads.items()
        }
        cost, memory = CostModel(spec, efficiency=efficiency), MemoryModel(spec, efficiency)
        return Scenario(
            graph=graph, models=models, spec=spec, workload=Workload.of(experiment), cost=cost, memory=memory
        )

    def heuristic(self, call: Call) -> Placement:
        """tp = 8, pp = nodes, dp = 1."""
        generates, trains = call.kind is Kind.GENERATE, call.kind is Kind.TRAIN
        tokens = self.tokens if generates else 16384
        strategy = Strategy(tp=PER_NODE, pp=self.nodes, micro_batch_tokens=tokens, recompute=trains)
        return Placement(Mesh(0, self.row["gpus"]), strategy)

    def published(self, system: str) -> float:
        """Seconds per iteration of the paper: of the result files where there are any."""
        return (self.row.get("measured_seconds") or {}).get(system) or self.row["seconds"][system]

    @property
    def published_gain(self) -> float:
        """By which part of its seconds the heuristic plan was slower."""
        return 1 - self.published(SEARCHED) / self.published(HEURISTIC)


def settings() -> list[Setting]:
    """All of them, in the order of the file."""
    return [Setting(row) for row in json.loads(PUBLISHED.read_text(encoding="utf-8"))]


@dataclass(frozen=True)
class Prediction:
    """What the planner says of a setting."""

    heuristic: PlanEvaluation
    calls: dict[str, CallCost]
    """Of the heuristic plan."""
    found: "Found | None"

    def gain(self, plan: PlanEvaluation) -> float:
        """By which part of its seconds the heuristic plan is slower than another one."""
        return 1 - plan.seconds / self.heuristic.seconds


@dataclass(frozen=True, kw_only=True)
class Found:
    """Plans that a search finds for a setting."""

    searched: SearchResult
    restricted: PlanEvaluation
    """The fastest of those that ReaL's engine runs."""
    chosen: PlanEvaluation
    """The one of them that ReaL's estimator holds for the fastest."""


def predict(setting: Setting, efficiency: Efficiency, *, searching: bool = False) -> Prediction:
    """Cost the heuristic plan, and search for a better one."""
    scenario = setting.scenario(efficiency)
    graph = scenario.graph
    plan = Plan(scenario.spec.cluster, {call.name: setting.heuristic(call) for call in graph.calls})
    search_space = SearchSpace(
        micro_batch_tokens=(16384, 65536, setting.tokens), recompute=(True,), keep=False
    )
    problem = build_problem(scenario, search_space=search_space, include=[plan])
    assignment = problem.find_assignment(plan)
    assert assignment is not None
    costs = {
        call.name: scenario.cost.call(call, scenario.models[call.role], plan[call.name], scenario.workload)
        for call in graph.order
    }
    heuristic = Timeline(problem).evaluate(assignment)
    if not searching:
        return Prediction(heuristic, costs, None)
    narrow = restrict(scenario, setting, plan)
    start = narrow.find_assignment(plan)
    assert start is not None
    choice = search_plans(judge_as_real(scenario, narrow), starts=[start])
    found = Found(
        searched=search_plans(problem, starts=[assignment]),
        restricted=search_plans(narrow, starts=[start]).evaluation,
        chosen=Timeline(narrow).evaluate(choice.assignment),
    )
    return Prediction(heuristic, costs, found)


def restrict(scenario: Scenario, setting: Setting, heuristic: Plan) -> Problem:
    """Build the search problem of the plans that ReaL's engine runs, and the heuristic one."""
    graph = scenario.graph
    own = {call.name: list_executions(call, setting) for call in graph.calls}
    plans = [
        Plan(
            scenario.spec.cluster, {name: placements[i % len(placements)] for name, placements in own.items()}
        )
        for i in range(max(map(len, own.values())))
    ]
    given = SearchSpace(micro_batch_tokens=(), recompute=(True,), keep=False)
    problem = build_problem(scenario, search_space=given, include=[heuristic, *plans])

    def runs(call: Call, candidate: Candidate) -> bool:
        if candidate.placement == heuristic[call.name]:
            return not candidate.offload_optimizer and not candidate.offload
        fits = candidate.bytes_alone(is_home=True) <= problem.memory_bytes[0]
        return fits and not candidate.offload_optimizer and (call.role in OFFLOADED or not candidate.offload)

    kept = {
        call.name: tuple(one for one in problem.candidates[call.name] if runs(call, one))
        for call in graph.calls
    }
    return replace(problem, candidates=kept)


def judge_as_real(scenario: Scenario, problem: Problem) -> Problem:
    """Replace the seconds of candidates by those that ReaL's estimator makes of them (`search_engine/estimate.py`).

    It leaves out messages between stages and the reduction of gradients, and takes what tensor-parallel ranks
    compute to last 3 % less for each of them (generation: for each rank of data and tensor parallelism, up to 8),
    and 4 % less again in training without other parallelism; more than 8 stages take 1 % more each.
    """

    def judge(call: Call, candidate: Candidate) -> Candidate:
        s = candidate.placement.strategy
        cost = scenario.cost.call(
            call, scenario.models[call.model_role], candidate.placement, scenario.workload
        )
        seconds = sum(value for name, value in cost.terms.items() if name not in ("pipeline", "data"))
        if call.kind is Kind.GENERATE:
            seconds *= 1 - 0.03 * min(s.dp * s.tp, 8) * (s.dp * s.tp > 1)
        else:
            seconds *= 1 - 0.03 * s.tp * (s.tp > 1)
            seconds *= 1 - 0.04 * s.tp * (call.kind is Kind.TRAIN and s.dp * s.pp == 1)
        return replace(candidate, seconds=seconds * (1 + 0.01 * s.pp * (s.pp > 8)))

    judged = {
        call.name: tuple(judge(call, one) for one in problem.candidates[call.name])
        for call in scenario.graph.calls
    }
    return replace(problem, candidates=judged)


def list_executions(call: Call, setting: Setting) -> list[Placement]:
    """List the placements of a call that ReaL's search enumerates."""
    r, trains = setting.row, call.kind is Kind.TRAIN
    sizes = [PER_NODE // 2, *(PER_NODE * n for n in range(1, setting.nodes + 1))]
    found = []
    for size, tp in product(sizes, (1, 2, 4, 8)):
        for pp in range(1, min(max(setting.nodes, 8), size // tp) + 1):
            dp = size // tp // pp
            inside = dp * tp in (1, 2, 4, 8) or (dp * tp % 8 == 0 and not trains)
            chunks = dp * pp * (2 * MINIBATCHES if trains else 1)
            if dp * tp * pp != size or tp > size or not inside or chunks > r["batch"]:
                continue
            rows = -(
                -r["batch"] // (dp * pp * ((MINIBATCHES if pp == 1 else 2 * MINIBATCHES) if trains else 1))
            )
            each = r["prompt"] + r["gen"]
            if call.kind is Kind.GENERATE:
                each = BLOCK_TOKENS * (count_prompt_blocks(r["prompt"]) + count_blocks(r["gen"]))
            strategy = Strategy(dp=dp, tp=tp, pp=pp, micro_batch_tokens=rows * each, recompute=trains)
            firsts = range(0, r["gpus"] - size + 1, min(size, PER_NODE))
            found += [Placement(Mesh(first, size), strategy) for first in firsts]
    return found


def disorder(first: list[float], second: list[float]) -> int:
    """Pairs that the two lists order differently."""
    return sum(
        (first[i] - first[j]) * (second[i] - second[j]) < 0 for i, j in combinations(range(len(first)), 2)
    )


def fit_baseline(rows: list[Setting], published: list[float]) -> list[float]:
    """Fit two numbers: seconds per published operation of a GPU, and per layer and generated token."""
    terms = np.array([_baseline_terms(row) for row in rows])
    fitted, *_ = np.linalg.lstsq(terms / np.array(published)[:, None], np.ones(len(rows)), rcond=None)
    return list(fitted)


def _baseline_terms(setting: Setting) -> tuple[float, float]:
    r = setting.row
    return r["iter_PFLOP"] / r["gpus"], SHAPES[NAMES[r["actor"]]].layers * r["gen"]


def describe_baseline(rows: list[Setting]) -> str:
    """Say how far such a formula is off, on the rows that it is fitted to, and on those of a size left out."""

    def errors(fitted: list[Setting], asked: list[Setting]) -> list[float]:
        numbers = fit_baseline(fitted, [row.published(HEURISTIC) for row in fitted])
        return [
            abs(float(np.dot(numbers, _baseline_terms(row))) / row.published(HEURISTIC) - 1) for row in asked
        ]

    apart = []
    for size in sorted({row.row["actor"] for row in rows}):
        inside = [row for row in rows if row.row["actor"] == size]
        apart += errors([row for row in rows if row not in inside], inside)
    return f"{np.mean(errors(rows, rows)):.1%}, and {np.mean(apart):.1%} on a size that it was not fitted to"


def row_of(setting: Setting) -> dict[str, Any]:
    """A row of the table."""
    prediction = predict(setting, ENGINE, searching=True)
    found, heuristic = prediction.found, prediction.heuristic
    assert found is not None
    searched = found.searched
    terms: Counter[str] = Counter()
    for cost in prediction.calls.values():
        terms.update(cost.terms)
    return {
        "setting": setting.name,
        "published": setting.published(HEURISTIC),
        "predicted": round(heuristic.seconds, 2),
        "peak_bytes": round(heuristic.peak_bytes),
        "fits": heuristic.fits,
        "this_engine": round(predict(setting, Efficiency()).heuristic.seconds, 2),
        "published_searched": setting.published(SEARCHED),
        "predicted_searched": round(searched.evaluation.seconds, 2),
        "published_gain": round(setting.published_gain, 4),
        "chosen_gain": round(prediction.gain(found.chosen), 4),
        "restricted_gain": round(prediction.gain(found.restricted), 4),
        "searched_gain": round(prediction.gain(searched.evaluation), 4),
        "gap": round(searched.gap, 4),
        "calls": {name: round(cost.seconds, 2) for name, cost in prediction.calls.items()},
        "terms": {name: round(seconds, 2) for name, seconds in terms.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print(f"{'':30} {'heuristic':>26} {'gain':>20}")
    print(
        f"{'setting':30} {'publ.':>8} {'pred.':>8} {'error':>8} {'publ.':>10} {'chosen':>8} {'restricted':>11}"
        f" {'searched':>9}"
    )
    rows = []
    for setting in settings():
        row = row_of(setting)
        rows.append(row)
        print(
            f"{row['setting']:30} {row['published']:8.1f} {row['predicted']:8.1f}"
            f" {row['predicted'] / row['published'] - 1:+8.1%} {row['published_gain']:10.1%}"
            f" {row['chosen_gain']:8.1%} {row['restricted_gain']:11.1%} {row['searched_gain']:9.1%}",
            flush=True,
        )
    errors = [row["predicted"] / row["published"] - 1 for row in rows]
    bare = [abs(row["this_engine"] / row["published"] - 1) for row in rows]
    apart = [row["chosen_gain"] - row["published_gain"] for row in rows]
    beyond = {
        name: sum(row[f"{name}_gain"] - row["chosen_gain"] for row in rows) / len(rows)
        for name in ("restricted", "searched")
    }
    wrong = disorder([row["published"] for row in rows], [row["predicted"] for row in rows])
    pairs = len(rows) * (len(rows) - 1) // 2
    print(
        f"heuristic: errors {min(errors):+.1%} to {max(errors):+.1%}, mean of their sizes"
        f" {sum(map(abs, errors)) / len(errors):.1%}; {wrong} of {pairs} pairs in another order\n"
        f"with the constants of this project's engine: mean {sum(bare) / len(bare):.1%}\n"
        f"two numbers fitted (operations / GPUs, layers x generated tokens): mean {describe_baseline(settings())}\n"
        f"gains of what ReaL chooses: {min(apart) * 100:+.0f} to {max(apart) * 100:+.0f} percentage points from the"
        f" published ones, mean of their sizes {sum(map(abs, apart)) / len(rows) * 100:.1f}\nbeyond that, the best"
        f" of ReaL's plans gains {beyond['restricted'] * 100:.1f} points more, and the best of ours"
        f" {beyond['searched'] * 100:.1f}"
    )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
