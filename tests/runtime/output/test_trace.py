"""The trace of a run beside the one that was predicted."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from realrl.cli.app import run_app
from realrl.config.errors import RunError
from realrl.plan.plan import Plan
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.simulate.predicted_trace import predict_trace
from realrl.program.trace_file import (
    TRACE,
    TRACES,
    make_event,
    merge_rank_traces,
    read_events,
    read_rank_traces,
    write_rank_trace,
    write_trace,
)
from realrl.recipe.load import load_experiment
from realrl.runtime.prepare.scenarios import make_scenario
from realrl.runtime.worker.trace import KEPT, Trace
from realrl.runtime.worker.worker import Worker
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


def record(trace: Trace, name: str) -> None:
    with trace.slice(name):
        pass


def test_a_trace_keeps_the_last_steps_and_what_follows_them() -> None:
    trace = Trace(3, steps=2)
    record(trace, "evaluation 0")
    for step in range(1, 6):
        trace.begin_step()
        record(trace, f"step {step}")
        record(trace, f"evaluation {step}")
        if step == 2:
            assert trace.events[0]["name"] == "evaluation 0"
    kept = [f"{kind} {step}" for step in (3, 4, 5) for kind in ("step", "evaluation")]
    assert [event["name"] for event in trace.events] == kept


def test_a_long_evaluation_does_not_take_memory_without_end() -> None:
    trace = Trace(0, steps=1)
    for number in range(KEPT + 5):
        record(trace, str(number))
    assert len(trace.events) == KEPT and trace.events[-1]["name"] == str(KEPT + 4)


def test_a_run_that_fails_leaves_its_last_steps(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, run_call = iter(range(100)), Worker._run

    def fail(*arguments: Any) -> None:
        if next(take) == 3:
            raise RunError("no more")
        run_call(*arguments)

    monkeypatch.setattr(Worker, "_run", fail)
    recipe = world.recipe("sft", tmp_path, debug__traced_steps=2)
    assert run_app(["train", str(recipe)]) == 1
    events = read_events(tmp_path / "run" / "trace.json")
    assert sorted({event["args"]["step"] for event in events}) == [1, 2, 3]
    assert [event["args"].get("error") for event in events][-2:] == [None, "RunError"]
    assert list(read_rank_traces(tmp_path / "run")) == [0]


def test_the_trace_of_a_run_has_all_ranks_that_have_left_one(tmp_path: Path) -> None:
    merge_rank_traces(tmp_path)
    assert not (tmp_path / TRACE).exists()
    (tmp_path / TRACES).mkdir()
    (tmp_path / TRACES / "rank-1.json").write_text('{"traceEvents": [{"ph": "X"}, 3]}')
    for rank in (0, 2):
        event = make_event(rank, "feed       prompts", 5e15 + rank, 2.0, {"step": 7})
        write_rank_trace(tmp_path, rank, [event])
    merge_rank_traces(tmp_path)
    events = read_events(tmp_path / TRACE)
    assert [(event["tid"], event["ts"], event["args"]) for event in events] == [
        (0, 0.0, {"step": 7}),
        (2, 2.0, {"step": 7}),
    ]
