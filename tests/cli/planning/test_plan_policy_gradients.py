"""`realrl plan` of every shipped recipe of a policy gradient, and of expert iteration, on 64 GPUs."""

import json
from pathlib import Path

import pytest

from realrl.cli.app import run_app

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "recipes"
RECIPES = [*sorted((FOLDER / "policy_gradient").glob("*.yaml")), FOLDER / "expert_iteration.yaml"]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_policy_gradient_is_planned_on_64_gpus_within_their_memory(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # the recipe names its reward from there
    arguments = ["plan", str(recipe), "--cluster", "h100:8x8", "--seconds", "2", "--json"]
    assert run_app(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["peak_bytes"] < 80 * 2**30
    assert 0 <= found["gap"] < 0.5 and found["step_seconds"] > 0
    calls = set(found["calls"])
    assert {"actor.generate", "actor.train", "reward.function"} <= calls
    assert ("actor.generate_greedy" in calls) == (recipe.stem == "remax")
    assert ("ref.inference" in calls) == (
        recipe.stem in ("rloo", "reinforce_pp", "reinforce_pp_baseline", "remax")
    )
