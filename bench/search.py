"""Measure time and gap of the plan search, for PPO on 128, 1,024 and 10,000 GPUs.

Everything runs on one core, and seconds are processor time. The gap covers all enumerated plans. `evals/s` counts
new random plans, 4,096 at a time; evaluating a plan means its timeline and its memory, reallocations included. The
table shows the load of the machine, because other programs slow the search down.

    OMP_NUM_THREADS=1 python bench/search.py [--json FILE] [--seed N] [--busy N] [--few]

`--busy N` runs N endless loops during the search. `plan`, a digest of the plan found, must not change. `--few`
leaves out the clusters of 1,024 and more GPUs.
"""

import argparse
import hashlib
import os
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

import numpy as np
from harness import Results, make_parser

from realrl.algorithms.ppo import ALGORITHM as PPO_SPEC
from realrl.algorithms.ppo import train_graph
from realrl.families.sizes import SHAPES
from realrl.plan.presets import make_plan
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.cost.cost_model import CostModel
from realrl.planner.memory.call_memory import MemoryModel
from realrl.planner.search.many_plans import Timeline
from realrl.planner.search.search import search_plans
from realrl.planner.simulate.scenario import Scenario
from realrl.planner.space.build import build_problem
from realrl.planner.space.problem import Problem
from realrl.planner.workload.workload import Workload
from realrl.program.memory import StoredModel

GRAPH = train_graph(minibatches=4)
BATCH, RANDOM_BATCHES = 4096, 30


@dataclass(frozen=True)
class Setting:
    """A step to plan."""

    cluster: str
    actor: str
    """Sizes of the actor and of the reference."""
    critic: str
    """Sizes of the critic and of the reward model."""
    tokens: int
    """Tokens of each prompt, and of each answer."""
    sequences: int


SETTINGS = (
    Setting("a100-80g:16x8", "llama-2-70b", "llama-2-7b", 128, 512),
    Setting("a100-80g:16x8", "llama-2-70b", "llama-2-7b", 1024, 512),
    Setting("a100-80g:16x8", "llama-2-70b", "llama-2-70b", 128, 512),
    Setting("a100-80g:16x8", "llama-2-7b", "llama-2-7b", 1024, 512),
    Setting("h100:16x8", "llama-3-70b", "llama-3-8b", 512, 1024),
    Setting("a100-80g:128x8", "llama-2-70b", "llama-2-7b", 1024, 4096),
    Setting("h100:128x8", "llama-3-70b", "llama-3-70b", 1024, 4096),
    Setting("h100:1250x8", "llama-3-70b", "llama-3-8b", 1024, 16384),
)


@dataclass(frozen=True)
class Row:
    """One search."""

    setting: Setting
    options_per_call: int
    """Mean number of candidates of a call."""
    build_seconds: float
    search_seconds: float
    step_seconds: float
    heuristic_seconds: float
    """Seconds of a step of the preset `heuristic`; infinite if this preset does not fit."""
    lower_bound_seconds: float
    gap: float
    evaluations: int
    nodes: int
    evaluations_per_second: float
    peak_rss_bytes: int
    """Peak memory of this process so far."""
    plan: str
    """Digest of the plan found."""
    load: float
    """Load of the machine over the last minute."""


def build(setting: Setting) -> Problem:
    """Build the search problem of a setting."""
    spec = ClusterSpec.parse(setting.cluster)
    names = {"actor": setting.actor, "ref": setting.actor, "critic": setting.critic, "reward": setting.critic}
    shapes = {role: SHAPES[name] for role, name in names.items()}
    length = (setting.tokens,)
    workload = Workload(setting.sequences, length, length, setting.tokens)
    preset = make_plan("heuristic", GRAPH, spec.cluster, 8192, shapes) if spec.cluster.nodes <= 80 else None
    models = {
        role: StoredModel(shape, PPO_SPEC.heads[role], "bfloat16", GRAPH.trained(role))
        for role, shape in shapes.items()
    }
    scenario = Scenario(
        graph=GRAPH,
        models=models,
        spec=spec,
        workload=workload,
        cost=CostModel(spec),
        memory=MemoryModel(spec),
    )
    return build_problem(scenario, include=[preset] if preset else [])


def rate(problem: Problem, seed: int) -> float:
    """Measure how many random plans are evaluated per second."""
    timeline = Timeline(problem)
    rng = np.random.default_rng(seed)
    sizes = timeline.tables.sizes[:, None]
    number = RANDOM_BATCHES if problem.cluster.size <= 1024 else 1
    batches = [rng.integers(0, sizes, (len(sizes), BATCH)) for _ in range(number)]
    start = time.process_time()
    for batch in batches:
        timeline(batch)
    return BATCH * number / (time.process_time() - start)


def heuristic(problem: Problem) -> float:
    """Evaluate the step seconds of the preset `heuristic`."""
    if problem.cluster.nodes > 80:  # the preset would have more stages than the models have layers
        return float("inf")
    assignment = problem.find_assignment(make_plan("heuristic", GRAPH, problem.cluster, 8192))
    found = Timeline(problem).evaluate(assignment) if assignment else None
    return found.seconds if found and found.fits else float("inf")


def measure(setting: Setting, seed: int) -> Row:
    """Build a problem, search it, and time both."""
    start = time.process_time()
    problem = build(setting)
    built = time.process_time()
    result = search_plans(problem, seed=seed)
    searched = time.process_time()
    return Row(
        setting,
        sum(map(len, problem.candidates.values())) // len(problem.candidates),
        round(built - start, 2),
        round(searched - built, 2),
        round(result.evaluation.seconds, 3),
        round(heuristic(problem), 3),
        round(result.lower_bound, 3),
        round(result.gap, 4),
        result.evaluations,
        result.nodes,
        round(rate(problem, seed)),
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        hashlib.sha256(str(problem.plan(result.assignment)).encode()).hexdigest()[:8],
        round(os.getloadavg()[0], 1),
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--few", action="store_true")
    arguments = parser.parse_args()
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(arguments.busy)]
    try:
        run(arguments)
    finally:
        for loop in loops:
            loop.kill()


def run(arguments: argparse.Namespace) -> None:
    """Search all settings; print and write the rows."""
    rows = []
    header = (
        "options  build  search    step  heuristic   gap  evaluations  nodes    evals/s   RSS  load  plan"
    )
    print(f"{'setting':58} {header}")
    for setting in SETTINGS[:5] if arguments.few else SETTINGS:
        row = measure(setting, arguments.seed)
        rows.append(row)
        models = f"{setting.actor} + {setting.critic}, {setting.sequences}x2x{setting.tokens}"
        print(
            f"{setting.cluster + ': ' + models:58} {row.options_per_call:7} {row.build_seconds:6.2f}"
            f" {row.search_seconds:7.2f} {row.step_seconds:7.2f} {row.heuristic_seconds:10.2f} {row.gap:5.1%}"
            f" {row.evaluations:12,} {row.nodes / 1e6:5.1f}M {row.evaluations_per_second:10,.0f}"
            f" {row.peak_rss_bytes / 2**30:4.1f}G {row.load:5.1f}  {row.plan}",
            flush=True,
        )
    found = {"seed": arguments.seed, "rows": [asdict(row) for row in rows]}
    Results(arguments.json).add("search", found)


if __name__ == "__main__":
    main()
