"""The gradients of losses agree with finite differences, and reach the last token of a sequence."""

from pathlib import Path
from typing import Any

import pytest

from realrl.testing.findings import Finding
from realrl.testing.gradients import ProbedRun, judge_gradients
from realrl.testing.ranks import run_on_ranks
from tests.conftest import World

ALGORITHMS = (
    *(
        "sft",
        "reward",
        "ranked_reward",
        "process_reward",
        "dpo",
        "orpo",
        "simpo",
        "kto",
        "offline_distillation",
    ),
    *("distillation", "expert_iteration", "ppo", "grpo", "gspo", "dapo", "rloo"),
)

CHANGES: dict[str, dict[str, Any]] = {"ranked_reward": {"loss__answers": 3}}


@pytest.fixture(scope="module")
def findings(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Finding]]:
    """What is found about the losses of each algorithm."""
    recipes = {}
    for algorithm in ALGORITHMS:
        directory = tmp_path_factory.mktemp(algorithm)
        recipes[algorithm] = world.recipe(
            algorithm, directory, training__steps=1, **CHANGES.get(algorithm, {})
        )
    run_on_ranks(1, [*recipes.values()], classes=dict.fromkeys(recipes.values(), ProbedRun))
    return {name: [*judge_gradients(recipe.parent / "run")] for name, recipe in recipes.items()}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_losses_of_this_package_have_right_gradients(
    algorithm: str, findings: dict[str, list[Finding]]
) -> None:
    found = findings[algorithm]
    assert found and not [finding for finding in found if finding.problem or finding.notes]


def test_a_probed_run_trains_like_any_other(world: World, tmp_path: Path) -> None:
    recipes = []
    for name in ("plain", "probed"):
        (tmp_path / name).mkdir()
        recipes.append(world.recipe("dpo", tmp_path / name, training__steps=2))
    run_on_ranks(1, recipes, classes={recipes[1]: ProbedRun})
    plain, probed = ((file.parent / "run" / "final" / "model.safetensors").read_bytes() for file in recipes)
    assert plain == probed
