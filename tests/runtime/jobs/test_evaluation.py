"""Evaluation alone, and in training: the same metrics under every plan, and the best of all kept."""

import json
from collections.abc import Mapping
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import yaml

from realrl.cli.app import run_app
from realrl.config.errors import UserError
from realrl.recipe.evaluation import BestConfig, EvaluationConfig
from realrl.recipe.graphs import build_graph
from realrl.recipe.load import load_experiment
from realrl.runtime.evaluation.answers import Answer, AnswerMetrics
from realrl.runtime.evaluation.training import BestEvaluation
from realrl.testing.ranks import run_on_ranks
from tests.conftest import World, read_metrics, thin, write_jsonl

REWARD = """
def count_e(completions, target):
    return [float(text.count("e") % 3 == wanted) for text, wanted in zip(completions, target)]
"""


def read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def grpo(world: World, directory: Path, **changes: Any) -> Path:
    """A recipe of GRPO with a mixture of rewards, and an evaluation of four answers to each of nine prompts."""
    directory.mkdir(exist_ok=True)
    (directory / "reward.py").write_text(REWARD)
    prompts = [json.loads(line)["prompt"] for line in (world.root / "ppo.jsonl").read_text().splitlines()]
    records = [
        {"prompt": prompt, "target": i % 3, "letter": "aest"[i % 4]} for i, prompt in enumerate(prompts)
    ]
    settings: dict[str, Any] = {
        "data__train": write_jsonl(directory / "train.jsonl", records),
        "data__eval": write_jsonl(directory / "eval.jsonl", records[:9]),
        "data__batch": 8,
        "data__eval_batch": 4,
        "models": {"actor": {"path": world.actor, "optimizer": {"lr": 1e-2}}},
        "reward": {
            "count": f"{directory / 'reward.py'}:count_e",
            "last": {
                "verifier": {"kind": "exact_match", "answer": "letter", "extract": "([a-z])[^a-z]*$"},
                "weight": 0.5,
            },
        },
        "policy": {"samples": 2, "kl": {"coef": 0.01}},
        "generation__max_new_tokens": 10,
        "evaluation": {
            "samples": 4,
            "pass_at": [1, 2, 4],
            "majority_at": [1, 4],
            "against": world.actor,
            "shown": 3,
        },
        "training__steps": 2,
    }
    return world.recipe("grpo", directory, **{**settings, **changes})


def evaluate(recipe: Path, *arguments: str) -> dict[str, Any]:
    """What `realrl eval` writes besides samples."""
    directory = recipe.parent / "evaluated"
    assert run_app(["eval", str(recipe), "--out", str(directory), *arguments]) == 0
    found: dict[str, Any] = json.loads((directory / "metrics.json").read_text())
    return found


