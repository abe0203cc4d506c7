"""Plans on 64 devices for the recipes that learn from preferences."""

import json
from pathlib import Path

import pytest

from realrl.cli.app import run_app

RECIPES = Path(__file__).parents[3] / "recipes"
SIZE = ("path=null", "shape=llama-2-7b")

NAMES = (
    "dpo",
    "orpo",
    "simpo",
    "kto",
    "reward",
    "ranked_reward",
    "process_reward",
    "distillation",
    "offline_distillation",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_is_found_for_every_shipped_recipe(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    role = "reward" if "reward" in name else "actor"
    roles = [role, "teacher"] if "distillation" in name else [role]
    settings = [f"models.{role}.{field}" for role in roles for field in (*SIZE, "tokenizer=t")]
    options = ["--cluster", "h100:8x8", "--seconds", "2", "--json"]
    assert run_app(["plan", str(RECIPES / f"{name}.yaml"), *settings, *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step_seconds"] >= found["lower_bound_seconds"] > 0
    items = {"ranked_reward": 16, "simpo": 128, "distillation": 256}.get(name, 64)
    assert found["workload"]["items"] == items and found["fits"]
