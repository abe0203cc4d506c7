"""Runs whose ranks generate together: data-parallel ranks that divide experts, and so decode in step, and
context-parallel ranks, which divide the KV cache."""

from pathlib import Path
from typing import Any

import pytest

from realrl.config.errors import UserError
from realrl.dataflow.asynchrony import hand_on_portions
from realrl.plan.cluster import Cluster
from realrl.plan.placement import Placement
from realrl.plan.plan import Plan
from realrl.recipe.graphs import build_graph
from realrl.recipe.load import load_experiment
from realrl.testing.compare import compare_runs
from realrl.testing.ranks import run_on_ranks
from tests.conftest import EVERY_RUN, World, build_world, write_jsonl
from tests.runtime.checkpoints.test_expert_plans import SHAPE
from tests.runtime.learning.test_plans import OPTIMIZER
from tests.runtime.strategies import use_strategy

REWARD = """
def score(completions, **columns):
    return [float(len(text) % 5) for text in completions]
"""
FROZEN = {"models__actor__optimizer": {"lr": 1e-30}}
CASES: dict[str, dict[str, Any]] = {
    "partial answers": {
        "asynchrony": {"staleness": 2, "partial": True, "overlap": False},
        "models__actor__router_replay": False,
    },
    "exact": {"exact": True},
    "rounds": {"policy": {"samples": 4, "minibatches": 2, "sampling_rounds": 2}, **FROZEN},
    "few prompts": {"data__batch": 2, "policy__samples": 2, "policy__minibatches": 1},
}
"""Settings of GRPO."""


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build_world(tmp_path_factory.mktemp("mixtures"), SHAPE)


def write_recipe(world: World, directory: Path, *, size: int, plan: str, **changes: Any) -> Path:
    directory.mkdir()
    (directory / "reward.py").write_text(REWARD)
    prompts = write_jsonl(
        directory / "prompts.jsonl",
        [{"prompt": "the film was " + "very " * (i % 7) + "good"} for i in range(32)],
    )
    usual = {
        "reward": str(directory / "reward.py") + ":score",
        "models__reward": None,
        "models__actor__optimizer": OPTIMIZER,
        "data__train": prompts,
        "training__steps": 3,
        "cluster": f"1x{size}",
        "evaluation": {"every": 3, "samples": 1, "pass_at": [1]},
        # Only one of two ranks has an answer to sample.
        "data__eval": write_jsonl(directory / "eval.jsonl", [{"prompt": "the film"}]),
    }
    file = world.recipe("dapo" if "rounds" in directory.name else "grpo", directory, **{**usual, **changes})
    use_strategy(file, plan, size)
    return file


PLANS = {
    "d2 t1 p1 e2": 2,
    "d1 c2 t1 p1 e2": 2,
    "d1 c2 t1 p1": 2,
    "d4 t1 p1 e2": 4,
    "d2 c2 t1 p1 e4": 4,
    "d1 c2 t1 p2": 4,
    "d1 c2 t1 p2 e2": 4,
}
"""Strategies of all calls, and the number of processes."""


@pytest.mark.parametrize("plan", PLANS)
def test_ranks_that_generate_together_learn_what_one_process_learns(
    mixtures: World, tmp_path: Path, plan: str
) -> None:
    size, divides_cache = PLANS[plan], " c2 " in plan
    names = [
        name
        for name in CASES
        if (size == 2 or name != "few prompts") and not (divides_cache and name == "exact")
    ]
    if divides_cache and not EVERY_RUN:  # settings take turns
        names = names[list(PLANS).index(plan) % 2 :: 2]
    alone = [
        write_recipe(mixtures, tmp_path / f"{name} alone", size=1, plan="d1 t1 p1", **CASES[name])
        for name in names
    ]
    together = [
        write_recipe(mixtures, tmp_path / f"{name} together", size=size, plan=plan, **CASES[name])
        for name in names
    ]
    run_on_ranks(1, alone)
    run_on_ranks(size, together)
    for name, one, several in zip(names, alone, together, strict=True):
        compare_runs(
            several.parent / "run", one.parent / "run", name=name, than="one process", tolerance=1e-4
        )


@pytest.mark.parametrize(
    ("generate", "portions", "sentence"),
    [
        ("d2 t1 p2 e2 @0-3 mb=256", 1, "which then decode in step; that has no pipeline, so leave pp=2 out"),
        ("d4 t1 p1 e2 @0-3 mb=256", 2, "they hand on portions at different times"),
        ("d1 t2 p2 e2 @0-3 mb=256", 1, None),
        ("d1 t4 p1 e2 @0-3 mb=256", 2, None),
    ],
)
def test_what_cannot_decode_in_step_is_refused(
    mixtures: World, tmp_path: Path, generate: str, portions: int, sentence: str | None
) -> None:
    experiment = load_experiment(str(mixtures.recipe("grpo", tmp_path)))
    graph = hand_on_portions(build_graph(experiment), portions) if portions > 1 else build_graph(experiment)
    place = Placement.parse("d4 t1 p1 @0-3 mb=256")
    placements = {call.name: place for call in graph.calls}
    plan = Plan(Cluster(1, 4), placements | {"actor.generate": Placement.parse(generate)})
    if sentence is None:
        plan.check(graph, {})
        return
    with pytest.raises(UserError) as caught:
        plan.check(graph, {})
    assert sentence in str(caught.value)