@pytest.fixture(scope="module")
def alone(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the recipe, which has been evaluated and then trained, in one process."""
    best = {"metric": "reward.sum/score", "keep": "lowest"}
    directory = tmp_path_factory.mktemp("alone")
    recipe = grpo(world, directory, evaluation__every=1, evaluation__best=best)
    assert run_app(["eval", str(recipe)]) == 0
    assert run_app(["train", str(recipe)]) == 0
    return directory


def test_evaluation_alone_is_that_of_training_before_the_first_step(alone: Path) -> None:
    report = json.loads((alone / "run" / "eval" / "metrics.json").read_text())
    assert report["metrics"] == read_metrics(alone / "run", "eval")[0]
    rows = read_rows(alone / "run" / "eval" / "samples.jsonl")
    assert len(rows) == 9 * 4 and report["records"] == 9
    assert rows[: 3 * 4] == read_rows(alone / "run" / "samples" / "step-000000.jsonl")


def test_metrics_of_several_answers_follow_from_the_samples(alone: Path) -> None:
    metrics = json.loads((alone / "run" / "eval" / "metrics.json").read_text())["metrics"]
    rows = read_rows(alone / "run" / "eval" / "samples.jsonl")
    prompts = [rows[i : i + 4] for i in range(0, len(rows), 4)]
    assert all(len({row["prompt"] for row in answers}) == 1 for answers in prompts)
    assert any(len({row["completion"] for row in answers}) > 1 for answers in prompts)
    assert metrics["reward.sum/score"] == pytest.approx(sum(row["score"] for row in rows) / len(rows))
    right = [[row["score"] >= 1 for row in answers] for answers in prompts]
    assert metrics["pass@1"] == pytest.approx(sum(map(sum, right)) / len(rows))
    assert metrics["pass@4"] == pytest.approx(sum(map(any, right)) / 9)
    assert metrics["pass@1"] < metrics["pass@2"] < metrics["pass@4"]
    assert metrics["pass@4/prompts"] == metrics["majority@4/prompts"] == 9


def test_a_majority_votes_by_what_the_verifier_reads(alone: Path) -> None:
    metrics = json.loads((alone / "run" / "eval" / "metrics.json").read_text())["metrics"]
    rows = read_rows(alone / "run" / "eval" / "samples.jsonl")
    letters = [record["letter"] for record in read_rows(alone / "eval.jsonl")]
    assert metrics["majority@1"] == pytest.approx(metrics["last.function/term_score"]) != 0
    shares = []
    for letter, i in zip(letters, range(0, len(rows), 4), strict=True):
        read = [row["answer"] for row in rows[i : i + 4]]
        assert all(answer is None or len(answer) == 1 for answer in read)
        votes = {answer: read.count(answer) for answer in read if answer is not None}
        first = [answer for answer in votes if votes[answer] == max(votes.values())]
        shares.append((letter in first) / max(1, len(first)))
    assert metrics["majority@4"] == pytest.approx(sum(shares) / 9)


def test_a_model_wins_half_of_the_time_against_itself(alone: Path) -> None:
    first, *later = (metrics["win_rate"] for metrics in read_metrics(alone / "run", "eval"))
    assert first == 0.5 and any(rate != 0.5 for rate in later)
    rows = read_rows(alone / "run" / "samples" / "step-000000.jsonl")
    assert all(row["completion"] == row["against"] for row in rows)


def test_the_models_of_the_best_evaluation_are_kept(world: World, alone: Path) -> None:
    scores = [metrics["reward.sum/score"] for metrics in read_metrics(alone / "run", "eval")]
    best = json.loads((alone / "run" / "best.json").read_text())
    assert best == {
        "metric": "reward.sum/score",
        "value": min(scores),
        "step": scores.index(min(scores)),
    }
    assert json.loads((alone / "run" / "summary.json").read_text())["best"] == best
    kept = evaluate(alone / "recipe.yaml", f"models.actor.path={alone / 'run' / 'best'}")
    assert kept["metrics"]["reward.sum/score"] == pytest.approx(min(scores))


def test_two_processes_evaluate_like_one(world: World, alone: Path, tmp_path: Path) -> None:
    recipe = grpo(world, tmp_path, cluster="1x2")
    run_on_ranks(2, [recipe], evaluated=[recipe])
    ours, theirs = tmp_path / "run" / "eval", alone / "run" / "eval"
    metrics, expected = (
        json.loads((place / "metrics.json").read_text())["metrics"] for place in (ours, theirs)
    )
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert read_rows(ours / "samples.jsonl") == read_rows(theirs / "samples.jsonl")
    assert [entry.name for entry in (tmp_path / "run").iterdir()] == ["eval"]


@pytest.mark.parametrize("algorithm", ["sft", "ppo"])
def test_an_evaluation_without_functions_is_that_of_training(
    finished: Mapping[str, Path], algorithm: str
) -> None:
    run_dir = finished[algorithm]
    found = evaluate(run_dir.parent / "recipe.yaml")
    assert found["metrics"] == read_metrics(run_dir, "eval")[0]
    assert (run_dir.parent / "evaluated" / "samples.jsonl").exists() is (algorithm == "ppo")


def test_a_best_evaluation_is_of_a_metric_that_there_is() -> None:
    best = BestEvaluation(BestConfig(metric="pass@1", keep="highest"))
    assert [
        best.take(step, {"pass@1": value}) for step, value in enumerate((nan, 0.5, 0.5, 0.25, inf, 0.75))
    ] == [
        *(False, True, False, False),
        *(False, True),
    ]
    assert best.to_json() == {"metric": "pass@1", "value": 0.75, "step": 5}
    with pytest.raises(
        UserError, match=r"metric=pass@1: evaluations have no such metric; did you mean pass@2\?"
    ):
        best.take(1, {"pass@2": 1.0})


@pytest.mark.parametrize(
    ("algorithm", "strategy"),
    thin(
        [
            ("sft", {"mesh": "0-1", "dp": 2, "zero": 3}),
            ("sft", {"mesh": "0-2", "dp": 3}),
            ("dpo", {"mesh": "0-3", "dp": 2, "tp": 2}),
            ("sft", {"mesh": "0-3", "dp": 2, "pp": 2}),
            ("grpo", {"mesh": "0-2", "dp": 3}),
            ("grpo", {"mesh": "0-3", "dp": 2, "pp": 2}),
            ("ppo", {"mesh": "0-2", "dp": 3}),
        ],
        2,
    ),
)
def test_an_evaluation_of_one_record_leaves_ranks_idle(
    world: World, tmp_path: Path, algorithm: str, strategy: dict[str, Any]
) -> None:
    write_one = {"sft": "sft", "dpo": "reward"}.get(algorithm, "ppo")
    record = json.loads((world.root / f"{write_one}.jsonl").read_text().splitlines()[0])
    one = write_jsonl(tmp_path / "one.jsonl", [{**record, "target": 0, "letter": "a"}])
    changes: dict[str, Any] = {"data__eval": one, "training__steps": 1}
    if algorithm == "grpo":
        changes["evaluation"] = {"samples": 1, "pass_at": [1], "against": world.actor}
        alone = grpo(world, tmp_path, **changes, run_dir=str(tmp_path / "alone"))
    else:
        alone = world.recipe(algorithm, tmp_path, **changes, run_dir=str(tmp_path / "alone"))
    assert run_app(["train", str(alone)]) == 0
    size = 1 + int(strategy["mesh"][-1])
    calls = [call.name for call in build_graph(load_experiment(str(alone))).calls]
    entry = {call: strategy for call in calls if strategy.get("zero") is None or call != "actor.generate"}
    for call in calls:
        if call.endswith((".function", ".sum")):
            entry[call] = {"mesh": strategy["mesh"], "dp": size}
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump({"cluster": f"1x{size}", "calls": entry}))
    together = [f"cluster=1x{size}", f"plan={plan}", f"run_dir={tmp_path / 'together'}", "data.batch=24"]
    assert run_app(["train", str(alone), *together]) == 0
    ours, theirs = (read_metrics(tmp_path / name, "eval")[0] for name in ("together", "alone"))
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    found = evaluate(alone, *together)
    assert found["metrics"] == pytest.approx(ours, rel=1e-4, abs=1e-6)


def test_pass_at_k_says_over_how_many_prompts_it_is_a_mean() -> None:
    scores = [[1.0, 0.0], [1.0, nan], [nan, nan], [0.0, 0.0]]
    answers = [
        Answer(prompt="", completion="", tokens=[], finished=True, values={"score": score})
        for prompt in scores
        for score in prompt
    ]
    settings = EvaluationConfig(samples=2, pass_at=[1, 2])
    found = AnswerMetrics(settings, None).compute(answers, None)
    assert found == {"pass@1": 0.5, "pass@1/prompts": 3, "pass@2": 0.5, "pass@2/prompts": 2}
