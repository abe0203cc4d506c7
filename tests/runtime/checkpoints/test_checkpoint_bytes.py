"""Bytes of checkpoints that runs have written, beside those that are predicted."""

from pathlib import Path
from typing import Any

import pytest

from realrl.checkpoint.saved import list_checkpoints
from realrl.cli.app import run_app
from realrl.plan.placement import Mesh, Placement, Strategy
from realrl.plan.plan import Plan
from realrl.planner.cluster.cluster_spec import ClusterSpec
from realrl.planner.reliability.storage import count_traffic
from realrl.program.lower import home_placements
from realrl.recipe.load import load_experiment
from realrl.runtime.prepare.scenarios import make_scenario
from tests.conftest import World
from tests.runtime.checkpoints.test_resume import write_recipe


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"ppo__ref_ema": 0.5},
        {"models__actor__dtype": "bfloat16", "models__actor__trainable_layers": 1},
    ],
)
def test_every_rank_writes_as_many_bytes_as_predicted(
    world: World, tmp_path: Path, changes: dict[str, Any]
) -> None:
    whole = Placement(
        Mesh(0, 4),
        Strategy(
            dp=2,
            tp=2,
        ),
    )
    staged = Placement(Mesh(0, 4), Strategy(dp=2, pp=2))
    single = {"data__eval": None, "evaluation__every": None, "training__steps": 1}
    recipe = write_recipe(world, "ppo", tmp_path, cluster="1x4", **single, **changes)
    experiment = load_experiment(str(recipe))
    scenario = make_scenario(experiment, ClusterSpec.parse("cpu:1x4"))
    places = {call.name: staged if call.role == "critic" else whole for call in scenario.graph.calls}
    plan = Plan(scenario.spec.cluster, places)
    plan.save(tmp_path / "plan.yaml", scenario.graph)
    assert run_app(["train", str(recipe), f"plan={tmp_path / 'plan.yaml'}"]) == 0
    checkpoint = list_checkpoints(Path(experiment.run_dir))[1]
    sizes = [(checkpoint / f"rank-{rank:05}.bin").stat().st_size for rank in range(4)]
    predicted = count_traffic(scenario, home_placements(scenario.graph, plan)).written
    assert sum(sizes) == pytest.approx(predicted.sum(), rel=0.05)
    for size, of_rank in zip(sizes, predicted, strict=True):
        assert size == pytest.approx(of_rank, rel=0.12)
