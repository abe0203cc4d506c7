"""Commands take the directory of a run in place of its recipe, and its final model in place of a model."""

import json
from pathlib import Path

import pytest

from realrl.cli.app import run_app
from tests.conftest import World


@pytest.fixture(scope="module", params=["full", "lora"])
def run_dir(request: pytest.FixtureRequest, world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that has learnt something, of a whole model or of adapters."""
    changes = {"models__actor__lora": {"rank": 4}, "models__actor__optimizer": {"lr": 1e-2}}
    recipe = world.recipe(
        "dpo",
        tmp_path_factory.mktemp("runs"),
        data__eval=str(world.root / "reward.jsonl"),
        training__steps=2,
        **(changes if request.param == "lora" else {}),
    )
    assert run_app(["train", str(recipe)]) == 0
    return recipe.parent / "run"


@pytest.mark.parametrize("command", [["show"], ["data", "--samples", "1"], ["plan", "--cluster", "cpu:1x1"]])
def test_commands_of_recipes_take_the_directory_of_a_run(
    run_dir: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    name, *options = command
    assert run_app([name, str(run_dir), *options]) == 0
    of_run = capsys.readouterr().out
    assert run_app([name, str(run_dir / "config.yaml"), *options]) == 0
    said = capsys.readouterr().out
    if name != "plan":  # which says how long it took
        assert of_run.replace("resume: auto", "") == said.replace("resume: auto", "")


def test_doctor_examines_for_the_recipe_of_a_run(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_app(["doctor", str(run_dir), "--json"])  # its status is that of the machine
    assert any(finding["subject"] == "recipe" for finding in json.loads(capsys.readouterr().out))


def evaluate(tmp_path: Path, *arguments: str) -> dict[str, float]:
    assert run_app(["eval", *arguments, "--out", str(tmp_path)]) == 0
    metrics: dict[str, float] = json.loads((tmp_path / "metrics.json").read_text())["metrics"]
    return metrics


def test_a_run_is_evaluated_with_its_final_models(run_dir: Path, tmp_path: Path, world: World) -> None:
    config = str(run_dir / "config.yaml")
    trained = evaluate(tmp_path, str(run_dir))
    assert trained == evaluate(tmp_path, config, f"models.actor.path={run_dir / 'final'}")
    last = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    expected = next(line for line in reversed(last) if line["kind"] == "eval")["metrics"]
    assert trained == pytest.approx({name: expected[name] for name in trained}, rel=1e-4)
    before = evaluate(tmp_path, str(run_dir), f"models.actor.path={world.actor}")
    assert before != pytest.approx(trained, rel=1e-3)


def test_generate_takes_the_final_model_of_a_run(run_dir: Path, tmp_path: Path) -> None:
    written = []
    for model in (run_dir, run_dir / "final"):
        out = tmp_path / f"{len(written)}.jsonl"
        command = ["generate", str(model), "--prompt", "the film", "--max-new-tokens", "8", "--out", str(out)]
        assert run_app(command) == 0
        written.append(out.read_text())
    assert written[0] == written[1]


def test_a_run_without_final_models_says_how_to_get_them(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = world.recipe("dpo", tmp_path, data__eval=str(world.root / "reward.jsonl"))
    assert run_app(["train", str(recipe), "training.steps=1"]) == 0
    run = tmp_path / "run"
    (run / "final").rename(tmp_path / "moved")
    for command in (["eval", str(run)], ["generate", str(run), "--prompt", "a"]):
        assert run_app(command) == 2
        assert f"`realrl export {run} --out DIR`" in capsys.readouterr().err
    evaluate(tmp_path / "out", str(run), f"models.actor.path={tmp_path / 'moved'}")
