"""The trace of a run beside the one that was predicted."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from realrl.plan.plan import Plan
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.simulate.predicted_trace import predict_trace
from realrl.program.trace_file import write_trace
from realrl.recipe.load import load_experiment
from realrl.runtime.prepare.scenarios import make_scenario
from realrl.testing.ranks import run_on_ranks
from tests.conftest import World

STEPS = 3
PLAN = {
    "cluster": "1x2",
    "calls": {
        "actor.generate": {"mesh": "0-1", "dp": 1, "tp": 2},
        "reward.inference": {"mesh": 1, "dp": 1},
        "ref.inference": {"mesh": 0, "dp": 1},
        "critic.inference": {"mesh": 0, "dp": 1},
        "actor.train": {"mesh": "0-1", "dp": 1, "pp": 2},
        "critic.train": {"mesh": "0-1", "dp": 2},
    },
    "offload": ["ref", "critic"],
    "offload_optimizer": ["actor"],
    "keep": ["actor"],
}
"""Every kind of instruction."""


def names(events: Sequence[dict[str, Any]], rank: int, step: int) -> list[str]:
    slices = [e for e in events if e["ph"] == "X" and e["tid"] == rank and e["args"]["step"] == step]
    return [e["name"] for e in sorted(slices, key=lambda e: e["ts"])]


def test_measured_traces_have_the_predicted_instructions(world: World, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(PLAN))
    plan_file = str(tmp_path / "plan.yaml")
    recipe = world.recipe(
        "ppo", tmp_path, cluster="1x2", plan=plan_file, training__steps=STEPS, ppo__ref_ema=0.1
    )
    run_on_ranks(2, [recipe])
    scenario = make_scenario(load_experiment(str(recipe)), ClusterSpec.parse("cpu:1x2"))
    plan = Plan.load(plan_file, scenario.graph, 256)
    write_trace(tmp_path / "predicted.json", predict_trace(scenario, plan, STEPS), "predicted")
    files = (tmp_path / "predicted.json", tmp_path / "run" / "trace.json")
    predicted, measured = (json.loads(file.read_text())["traceEvents"] for file in files)
    for rank in range(2):
        for step in range(STEPS):
            assert names(measured, rank, step) == names(predicted, rank, step), (rank, step)
    rows = [
        {(e["pid"], e.get("tid")): e["args"] for e in trace if e["ph"] == "M"}
        for trace in (predicted, measured)
    ]
    assert not rows[0].keys() & rows[1].keys()
    assert list(rows[0].values())[1:] == list(rows[1].values())[1:]
