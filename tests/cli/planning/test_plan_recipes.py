"""`realrl plan` finds a plan that fits for every recipe here, on its own cluster or on 16 GPUs."""

import json
from pathlib import Path

import pytest
import yaml

from realrl.cli.app import run_app
from realrl.recipe.graphs import build_graph
from realrl.recipe.load import load_experiment
from tests.conftest import thin

ROOT = Path(__file__).parents[3]
RECIPES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "recipes").rglob("*.yaml"))
CLUSTERS = {
    "recipes/demo": "cpu:1x2",
    "recipes/demo_grpo": "cpu:1x2",
    "recipes/demo_agent": "cpu:1x2",
    "recipes/small": "h100:1x1",
}
"""Folder -> cluster, for recipes without a kind of device."""


def list_sizes(recipe: str) -> list[str]:
    """Overrides that replace the placeholder paths of models with sizes."""
    document = yaml.safe_load((ROOT / recipe).read_text())
    folder = str(Path(recipe).parent)
    shape = {"recipes/small": "qwen2.5-0.5b"}.get(folder, "llama-2-7b")
    if folder.startswith("recipes/demo"):
        demo = yaml.safe_load((ROOT / folder / "sft.yaml").read_text())
        shape = json.dumps(demo["models"]["actor"]["shape"])
    return [
        f"models.{role}.{field}"
        for role, model in document["models"].items()
        if "path" in model
        for field in ("path=null", f"shape={shape}", "tokenizer=t")
    ]


def choose_cluster(recipe: str) -> str:
    cluster = yaml.safe_load((ROOT / recipe).read_text()).get("cluster", "")
    folder = str(Path(recipe).parent)
    return cluster if ":" in cluster else CLUSTERS.get(folder, "h100:2x8")


@pytest.mark.parametrize("recipe", thin(RECIPES, 3))
def test_a_plan_within_the_memory_is_found_for_every_shipped_recipe(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # recipes name their rewards from there
    sizes = list_sizes(recipe)
    options = ["--cluster", choose_cluster(recipe), "--effort", "10000", "--json"]
    assert run_app(["plan", recipe, *sizes, *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["gap"] >= 0
    assert found["step_seconds"] >= found["lower_bound_seconds"] > 0
    experiment = load_experiment(recipe, sizes)
    assert set(found["calls"]) == {call.name for call in build_graph(experiment).calls}
    samples = found["workload"]["samples_per_prompt"]
    assert found["workload"]["items"] == experiment.data.batch * samples


def test_there_are_recipes_for_one_device_8_and_64() -> None:
    clusters = [choose_cluster(recipe) for recipe in RECIPES]
    counts = [sum(cluster.endswith(size) for cluster in clusters) for size in ("1x1", "1x8", "8x8")]
    assert len(RECIPES) >= 15 and all(count >= 3 for count in counts)


def test_why_nothing_fits_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert (
        run_app(["plan", "recipes/64_gpus/dpo_70b.yaml", "--cluster", "h100:1x8", "--effort", "10000"]) == 2
    )
    assert "needs" in capsys.readouterr().err
