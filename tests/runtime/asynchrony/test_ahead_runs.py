"""Runs whose sampling runs ahead: they learn the same under every plan, and exactly what the settings say."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from realrl.cli.app import run_app
from realrl.config.errors import UserError
from realrl.engine.finite import NotFiniteLogitsError
from realrl.engine.generation.generator import Generation
from realrl.recipe.graphs import build_graph
from realrl.recipe.load import load_experiment
from realrl.runtime.worker import worker
from realrl.testing.ranks import run_on_ranks
from tests.conftest import World, read_metrics

REWARD = """
def score(completions, **columns):
    return [float(len(text) % 5) for text in completions]
"""
ALGORITHMS = ("ppo", "grpo", "reinforce_pp")


def write_recipe(world: World, directory: Path, algorithm: str, staleness: int, **changes: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "reward.py").write_text(REWARD)
    changes = {"reward": str(directory / "reward.py") + ":score", "models__reward": None, **changes}
    changes = {"asynchrony": {"staleness": staleness}, **changes}
    return world.recipe(algorithm, directory, **changes)


def part(file: Path, size: int = 2) -> Path:
    """Let a recipe generate on its last rank, and do everything else on the others."""
    experiment = load_experiment(str(file))
    calls: dict[str, Any] = {}
    for call in build_graph(experiment).calls:
        if call.kind == "generate":
            calls[call.name] = {"mesh": str(size - 1), "dp": 1, "tp": 1, "pp": 1}
        elif call.is_function:
            calls[call.name] = {"mesh": str(size - 1), "dp": 1}
        else:
            mesh = "0" if size == 2 else f"0-{size - 2}"
            calls[call.name] = {"mesh": mesh, "dp": size - 1, "tp": 1, "pp": 1}
    plan = file.with_name("plan.yaml")
    plan.write_text(yaml.safe_dump({"cluster": f"1x{size}", "calls": calls}))
    document = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump(document | {"plan": str(plan), "cluster": f"1x{size}"}))
    return file


def learnt(file: Path) -> list[dict[str, float]]:
    """Metrics of the steps of a run that say what it learnt."""
    rows = read_metrics(Path(yaml.safe_load(file.read_text())["run_dir"]))
    names = ("loss", "score", "kl", "grad_norm", "value_loss", "importance_ratio", "response_tokens")
    return [{k: v for k, v in row.items() if k.rpartition("/")[2] in names} for row in rows]


@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_learning_is_the_same_on_one_process_and_apart(
    world: World, tmp_path: Path, algorithm: str, staleness: int
) -> None:
    alone = write_recipe(world, tmp_path / "alone", algorithm, staleness)
    apart = part(write_recipe(world, tmp_path / "apart", algorithm, staleness))
    run_on_ranks(1, [alone])
    run_on_ranks(2, [apart])
    assert len(learnt(alone)) == len(learnt(apart)) == 5
    for mine, theirs in zip(learnt(alone), learnt(apart), strict=True):
        assert mine and mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)


PARTIAL = [
    {"staleness": 1, "overlap": False},
    {"staleness": 2},
    {"staleness": 3},
    {"staleness": 3, "overlap": False},
]


@pytest.mark.parametrize("settings", PARTIAL, ids=str)
def test_partial_answers_are_those_of_one_piece_if_weights_do_not_change(
    world: World, tmp_path: Path, settings: dict[str, Any]
) -> None:
    # Exact products, so that a prefill of earlier tokens has the numbers of the decode steps.
    frozen = {"models__actor__optimizer": {"lr": 1e-30}, "training__steps": 4, "exact": True}
    whole = write_recipe(world, tmp_path / "whole", "grpo", 0, **frozen)
    parted = write_recipe(
        world, tmp_path / "parted", "grpo", 0, **frozen, asynchrony={**settings, "partial": True}
    )
    run_on_ranks(1, [whole, parted])
    assert learnt(parted) == learnt(whole)


@pytest.mark.parametrize("settings", PARTIAL, ids=str)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_partial_answers_are_the_same_on_one_process_and_apart(
    world: World, tmp_path: Path, algorithm: str, settings: dict[str, Any]
) -> None:
    changes = {"asynchrony": {**settings, "partial": True}}
    alone = write_recipe(world, tmp_path / "alone", algorithm, 0, **changes)
    apart = part(write_recipe(world, tmp_path / "apart", algorithm, 0, **changes))
    run_on_ranks(1, [alone])
    run_on_ranks(2, [apart])
    for mine, theirs in zip(learnt(alone), learnt(apart), strict=True):
        assert mine and mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)


def test_greedy_answers_continue_without_log_probabilities(world: World, tmp_path: Path) -> None:
    settings = {"policy__baseline": "greedy", "policy__samples": 1, "policy__scale": "none"}
    frozen = {"models__actor__optimizer": {"lr": 1e-30}, "training__steps": 3, "exact": True, **settings}
    whole = write_recipe(world, tmp_path / "whole", "grpo", 0, **frozen)
    parts = {"asynchrony": {"staleness": 2, "partial": True}}
    parted = write_recipe(world, tmp_path / "parted", "grpo", 0, **frozen, **parts)
    run_on_ranks(1, [whole, parted])
    assert learnt(parted) == learnt(whole)


GAME = """
class Game:
    def reset(self, **record):
        self.turns = 0

    def step(self, text):
        self.turns += 1
        return "go on", float(len(text) % 3), self.turns == 2
