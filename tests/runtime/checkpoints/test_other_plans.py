"""Runs that go on from a checkpoint under another plan, on more or fewer processes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from realrl.plan.cluster import Cluster
from realrl.plan.presets import PRESETS
from realrl.recipe.graphs import build_graph
from realrl.recipe.load import load_experiment
from realrl.testing.check import make_uniform_plan
from realrl.testing.compare import compare_runs
from realrl.testing.ranks import run_on_ranks
from tests.conftest import FORMS, World, build_world, thin
from tests.runtime.checkpoints.interrupted import interrupt
from tests.runtime.learning.test_plans import OPTIMIZER, SHAPE

ALGORITHMS: Mapping[str, Mapping[str, Any]] = {
    "sft": {},
    "reward": {"models__reward__optimizer": OPTIMIZER},
    "dpo": {},
    "grpo": {"policy__kl": {"coef": 0.05}, "policy__samples": 2},
    "ppo": {
        "ppo__value_norm": "running",
        "ppo__ref_ema": 0.5,
        "ppo__kl": {"adaptive": True, "target": 0.01, "horizon": 100},
        "models__critic__optimizer": OPTIMIZER,
    },
}
PLANS: Mapping[int, tuple[str, ...]] = {
    1: ("symmetric",),
    2: ("2 1 1 1 3", "1 1 1 2", "1 1 1 2 1 2", "1 2 1 1"),
    3: ("1 1 3 1", "separate", "1 3 1 1 3"),
    8: ("2 1 2 2", "interleave"),
}
"""Number of processes -> presets, and dp, cp, tp, pp, the stage of ZeRO and vpp of uniform plans, of which
algorithms take turns."""
STARTS = {
    "sft": "2 1 2 1",
    "reward": "2 1 2 1 2",
    "dpo": "2 1 1 2 1 2",
    "grpo": "1 2 1 2 2",
    "ppo": "2 1 2 1 3",
}
"""Algorithm -> the uniform plan, on 4 processes, that its checkpoint is written under."""
FEW = ("dpo", "ppo")
"""Algorithms that go on with more than three processes, which take long: one model, and four."""


def write_recipe(world: World, algorithm: str, directory: Path, devices: int, plan: str) -> Path:
    """A recipe of an algorithm on so many devices, of 5 steps with a checkpoint after 2."""
    directory.mkdir(parents=True)
    changes = {
        **ALGORITHMS[algorithm],
        "cluster": f"1x{devices}",
        "checkpoint__every": 2,
        "checkpoint__keep": 3,
    }
    if algorithm != "reward":
        changes["models__actor__optimizer"] = OPTIMIZER
    changes["data__eval"] = str(world.root / f"{FORMS.get(algorithm, 'ppo')}.jsonl")
    if plan not in PRESETS:
        dp, cp, tp, pp, *others = map(int, plan.split())
        zero, vpp = (*others, 1, 1)[:2]
        graph = build_graph(load_experiment(str(world.recipe(algorithm, directory, **changes))))
        degrees = {"cp": cp, "tp": tp, "pp": pp, "vpp": vpp}
        made = make_uniform_plan(
            graph, Cluster(1, dp * cp * tp * pp), **degrees, zero=zero, micro_batch_tokens=256
        )
        made.save(directory / "plan.yaml", graph)
        plan = str(directory / "plan.yaml")
    return world.recipe(algorithm, directory, plan=plan, **changes)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A world whose models can be cut in three and in four, both ways."""
    return build_world(tmp_path_factory.mktemp("wide"), SHAPE)


@pytest.fixture(scope="module")
def uninterrupted(wide: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Algorithm -> the directory of its run on 4 processes."""
    top = tmp_path_factory.mktemp("uninterrupted")
    recipes = {name: write_recipe(wide, name, top / name, 4, plan) for name, plan in STARTS.items()}
    run_on_ranks(4, list(recipes.values()))
    return {name: recipe.parent / "run" for name, recipe in recipes.items()}


@pytest.mark.parametrize("size", thin([2, 1, 8, 3], 2))
def test_a_run_goes_on_alike_on_other_processes(
    uninterrupted: Mapping[str, Path], wide: World, tmp_path: Path, size: int
) -> None:
    recipes = {}
    for i, (algorithm, run_dir) in enumerate(uninterrupted.items()):
        if size > 3 and algorithm not in FEW:
            continue
        plan = PLANS[size][i % len(PLANS[size])]
        if plan == "separate" and algorithm in ("sft", "reward"):
            plan = PLANS[size][0]
        recipes[algorithm] = write_recipe(wide, algorithm, tmp_path / algorithm, size, plan)
        interrupt(run_dir, 2, tmp_path / algorithm)
    run_on_ranks(size, list(recipes.values()))
    for algorithm, recipe in recipes.items():
        resumed = recipe.parent / "run"
        assert len((resumed / "history.jsonl").read_text().splitlines()) == 2
        compare_runs(
            resumed, uninterrupted[algorithm], name=algorithm, than="without interruption", tolerance=1e-4
        )
