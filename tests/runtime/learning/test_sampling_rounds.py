"""Dynamic sampling: prompts whose answers score the same are replaced, in rounds, alike under every plan."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from realrl.recipe.graphs import build_graph
from realrl.recipe.load import load_experiment
from realrl.testing.ranks import run_on_ranks
from tests.conftest import World, read_metrics

SAMPLES, BATCH, STEPS, ROUNDS = 4, 8, 3, 3

CODE = """
import json, pathlib

LOG = pathlib.Path(__file__).with_name("log.jsonl")

def score(prompts, completions, boring):
    scores = [0.5 if dull else float(len(text)) for text, dull in zip(completions, boring)]
    with LOG.open("a") as file:
        file.write(json.dumps([prompts, scores]) + "\\n")
    return scores
"""


def recipe(
    world: World, directory: Path, *, boring: int, size: int = 1, strategy: str = "", plan: str = "symmetric"
) -> Path:
    """Of every five prompts the answers to `boring` score the same."""
    directory.mkdir(parents=True)
    (directory / "reward.py").write_text(CODE)
    prompts = [json.loads(line) for line in (world.root / "ppo.jsonl").read_text().splitlines()]
    records = [record | {"boring": i % 5 < boring} for i, record in enumerate(prompts)]
    (directory / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    changes: dict[str, Any] = {
        "cluster": f"1x{size}",
        "data__train": str(directory / "records.jsonl"),
        "data__eval": None,
        "data__batch": BATCH,
        "training__steps": STEPS,
        "models__reward": None,
        "models__actor__optimizer": {"lr": 1e-3, "eps": 1e-5, "schedule": "constant"},
        "reward": str(directory / "reward.py:score"),
        "policy": {"samples": SAMPLES, "minibatches": 2, "sampling_rounds": ROUNDS},
        "debug__verify_reallocation": True,
        "plan": plan,
    }
    file = world.recipe("dapo", directory, **changes)
    if strategy:
        dp, tp, pp = map(int, strategy.split())
        calls = build_graph(load_experiment(str(file))).calls
        entry = {"mesh": f"0-{size - 1}", "dp": dp, "tp": tp, "pp": pp}
        own = {call.name: {"mesh": "1", "dp": 1} if call.is_function else entry for call in calls}
        # Generation elsewhere than training, so that every round moves parameters.
        own["actor.generate"] = {"mesh": "0", "dp": 1, "tp": 1, "pp": 1}
        (directory / "plan.yaml").write_text(yaml.safe_dump({"cluster": f"1x{size}", "calls": own}))
        document = yaml.safe_load(file.read_text()) | {"plan": str(directory / "plan.yaml")}
        file.write_text(yaml.safe_dump(document))
    return file.rename(directory / f"{directory.name}.yaml")


def replay(log: Path) -> list[dict[str, float]]:
    """What the steps of one process should report, from all scores that its function has given."""
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    steps = []
    while calls:
        differing: list[list[float]] = []
        equal: list[list[float]] = []
        taken = rounds = 0
        while len(differing) < BATCH and rounds < ROUNDS:
            prompts, scores = calls.pop(0)
            groups = [scores[i : i + SAMPLES] for i in range(0, len(scores), SAMPLES)]
            assert len(groups) == BATCH - len(differing)
            assert all(len({*prompts[i : i + SAMPLES]}) == 1 for i in range(0, len(prompts), SAMPLES))
            for group in groups:
                (differing if len({*group}) > 1 else equal).append(group)
            taken += len(groups)
            rounds += 1
        missing = BATCH - len(differing)
        trained = [score for group in differing + equal[len(equal) - missing :] for score in group]
        steps.append(
            {
                "actor.generate/rounds": rounds,
                "actor.generate/prompts": taken,
                "actor.train/groups_of_equal_rewards": missing / BATCH,
                "actor.train/score": sum(trained) / len(trained),
            }
        )
    return steps


@pytest.mark.parametrize("boring", [2, 5])
def test_prompts_whose_answers_score_the_same_are_replaced_in_rounds(
    world: World, tmp_path: Path, boring: int
) -> None:
    files = {"alone": recipe(world, tmp_path / "alone", boring=boring)}
    files["two"] = recipe(world, tmp_path / "two", boring=boring, size=2)
    if boring == 2:
        files["stages"] = recipe(world, tmp_path / "stages", boring=boring, size=2, strategy="1 1 2")
        files["apart"] = recipe(world, tmp_path / "apart", boring=boring, size=2, plan="disjoint")
    run_on_ranks(1, [files["alone"]])
    run_on_ranks(2, [file for name, file in files.items() if name != "alone"])
    expected = replay(files["alone"].parent / "log.jsonl")
    assert len(expected) == STEPS
    if boring == 5:  # nothing to learn from: all rounds are taken, and nothing changes
        assert all(step["actor.generate/rounds"] == ROUNDS for step in expected)
    else:
        assert any(step["actor.generate/rounds"] > 1 for step in expected)
    alone = read_metrics(files["alone"].parent / "run")
    for name, file in files.items():
        found = read_metrics(file.parent / "run")
        assert len(found) == STEPS
        for step, ours, reference in zip(found, expected, alone, strict=True):
            assert {key: step[key] for key in ours} == pytest.approx(ours), name
            for metric in ("policy_loss_per_token", "loss", "grad_norm", "response_tokens", "entropy"):
                value = reference[f"actor.train/{metric}"]
                assert step[f"actor.train/{metric}"] == pytest.approx(value, rel=1e-4, abs=1e-6), name