"""
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


def write_game(directory: Path) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "game.py").write_text(GAME)
    return f"{directory / 'game.py'}:Game"


def test_an_environment_plays_ahead(world: World, tmp_path: Path) -> None:
    def recipe(name: str, staleness: int) -> Path:
        environment = {"factory": write_game(tmp_path / name), "max_turn_tokens": 5}
        changes = {"environment": environment, "data__chat_template": TEMPLATE, "models__reward": None}
        asynchrony = {"staleness": staleness}
        changes |= {"generation__max_new_tokens": 40, "reward": None, "asynchrony": asynchrony}
        return world.recipe("grpo", tmp_path / name, **changes)

    synchronous, alone, apart = recipe("synchronous", 0), recipe("alone", 1), part(recipe("apart", 1))
    run_on_ranks(1, [synchronous, alone])
    run_on_ranks(2, [apart])
    assert learnt(alone)[0]["actor.train/score"] == learnt(synchronous)[0]["actor.train/score"]
    assert learnt(alone) != learnt(synchronous)
    for mine, theirs in zip(learnt(alone), learnt(apart), strict=True):
        assert mine and mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("algorithm", "changes", "message"),
    [
        ("sft", {}, "asynchrony.staleness=2: steps of sft do not sample; leave it out"),
        (
            "dapo",
            {},
            "if a step samples in up to 4 rounds; set policy.sampling_rounds=1, or staleness=0",
        ),
        (
            "grpo",
            {"environment": "GAME", "asynchrony__partial": True},
            "trajectories in an environment are not interrupted; set partial=false",
        ),
    ],
)
def test_what_cannot_run_ahead_is_refused(
    world: World, tmp_path: Path, algorithm: str, changes: dict[str, Any], message: str
) -> None:
    if "environment" in changes:
        changes = {**changes, "environment": write_game(tmp_path)}
    file = world.recipe(algorithm, tmp_path, asynchrony__staleness=2, **changes)
    with pytest.raises(UserError) as error:
        load_experiment(str(file))
    assert message in str(error.value)


def test_logits_of_a_later_part_that_are_not_finite_name_the_batch(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: Any, part: Any, **named: Any) -> Generation:
        continued = [place for place, (tokens, _) in enumerate(part.begun) if tokens]
        if continued:
            raise NotFiniteLogitsError(7, arguments[1].ids[-1])  # of the batch that has just begun
        return Generation(*arguments, part=part, **named)

    monkeypatch.setattr(worker, "Generation", fail)
    settings = {"staleness": 2, "partial": True}
    file = write_recipe(world, tmp_path, "reinforce_pp", 0, asynchrony=settings)
    assert run_app(["train", str(file)]) == 1
    said = "the logits of token 8 after the prompt of item 16 of the batch of step 2 are not finite"
    assert said in capsys.readouterr().err
